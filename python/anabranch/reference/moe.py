"""The whole Mixture-of-Experts layer in numpy float64: route, dispatch, experts, combine, and back."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .balance import load_balance_loss, load_balance_loss_backward, z_loss, z_loss_backward
from .dispatch import Plan, combine, dispatch, dispatch_backward, plan
from .experts import expert_ffn, expert_ffn_backward
from .router import Routing, route, route_backward
from .scores import as_float64


class MoEOutput(NamedTuple):
    """output float64[..., D], aux_loss and z_loss float64, tokens_per_expert int32[E], dropped int32."""

    output: np.ndarray
    aux_loss: np.ndarray
    z_loss: np.ndarray
    tokens_per_expert: np.ndarray
    dropped: np.int32


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """The options of `moe` and `moe_backward`.

    topk to forced_experts and experts: as in `router.route`, per token with x's leading dimensions.
    activation, b_in, b_out, weight_early: as in `experts.expert_ffn`.
    aux_loss_coeff, z_loss_coeff: of the losses in `balance`; a loss whose coefficient is 0 is 0.
    align_size: as in `dispatch.plan`.
    kept: bool with the shape of the experts; False: the slot found no room (`capacity.kept_slots`). None: all did.
    """

    topk: int
    score_function: str = "softmax"
    normalize: bool = True
    expert_bias: np.ndarray | None = None
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float = 1.0
    activation: str = "silu"
    b_in: np.ndarray | None = None
    b_out: np.ndarray | None = None
    weight_early: bool = False
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    token_mask: np.ndarray | None = None
    forced_experts: np.ndarray | None = None
    align_size: int = 0
    experts: np.ndarray | None = None
    kept: np.ndarray | None = None

    def routing(self):
        """The keyword arguments of `route` and `route_backward`, token dimensions flattened."""

        def per_token(array, *trailing):
            return None if array is None else np.reshape(array, (-1, *trailing))

        return {
            "topk": self.topk,
            "score_function": self.score_function,
            "normalize": self.normalize,
            "expert_bias": self.expert_bias,
            "num_groups": self.num_groups,
            "group_topk": self.group_topk,
            "scaling_factor": self.scaling_factor,
            "token_mask": per_token(self.token_mask),
            "forced_experts": per_token(self.forced_experts, self.topk),
            "experts": per_token(self.experts, self.topk),
        }


class _Routed(NamedTuple):
    """Both directions start from this."""

    x: np.ndarray  # [T, D]
    logits: np.ndarray  # [T, E]
    routing: Routing
    plan: Plan
    rows: np.ndarray  # [R, D]
    num_tokens: int  # unmasked


def _route_and_dispatch(x, gate, options):
    x, gate = as_float64(x, "x"), as_float64(gate, "gate")
    x = x.reshape(-1, x.shape[-1])
    num_tokens = x.shape[0]
    if options.token_mask is not None:
        mask = np.reshape(options.token_mask, -1)
        num_tokens = int(mask.sum())
        # a masked token counts nowhere: not in d_gate = x^T d_logits either, where 0 * NaN is NaN
        x = np.where(mask[:, None], x, 0.0)
    logits = x @ gate
    routing = route(logits, **options.routing())
    experts = routing.experts
    if options.kept is not None:
        experts = np.where(np.reshape(options.kept, experts.shape), experts, -1)
    layout = plan(experts, gate.shape[1], options.align_size)
    layout = layout._replace(dropped=layout.dropped + np.int32((experts != routing.experts).sum()))
    return _Routed(x, logits, routing, layout, dispatch(x, layout), num_tokens)


def _row_weights(layout, weights):
    """w of every row's slot, 0 in padding. [R]."""
    slot = layout.slot_of_row
    return np.where(slot >= 0, weights.reshape(-1)[np.maximum(slot, 0)], 0.0) if slot.size else np.zeros(0)


def moe(x, gate, w_in, w_out, **options):
    """out[t] = sum_k w[t, k] expert_e(x[t]) over the K experts e that the logits x gate select.

    Args:
      x: [..., D]. gate: [D, E]. w_in: [E, D, 2 or 1, F]. w_out: [E, F, D].
      options: `MoEOptions`.

    Returns: `MoEOutput`.
    """
    o = MoEOptions(**options)
    routed = _route_and_dispatch(x, gate, o)
    routing, layout = routed.routing, routed.plan
    y = expert_ffn(
        routed.rows,
        w_in,
        w_out,
        layout.group_sizes,
        activation=o.activation,
        b_in=o.b_in,
        b_out=o.b_out,
        row_weights=_row_weights(layout, routing.weights) if o.weight_early else None,
        weight_early=o.weight_early,
        slot_of_row=layout.slot_of_row,
    )
    output = combine(y, layout, None if o.weight_early else routing.weights)
    counts, n = routing.tokens_per_expert, routed.num_tokens
    aux = z = np.float64(0.0)
    if o.aux_loss_coeff:
        aux = load_balance_loss(routing.score_sum, counts, o.topk, o.aux_loss_coeff, n)
    if o.z_loss_coeff:
        z = z_loss(routing.lse, o.z_loss_coeff, n)
    return MoEOutput(output.reshape(np.shape(x)), aux, z, counts, layout.dropped)


def moe_backward(x, gate, w_in, w_out, d_output, d_aux_loss=0.0, d_z_loss=0.0, **options):
    """Gradients of `moe` from the cotangents of its output and its two losses.

    Returns: dict of x, gate, w_in, w_out, b_in, b_out (None where not given) and, on the way to the gate, of the
    routing's weights [T, K]; float64.
    """
    o = MoEOptions(**options)
    routed = _route_and_dispatch(x, gate, o)
    routing, layout = routed.routing, routed.plan
    d_out = as_float64(d_output, "d_output").reshape(routed.x.shape)
    grads = expert_ffn_backward(
        dispatch(d_out, layout),
        routed.rows,
        w_in,
        w_out,
        layout.group_sizes,
        activation=o.activation,
        b_in=o.b_in,
        b_out=o.b_out,
        row_weights=_row_weights(layout, routing.weights),
        slot_of_row=layout.slot_of_row,
    )
    row = layout.row_of_slot
    d_weights = np.zeros(row.shape)
    d_weights[row >= 0] = grads.d_row_weights[row[row >= 0]]

    counts, n = routing.tokens_per_expert, routed.num_tokens
    d_score_sum = d_lse = None
    if o.aux_loss_coeff:
        d_score_sum = load_balance_loss_backward(routing.score_sum, counts, o.topk, o.aux_loss_coeff, n, d_aux_loss)
    if o.z_loss_coeff:
        d_lse = z_loss_backward(routing.lse, o.z_loss_coeff, n, d_z_loss)
    d_logits = route_backward(routed.logits, d_weights=d_weights, d_score_sum=d_score_sum, d_lse=d_lse, **o.routing())
    d_x = dispatch_backward(grads.d_rows, layout) + d_logits @ as_float64(gate, "gate").T
    return {
        "x": d_x.reshape(np.shape(x)),
        "gate": routed.x.T @ d_logits,
        "w_in": grads.d_w_in,
        "w_out": grads.d_w_out,
        "b_in": grads.d_b_in,
        "b_out": grads.d_b_out,
        "weights": d_weights,
    }

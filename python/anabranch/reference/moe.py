"""The whole Mixture-of-Experts layer in numpy float64: route, dispatch, experts, combine, and their gradients."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .balance import load_balance_loss, load_balance_loss_backward, z_loss, z_loss_backward
from .dispatch import combine, dispatch, dispatch_backward, plan
from .experts import activate, activate_backward, expert_ffn, expert_ffn_backward
from .lora import Lora
from .replay import Replay
from .router import Routing, route, route_backward
from .scores import as_float64


class MoEOutput(NamedTuple):
    """The result of `moe`.

    output float64[..., D], aux_loss and z_loss float64, tokens_per_expert int32[E], dropped int32, experts
    int32[..., K], weights float64[..., K].
    """

    output: np.ndarray
    aux_loss: np.ndarray
    z_loss: np.ndarray
    tokens_per_expert: np.ndarray
    dropped: np.int32
    experts: np.ndarray
    weights: np.ndarray


class RoutedExpertsOutput(NamedTuple):
    """output float64[..., D], tokens_per_expert int32[E], dropped int32."""

    output: np.ndarray
    tokens_per_expert: np.ndarray
    dropped: np.int32


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """The options of `moe` and `moe_backward`.

    topk to replay, and experts: as in `router.route`, with x's leading dimensions where they are per token.
    gate_bias: [E], added to the logits.
    activation to kept, fp8_scales, sent_dtype, lora, lora_scale, lora_dtype: as in `routed_experts`.
    aux_loss_coeff, z_loss_coeff: coefficients of the losses in `balance`; a loss with coefficient 0 is 0.
    saved_dtype: for the backward pass, as in `experts.expert_ffn_backward`.
    """

    topk: int
    score_function: str = "softmax"
    normalize: bool = True
    expert_bias: np.ndarray | None = None
    num_groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int | None = None
    scaling_factor: float = 1.0
    gate_bias: np.ndarray | None = None
    activation: str = "silu"
    b_in: np.ndarray | None = None
    b_out: np.ndarray | None = None
    weight_early: bool = False
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    token_mask: np.ndarray | None = None
    forced_experts: np.ndarray | None = None
    replay: Replay | None = None
    align_size: int = 0
    experts: np.ndarray | None = None
    kept: np.ndarray | None = None
    fp8_scales: str | None = None
    saved_dtype: np.dtype | None = None
    sent_dtype: np.dtype | None = None
    lora: Lora | None = None
    lora_scale: float | tuple[float, float] = 1.0
    lora_dtype: np.dtype | None = None

    def routing(self):
        """The keyword arguments of `route` and `route_backward`, with flattened token dimensions."""

        def per_token(array, *trailing):
            return None if array is None else np.reshape(array, (-1, *trailing))

        return {
            "topk": self.topk,
            "score_function": self.score_function,
            "normalize": self.normalize,
            "expert_bias": self.expert_bias,
            "num_groups": self.num_groups,
            "group_topk": self.group_topk,
            "group_score_topk": self.group_score_topk,
            "scaling_factor": self.scaling_factor,
            "token_mask": per_token(self.token_mask),
            "forced_experts": per_token(self.forced_experts, self.topk),
            "replay": None if self.replay is None else self.replay.flat(),
            "experts": per_token(self.experts, self.topk),
        }

    def network(self):
        """The keyword arguments of `routed_experts`."""
        experts = ("activation", "b_in", "b_out", "weight_early", "align_size", "kept", "fp8_scales", "sent_dtype")
        return {name: getattr(self, name) for name in (*experts, "lora", "lora_scale", "lora_dtype")}


# ---------------------------------------------------------------- after the router


def _flat(array):
    return np.reshape(array, (-1, np.shape(array)[-1]))


def _routed(experts, num_experts, align_size, kept):
    """The plan of experts [T, K] without the assignments outside `kept`, which it counts as dropped."""
    has_room = np.ones(experts.shape, bool) if kept is None else np.reshape(kept, experts.shape)
    whole = plan(experts, num_experts, align_size)
    routed = plan(np.where(has_room, experts, -1), num_experts, align_size)
    valid = (experts >= 0) & (experts < num_experts)
    return routed._replace(
        tokens_per_expert=whole.tokens_per_expert, dropped=whole.dropped + np.int32((valid & ~has_room).sum())
    )


def _row_weights(routed, weights):
    """w of every row's assignment, 0 in padding. [R]."""
    slot = routed.slot_of_row
    return np.where(slot >= 0, weights.reshape(-1)[np.maximum(slot, 0)], 0.0) if slot.size else np.zeros(0)


def routed_experts(
    x,
    experts,
    weights,
    w_in,
    w_out,
    *,
    activation="silu",
    b_in=None,
    b_out=None,
    weight_early=False,
    align_size=0,
    kept=None,
    fp8_scales=None,
    sent_dtype=None,
    lora=None,
    lora_scale=1.0,
    lora_dtype=None,
):
    """out[t] = sum_k weights[t, k] expert_e(x[t]), e = experts[t, k].

    Args:
      x: [..., D]. experts: int[..., K]; an index outside [0, E) is no expert. weights: [..., K], any real numbers.
      w_in: [E, D, 2 or 1, F]. w_out: [E, F, D].
      activation, b_in, b_out, weight_early: as in `experts.expert_ffn`.
      align_size: as in `dispatch.plan`.
      kept: bool with the shape of the experts; False: the assignment exceeds the capacity (`capacity.kept_slots`).
        None: no limit.
      fp8_scales, sent_dtype, lora, lora_scale, lora_dtype: as in `experts.expert_ffn`.

    Returns: `RoutedExpertsOutput`; dropped counts invalid indices other than -1 and assignments outside `kept`.
    """
    weights = as_float64(_flat(weights), "weights")
    routed = _routed(_flat(experts), len(w_in), align_size, kept)
    y = expert_ffn(
        dispatch(as_float64(_flat(x), "x"), routed),
        w_in,
        w_out,
        routed.group_sizes,
        activation=activation,
        b_in=b_in,
        b_out=b_out,
        row_weights=_row_weights(routed, weights) if weight_early else None,
        weight_early=weight_early,
        slot_of_row=routed.slot_of_row,
        fp8_scales=fp8_scales,
        sent_dtype=sent_dtype,
        lora=lora,
        lora_scale=lora_scale,
        lora_dtype=lora_dtype,
    )
    output = combine(y, routed, None if weight_early else weights)
    return RoutedExpertsOutput(output.reshape(np.shape(x)), routed.tokens_per_expert, routed.dropped)


def routed_experts_backward(
    x,
    experts,
    weights,
    w_in,
    w_out,
    d_output,
    *,
    activation="silu",
    b_in=None,
    b_out=None,
    weight_early=False,
    align_size=0,
    kept=None,
    saved_dtype=None,
    fp8_scales=None,
    sent_dtype=None,
    lora=None,
    lora_scale=1.0,
    lora_dtype=None,
):
    """Gradients of `routed_experts` from the cotangent of its output; the same for early and late weights.

    saved_dtype, fp8_scales, sent_dtype, lora, lora_scale, lora_dtype: as in `experts.expert_ffn_backward`.

    Returns: dict of x, weights, w_in, w_out, b_in, b_out, lora (None if not given); float64.
    """
    shape, weights = np.shape(weights), as_float64(_flat(weights), "weights")
    routed = _routed(_flat(experts), len(w_in), align_size, kept)
    grads = expert_ffn_backward(
        dispatch(as_float64(_flat(d_output), "d_output"), routed),
        dispatch(as_float64(_flat(x), "x"), routed),
        w_in,
        w_out,
        routed.group_sizes,
        activation=activation,
        b_in=b_in,
        b_out=b_out,
        row_weights=_row_weights(routed, weights),
        slot_of_row=routed.slot_of_row,
        saved_dtype=saved_dtype,
        fp8_scales=fp8_scales,
        sent_dtype=sent_dtype,
        lora=lora,
        lora_scale=lora_scale,
        lora_dtype=lora_dtype,
    )
    row = routed.row_of_slot
    d_weights = np.zeros(row.shape)
    d_weights[row >= 0] = grads.d_row_weights[row[row >= 0]]
    return {
        "x": dispatch_backward(grads.d_rows, routed).reshape(np.shape(x)),
        "weights": d_weights.reshape(shape),
        "w_in": grads.d_w_in,
        "w_out": grads.d_w_out,
        "b_in": grads.d_b_in,
        "b_out": grads.d_b_out,
        "lora": grads.d_lora,
    }


# ---------------------------------------------------------------- from x


class _Routed(NamedTuple):
    """The inputs of both passes after routing."""

    x: np.ndarray  # [T, D]
    logits: np.ndarray  # [T, E]
    routing: Routing
    num_tokens: int  # unmasked


def _route(x, gate, options):
    x, gate = as_float64(_flat(x), "x"), as_float64(gate, "gate")
    num_tokens = x.shape[0]
    if options.token_mask is not None:
        mask = np.reshape(options.token_mask, -1)
        num_tokens = int(mask.sum())
        # Masked tokens must not enter d_gate = x^T d_logits either: 0 * NaN is NaN.
        x = np.where(mask[:, None], x, 0.0)
    logits = x @ gate
    if options.gate_bias is not None:
        logits = logits + as_float64(options.gate_bias, "gate_bias")
    return _Routed(x, logits, route(logits, **options.routing()), num_tokens)


def moe(x, gate, w_in, w_out, **options):
    """out[t] = sum_k w[t, k] expert_e(x[t]) over the K experts e selected by the logits x gate + gate_bias.

    Args:
      x: [..., D]. gate: [D, E]. w_in: [E, D, 2 or 1, F]. w_out: [E, F, D].
      options: `MoEOptions`.

    Returns: `MoEOutput`.
    """
    o = MoEOptions(**options)
    flat_x, _, routing, n = _route(x, gate, o)
    result = routed_experts(flat_x, routing.experts, routing.weights, w_in, w_out, **o.network())
    counts = routing.tokens_per_expert
    aux = z = np.float64(0.0)
    if o.aux_loss_coeff:
        aux = load_balance_loss(routing.score_sum, counts, o.topk, o.aux_loss_coeff, n)
    if o.z_loss_coeff:
        z = z_loss(routing.lse, o.z_loss_coeff, n)
    slots = (*np.shape(x)[:-1], o.topk)
    experts, weights = routing.experts.reshape(slots), routing.weights.reshape(slots)
    return MoEOutput(result.output.reshape(np.shape(x)), aux, z, counts, result.dropped, experts, weights)


def moe_backward(x, gate, w_in, w_out, d_output, d_aux_loss=0.0, d_z_loss=0.0, d_weights=0.0, **options):
    """Gradients of `moe` from the cotangents of its output, its two losses and its weights.

    Returns: dict of x, gate, gate_bias, w_in, w_out, b_in, b_out, lora (None if not given) and weights; float64. The
      last is the whole cotangent of the routing's weights [T, K]: d_weights plus the gradient through the experts.
    """
    o = MoEOptions(**options)
    flat_x, logits, routing, n = _route(x, gate, o)
    after_router = (flat_x, routing.experts, routing.weights, w_in, w_out, _flat(d_output))
    grads = routed_experts_backward(*after_router, **o.network(), saved_dtype=o.saved_dtype)
    total_d_weights = grads["weights"] + np.reshape(
        np.broadcast_to(d_weights, (*np.shape(x)[:-1], o.topk)), (-1, o.topk)
    )
    counts = routing.tokens_per_expert
    d_score_sum = d_lse = None
    if o.aux_loss_coeff:
        d_score_sum = load_balance_loss_backward(routing.score_sum, counts, o.topk, o.aux_loss_coeff, n, d_aux_loss)
    if o.z_loss_coeff:
        d_lse = z_loss_backward(routing.lse, o.z_loss_coeff, n, d_z_loss)
    d_logits = route_backward(logits, d_weights=total_d_weights, d_score_sum=d_score_sum, d_lse=d_lse, **o.routing())
    return grads | {
        "x": (grads["x"] + d_logits @ as_float64(gate, "gate").T).reshape(np.shape(x)),
        "gate": flat_x.T @ d_logits,
        "gate_bias": None if o.gate_bias is None else d_logits.sum(axis=0),
        "weights": total_d_weights,
    }


# ---------------------------------------------------------------- shared expert


def _sigmoid(z):
    return np.exp(-np.logaddexp(0.0, -z))


def _shared(x, w_in, w_out, w_gate, activation, saved_dtype=None):
    """(x [T, D], h [T, P, S] in saved_dtype, a [T, S], y [T, D], g [T, 1]) of `shared_expert`, whose result is g y."""
    x, w_in, w_out = as_float64(_flat(x), "x"), as_float64(w_in, "w_in"), as_float64(w_out, "w_out")
    h = np.einsum("td,dps->tps", x, w_in)
    if saved_dtype is not None:
        h = h.astype(saved_dtype).astype(np.float64)
    a = activate(h, activation)
    g = np.ones((len(x), 1))
    if w_gate is not None:
        g = _sigmoid(x @ as_float64(w_gate, "w_gate").reshape(-1, 1))
    return x, h, a, a @ w_out, g


def shared_expert(x, w_in, w_out, *, w_gate=None, activation="silu"):
    """A dense expert for every token: sigmoid(<x, w_gate>) (a W_out), a as in `experts.expert_ffn`.

    Args: x [..., D], w_in [D, 2 or 1, S], w_out [S, D], w_gate [D] or [D, 1]; None: no gate. Returns: [..., D].
    """
    *_, y, g = _shared(x, w_in, w_out, w_gate, activation)
    return (g * y).reshape(np.shape(x))


def shared_expert_backward(x, w_in, w_out, d_output, *, w_gate=None, activation="silu", saved_dtype=None):
    """Gradients of `shared_expert`: dict of x, w_in, w_out, w_gate (None if not given); float64.

    saved_dtype: as in `experts.expert_ffn_backward`.
    """
    flat_x, h, a, y, g = _shared(x, w_in, w_out, w_gate, activation, saved_dtype)
    d_out = as_float64(_flat(d_output), "d_output")
    d_h = activate_backward((g * d_out) @ as_float64(w_out, "w_out").T, h, activation)
    d_x = np.einsum("tps,dps->td", d_h, as_float64(w_in, "w_in"))
    d_w_gate = None
    if w_gate is not None:
        d_z = (d_out * y).sum(-1, keepdims=True) * g * (1 - g)
        d_x += d_z * as_float64(w_gate, "w_gate").reshape(1, -1)
        d_w_gate = (flat_x.T @ d_z).reshape(np.shape(w_gate))
    return {
        "x": d_x.reshape(np.shape(x)),
        "w_in": np.einsum("td,tps->dps", flat_x, d_h),
        "w_out": a.T @ (g * d_out),
        "w_gate": d_w_gate,
    }

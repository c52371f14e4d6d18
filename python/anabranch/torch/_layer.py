"""The layer as one differentiable function: its rules are the operations' own, in the order in which data flows.

With a router they are those of `moe`, with a selection that is given those of `routed_experts`. Losses are computed
outside, from the sums that come out of here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.router_options import RouterOptions
from anabranch.rows import num_rows_needed
from anabranch.torch import _ops
from anabranch.torch._autograd import Function, without_autocast
from anabranch.torch._gate import gate_backward, logits_of
from anabranch.torch.experts import Network
from anabranch.torch.router import logits_gradient, routing_of


class LayerConfig(NamedTuple):
    """The options of the layer that are part of a program."""

    router: RouterOptions | None
    """None: experts and weights are given, there is no gate."""
    network: Network
    num_experts: int
    align_size: int


class Operands(NamedTuple):
    """The tensors of the layer, flat: x is [T, D]. None: not given."""

    x: Tensor
    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    gate: Tensor | None = None
    gate_bias: Tensor | None = None
    weights: Tensor | None = None
    """float32 [T, K]."""
    expert_bias: Tensor | None = None
    token_mask: Tensor | None = None
    forced_experts: Tensor | None = None
    experts: Tensor | None = None
    """int32 [T, K]; an index outside [0, E) is no expert."""
    qb_bin_bounds: Tensor | None = None


class LayerOutput(NamedTuple):
    """What the layer computes, flat. Without a router some have no elements: the last four."""

    output: Tensor
    """[T, D], dtype of x."""
    tokens_per_expert: Tensor
    """int32 [E]: before any dropping."""
    dropped: Tensor
    """int32 []."""
    weights: Tensor
    """float32 [T, K]."""
    experts: Tensor
    """int32 [T, K]."""
    score_sum: Tensor
    """float32 [E]."""
    lse: Tensor
    """float32 [T]; of a masked token 0."""
    qb_histogram: Tensor
    """int32 [E, bins]."""
    h: Tensor
    """Kept for the backward pass, as are the next four."""
    logits: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor
    group_sizes: Tensor


_KEPT = ("h", "logits", "row_of_slot", "slot_of_row", "group_sizes")


def _forward(config: LayerConfig, operands: Operands) -> LayerOutput:
    x = operands.x
    if config.router is None:
        weights, experts = operands.weights, operands.experts
        assert weights is not None and experts is not None
        score_sum, lse, logits = (x.new_empty((0,), dtype=torch.float32) for _ in range(3))
        histogram = x.new_empty((0,), dtype=torch.int32)
    else:
        assert operands.gate is not None
        logits = logits_of(x, operands.gate)
        if operands.gate_bias is not None:
            logits = logits + operands.gate_bias.float()
        weights, experts, _, score_sum, lse, histogram = routing_of(
            config.router,
            logits,
            operands.expert_bias,
            operands.token_mask,
            operands.forced_experts,
            operands.qb_bin_bounds,
        )
    E, slots = config.num_experts, experts.shape[0] * experts.shape[1]
    rows = num_rows_needed(slots, E, config.align_size)
    counts, group_sizes, _, row_of_slot, slot_of_row, dropped = _ops.plan(experts, E, rows, config.align_size, 1)
    output, h = _ops.experts(
        x,
        weights,
        row_of_slot,
        slot_of_row,
        group_sizes,
        operands.w_in.to(x.dtype),
        operands.b_in,
        operands.w_out.to(x.dtype),
        operands.b_out,
        *config.network,
    )
    if config.router is None:
        weights, experts = (x.new_empty((0,), dtype=dtype) for dtype in (torch.float32, torch.int32))
    return LayerOutput(
        output, counts, dropped, weights, experts, score_sum, lse, histogram,
        h, logits, row_of_slot, slot_of_row, group_sizes,
    )  # fmt: skip


class _Mixture(Function):
    tensors = Operands._fields

    @staticmethod
    def forward(config, *tensors):
        with without_autocast(tensors[0].device):
            return tuple(_forward(config, Operands(*tensors)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.config, *tensors = inputs
        operands, result = Operands(*tensors), LayerOutput(*output)
        differentiable = ("output",) if ctx.config.router is None else ("output", "weights", "score_sum", "lse")
        ctx.mark_non_differentiable(
            *(o for name, o in zip(LayerOutput._fields, output, strict=True) if name not in differentiable)
        )
        ctx.set_materialize_grads(False)
        ctx.device = operands.x.device
        selection = operands if ctx.config.router is None else result
        ctx.save_for_backward(
            *(
                operands.x,
                operands.w_in,
                operands.w_out,
                operands.b_in,
                operands.b_out,
                operands.gate,
                operands.gate_bias,
            ),
            *(operands.token_mask, selection.weights, selection.experts, result.lse),
            *(getattr(result, name) for name in _KEPT),
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_output, _counts, _dropped, d_weights, _experts, d_score_sum, d_lse, *_):
        with without_autocast(ctx.device):
            found = _backward(ctx, d_output, d_weights, d_score_sum, d_lse)
        return None, *(found.get(name) for name in Operands._fields)


def _backward(ctx, d_output, d_weights, d_score_sum, d_lse):
    """The gradients by the names of their operands."""
    (
        x, w_in, w_out, b_in, b_out, gate, gate_bias, token_mask, weights, experts, lse,
        h, logits, row_of_slot, slot_of_row, group_sizes,
    ) = ctx.saved_tensors  # fmt: skip
    config, dtype = ctx.config, x.dtype
    wants = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=True))
    if d_output is None:
        d_output = torch.zeros_like(x)
    up, down = w_in.to(dtype), w_out.to(dtype)
    dh, d_w_out, d_b_out, d_w = _ops.experts_hidden(
        d_output, h, x, weights, slot_of_row, group_sizes, up, b_in, down, b_out, w_out.dtype,
        wants["w_out"], *config.network,
    )  # fmt: skip
    found = {"w_out": d_w_out if wants["w_out"] else None, "b_out": None if b_out is None else d_b_out}
    addend = None
    if config.router is None:
        found["weights"] = d_w
    elif any(wants[name] for name in ("x", "gate", "gate_bias")):
        if d_weights is not None:
            d_w = d_w + d_weights
        d_logits = logits_gradient(config.router, logits, experts, token_mask, lse, d_w, d_score_sum, d_lse)
        tokens = x if token_mask is None else torch.where(token_mask[:, None], x, 0)  # 0 * NaN would be NaN
        through = gate_backward(tokens, gate, d_logits)
        addend, found["gate"] = through.x, through.gate.to(gate.dtype)
        if gate_bias is not None:
            found["gate_bias"] = d_logits.sum(0).to(gate_bias.dtype)
    d_x, d_w_in, d_b_in = _ops.experts_inputs(
        dh, x, addend, row_of_slot, slot_of_row, group_sizes, up, b_in, down, w_in.dtype, wants["x"], wants["w_in"],
        *config.network,
    )  # fmt: skip
    found |= {"x": d_x if wants["x"] else None, "w_in": d_w_in if wants["w_in"] else None}
    return found | {"b_in": None if b_in is None else d_b_in}


def mixture(config: LayerConfig, operands: Operands) -> LayerOutput:
    """The layer on checked, flat operands."""
    return LayerOutput(*_Mixture.apply(config, *operands))

"""Forward and backward pass of the layer on one rank of a process group.

A rank routes its own tokens. A transport (exchange.py) sends them to their experts and returns the sums. Sums for
losses are those of this rank; the caller adds them over the ranks. Gradients follow binding/group.py: those
of this rank's experts are of the mean of the ranks' losses. Those of its tokens and of the replicated gate are this
rank's part, whose mean over the ranks is that gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.lora import NAMES
from anabranch.torch.binding.autocast import without_autocast
from anabranch.torch.binding.autograd import Function
from anabranch.torch.layer.gate import biased_gate_logits, gate_backward
from anabranch.torch.layer.group_halves import Halves, halves
from anabranch.torch.layer.operands import LayerConfig, Operands, requested_cotangents
from anabranch.torch.layer.replay import route_tokens
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.experts import cast_weight
from anabranch.torch.ops.factors import factor_arguments
from anabranch.torch.ops.gradients import FROM_DH, OPERANDS, request
from anabranch.torch.ops.packed import oriented_backward
from anabranch.torch.ops.quantized import backward_operands, forward_operands
from anabranch.torch.ops.router import logits_gradient
from anabranch.torch.parallel.alike import compare_options
from anabranch.torch.parallel.exchange import Ranks, Route, drop_over_capacity
from anabranch.torch.parallel.transports import transport


class GroupConfig(NamedTuple):
    """Static options of the layer and of the exchange. `layer.num_experts` counts the experts of all ranks."""

    layer: LayerConfig
    ranks: Ranks
    transport: str
    fp8_exchange: bool


class GroupOutput(NamedTuple):
    """The results of the layer for this rank's tokens. Without a router, the results of routing have no elements."""

    output: Tensor
    """[T, D], dtype of x."""
    tokens_per_expert: Tensor
    """int32 [E], before dropping."""
    all_tokens_per_expert: Tensor
    """As tokens_per_expert, for all ranks; so are the next two."""
    all_dropped: Tensor
    """int32 [P]: dropped slots, by source rank."""
    all_qb_histogram: Tensor
    """int32 [E, bins]."""
    weights: Tensor
    """float32 [T, K]."""
    experts: Tensor
    """int32 [T, K], before dropping."""
    score_sum: Tensor
    """float32 [E]."""
    lse: Tensor
    """float32 [T], 0 for a masked token."""
    h: Tensor
    """Saved for backward, as are the following."""
    lora_u: Tensor
    """[R, r], of the adapter of w_in; no elements without it."""
    lora_copies: Tensor
    """[n], the copies of factors of another dtype than x, see `factors`; no elements without them."""
    there: Tensor
    """See `Passed`."""
    logits: Tensor
    experts_weighed_by_router: Tensor
    """int32 [T, K], see `replay`; no elements without recorded weights."""
    row_of_slot: Tensor
    slot_of_row: Tensor
    group_sizes: Tensor
    sent_row_of_slot: Tensor
    sent_slot_of_row: Tensor


_DIFFERENTIABLE = ("output", "weights", "score_sum", "lse")


def _network(config: GroupConfig, topk: int) -> Any:
    return config.layer.network._replace(topk=topk)


def _halves(config: GroupConfig, x: Tensor, has_adapter: bool) -> Halves:
    fp8_scales = config.layer.network.fp8_scales if config.fp8_exchange else None
    return halves(transport(config.transport, config.ranks), x, fp8_scales, has_adapter)


def _forward(config: GroupConfig, operands: Operands) -> GroupOutput:
    x, layer, ranks = operands.x, config.layer, config.ranks
    invalid = compare_options(config, x)
    passes = _halves(config, x, operands.lora_a_in is not None)
    sending = passes.start(x)
    no_floats = x.new_empty((0,), dtype=torch.float32)
    no_integers = x.new_empty((0,), dtype=torch.int32)
    weighed = None
    if layer.router is None:
        weights, experts = operands.weights, operands.experts
        assert weights is not None and experts is not None
        outside = (experts < 0) | (experts >= layer.num_experts)
        invalid = invalid + (outside & (experts != -1)).sum(dtype=torch.int32)
        experts = torch.where(outside, -1, experts)
        counts = torch_ops.plan(experts, layer.num_experts, 0, 0, 1)[0]
        score_sum, lse, logits, histogram = no_floats, no_floats.clone(), no_floats.clone(), no_integers
    else:
        if operands.gate is None:
            assert operands.logits is not None
            logits = operands.logits
        else:
            logits = biased_gate_logits(x, operands.gate, operands.gate_bias)
        requested = layer.requested._replace(tokens_per_expert=True)
        routing = route_tokens(layer.router, logits, operands, requested)
        weights, experts, counts, score_sum, lse, histogram, weighed = routing
    remaining, weights, dropped = drop_over_capacity(ranks, experts, weights)
    by_source = dropped.new_zeros(ranks.ranks)
    by_source[ranks.rank] = invalid + dropped
    own = counts, by_source, histogram
    joined = torch.cat([values.reshape(-1) for values in own])
    network = (
        cast_weight(layer.network, operands.w_in, x.dtype),
        operands.b_in,
        cast_weight(layer.network, operands.w_out, x.dtype),
        operands.b_out,
        *forward_operands(operands.quantized()),
        *factor_arguments(operands.factors()),
        *_network(config, passes.topk),
    )
    passed = passes.experts(x, sending, remaining, weights, joined, network, layer.network.weight_early)
    if layer.router is None:
        weights, experts = no_floats.clone(), no_integers.clone()
    elif operands.gate is None:
        logits = no_floats  # an autograd function must not return an argument
    weighed = no_integers.clone() if weighed is None else weighed
    parts = passed.counts.split([values.numel() for values in own])
    of_all = [part.clone().view_as(values) for part, values in zip(parts, own, strict=True)]
    *saved, route = passed[2:]
    return GroupOutput(
        *(passed.output, counts, *of_all, weights, experts, score_sum, lse, *saved, logits, weighed, *route)
    )


class _GroupLayer(Function):
    tensors = Operands._fields

    @staticmethod
    def forward(config, *tensors):
        with without_autocast(tensors[0].device):
            return tuple(_forward(config, Operands(*tensors)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.config, *tensors = inputs
        operands, result = Operands(*tensors), GroupOutput(*output)
        has_router = ctx.config.layer.router is not None
        names = _DIFFERENTIABLE if has_router else _DIFFERENTIABLE[:1]
        ctx.mark_non_differentiable(*(getattr(result, n) for n in GroupOutput._fields if n not in names))
        ctx.set_materialize_grads(False)
        ctx.device = operands.x.device
        selection = result if has_router else operands
        experts = selection.experts if operands.replay_weights is None else result.experts_weighed_by_router
        ctx.save_for_backward(
            *(operands.x, operands.w_in, operands.w_out, operands.b_in, operands.b_out),
            *(operands.gate, operands.gate_bias, operands.token_mask, selection.weights, experts),
            *(result.h, result.logits if operands.logits is None else operands.logits, result.lse),
            *backward_operands(operands.quantized()),
            *(None if operands.lora_a_in is None else result.lora_u, result.lora_copies, *operands.factors()),
            result.there,
            *(getattr(result, name) for name in Route._fields),
        )

    @staticmethod
    def backward(ctx, d_output, *others):
        d = dict(zip(GroupOutput._fields, (d_output, *others), strict=True))
        with without_autocast(ctx.device):
            gradients = _backward(ctx, d)
        return None, *(gradients.get(name) for name in Operands._fields)


def _backward(ctx, d):
    """Gradients by operand name. Every rank takes part in all collectives, even if it needs no gradient."""
    (
        x, w_in, w_out, b_in, b_out, gate, gate_bias, token_mask, weights, experts, h, logits, lse,
        w_in_q, w_in_scales, w_out_q, w_out_scales, lora_u, lora_copies, lora_a_in, lora_b_in, lora_a_out, lora_b_out,
        there, *route,
    ) = ctx.saved_tensors  # fmt: skip
    config, route, dtype = ctx.config, Route(*route), x.dtype
    layer, passes = config.layer, _halves(config, x, lora_a_in is not None)
    needs = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=True))
    d_output = torch.zeros_like(x) if d["output"] is None else d["output"]
    up, down = (cast_weight(layer.network, w, dtype) for w in (w_in, w_out))
    quantized = oriented_backward(layer.network, w_in, w_out, (w_in_q, w_in_scales, w_out_q, w_out_scales))
    factors = factor_arguments((lora_a_in, lora_b_in, lora_a_out, lora_b_out), lora_copies)
    network = *quantized, *factors, *_network(config, passes.topk)
    # Every rank sends the gradient of x, and of the weights, back to the tokens.
    requested = request({name: needs[name] for name in OPERANDS} | {"x": True, "weights": True})
    rest = up, b_in, down, b_out, lora_u, w_out.dtype, requested, *network
    hidden, d_w = passes.hidden(d_output, x, route, weights, there, h, rest)
    dh, d_w_out, d_b_out, _, dh_q, dh_scales, v_in, *d_factors = hidden
    gradients, addend = {}, None
    if layer.router is None:
        gradients["weights"] = d_w
    else:
        if d["weights"] is not None:
            d_w = d_w + d["weights"]
        d_sums = requested_cotangents(layer, d["score_sum"], d["lse"])
        d_logits = logits_gradient(layer.router, logits, experts, token_mask, lse, d_w, *d_sums)
        if needs["logits"]:
            gradients["logits"] = d_logits
    if gate is not None:
        tokens = x if token_mask is None else torch.where(token_mask[:, None], x, 0)  # 0 * NaN would be NaN
        through = gate_backward(tokens, gate, d_logits, needs_x=needs["x"], needs_gate=needs["gate"])
        addend = through.x
        if through.gate is not None:
            gradients["gate"] = through.gate.to(gate.dtype)
        if needs["gate_bias"]:
            gradients["gate_bias"] = d_logits.sum(0).to(gate_bias.dtype)
    d_x_name, d_x_dtype = ("port", torch.float32) if needs["port"] else ("x", dtype)
    of_dh = dh, dh_q, dh_scales, v_in, w_in.dtype
    of_weights = request({name: needs[name] for name in FROM_DH - {"x"}})
    d_x, d_w_in, d_b_in = passes.inputs(route, d_x_dtype, addend, of_weights, of_dh, (up, b_in, down, *network))
    gradients |= {
        d_x_name: d_x,
        "w_in": d_w_in,
        "b_in": d_b_in,
        "w_out": d_w_out,
        "b_out": d_b_out,
        **dict(zip(NAMES, d_factors, strict=True)),
    }
    return {name: gradient if needs[name] else None for name, gradient in gradients.items()}


def group_layer(config: GroupConfig, operands: Operands) -> GroupOutput:
    """The layer on checked, flattened operands of this rank."""
    return GroupOutput(*_GroupLayer.call(config, *operands))

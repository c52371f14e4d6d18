"""Forward and backward pass of the layer on one rank of a process group.

A rank routes its own tokens. A transport (exchange.py) sends them to their experts and returns the sums. Counts and
sums returned here are those of this rank; the caller adds them over the ranks. Gradients follow binding/group.py: those
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
from anabranch.torch.layer.operands import LayerConfig, Operands, requested_cotangents
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.experts import cast_weight
from anabranch.torch.ops.factors import factor_arguments
from anabranch.torch.ops.gradients import FROM_DH, OPERANDS, request
from anabranch.torch.ops.packed import oriented_backward
from anabranch.torch.ops.quantized import backward_operands, forward_operands
from anabranch.torch.ops.router import logits_gradient, run_route
from anabranch.torch.parallel.alike import compare_options
from anabranch.torch.parallel.exchange import Ranks, Route, Sending, Transport, drop_over_capacity
from anabranch.torch.parallel.message import QuantizedOperand, dequantize, pack, quantize_rows, unpack
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
    dropped: Tensor
    """int32 []: dropped slots of this rank's tokens."""
    weights: Tensor
    """float32 [T, K]."""
    experts: Tensor
    """int32 [T, K], before dropping."""
    score_sum: Tensor
    """float32 [E]."""
    lse: Tensor
    """float32 [T], 0 for a masked token."""
    qb_histogram: Tensor
    """int32 [E, bins]."""
    h: Tensor
    """Saved for backward, as are the following."""
    lora_u: Tensor
    """[R, r], of the adapter of w_in; no elements without it."""
    lora_copies: Tensor
    """[n], the copies of factors of another dtype than x, see `factors`; no elements without them."""
    logits: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor
    group_sizes: Tensor
    sent_row_of_slot: Tensor
    sent_slot_of_row: Tensor


_DIFFERENTIABLE = ("output", "weights", "score_sum", "lse")


def _network(config: GroupConfig, topk: int) -> Any:
    return config.layer.network._replace(topk=topk)


def _start(config: GroupConfig, chosen: Transport, tokens: Tensor) -> Sending:
    """Starts to send tokens [T, D], in FP8 with fp8_exchange."""
    return chosen.start(pack(quantize_rows(tokens, config.layer.network.fp8_scales)) if config.fp8_exchange else tokens)


def _arrived(chosen: Transport, route: Route, sending: Sending, D: int) -> QuantizedOperand:
    """Tokens that were sent in FP8."""
    return unpack(chosen.arrived(route, sending), D)


def _forward(config: GroupConfig, operands: Operands) -> GroupOutput:
    x, layer, ranks = operands.x, config.layer, config.ranks
    invalid = compare_options(config, x)
    chosen = transport(config.transport, ranks)
    sending = _start(config, chosen, x)
    no_floats = x.new_empty((0,), dtype=torch.float32)
    no_integers = x.new_empty((0,), dtype=torch.int32)
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
        weights, experts, counts, score_sum, lse, histogram = run_route(
            layer.router,
            logits,
            operands.expert_bias,
            operands.token_mask,
            operands.forced_experts,
            operands.qb_bin_bounds,
            requested=layer.requested._replace(tokens_per_expert=True),
        )
    remaining, weights, dropped = drop_over_capacity(ranks, experts, weights)
    route = chosen.plan(remaining)
    early = layer.network.weight_early
    there = chosen.send_weights(route, weights) if early or chosen.weights_there else None
    arrived: tuple[Any, ...] = (x, None, None)  # x, quantised x and its scales
    if not config.fp8_exchange:
        arrived = chosen.arrived(route, sending), None, None
    else:
        quantized = _arrived(chosen, route, sending, x.shape[1])
        arrived = x if operands.lora_a_in is None else dequantize(quantized, x.dtype), *quantized
    sums, h, u, copies = torch_ops.experts(
        *arrived,
        there,
        route.row_of_slot,
        route.slot_of_row,
        route.group_sizes,
        cast_weight(layer.network, operands.w_in, x.dtype),
        operands.b_in,
        cast_weight(layer.network, operands.w_out, x.dtype),
        operands.b_out,
        *forward_operands(operands.quantized()),
        *factor_arguments(operands.factors()),
        *_network(config, chosen.topk),
    )
    output = chosen.collect(route, chosen.start_return(sums), None if there is not None else weights, x.dtype)
    if layer.router is None:
        weights, experts = no_floats.clone(), no_integers.clone()
    elif operands.gate is None:
        logits = no_floats  # an autograd function must not return an argument
    return GroupOutput(
        output, counts, invalid + dropped, weights, experts, score_sum, lse, histogram, h, u, copies, logits, *route
    )  # fmt: skip


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
        ctx.save_for_backward(
            *(operands.x, operands.w_in, operands.w_out, operands.b_in, operands.b_out),
            *(operands.gate, operands.gate_bias, operands.token_mask, selection.weights, selection.experts),
            *(result.h, result.logits if operands.logits is None else operands.logits, result.lse),
            *backward_operands(operands.quantized()),
            *(None if operands.lora_a_in is None else result.lora_u, result.lora_copies, *operands.factors()),
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
        *route,
    ) = ctx.saved_tensors  # fmt: skip
    config, route, dtype = ctx.config, Route(*route), x.dtype
    layer, chosen = config.layer, transport(config.transport, config.ranks)
    options = _network(config, chosen.topk)
    needs = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=True))
    d_output = torch.zeros_like(x) if d["output"] is None else d["output"]
    # Cotangents and weights are sent to the experts, which then have all operands of d_weights. Gradients of the
    # experts are means over the P ranks: the weights carry the factor 1/P, and the sum of d_x multiplies by P.
    P, d_rows_sent = config.ranks.ranks, (None, None)
    sending = _start(config, chosen, d_output)
    there = chosen.send_weights(route, weights) / P
    if config.fp8_exchange:
        d_rows_sent = _arrived(chosen, route, sending, x.shape[1])
        d_rows = dequantize(d_rows_sent, d_output.dtype)
    else:
        d_rows = chosen.arrived(route, sending)
    sending = _start(config, chosen, x)
    # Without FP8 and adapters, experts_hidden reads only the shape of the tokens, which then arrive meanwhile.
    arrives_later = sending.arriving is not None and not config.fp8_exchange and lora_a_in is None
    if config.fp8_exchange:
        arrived = dequantize(_arrived(chosen, route, sending, x.shape[1]), dtype)
    else:
        arrived = sending.arriving if arrives_later else chosen.arrived(route, sending)
    up, down = (cast_weight(layer.network, w, dtype) for w in (w_in, w_out))
    quantized = oriented_backward(layer.network, w_in, w_out, (w_in_q, w_in_scales, w_out_q, w_out_scales))
    factors = factor_arguments((lora_a_in, lora_b_in, lora_a_out, lora_b_out), lora_copies)
    # Every rank sends the gradient of x, and of the weights, back to the tokens.
    requested = request({name: needs[name] for name in OPERANDS} | {"x": True, "weights": True})
    hidden = torch_ops.experts_hidden(
        d_rows, *d_rows_sent, h, arrived, there, route.slot_of_row, route.group_sizes, up, b_in, down, b_out, lora_u,
        w_out.dtype, requested, *quantized, *factors, *options,
    )  # fmt: skip
    dh, d_w_out, d_b_out, d_there, dh_q, dh_scales, v_in, *d_factors = hidden
    d_w = chosen.collect_weights(route, d_there)
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
    if arrives_later:
        arrived = chosen.arrived(route, sending)

    def inputs(wanted):
        return torch_ops.experts_inputs(
            dh, dh_q, dh_scales, arrived, None, route.row_of_slot, route.slot_of_row, route.group_sizes, up, b_in, down,
            v_in, w_in.dtype, dtype, wanted, *quantized, *factors, *options,
        )  # fmt: skip

    # The sums of d_x return while the weights' gradients are computed.
    d_arrived, d_w_in, d_b_in = inputs(request({"x": True}) if chosen.overlaps else requested)
    returning = chosen.start_return(d_arrived)
    of_weights = request({name: needs[name] for name in FROM_DH - {"x"}})
    if chosen.overlaps and of_weights:
        _, d_w_in, d_b_in = inputs(of_weights)
    factor = weights.new_full((x.shape[0], chosen.returning), P)
    d_x_name, d_x_dtype = ("port", torch.float32) if needs["port"] else ("x", dtype)
    d_x = chosen.collect(route, returning, factor, d_x_dtype, addend)
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

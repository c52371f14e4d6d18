"""Forward and backward pass of the layer on one rank of a process group.

A rank routes its own tokens. A transport (exchange.py) sends them to their experts and returns the sums. Sums for
losses are those of this rank; the caller adds them over the ranks. Gradients follow binding/group.py: those
of this rank's experts are of the mean of the ranks' losses. Those of its tokens are this rank's part, whose mean over
the ranks is that gradient. Those of the replicated gate are averaged over the ranks.

As in forward.py there are two autograd functions with the same passes. `_EagerGroupLayer` is for cases that native
operations compute (native_group.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.lora import NAMES
from anabranch.torch.binding.autocast import without_autocast
from anabranch.torch.binding.autograd import Function
from anabranch.torch.binding.eager import is_plain_eager, needs_graph
from anabranch.torch.binding.group import mean_gradient, with_mean_gradients
from anabranch.torch.layer import native_group
from anabranch.torch.layer.gate import biased_gate_logits, gate_backward
from anabranch.torch.layer.group_halves import Halves, halves
from anabranch.torch.layer.group_output import GroupConfig, GroupOutput
from anabranch.torch.layer.operands import Operands, requested_cotangents, view_gradients, view_parameters
from anabranch.torch.layer.replay import route_tokens
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.experts import cast_weight
from anabranch.torch.ops.factors import factor_arguments
from anabranch.torch.ops.gradients import FROM_DH, OPERANDS, request
from anabranch.torch.ops.packed import oriented_backward
from anabranch.torch.ops.quantized import backward_operands, forward_operands
from anabranch.torch.ops.router import logits_gradient
from anabranch.torch.parallel.alike import compare_options
from anabranch.torch.parallel.exchange import Route, drop_over_capacity
from anabranch.torch.parallel.transports import run_pass, transport

#: The results of `_GroupLayer`.
_RESULTS = GroupOutput._fields[:-2]
_DIFFERENTIABLE = ("output", "weights", "score_sum", "lse")


def _network(config: GroupConfig, topk: int) -> Any:
    return config.layer.network._replace(topk=topk)


def _halves(config: GroupConfig, x: Tensor, has_adapter: bool) -> Halves:
    fp8_scales = config.layer.network.fp8_scales if config.fp8_exchange else None
    return halves(transport(config.transport, config.ranks), x, fp8_scales, has_adapter)


def _run(config: GroupConfig, function: Callable[..., Any], *arguments: Any) -> Any:
    return run_pass(config.transport, config.ranks, function, config, *arguments)


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


def _saved(config: GroupConfig, o: Operands, result: GroupOutput) -> tuple[Tensor | None, ...]:
    """What the backward pass reads."""
    selection = o if config.layer.router is None else result
    experts = selection.experts if o.replay_weights is None else result.experts_weighed_by_router
    return (
        *(o.x, o.w_in, o.w_out, o.b_in, o.b_out, o.gate, o.gate_bias, o.token_mask, selection.weights, experts),
        *(result.h, result.logits if o.logits is None else o.logits, result.lse),
        *backward_operands(o.quantized()),
        *(None if o.lora_a_in is None else result.lora_u, result.lora_copies, *o.factors()),
        result.there,
        *(getattr(result, name) for name in Route._fields),
    )


class _GroupLayer(Function):
    tensors = Operands._fields

    @staticmethod
    def forward(config, *tensors):
        with without_autocast(tensors[0].device):
            return tuple(_run(config, _forward, Operands(*tensors)))[: len(_RESULTS)]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.config, *tensors = inputs
        operands, result = Operands(*tensors), GroupOutput(*output)
        names = _DIFFERENTIABLE if ctx.config.layer.router is not None else _DIFFERENTIABLE[:1]
        ctx.mark_non_differentiable(*(getattr(result, n) for n in _RESULTS if n not in names))
        ctx.set_materialize_grads(False)
        ctx.device = operands.x.device
        ctx.save_for_backward(*_saved(ctx.config, operands, result))

    @staticmethod
    def backward(ctx, *cotangents):
        d = dict(zip(_RESULTS, cotangents, strict=True))
        needs = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=True))
        with without_autocast(ctx.device):
            gradients = _run(ctx.config, _backward, needs, ctx.saved_tensors, *(d[name] for name in _DIFFERENTIABLE))
        return None, *(gradients.get(name) for name in Operands._fields)


class _EagerGroupLayer(Function):
    """The layer in the cases of native_group.py.

    `operands` has all operands. `given` has the first of those named `native_group.DIFFERENTIABLE`. The results are
    added to the empty list `results`. The gradient of the gate is averaged over the ranks of `group`.
    """

    tensors = native_group.DIFFERENTIABLE

    @staticmethod
    def forward(ctx, config, operands, group, results, *given):
        result = _run(config, native_group.forward, operands, group)
        ctx.config, ctx.group = config, group
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*_saved(config, operands, result))
        results.append(result)
        if config.layer.aux_loss or config.layer.z_loss:
            return result.output, result.weights, result.score_sum, result.lse
        return result.output, result.weights

    @staticmethod
    def backward(ctx, d_output, d_weights=None, d_score_sum=None, d_lse=None):
        names = native_group.DIFFERENTIABLE[: len(ctx.needs_input_grad) - 4]
        needs = dict.fromkeys(Operands._fields, False) | dict(zip(names, ctx.needs_input_grad[4:], strict=True))
        config, saved, cotangents = ctx.config, ctx.saved_tensors, (d_output, d_weights, d_score_sum, d_lse)
        device = saved[0].device
        if is_plain_eager(device, cotangents):
            gradients = _run(config, native_group.backward, needs, saved, ctx.group, *cotangents)
        else:
            with without_autocast(device):
                gradients = _run(config, _eager_backward, needs, saved, *cotangents)
        if needs["gate"]:
            gradients["gate"] = mean_gradient(ctx.group, gradients["gate"])
        return None, None, None, None, *(gradients.get(name) for name in names)


def _eager_backward(config: GroupConfig, needs: Mapping[str, bool], saved: Sequence[Any], *cotangents: Any) -> Any:
    """`_backward` for operands that may be parameters, see `view_parameters`."""
    given = Operands(*saved[:6])
    if given.w_in.dim() != 3:
        return _backward(config, needs, saved, *cotangents)
    views = view_parameters(given, config.layer.network.w_in_layout)[:6]
    return view_gradients(_backward(config, needs, (*views, *saved[6:]), *cotangents), given.w_in, given.b_in)


def _eager_layer(config: GroupConfig, operands: Operands, group: Any) -> GroupOutput:
    """`group_layer` in the cases of native_group.py."""
    o = operands
    given: tuple[Tensor | None, ...] = (o.x, o.w_in, o.w_out, o.b_in, o.b_out, o.gate)
    if o.lora_a_in is not None or o.lora_a_out is not None:
        given = (*given, *o.factors())
    if not needs_graph(given):
        result: GroupOutput = _run(config, native_group.forward, operands, group)
        return result
    results: list[GroupOutput] = []
    output, weights, *sums = _EagerGroupLayer.call_eager(config, operands, group, results, *given)
    (r,) = results
    score_sum, lse = sums or (r.score_sum, r.lse)
    return r._replace(output=output, weights=weights, score_sum=score_sum, lse=lse)


def _backward(
    config: GroupConfig,
    needs: Mapping[str, bool],
    saved: Sequence[Any],
    d_output: Tensor | None,
    d_weights: Tensor | None,
    d_score_sum: Tensor | None,
    d_lse: Tensor | None,
) -> dict[str, Tensor | None]:
    """Gradients by operand name. Every rank takes part in all collectives, even if it needs no gradient."""
    (
        x, w_in, w_out, b_in, b_out, gate, gate_bias, token_mask, weights, experts, h, logits, lse,
        w_in_q, w_in_scales, w_out_q, w_out_scales, lora_u, lora_copies, lora_a_in, lora_b_in, lora_a_out, lora_b_out,
        there, *of_route,
    ) = saved  # fmt: skip
    route, dtype = Route(*of_route), x.dtype
    layer, passes = config.layer, _halves(config, x, lora_a_in is not None)
    if d_output is None:
        d_output = torch.zeros_like(x)
    up, down = (cast_weight(layer.network, w, dtype) for w in (w_in, w_out))
    quantized = oriented_backward(layer.network, w_in, w_out, (w_in_q, w_in_scales, w_out_q, w_out_scales))
    factors = factor_arguments((lora_a_in, lora_b_in, lora_a_out, lora_b_out), lora_copies)
    network = *quantized, *factors, *_network(config, passes.topk)
    # Every rank sends the gradient of x, and of the weights, back to the tokens.
    requested = request({name: needs[name] for name in OPERANDS} | {"x": True, "weights": True})
    rest = up, b_in, down, b_out, lora_u, w_out.dtype, requested, *network
    hidden, d_w = passes.hidden(d_output, x, route, weights, there, h, rest)
    dh, d_w_out, d_b_out, _, dh_q, dh_scales, v_in, *d_factors = hidden
    gradients: dict[str, Tensor | None] = {}
    addend = None
    if layer.router is None:
        gradients["weights"] = d_w
    else:
        if d_weights is not None:
            d_w = d_w + d_weights
        d_sums = requested_cotangents(layer, d_score_sum, d_lse)
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


def group_layer(config: GroupConfig, operands: Operands, group: Any) -> GroupOutput:
    """The layer on checked, flattened operands of this rank of a group, which may be parameters, see `run_layer`."""
    if native_group.applies(config, operands):
        return _eager_layer(config, operands, group)
    if operands.w_in.dim() == 3:
        operands = view_parameters(operands, config.layer.network.w_in_layout, differentiable=True)
    gate, gate_bias = with_mean_gradients(group, operands.gate, operands.gate_bias)
    operands = operands._replace(gate=gate, gate_bias=gate_bias)
    return GroupOutput(*_GroupLayer.call(config, *operands))

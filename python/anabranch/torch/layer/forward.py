"""Forward and backward pass of the layer, and the autograd functions around them.

They compute `moe` if there is a router, and `routed_experts` if experts and weights are given. The caller computes
losses from the sums that they return.

There are two autograd functions with the same passes. `_FusedLayer` works under torch.compile, torch.func, modes and
tensor subclasses: every result is an output of the function. `_EagerLayer` is for plain tensors in eager mode. Its
outputs are only the differentiable results, because each input and output costs host time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.lora import NAMES
from anabranch.torch.binding.autocast import without_autocast
from anabranch.torch.binding.autograd import Function
from anabranch.torch.binding.eager import is_plain_eager, needs_graph
from anabranch.torch.layer import native_passes
from anabranch.torch.layer.gate import biased_gate_logits, gate_backward
from anabranch.torch.layer.operands import (
    LayerConfig,
    LayerOutput,
    Operands,
    requested_cotangents,
    view_gradients,
    view_parameters,
)
from anabranch.torch.layer.replay import needs_two_calls, route_tokens
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.experts import cast_weight
from anabranch.torch.ops.factors import factor_arguments
from anabranch.torch.ops.gradients import FROM_DH, OPERANDS, request
from anabranch.torch.ops.packed import oriented_backward
from anabranch.torch.ops.quantized import backward_operands, forward_operands
from anabranch.torch.ops.router import logits_gradient


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _forward(config: LayerConfig, operands: Operands) -> tuple[Tensor, ...]:
    """The fields of a LayerOutput."""
    o, x = operands, operands.x
    logits = o.logits if o.gate is None else biased_gate_logits(x, o.gate, o.gate_bias)
    # An autograd function must not return an argument, so given logits are not returned.
    returned = x.new_empty((0,), dtype=torch.float32) if logits is None or o.logits is not None else logits
    if config.router is None or not needs_two_calls(config.router, o.replay(), o.expert_bias):
        return *_layer(config, o, logits), returned
    assert logits is not None
    weights, experts, _, *statistics, weighed = route_tokens(config.router, logits, o, config.requested)
    results = _layer(config, o._replace(weights=weights, experts=experts), None)
    results = (*results[:3], weights, experts, *statistics, *results[8:], returned)
    return results if weighed is None else (*results, weighed)


def _layer(config: LayerConfig, operands: Operands, logits: Tensor | None) -> tuple[Tensor, ...]:
    """The first fields of a LayerOutput, up to `group_sizes`. Without logits, experts and weights are given."""
    o, x = operands, operands.x
    results: tuple[Tensor, ...] = torch_ops.layer(
        x, logits, o.weights, o.experts, o.expert_bias, o.token_mask, o.replay_experts, o.qb_bin_bounds,
        cast_weight(config.network, o.w_in, x.dtype), o.b_in,
        cast_weight(config.network, o.w_out, x.dtype), o.b_out, *forward_operands(o.quantized()),
        *factor_arguments(o.factors()), *config.options,
    )  # fmt: skip
    return results


#: The operands that may need a gradient.
_DIFFERENTIABLE = (
    "x", "w_in", "w_out", "b_in", "b_out", "gate", "gate_bias", "weights", "logits", "port", *NAMES,
)  # fmt: skip


class _Saved(NamedTuple):
    """What the backward pass reads, besides the operands for FP8."""

    x: Tensor
    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    gate: Tensor | None
    gate_bias: Tensor | None
    token_mask: Tensor | None
    weights: Tensor
    experts: Tensor
    """Those whose weights have a gradient."""
    lse: Tensor | None
    h: Tensor
    logits: Tensor
    row_of_slot: Tensor | None
    slot_of_row: Tensor | None
    group_sizes: Tensor | None
    maps: Tensor | None
    """The three maps in one tensor, from native operations."""
    lora_u: Tensor | None
    lora_copies: Tensor | None
    lora_a_in: Tensor | None
    lora_b_in: Tensor | None
    lora_a_out: Tensor | None
    lora_b_out: Tensor | None

    def factors(self) -> tuple[Tensor | None, ...]:
        """The fields of a Lora."""
        return self[-4:]


def _saved(config: LayerConfig, o: Operands, result: LayerOutput) -> tuple[Tensor | None, ...]:
    """The fields of a _Saved, and the operands for FP8, if they are given."""
    selection = o if config.router is None else result
    experts = selection.experts if result.experts_weighed_by_router is None else result.experts_weighed_by_router
    has_adapters = o.lora_a_in is not None or o.lora_a_out is not None
    return (
        *(o.x, o.w_in, o.w_out, o.b_in, o.b_out, o.gate, o.gate_bias, o.token_mask),
        *(selection.weights, experts, result.lse),
        *(result.h, result.logits if o.logits is None else o.logits),
        *(result.row_of_slot, result.slot_of_row, result.group_sizes, result.maps),
        *(None if o.lora_a_in is None else result.lora_u, result.lora_copies if has_adapters else None, *o.factors()),
        *(() if o.quantized() is None else backward_operands(o.quantized())),
    )


def _split(saved: Sequence[Any]) -> tuple[_Saved, Sequence[Any]]:
    """The inverse of `_saved`: a _Saved, and the operands for FP8."""
    number = len(_Saved._fields)
    return _Saved(*saved[:number]), saved[number:] or (None,) * 4


def _differentiable_results(config: LayerConfig) -> tuple[str, ...]:
    return ("output",) if config.router is None else ("output", "weights", "score_sum", "lse")


class _FusedLayer(Function):
    tensors = Operands._fields

    @staticmethod
    def forward(config, *tensors):
        with without_autocast(tensors[0].device):
            return _forward(config, Operands(*tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.config, *tensors = inputs
        o, result = Operands(*tensors), LayerOutput(*output)
        differentiable = _differentiable_results(ctx.config)
        ctx.mark_non_differentiable(
            *(
                o
                for name, o in zip(LayerOutput._fields[: len(output)], output, strict=True)
                if name not in differentiable
            )
        )
        ctx.set_materialize_grads(False)
        ctx.device = o.x.device
        ctx.save_for_backward(*_saved(ctx.config, o, result))

    @staticmethod
    def backward(ctx, d_output, _counts, _dropped, d_weights, _experts, d_score_sum, d_lse, *_):
        needs = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=True))
        with without_autocast(ctx.device):
            gradients = _backward(ctx.config, needs, ctx.saved_tensors, d_output, d_weights, d_score_sum, d_lse)
        return None, *(gradients.get(name) for name in Operands._fields)


class _EagerLayer(Function):
    """The layer on plain tensors in eager mode.

    `operands` has all operands, also those without a gradient. `given` has the first of those named _DIFFERENTIABLE.
    The results are added to the empty list `results`.
    """

    tensors = _DIFFERENTIABLE

    @staticmethod
    def forward(ctx, config, operands, results, is_native, *given):
        result = _eager_forward(config, operands, is_native)
        ctx.config, ctx.is_native = config, is_native
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*_saved(config, operands, result))
        results.append(result)
        if config.router is None:
            return result.output
        if config.aux_loss or config.z_loss:
            return result.output, result.weights, result.score_sum, result.lse
        return result.output, result.weights

    @staticmethod
    def backward(ctx, d_output, d_weights=None, d_score_sum=None, d_lse=None):
        names = _DIFFERENTIABLE[: len(ctx.needs_input_grad) - 4]
        needs = dict(zip(names, ctx.needs_input_grad[4:], strict=True))
        config, saved, cotangents = ctx.config, ctx.saved_tensors, (d_output, d_weights, d_score_sum, d_lse)
        device = saved[0].device
        has_logits_gradient = d_weights is None and (needs["x"] or needs["gate"])
        if ctx.is_native and (config.router is None or has_logits_gradient) and is_plain_eager(device, cotangents):
            d_sums = requested_cotangents(config, d_score_sum, d_lse)
            gradients = native_passes.backward(config, needs, *_split(saved), d_output, d_sums)
        else:
            with without_autocast(device):
                gradients = _eager_backward(config, needs, saved, *cotangents)
        return None, None, None, None, *(gradients.get(name) for name in names)


def _eager_backward(config: LayerConfig, needs: Mapping[str, bool], saved: Sequence[Any], *cotangents: Any) -> Any:
    """`_backward` for operands that may be parameters, see `view_parameters`."""
    s, quantized = _split(saved)
    if s.w_in.dim() != 3:
        return _backward(config, needs, saved, *cotangents)
    gradients = _backward(config, needs, (*view_parameters(s, config.network.w_in_layout), *quantized), *cotangents)
    return view_gradients(gradients, s.w_in, s.b_in)


def _eager_forward(config: LayerConfig, operands: Operands, is_native: bool) -> LayerOutput:
    if is_native:
        return native_passes.forward(config, operands)
    if operands.w_in.dim() == 3:
        operands = view_parameters(operands, config.network.w_in_layout)
    return LayerOutput(*_forward(config, operands))


def _eager_layer(config: LayerConfig, operands: Operands) -> LayerOutput:
    """`fused_layer` in the plain eager case."""
    o, is_native = operands, native_passes.applies(config, operands)
    given: tuple[Tensor | None, ...] = (o.x, o.w_in, o.w_out, o.b_in, o.b_out, o.gate)
    if not is_native or config.router is None:
        given = (*given, o.gate_bias, o.weights, o.logits, o.port, *o.factors())
    elif o.lora_a_in is not None or o.lora_a_out is not None:
        given = (*given, None, None, None, None, *o.factors())
    if not needs_graph(given):
        return _eager_forward(config, operands, is_native)
    results: list[LayerOutput] = []
    outputs = _EagerLayer.call_eager(config, operands, results, is_native, *given)
    (r,) = results
    if config.router is None:
        return r._replace(output=outputs)
    output, weights, *sums = outputs
    score_sum, lse = sums or (r.score_sum, r.lse)
    return LayerOutput(output, r.tokens_per_expert, r.dropped, weights, r.experts, score_sum, lse, *r[7:])


def _backward(
    config: LayerConfig,
    needs: Mapping[str, bool],
    saved: Sequence[Any],
    d_output: Tensor | None,
    d_weights: Tensor | None,
    d_score_sum: Tensor | None,
    d_lse: Tensor | None,
) -> dict[str, Tensor | None]:
    """Gradients by operand name. needs: whether an operand needs its gradient; False for a missing one."""
    (
        x, w_in, w_out, b_in, b_out, gate, gate_bias, token_mask, weights, experts, lse,
        h, logits, *maps, packed_maps, lora_u, lora_copies, lora_a_in, lora_b_in, lora_a_out, lora_b_out,
    ), quantized = _split(saved)  # fmt: skip
    factors = factor_arguments((lora_a_in, lora_b_in, lora_a_out, lora_b_out), lora_copies)
    if packed_maps is not None:
        maps = [*native_passes.unpacked_maps(config, packed_maps, experts, h)]
    row_of_slot, slot_of_row, group_sizes = maps
    if lse is None:
        lse = x.new_empty((0,), dtype=torch.float32)
    quantized = oriented_backward(config.network, w_in, w_out, quantized)
    needs, dtype = dict.fromkeys(_DIFFERENTIABLE, False) | dict(needs), x.dtype
    through_gate = gate is not None and (needs["x"] or needs["gate"] or needs["gate_bias"])
    needs_logits = through_gate or needs["logits"]
    if d_output is None:
        d_output = torch.zeros_like(x)
    up, down = (cast_weight(config.network, w, dtype) for w in (w_in, w_out))
    experts_operands = (h, x, weights, slot_of_row, group_sizes, up, b_in, down, b_out, lora_u)
    d_sums = requested_cotangents(config, d_score_sum, d_lse)
    experts_need = {name: needs[name] for name in OPERANDS} | {
        "x": needs["x"] or needs["port"],
        "weights": needs["weights"] or needs_logits,
    }
    requested = request(experts_need)
    # A cotangent of the weights is added to the experts' gradient first, so the backward pass of routing is separate.
    if fused := needs_logits and d_weights is None:
        *hidden, d_logits = torch_ops.layer_hidden(
            d_output, *experts_operands, logits, experts, token_mask, lse, *d_sums, w_out.dtype, requested,
            *quantized, *factors, *config.options,
        )  # fmt: skip
    else:
        hidden = torch_ops.experts_hidden(
            d_output, None, None, *experts_operands, w_out.dtype, requested, *quantized, *factors, *config.network
        )
    dh, d_w_out, d_b_out, d_w, dh_q, dh_scales, v_in, *d_factors = hidden
    gradients = {"w_out": d_w_out, "b_out": d_b_out} | dict(zip(NAMES, d_factors, strict=True))
    addend = None
    if config.router is None:
        gradients["weights"] = _as(d_w, weights.dtype)
    elif needs_logits:
        if not fused:
            d_w = d_w + d_weights
            d_logits = logits_gradient(config.router, logits, experts, token_mask, lse, d_w, *d_sums)
        if needs["logits"]:
            gradients["logits"] = d_logits
    if gate is not None and through_gate:
        tokens = x if token_mask is None else torch.where(token_mask[:, None], x, 0)  # 0 * NaN would be NaN
        through = gate_backward(tokens, gate, d_logits, needs_x=needs["x"], needs_gate=needs["gate"])
        addend = through.x
        if through.gate is not None:
            gradients["gate"] = _as(through.gate, gate.dtype)
        if gate_bias is not None and needs["gate_bias"]:
            gradients["gate_bias"] = _as(d_logits.sum(0), gate_bias.dtype)
    if any(experts_need[name] for name in FROM_DH):
        d_x, d_w_in, d_b_in = torch_ops.experts_inputs(
            dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, up, b_in, down, v_in,
            w_in.dtype, dtype if needs["x"] else torch.float32, requested, *quantized, *factors, *config.network,
        )  # fmt: skip
        gradients |= {"w_in": d_w_in, "b_in": d_b_in}
        gradients["x" if needs["x"] else "port"] = d_x
    return {name: gradient if needs[name] else None for name, gradient in gradients.items()}


def fused_layer(config: LayerConfig, operands: Operands, *, are_parameters: bool = False) -> LayerOutput:
    """The layer on checked, flattened operands. are_parameters: see `run_layer`."""
    if are_parameters or is_plain_eager(operands.x.device, operands):
        return _eager_layer(config, operands)
    return LayerOutput(*_FusedLayer.call(config, *operands))

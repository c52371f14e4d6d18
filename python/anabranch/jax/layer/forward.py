"""The forward and backward rule of the whole layer on one device's tokens, and on shards of tokens.

Both rules call the operations' own rules in the order of data flow; JAX differentiates nothing here. With a router they
are the rules of `moe`, with a given selection those of `routed_experts`. `moe` computes the losses itself, from sums
over all tokens that the rules return.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from anabranch import phases
from anabranch.jax.binding.arrays import flat
from anabranch.jax.binding.sharding import TokenCall
from anabranch.jax.layer.gate import GateResiduals, gate_residuals, select, select_backward
from anabranch.jax.layer.names import named_h, named_logits, named_routing, named_u
from anabranch.jax.layer.operands import (
    DIFFERENTIABLE,
    TOKEN_RESULTS,
    TOKENS,
    Cotangents,
    LayerConfig,
    LayerOutput,
    Operands,
    Selection,
    ffn_operands,
    flat_selection,
    flat_tokens,
    gradients,
    layer_output,
    output_names,
    quantize_weights,
    round_weights,
    weight_dtypes,
)
from anabranch.jax.ops.ffn import Saved, ffn_backward_by_slot, ffn_forward_by_slot, rows_gradient, up_gradients
from anabranch.jax.ops.plan import Plan, plan


class Residuals(NamedTuple):
    """Saved for the backward pass in addition to the operands and the selection."""

    gate: GateResiduals
    routed: Plan | None
    """None: the backward pass recomputes the plan."""
    h: jax.Array | None
    u: jax.Array | None
    """[R, r], with an adapter of w_in."""


def forward(config: LayerConfig, operands: Operands, *, save: bool) -> tuple[LayerOutput, Residuals]:
    """The forward rule on one device; `save`: whether a gradient is needed."""
    leading, operands = operands.x.shape[:-1], flat_tokens(quantize_weights(config, operands, backward=False))
    selection, sums, gate = select(config, operands, save=save, counts=False)  # the plan has the counts
    with jax.named_scope(phases.PLAN):
        routed = plan(selection.experts, operands.w_in.shape[0], align_size=config.align_size)
    routed = named_routing(routed)
    early, late = (selection.weights, None) if config.ffn.weight_early else (None, selection.weights)
    with jax.named_scope(phases.UP):
        y, saved = ffn_forward_by_slot(config.ffn, ffn_operands(operands, routed, early), save=save)
    with jax.named_scope(phases.DOWN):
        output = y.sum(routed.row_of_slot, late, operands.x.dtype)
    sums = sums._replace(tokens_per_expert=routed.tokens_per_expert)
    result = layer_output(config, leading, output, selection, sums, routed.dropped[None])
    return result, Residuals(gate, routed, named_h(saved.h), named_u(saved.u))


def backward(
    config: LayerConfig,
    operands: Operands,
    selection: Selection,
    residuals: Residuals,
    cotangents: Cotangents,
    gradient_dtypes: tuple[Any, Any],
    wanted: Collection[str],
) -> Operands:
    """The backward rule on one device: the wanted gradients by operand, None for the others.

    selection: the experts and weights that the forward pass used. gradient_dtypes: the dtypes of the gradients of w_in
    and w_out, each the dtype of x or float32.
    """
    given, operands = operands, flat_tokens(quantize_weights(config, operands, backward=True))
    selection = flat_selection(selection)
    gate, routed, h, u = residuals
    if routed is None:
        with jax.named_scope(phases.PLAN):
            routed = plan(selection.experts, operands.w_in.shape[0], align_size=config.align_size)
    ffn, d_out = ffn_operands(operands, routed, selection.weights), flat(cotangents.output)
    w_in_dtype, w_out_dtype = gradient_dtypes
    with jax.named_scope(phases.HIDDEN_GRADIENT):
        intermediate = ffn_backward_by_slot(config.ffn, ffn, Saved(h, u), d_out, wanted, w_out_dtype)
    d_weights = cotangents.total_d_weights(intermediate.weights)
    selected = select_backward(config, operands, selection, gate, d_weights, cotangents.sums, wanted)
    d_x = None
    if "x" in wanted:
        with jax.named_scope(phases.D_X):
            rows = rows_gradient(config.ffn, ffn, intermediate)
            d_x = rows.sum(routed.row_of_slot, None, given.x.dtype, selected.x)
        # Forces the sum before the gradients of UP, see ffn_backward_by_slot.
        d_x, dh = jax.lax.optimization_barrier((d_x, intermediate.dh))
        intermediate = intermediate._replace(dh=dh)
    with jax.named_scope(phases.WEIGHT_GRADIENTS):
        up = up_gradients(config.ffn, ffn, intermediate, wanted, w_in_dtype)
    return gradients(
        {
            "x": _like(given.x, d_x),
            "gate": _like(given.gate, selected.gate),
            "gate_bias": _like(given.gate_bias, selected.bias),
            "weights": _like(given.weights, selected.weights),
            **up,
            **intermediate.parameters,
        }
    )


def _like(operand: jax.Array | None, gradient: jax.Array | None) -> jax.Array | None:
    """Reshapes and casts a gradient of flat tokens like its operand; None if there is no such operand."""
    if operand is None or gradient is None:
        return None
    return gradient.reshape(operand.shape).astype(operand.dtype)


# ---------------------------------------------------------------- shards of tokens, all experts on every device


class _Static(NamedTuple):
    config: LayerConfig
    save: bool
    weight_dtypes: tuple[Any, Any]
    wanted: tuple[str, ...] = ()


class _ShardResiduals(NamedTuple):
    """Residuals of a shard, with the leading dimensions of x; None for a value that the gate does not need."""

    logits: jax.Array | None
    """[..., E]"""
    lse: jax.Array | None
    """[..., 1]"""
    h: jax.Array
    """[..., K, P, F]: with K rows per token, rows can be sharded like tokens."""
    u: jax.Array | None
    """[..., K, r]"""


def _shard_forward(static: _Static, *operands: Any) -> tuple[jax.Array, ...]:
    config = static.config
    result, residuals = forward(config, Operands(*operands), save=static.save)
    result = result._replace(dropped=result.dropped[0])
    results = tuple(getattr(result, name) for name in output_names(config))
    if residuals.h is None:
        return results
    leading, (logits, lse) = result.output.shape[:-1], residuals.gate
    rows = tuple(
        array.reshape(*leading, config.ffn.topk, *array.shape[1:])
        for array in (residuals.h, residuals.u)
        if array is not None
    )
    tokens = () if logits is None else (logits.reshape(*leading, logits.shape[1]),)
    if lse is not None:
        tokens = (*tokens, lse.reshape(*leading, 1))
    return (*results, *tokens, *rows)


def _shard_backward(static: _Static, *arrays: Any) -> tuple[jax.Array, ...]:
    config, _, dtypes, wanted = static
    remaining = iter(arrays)

    def take(kind: Any) -> Any:
        return kind(*(next(remaining) for _ in kind._fields))

    operands, selection, saved, cotangents = map(take, (Operands, Selection, _ShardResiduals, Cotangents))
    gate = GateResiduals(
        None if saved.logits is None else flat(saved.logits), None if saved.lse is None else flat(saved.lse)[:, 0]
    )
    h = saved.h.reshape(math.prod(saved.h.shape[:-2]), *saved.h.shape[-2:])
    u = None if saved.u is None else flat(saved.u)
    d_operands = backward(config, operands, selection, Residuals(gate, None, h, u), cotangents, dtypes, wanted)
    return tuple(gradient for name in DIFFERENTIABLE if (gradient := getattr(d_operands, name)) is not None)


def _token_dims(t: int, names: tuple[str, ...], token_names: tuple[str, ...]) -> tuple[int, ...]:
    """The number of token dimensions of each name: t for names in `token_names`, else 0."""
    return tuple(t if name in token_names else 0 for name in names)


def _unaligned(config: LayerConfig) -> LayerConfig:
    """Removes alignment: every shard has K rows per token, so rows shard like tokens; padding never changes results."""
    return dataclasses.replace(config, align_size=0)


def sharded_forward(
    config: LayerConfig, operands: Operands, *, save: bool
) -> tuple[LayerOutput, _ShardResiduals | None]:
    """The forward rule for tokens with any sharding, and the residuals for `sharded_backward`."""
    t, names = operands.x.ndim - 1, output_names(config)
    rows = ("h",) if operands.lora_a_in is None else ("h", "u")
    saved = (*gate_residuals(config), *rows) if save else ()
    results = (*_token_dims(t, names, TOKEN_RESULTS), *_token_dims(t, saved, saved))
    static = _Static(_unaligned(config), save, weight_dtypes(operands))
    call = TokenCall(_shard_forward, static, _token_dims(t, Operands._fields, TOKENS), results)
    arrays = dict(zip((*names, *saved), call(*round_weights(config, operands)), strict=True))
    # Checkpoint names inside a call are not visible outside, so they are set again here.
    naming = {"h": named_h, "u": named_u, "logits": named_logits, "output": lambda output: output}
    arrays = {name: naming.get(name, named_routing)(array) for name, array in arrays.items()}
    result = LayerOutput(**{name: arrays.get(name) for name in LayerOutput._fields})  # type: ignore[arg-type]
    result = result._replace(dropped=result.dropped[None])
    residuals = _ShardResiduals(*map(arrays.get, _ShardResiduals._fields)) if save else None  # type: ignore[arg-type]
    return result, residuals


def sharded_backward(
    config: LayerConfig,
    operands: Operands,
    selection: Selection,
    residuals: _ShardResiduals,
    cotangents: Cotangents,
    wanted: tuple[str, ...],
) -> Operands:
    """The backward rule of `sharded_forward`; gradients of replicated operands are summed over the shards."""
    t = operands.x.ndim - 1
    if not wanted:
        return gradients({})
    static = _Static(_unaligned(config), True, weight_dtypes(operands), wanted)
    token_fields = (*TOKENS, *Selection._fields, *_ShardResiduals._fields, "output")
    fields = (*Operands._fields, *Selection._fields, *_ShardResiduals._fields, *Cotangents._fields)
    call = TokenCall(_shard_backward, static, _token_dims(t, fields, token_fields), _token_dims(t, wanted, TOKENS))
    arrays = call(*round_weights(config, operands), *selection, *residuals, *cotangents)
    return gradients(dict(zip(wanted, arrays, strict=True)))

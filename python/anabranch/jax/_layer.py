"""The rules of the whole layer on the tokens of one device, and how shards of tokens run them.

Forward and backward rule are the operations' own rules in the order in which data flows; nothing is differentiated
through. The losses are not part of it: `moe` computes them from sums over all tokens, which come out of here.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax._arrays import flat
from anabranch.jax._ffn import (
    FfnConfig,
    FfnOperands,
    d_rows_of,
    d_w_in_of,
    ffn_backward_by_slot,
    ffn_forward_by_slot,
)
from anabranch.jax._sharding import TokenCall
from anabranch.jax.plan import Plan, plan
from anabranch.jax.router import RouterOptions, RouterResiduals, Routing, route_backward, route_forward


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The options of the layer that are part of the program."""

    router: RouterOptions
    ffn: FfnConfig
    aux_loss: bool
    z_loss: bool
    align_size: int


class Operands(NamedTuple):
    """The arrays of the layer; x is [..., D]. None: not given."""

    x: jax.Array
    gate: jax.Array
    w_in: jax.Array
    w_out: jax.Array
    b_in: jax.Array | None
    b_out: jax.Array | None
    expert_bias: jax.Array | None
    token_mask: jax.Array | None
    forced_experts: jax.Array | None


class LayerOutput(NamedTuple):
    """What the layer computes; sums are over all tokens that it was given."""

    output: jax.Array
    """[..., D], dtype of x."""
    score_sum: jax.Array
    """float32 [E]."""
    lse_squares: jax.Array
    """float32 []: the sum of lse[t]^2; 0 without a z-loss."""
    tokens_per_expert: jax.Array
    """int32 [E]."""
    dropped: jax.Array
    """int32 [S]: slots without a row, for each of S shards of the tokens that drop them by themselves."""


class Residuals(NamedTuple):
    """What the forward pass keeps beside its operands, for T tokens: h, the logits, [T, K]-sized routing."""

    routing: Routing
    logits: jax.Array
    layout: Plan | None
    """None: planned anew."""
    h: jax.Array | None


@functools.partial(jax.jit, static_argnums=2, inline=True)
def matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Float32 product of two matrices over one axis of each, summed in float32.

    Equal dtypes as they are. Of float32 and bfloat16, the CPU makes both float32; elsewhere float32 has no fast
    products, and the float32 factor goes as a sum of two bfloat16 ones, which hold 16 of its 24 bits. Others become
    float32.
    """
    if a.dtype == b.dtype:
        return _product(a, b, contract)
    if {a.dtype, b.dtype} != {jnp.dtype("float32"), jnp.dtype("bfloat16")}:
        return _product_in_float32(a, b, contract=contract)
    in_float32 = functools.partial(_product_in_float32, contract=contract)
    in_halves = functools.partial(_product_in_halves, contract=contract)
    product: jax.Array = jax.lax.platform_dependent(a, b, cpu=in_float32, default=in_halves)
    return product


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def bfloat16_matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int], result: Any) -> jax.Array:
    """Product of two matrices over one axis of each, summed in float32, of dtype `result`.

    Both factors are rounded to bfloat16 before they multiply; the CPU, for which that is no faster, makes them float32.
    """

    def in_float32(a: jax.Array, b: jax.Array) -> jax.Array:
        return _product_in_float32(a, b, contract=contract).astype(result)

    def rounded(a: jax.Array, b: jax.Array) -> jax.Array:
        return _product(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), contract, result)

    product: jax.Array = jax.lax.platform_dependent(a, b, cpu=in_float32, default=rounded)
    return product


@functools.partial(jax.jit, static_argnums=2, inline=True)
def halves_matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product of two float32 matrices over one axis of each, with 16 bits of both factors.

    On a GPU the sum of three products of bfloat16, which the tensor cores have; what is not finite becomes NaN there.
    The CPU takes them as they are.
    """
    in_float32 = functools.partial(_product_in_float32, contract=contract)
    in_halves = functools.partial(_product_of_halves, contract=contract)
    product: jax.Array = jax.lax.platform_dependent(a, b, cpu=in_float32, default=in_halves)
    return product


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int], result: Any = jnp.float32) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=result)


def _product_in_float32(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    return _product(a.astype(jnp.float32), b.astype(jnp.float32), contract)


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 arrays whose sum is the float32 array to 16 bits."""
    high = jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)  # XLA would leave out conversions there
    low = jnp.where(jnp.isfinite(high), a - high, 0)
    return high.astype(jnp.bfloat16), low.astype(jnp.bfloat16)


def _product_of_halves(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    left = jnp.concatenate([a_high, a_low, a_high], axis=contract[0])  # the product of both low halves is left out
    return _product(left, jnp.concatenate([b_high, b_high, b_low], axis=contract[1]), contract)


def _product_in_halves(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    left = a.dtype == jnp.float32  # the factor that is high + low; both stand side by side in one product
    wide, other = (a, b) if left else (b, a)
    terms, other_terms = contract if left else contract[::-1]

    def product(axis: int, other: jax.Array) -> jax.Array:
        both = jnp.concatenate(_halves(wide), axis=axis)
        return _product(both, other, contract) if left else _product(other, both, contract)

    kept = wide.shape[1 - terms]
    if other.size <= kept * other.shape[1 - other_terms]:  # smaller than the result: twice as many terms
        return product(terms, jnp.concatenate([other, other], axis=other_terms))
    result = product(1 - terms, other)
    return result[:kept] + result[kept:] if left else result[:, :kept] + result[:, kept:]


def flat_tokens(operands: Operands) -> Operands:
    """The operands with the leading dimensions of x, the mask and the forced experts as one."""
    mask, forced = operands.token_mask, operands.forced_experts
    return operands._replace(
        x=flat(operands.x),
        token_mask=None if mask is None else mask.reshape(math.prod(mask.shape)),
        forced_experts=None if forced is None else flat(forced),
    )


def round_weights(operands: Operands) -> Operands:
    """The operands with the experts' weights in the dtype of x, in which they multiply."""
    dtype = operands.x.dtype
    return operands._replace(w_in=operands.w_in.astype(dtype), w_out=operands.w_out.astype(dtype))


def weight_dtypes(operands: Operands) -> tuple[Any, Any]:
    """Of w_in and w_out as they were given, and so of their gradients."""
    return operands.w_in.dtype, operands.w_out.dtype


def route_tokens(config: LayerConfig, operands: Operands) -> tuple[Routing, jax.Array]:
    """Routing and logits of x [T, D]."""
    logits = matmul(operands.x, operands.gate, (1, 0))
    routing, _ = route_forward(
        config.router, logits, operands.expert_bias, operands.token_mask, operands.forced_experts
    )
    return routing, logits


def lse_squares(config: LayerConfig, routing: Routing) -> jax.Array:
    """The sum of lse^2 that a z-loss needs; a masked token has lse 0."""
    return jnp.sum(jnp.square(routing.lse)) if config.z_loss else jnp.zeros((), jnp.float32)


class RoutingGradients(NamedTuple):
    """What `routing_backward` returns."""

    x: jax.Array
    """[T, D] float32, or bfloat16 where x and the gate are: the part that came through the logits."""
    gate: jax.Array
    """[D, E] float32."""


def routing_backward(
    config: LayerConfig,
    operands: Operands,
    routing: Routing,
    logits: jax.Array,
    d_weights: jax.Array,
    cotangents: LayerOutput,
) -> RoutingGradients:
    """From the cotangents of the weights [T, K] and of the sums to x [T, D] and the gate, through the logits.

    Where x and the gate are bfloat16, the gradient of the logits is rounded to bfloat16 before it multiplies on a GPU,
    and so is the part of x. Else both products have at least 16 bits of it: a gate whose columns have much in common
    cancels nearly all of what it multiplies.
    """
    mask = operands.token_mask
    d_logits = route_backward(
        config.router,
        RouterResiduals(logits, routing.experts, mask, routing.lse),
        d_weights,
        cotangents.score_sum if config.aux_loss else None,
        2 * cotangents.lse_squares * routing.lse if config.z_loss else None,
    )
    x = operands.x
    if mask is not None:  # a masked token counts nowhere, whatever it holds: 0 * NaN would be NaN
        x = jnp.where(mask[:, None], x, 0)
    gate = operands.gate
    if x.dtype == gate.dtype == jnp.bfloat16:
        return RoutingGradients(
            bfloat16_matmul(d_logits, gate, (1, 1), jnp.bfloat16), bfloat16_matmul(x, d_logits, (0, 0), jnp.float32)
        )
    product = halves_matmul if x.dtype.itemsize == 2 and gate.dtype == jnp.float32 else matmul
    return RoutingGradients(product(d_logits, gate, (1, 1)), matmul(x, d_logits, (0, 0)))


def ffn_operands(operands: Operands, layout: Plan, weights: jax.Array | None) -> FfnOperands:
    """The experts' view of the layer's operands: tokens, gathered by the plan."""
    return FfnOperands(
        x=operands.x,
        slot_of_row=layout.slot_of_row,
        group_sizes=layout.group_sizes,
        w_in=operands.w_in,
        w_out=operands.w_out,
        b_in=operands.b_in,
        b_out=operands.b_out,
        weights=weights,
    )


def forward(config: LayerConfig, operands: Operands, *, keep_h: bool) -> tuple[LayerOutput, Residuals]:
    """The forward rule on what one device has; `keep_h`: a gradient is wanted."""
    shape, operands = operands.x.shape, flat_tokens(operands)
    routing, logits = route_tokens(config, operands)
    layout = plan(routing.experts, logits.shape[1], align_size=config.align_size)
    early, late = (routing.weights, None) if config.ffn.weight_early else (None, routing.weights)
    y, h = ffn_forward_by_slot(config.ffn, ffn_operands(operands, layout, early), keep_h=keep_h)
    result = LayerOutput(
        output=y.sum(layout.row_of_slot, late, operands.x.dtype).reshape(shape),
        score_sum=routing.score_sum,
        lse_squares=lse_squares(config, routing),
        tokens_per_expert=routing.tokens_per_expert,
        dropped=layout.dropped[None],
    )
    return result, Residuals(routing, logits, layout, h)


def backward(
    config: LayerConfig,
    operands: Operands,
    residuals: Residuals,
    cotangents: LayerOutput,
    gradient_dtypes: tuple[Any, Any],
) -> Operands:
    """The backward rule on what one device has: gradients of the float operands, None for the others.

    gradient_dtypes: of w_in and w_out, each that of x or float32.
    """
    shape, dtypes, operands = operands.x.shape, operands, flat_tokens(operands)
    routing, logits, layout, h = residuals
    assert h is not None  # the forward rule was run with keep_h
    if layout is None:
        layout = plan(routing.experts, logits.shape[1], align_size=config.align_size)
    ffn, d_out = ffn_operands(operands, layout, routing.weights), flat(cotangents.output)
    w_in_dtype, w_out_dtype = gradient_dtypes
    hidden = ffn_backward_by_slot(config.ffn, ffn, h, d_out, w_out_dtype)
    through_logits = routing_backward(config, operands, routing, logits, hidden.weights, cotangents)
    d_x = d_rows_of(config.ffn, ffn, hidden.dh).sum(layout.row_of_slot, None, dtypes.x.dtype, through_logits.x)
    d_x, dh = jax.lax.optimization_barrier((d_x, hidden.dh))  # the sum comes first: see ffn_backward_by_slot
    up, down = d_w_in_of(config.ffn, ffn, dh, w_in_dtype), hidden.down
    assert down is not None
    return Operands(
        x=d_x.reshape(shape),
        gate=through_logits.gate.astype(dtypes.gate.dtype),
        w_in=up.w,
        w_out=down.w,
        b_in=up.b,
        b_out=down.b,
        expert_bias=None,
        token_mask=None,
        forced_experts=None,
    )


# ---------------------------------------------------------------- shards of tokens, all experts on every device


class _Static(NamedTuple):
    config: LayerConfig
    keep_h: bool
    weight_dtypes: tuple[Any, Any]


def _shard_forward(static: _Static, *operands: Any) -> tuple[jax.Array, ...]:
    config, keep_h, _ = static
    result, residuals = forward(config, Operands(*operands), keep_h=keep_h)
    results = (*result[:4], result.dropped[0])
    if residuals.h is None:
        return results
    leading, routing = result.output.shape[:-1], residuals.routing
    # Rows have no tokens of their own, but there are K for each: so they are divided like tokens.
    h = residuals.h.reshape(*leading, config.router.topk, *residuals.h.shape[1:])
    tokens = (routing.weights, routing.experts, routing.lse[:, None], residuals.logits)
    return (*results, *(a.reshape(*leading, a.shape[1]) for a in tokens), h)


def _shard_backward(static: _Static, *arrays: Any) -> tuple[jax.Array, ...]:
    config, _, dtypes = static
    operands, arrays = Operands(*arrays[:9]), arrays[9:]
    (weights, experts, lse, logits), h = map(flat, arrays[:4]), arrays[4]
    # What only the forward pass returns has no use here.
    routing = Routing(weights, experts, jnp.zeros(0, jnp.int32), jnp.zeros(0), lse[:, 0])
    rows = h.reshape(math.prod(h.shape[:-2]), *h.shape[-2:])
    output, score_sum, squares = arrays[5:]
    cotangents = LayerOutput(output, score_sum, squares, routing.tokens_per_expert, routing.tokens_per_expert)
    gradients = backward(config, operands, Residuals(routing, logits, None, rows), cotangents, dtypes)
    return tuple(gradient for gradient in gradients[:6] if gradient is not None)


def _operand_tokens(t: int) -> tuple[int, ...]:
    """The token dimensions of x, gate, w_in, w_out, b_in, b_out, expert_bias, token_mask, forced_experts."""
    return (t, 0, 0, 0, 0, 0, 0, t, t)


def _unaligned(config: LayerConfig) -> LayerConfig:
    """Every shard has K rows a token, so that rows can be divided like tokens; padding never changes the result."""
    return dataclasses.replace(config, align_size=0)


def sharded_forward(
    config: LayerConfig, operands: Operands, *, keep_h: bool
) -> tuple[LayerOutput, tuple[jax.Array, ...]]:
    """The forward rule for tokens that are sharded in whatever way, and what `sharded_backward` needs of it."""
    t = operands.x.ndim - 1
    kept = (t, t, t, t, t) if keep_h else ()
    static = _Static(_unaligned(config), keep_h, weight_dtypes(operands))
    call = TokenCall(_shard_forward, static, _operand_tokens(t), (t, 0, 0, 0, 0, *kept))
    output, score_sum, squares, counts, dropped, *residuals = call(*round_weights(operands))
    return LayerOutput(output, score_sum, squares, counts, dropped[None]), tuple(residuals)


def sharded_backward(
    config: LayerConfig, operands: Operands, kept: tuple[jax.Array, ...], cotangents: LayerOutput
) -> Operands:
    """The backward rule of `sharded_forward`; gradients of what every shard has are summed over the shards."""
    t = operands.x.ndim - 1
    given = [i for i in range(6) if operands[i] is not None]
    results = tuple(_operand_tokens(t)[i] for i in given)
    static = _Static(_unaligned(config), True, weight_dtypes(operands))
    call = TokenCall(_shard_backward, static, (*_operand_tokens(t), t, t, t, t, t, t, 0, 0), results)
    gradients = dict(zip(given, call(*round_weights(operands), *kept, *cotangents[:3]), strict=True))
    return Operands(*map(gradients.get, range(9)))  # type: ignore[arg-type]

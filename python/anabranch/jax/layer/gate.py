"""The gate and the router inside the layer's rules: from one device's tokens to experts and weights, and back."""

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp

from anabranch import phases
from anabranch.jax.binding.arrays import flat
from anabranch.jax.layer.names import named_logits, named_routing
from anabranch.jax.layer.operands import LayerConfig, Operands, Selection, Sums
from anabranch.jax.layer.replay import experts_weighed_by_router, route_tokens
from anabranch.jax.ops.matmul import bfloat16_matmul, halves_matmul, matmul
from anabranch.jax.ops.router import Requested, RouterResiduals, route_backward


class GateResiduals(NamedTuple):
    """Saved for the gate's backward pass in addition to the selection; None if the selection was given."""

    logits: jax.Array | None
    """float32 [T, E]."""
    lse: jax.Array | None
    """float32 [T]; None also if the backward pass does not read it."""


def _logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x gate, float32 [T, E]."""
    if x.dtype == jnp.float16 and gate.dtype != jnp.float16:
        return halves_matmul(x.astype(jnp.float32), gate.astype(jnp.float32), (1, 0))
    return matmul(x, gate, (1, 0))


def router_logits(x: jax.Array, gate: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The logits that the layer's router computes from x [..., D], float32 [..., E]."""
    logits = _logits(flat(x), gate)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return logits.reshape(*x.shape[:-1], gate.shape[1])


def gate_residuals(config: LayerConfig) -> tuple[str, ...]:
    """The fields of GateResiduals that the backward pass needs."""
    if config.router is None:
        return ()
    return GateResiduals._fields if config.router.reads_lse or config.z_loss else ("logits",)


def select(
    config: LayerConfig, operands: Operands, *, save: bool, counts: bool
) -> tuple[Selection, Sums, GateResiduals]:
    """The experts and weights of x [T, D]: those in the operands, or the router's.

    save: whether a gradient is needed. counts: whether tokens_per_expert is requested; otherwise it is None. Values
    that neither these nor a loss needs are not computed; score_sum is then zeros.
    """
    if config.router is None:
        assert operands.experts is not None and operands.weights is not None
        return Selection(operands.experts, operands.weights), Sums(None, None, None), GateResiduals(None, None)
    assert operands.gate is not None
    with jax.named_scope(phases.GATE):
        logits = _logits(operands.x, operands.gate)
        if operands.gate_bias is not None:
            logits = logits + operands.gate_bias.astype(jnp.float32)
    logits = named_logits(logits)
    lse = config.z_loss or (save and "lse" in gate_residuals(config))
    with jax.named_scope(phases.ROUTE):
        routing = route_tokens(config.router, logits, operands, Requested(counts, config.aux_loss, lse))
    routing = named_routing(routing)
    # A masked token has lse 0.
    squares = jnp.sum(jnp.square(routing.lse)) if config.z_loss else jnp.zeros((), jnp.float32)
    score_sum = jnp.zeros(logits.shape[1], jnp.float32) if routing.score_sum is None else routing.score_sum
    sums = Sums(score_sum, squares, routing.tokens_per_expert, routing.qb_histogram)
    return Selection(routing.experts, routing.weights), sums, GateResiduals(logits, routing.lse)


class GateGradients(NamedTuple):
    """The result of `select_backward`."""

    x: jax.Array | None
    """[T, D], dtype of x: the part that came through the logits."""
    gate: jax.Array | None
    """[D, E] float32."""
    bias: jax.Array | None
    """[E] float32, the gradient of gate_bias; None without one."""
    weights: jax.Array | None
    """[T, K], the gradient of given weights; all other fields are then None."""


def select_backward(
    config: LayerConfig,
    operands: Operands,
    selection: Selection,
    residuals: GateResiduals,
    d_weights: jax.Array,
    d_sums: Sums,
    wanted: Collection[str],
) -> GateGradients:
    """Propagates the cotangents of the weights [T, K] and of the sums through the logits to x [T, D] and the gate.

    wanted: the operands whose gradients are computed, of x, gate and gate_bias; the other gradients are None.

    If x and the gate are bfloat16, a GPU rounds the gradient of the logits to bfloat16 before both GEMMs, and rounds
    the gate's part of d_x. Otherwise both GEMMs use at least 16 bits of that gradient's mantissa, because nearly all of
    it cancels if the gate's columns have much in common. Float16 has the range 6e-8 to 65504, so nothing here is
    rounded to it: a float16 x and gate are converted to float32, and two bfloat16 operands represent a float16 number
    exactly.
    """
    if config.router is None:
        return GateGradients(None, None, None, d_weights if "weights" in wanted else None)
    if not {"x", "gate", "gate_bias"} & set(wanted):
        return GateGradients(None, None, None, None)
    mask = operands.token_mask
    assert operands.gate is not None and residuals.logits is not None
    assert d_sums.score_sum is not None and d_sums.lse_squares is not None
    d_lse = None
    if config.z_loss:
        assert residuals.lse is not None
        d_lse = 2 * d_sums.lse_squares * residuals.lse
    with jax.named_scope(phases.ROUTE_BACKWARD):
        experts = experts_weighed_by_router(operands, selection.experts)
        d_logits = route_backward(
            config.router,
            RouterResiduals(residuals.logits, experts, mask, residuals.lse),
            d_weights,
            d_sums.score_sum if config.aux_loss else None,
            d_lse,
        )
    with jax.named_scope(phases.GATE_BACKWARD):
        return _gate_backward(operands, d_logits, wanted)


def _gate_backward(operands: Operands, d_logits: jax.Array, wanted: Collection[str]) -> GateGradients:
    """The GEMMs of `select_backward`."""
    x, gate, mask = operands.x, operands.gate, operands.token_mask
    assert gate is not None
    # A masked token has a gradient of 0.
    bias = jnp.sum(d_logits, axis=0) if operands.gate_bias is not None and "gate_bias" in wanted else None
    d_x: jax.Array | None = None
    d_gate: jax.Array | None = None
    if mask is not None:  # a masked token must not contribute, whatever its values: 0 * NaN is NaN
        x = jnp.where(mask[:, None], x, 0)
    if x.dtype == gate.dtype == jnp.bfloat16:
        if "x" in wanted:
            d_x = bfloat16_matmul(d_logits, gate, (1, 1), jnp.bfloat16)
        if "gate" in wanted:
            d_gate = bfloat16_matmul(x, d_logits, (0, 0), jnp.float32)
        return GateGradients(d_x, d_gate, bias, None)
    dtype = x.dtype
    x_matmul = gate_matmul = matmul
    if dtype == jnp.float16:
        x, gate = x.astype(jnp.float32), gate.astype(jnp.float32)
        x_matmul = gate_matmul = halves_matmul
    elif dtype.itemsize == 2 and gate.dtype == jnp.float32:
        x_matmul = halves_matmul
    if "x" in wanted:
        d_x = x_matmul(d_logits, gate, (1, 1)).astype(dtype)
    if "gate" in wanted:
        d_gate = gate_matmul(x, d_logits, (0, 0))
    return GateGradients(d_x, d_gate, bias, None)

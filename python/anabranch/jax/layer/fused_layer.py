"""The layer as one differentiable function: on one device, on sharded tokens, or on a mesh with `Parallel`."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import Axes, all_manual, arrays_are_local, current_mesh, vary_alike
from anabranch.jax.layer.forward import Residuals, backward, forward, sharded_backward, sharded_forward
from anabranch.jax.layer.names import named_output, named_x
from anabranch.jax.layer.on_mesh import divide, placed_backward, placed_forward
from anabranch.jax.layer.operands import (
    DIFFERENTIABLE,
    Cotangents,
    LayerConfig,
    LayerOutput,
    Operands,
    Selection,
    quantized_fields,
    round_factors,
    round_weights,
    weight_dtypes,
)
from anabranch.jax.ops.experts import check_fp8_operands, dtypes_of_factors, experts_arrays
from anabranch.jax.ops.ffn import FfnConfig
from anabranch.jax.ops.packed import refuse_gradients, weight_shape
from anabranch.jax.parallel.parallel import Parallel, Placement, manual_shard_axes, place
from anabranch.layouts import Layouts
from anabranch.lora import Lora, check_lora, operand_fields
from anabranch.options import ExpertsOptions
from anabranch.precision import check_fp8_exchange
from anabranch.rows import check_num_slots


@reverse_mode("moe", nondiff_argnums=(0, 1))
def _fused_layer(config: LayerConfig, placement: Placement | None, operands: Operands) -> LayerOutput:
    return _forward(config, placement, operands, save=False)[0]


def _forward(
    config: LayerConfig, placement: Placement | None, operands: Operands, *, save: bool
) -> tuple[LayerOutput, Any]:
    if placement is not None:
        return placed_forward(config, placement, operands, save=save)
    if arrays_are_local(operands.x):
        return forward(config, round_weights(config, operands), save=save)
    return sharded_forward(config, operands, save=save)


def _fused_layer_forward(
    config: LayerConfig, placement: Placement | None, operands: Operands
) -> tuple[LayerOutput, tuple[Operands, Selection, Any]]:
    # The backward pass reads the rounded factors, too.
    operands = round_factors(operands._replace(x=named_x(operands.x)))
    result, saved = _forward(config, placement, operands, save=True)
    result = result._replace(output=named_output(result.output))
    source = operands if config.router is None else result
    assert source.experts is not None and source.weights is not None
    return result, (operands, Selection(source.experts, source.weights), saved)


def _fused_layer_backward(
    config: LayerConfig,
    placement: Placement | None,
    needed: Operands,
    residuals: tuple[Operands, Selection, Any],
    d_result: LayerOutput,
) -> tuple[Operands]:
    operands, selection, saved = residuals
    refuse_gradients(operands, needed)
    d = Cotangents(d_result.output, d_result.weights, d_result.score_sum, d_result.lse_squares)
    wanted = tuple(name for name in DIFFERENTIABLE if getattr(needed, name))
    if placement is not None:
        return (placed_backward(config, placement, wanted, operands, selection, saved, d),)
    if isinstance(saved, Residuals):
        dtypes = weight_dtypes(operands)
        return (backward(config, round_weights(config, operands), selection, saved, d, dtypes, wanted),)
    return (sharded_backward(config, operands, selection, saved, d, wanted),)


_fused_layer.define_gradients(_fused_layer_forward, _fused_layer_backward)


def ffn_config(options: ExpertsOptions, parts: int, topk: int, lora: Lora | None = None) -> FfnConfig:
    """Checks the options of the experts; parts: P of w_in; lora: checked."""
    # Zeroing padding rows that nothing reads costs time, but JAX's NaN checks read everything that the rules return.
    skip_rest = not (jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # type: ignore[attr-defined]
    float32_factors = tuple(n for n, a in operand_fields(lora).items() if a is not None and a.dtype == jnp.float32)
    return FfnConfig.of(options.experts(parts, topk, lora), skip_rest=skip_rest, float32_factors=float32_factors)


def lora_factors(layouts: Layouts, x: jax.Array, w_in: jax.Array, lora: Any) -> Lora | None:
    """Checks the argument lora against the checked w_in."""
    return check_lora(check.array, dtypes_of_factors(x), lora, layouts.sizes("w_in", weight_shape(w_in)))


def check_parallel(parallel: Any, config: FfnConfig) -> None:
    """Refuses a `parallel` that is neither None nor a Parallel, or that contradicts the experts' options."""
    if parallel is None:
        return
    if not isinstance(parallel, Parallel):
        raise TypeError(f"parallel: got {check.describe(parallel)}, expected a Parallel")
    check_fp8_exchange(config.precision, parallel.fp8_exchange)


def experts_operands(
    layouts: Layouts, x: jax.Array, w_in: Any, w_out: Any, b_in: Any, b_out: Any
) -> tuple[dict[str, Any], int, int]:
    """`experts_arrays` of a layer, whose matrices may also be float32."""
    arrays, E, P = experts_arrays(layouts, x, tuple(dict.fromkeys((str(x.dtype), "float32"))), w_in, w_out, b_in, b_out)
    if E < 1:
        raise ValueError(f"w_in: got {check.describe(arrays['w_in'])}, expected at least one expert")
    return arrays, E, P


def quantized_arrays(config: FfnConfig, arrays: dict[str, Any], quantized: Any) -> dict[str, Any]:
    """Checks the widths and the argument `quantized`; returns fields of Operands. arrays: the experts' arrays."""
    checked = check_fp8_operands(config, arrays, quantized)
    return quantized_fields(checked if config.fp8 else None)


def fused_layer(config: LayerConfig, operands: Operands, parallel: Parallel | None) -> LayerOutput:
    """The layer on checked operands. Inside a jax.shard_map over the whole mesh, results are per shard."""
    placement = None
    if parallel is not None and not all_manual(current_mesh(operands.x)):
        ffn, arrays = config.ffn, operands._asdict()
        placement = place(parallel, arrays, ffn.topk, config.align_size, ffn.layouts, fp8=ffn.fp8)
        operands = divide(placement, operands)
    return _fused_layer(config, placement, Operands(*vary_alike(*operands)))


def unreduced_axes(parallel: Parallel | None, x: jax.Array, topk: int) -> Axes:
    """The mesh axes over which the caller must reduce the sums of `fused_layer`, according to `parallel`.

    Raises:
      ValueError: the axes can't be reduced over here, or the counts of all shards exceed int32.
    """
    if parallel is None or not all_manual(current_mesh(x)):
        return ()
    axes = manual_shard_axes(parallel)
    shards = math.prod(jax.lax.axis_size(axis) for axis in axes)
    check_num_slots("x", shards * math.prod(x.shape[:-1]), topk)
    return axes

"""The layer as one differentiable function, wherever its arrays are: on one device, in shards, on a mesh."""

import dataclasses
import math
from typing import Any

import jax

from anabranch.activation import as_activation
from anabranch.jax.binding import check
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import Axes, all_manual, mesh_of, runs_as_it_is, vary_alike
from anabranch.jax.layer.forward import Residuals, backward, forward, sharded_backward, sharded_forward
from anabranch.jax.layer.names import named_x
from anabranch.jax.layer.on_mesh import divide, placed_backward, placed_forward
from anabranch.jax.layer.operands import (
    Cotangents,
    LayerConfig,
    LayerOutput,
    Operands,
    Selection,
    quantized_fields,
    round_weights,
    weight_dtypes,
)
from anabranch.jax.ops.experts import check_fp8_operands, experts_arrays
from anabranch.jax.ops.ffn import FfnConfig
from anabranch.jax.ops.precision_choice import Spread, decided
from anabranch.jax.parallel.parallel import Parallel, Placement, mesh_for, place, shards_of_this_device
from anabranch.layouts import Layouts
from anabranch.precision import check_fp8, check_fp8_exchange, precision_number
from anabranch.rows import check_num_slots


@reverse_mode("moe", nondiff_argnums=(0, 1))
def _mixture(config: LayerConfig, placement: Placement | None, operands: Operands) -> LayerOutput:
    return _forward(config, placement, operands, keep=False)[0]


def _forward(
    config: LayerConfig, placement: Placement | None, operands: Operands, *, keep: bool
) -> tuple[LayerOutput, Any]:
    if placement is not None:
        return placed_forward(config, placement, operands, keep=keep)
    if runs_as_it_is(operands.x):
        return forward(config, round_weights(config, operands), keep_h=keep)
    return sharded_forward(config, operands, keep_h=keep)


def _mixture_forward(
    config: LayerConfig, placement: Placement | None, operands: Operands
) -> tuple[LayerOutput, tuple[Operands, Selection, Any]]:
    operands = operands._replace(x=named_x(operands.x))
    result, kept = _forward(config, placement, operands, keep=True)
    source = operands if config.router is None else result
    assert source.experts is not None and source.weights is not None
    return result, (operands, Selection(source.experts, source.weights), kept)


def _mixture_backward(
    config: LayerConfig,
    placement: Placement | None,
    residuals: tuple[Operands, Selection, Any],
    d_result: LayerOutput,
) -> tuple[Operands]:
    operands, selection, kept = residuals
    d = Cotangents(d_result.output, d_result.weights, d_result.score_sum, d_result.lse_squares)
    if placement is not None:
        return (placed_backward(config, placement, operands, selection, kept, d),)
    if isinstance(kept, Residuals):
        return (backward(config, round_weights(config, operands), selection, kept, d, weight_dtypes(operands)),)
    return (sharded_backward(config, operands, selection, kept, d),)


_mixture.defvjp(_mixture_forward, _mixture_backward)


def network_config(
    activation: Any, parts: int, topk: int, weight_early: Any, layouts: Layouts, precision: Any, fp8_scales: Any
) -> FfnConfig:
    """Checks the options of the experts; parts: P of w_in."""
    number = precision_number(precision)
    return FfnConfig(
        activation=as_activation(activation, parts),
        weight_early=check.boolean("weight_early", weight_early),
        topk=topk,
        layouts=layouts,
        precision=number,
        fp8_scales=check_fp8(number, fp8_scales),
        # No time for zeros that nobody reads, unless JAX looks for NaN in what the rules hand on.
        skip_rest=not (jax.config.jax_debug_nans or jax.config.jax_debug_infs),  # type: ignore[attr-defined]
    )


def check_parallel(parallel: Any, config: FfnConfig) -> None:
    """Refuses what is not a Parallel, nor None, or has no use with the options of the experts."""
    if parallel is None:
        return
    if not isinstance(parallel, Parallel):
        raise TypeError(f"parallel: got {check.describe(parallel)}, expected a Parallel")
    check_fp8_exchange(config.precision, parallel.fp8_exchange)


def check_align_size(align_size: Any) -> int:
    """Returns a multiple for the rows of an expert; 0: none."""
    return check.integer("align_size", align_size, 0, check.INDEX_LIMIT - 1)


def experts_operands(
    layouts: Layouts, x: jax.Array, w_in: Any, w_out: Any, b_in: Any, b_out: Any
) -> tuple[dict[str, Any], int, int]:
    """`experts_arrays` of a layer, whose matrices may be float32."""
    arrays, E, P = experts_arrays(layouts, x, tuple(dict.fromkeys((str(x.dtype), "float32"))), w_in, w_out, b_in, b_out)
    if E < 1:
        raise ValueError(f"w_in: got {check.describe(arrays['w_in'])}, expected at least one expert")
    return arrays, E, P


def _spread(parallel: Parallel | None, x: jax.Array) -> Spread:
    """How the layer is spread over devices; inside a jax.shard_map over the whole mesh its sizes are those of one."""
    if parallel is None or all_manual(mesh_of(x)):
        return Spread()
    mesh = mesh_for(parallel, x)

    def devices(*axes: str | None) -> int:
        return math.prod(mesh.shape[axis] for axis in axes if axis is not None)

    return Spread(
        mesh if parallel.mesh is None else parallel.mesh,
        tokens=devices(*parallel.token_axes),
        experts=devices(parallel.expert_axis),
        hidden=devices(parallel.tensor_axis),
        widths=devices(*parallel.fsdp_axes),
    )


def with_quantized(
    config: LayerConfig, x: jax.Array, arrays: dict[str, Any], quantized: Any, parallel: Parallel | None
) -> tuple[LayerConfig, dict[str, Any]]:
    """Checks widths and the argument `quantized`, beside arrays by the names of Operands; decides what "auto" means.

    Returns:
      The config with a precision, and what is multiplied with of `quantized`, as fields of Operands.
    """
    found = check_fp8_operands(config.ffn, arrays["w_in"], quantized)
    ffn = decided(config.ffn, x, arrays["w_in"], found, _spread(parallel, x))
    return dataclasses.replace(config, ffn=ffn), quantized_fields(found if ffn.fp8 else None)


def mixture(config: LayerConfig, operands: Operands, parallel: Parallel | None) -> LayerOutput:
    """The layer on checked operands. Inside a jax.shard_map over the whole mesh, results are those of the shard."""
    placement = None
    if parallel is not None and not all_manual(mesh_of(operands.x)):
        ffn, arrays = config.ffn, operands._asdict()
        placement = place(parallel, arrays, ffn.topk, config.align_size, ffn.layouts, fp8=ffn.fp8)
        operands = divide(placement, operands)
    return _mixture(config, placement, Operands(*vary_alike(*operands)))


def axes_of_sums(parallel: Parallel | None, x: jax.Array, topk: int) -> Axes:
    """The mesh axes over which the sums of `mixture` are still parts, as `parallel` wants them added up.

    Raises:
      ValueError: axes that can't be added up here, or counts of all shards that int32 can't hold.
    """
    if parallel is None or not all_manual(mesh_of(x)):
        return ()
    axes = shards_of_this_device(parallel)
    shards = math.prod(jax.lax.axis_size(axis) for axis in axes)
    check_num_slots("x", shards * math.prod(x.shape[:-1]), topk)
    return axes

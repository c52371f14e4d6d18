"""The layer and its collectives on all JAX devices, which are the ranks of one axis."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from anabranch.jax import Parallel, moe
from benchmarks import layer_jax, timing
from benchmarks.layer_jax import Operands
from benchmarks.shapes import LayerShape
from benchmarks.timing import Timing

AXIS = "expert"
_BATCH_SECONDS = 40e-3


def ranks() -> Mesh:
    """Returns a mesh of all devices along one axis."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def operands(
    mesh: Mesh, parallel: Parallel, shape: LayerShape, dtype: str, routing: str | None = None, seed: int = 0
) -> Operands:
    """Returns `layer_jax.operands` with shape.T tokens per rank, sharded as `parallel` requires."""
    specs = parallel.specs()
    placed = {name: NamedSharding(mesh, specs[name]) for name in ("x", "gate", "w_in", "w_out")}
    placed["d_out"] = placed["x"]
    experts = placed["x"] if routing == "zipf" else None
    shardings = Operands(**cast(Any, placed | {"experts": experts}))
    whole = shape._replace(T=shape.T * mesh.size)
    make = functools.partial(layer_jax.operands, whole, dtype, routing)
    made: Operands = jax.jit(make, static_argnums=0, out_shardings=shardings)(seed)
    return made


def layer(parallel: Parallel, precision: str = "highest") -> layer_jax.Layer:
    """Returns moe() spread over the ranks."""
    return layer_jax.Layer(functools.partial(layer_jax.ours, precision=precision, parallel=parallel))


def measure_layer(
    shape: LayerShape,
    dtype: str,
    by: str,
    routing: str | None,
    transport: str | None,
    capacity_factor: float | None,
    repeats: int,
) -> tuple[Timing, Timing, int]:
    """Times forward and both passes of the layer with shape.T tokens per rank, and counts dropped assignments.

    Args:
      by: "jax"; "fp8": with precision="fp8"; "fp8-exchange": also sends tokens in FP8.
      routing: see layer_jax.operands.
      transport: None: the layer on one device, with all experts.
    """
    precision = "highest" if by == "jax" else "fp8"
    if transport is None:
        given = jax.jit(lambda seed: layer_jax.operands(shape, dtype, routing, seed))(0)
        run = layer_jax.Layer(functools.partial(layer_jax.ours, precision=precision))
        forward, both = (_seconds(one, given, repeats) for one in layer_jax.passes(run, shape.K).values())
        return forward, both, 0
    mesh = ranks()
    parallel = Parallel(
        expert_axis=AXIS, transport=transport, capacity_factor=capacity_factor, fp8_exchange=by == "fp8-exchange"
    )
    with jax.set_mesh(mesh):
        given = operands(mesh, parallel, shape, dtype, routing)
        run = layer(parallel, precision)

        def dropped(*arrays: Any) -> jax.Array:
            options: dict[str, Any] = {"precision": precision, "parallel": parallel}
            return moe(*arrays[:4], topk=shape.K, forced_experts=arrays[4], **options).dropped

        forward, both = (_seconds(one, given, repeats) for one in layer_jax.passes(run, shape.K).values())
        return forward, both, int(jax.jit(dropped)(*given[:4], given.experts))


def collectives(mesh: Mesh, shape: LayerShape, dtype: str) -> Mapping[str, tuple[Callable[..., Any], Any, int]]:
    """Returns the collectives of the transports by XLA: function, operand, and bytes that a rank sends.

    all_to_all and ragged_all_to_all exchange T K rows per rank, equally many with each rank. all_gather and
    all_to_all_sums are those of the ring transport: T rows out, and T rows of partial sums back.
    """
    P, T, D = mesh.size, shape.T, shape.D
    rows = T * shape.K // P
    spec = PartitionSpec(AXIS)

    def all_to_all(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)

    def all_gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, AXIS, tiled=True)

    def ragged(x: jax.Array) -> jax.Array:
        sizes, starts = jnp.full(P, rows, jnp.int32), jnp.arange(P, dtype=jnp.int32) * rows
        here = jnp.full(P, jax.lax.axis_index(AXIS) * rows, jnp.int32)
        return jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, here, sizes, axis_name=AXIS)

    # By name: the function, rows that a rank holds, and rows that it sends.
    exchange = (P * rows, (P - 1) * rows)
    known = {
        "all_to_all": (all_to_all, *exchange),
        "all_gather": (all_gather, T, (P - 1) * T),
        "all_to_all_sums": (all_to_all, P * T, (P - 1) * T),
        "ragged_all_to_all": (ragged, *exchange),
    }
    if mesh.devices.flat[0].platform == "cpu":  # XLA has no ragged_all_to_all there
        del known["ragged_all_to_all"]
    found = {}
    for name, (function, held, sent) in known.items():
        run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        filled = functools.partial(jnp.ones, (P * held, D), dtype)
        operand = jax.jit(filled, out_shardings=NamedSharding(mesh, spec))()
        found[name] = (run, operand, sent * D * jnp.dtype(dtype).itemsize)
    return found


def measure_collectives(shape: LayerShape, dtype: str, repeats: int) -> dict[str, tuple[Timing, int]]:
    """Times each of `collectives`; also returns the bytes that a rank sends."""
    mesh = ranks()
    with jax.set_mesh(mesh):
        return {
            name: (_seconds(function, (operand,), repeats), sent)
            for name, (function, operand, sent) in collectives(mesh, shape, dtype).items()
        }


def _seconds(function: Callable[..., Any], given: Sequence[Any], repeats: int) -> Timing:
    program = jax.jit(function).lower(*given).compile()
    return timing.seconds_of_program(
        lambda group: program(*group[0]), [[given]], repeats=repeats, seconds=_BATCH_SECONDS, executions=(2, 8)
    )

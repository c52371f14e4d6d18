"""The bridge from JAX to the C library: registers the XLA FFI handlers and calls them.

A call names its operands and results as the C struct does (include/anabranch/*.h); None means "not given" or "not
wanted", so one handler serves every combination of optional tensors.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anabranch import _library
from anabranch.jax._sharding import TokenCall, vary_alike

_HANDLERS = (
    "ab_xla_combine",
    "ab_xla_combine_backward",
    "ab_xla_dispatch",
    "ab_xla_expand_row_id_map",
    "ab_xla_expert_ffn_backward",
    "ab_xla_expert_ffn_forward",
    "ab_xla_grouped_matmul",
    "ab_xla_grouped_matmul_dw",
    "ab_xla_plan",
    "ab_xla_router_backward",
    "ab_xla_router_forward",
    "ab_xla_score_sum",
    "ab_xla_sort_chunks",
)


#: The handlers that libanabranch_cuda.so has too, there named ab_cuda_xla_...
_CUDA_HANDLERS = (
    "ab_xla_combine",
    "ab_xla_combine_backward",
    "ab_xla_dispatch",
    "ab_xla_expand_row_id_map",
    "ab_xla_plan",
    "ab_xla_router_backward",
    "ab_xla_router_forward",
    "ab_xla_score_sum",
    "ab_xla_sort_chunks",
)


def custom_calls() -> tuple[str, ...]:
    """Names of the custom calls that programs with our operations hold; `jax.export` must be told to allow them.

    >>> "ab_xla_plan" in custom_calls()
    True
    """
    return _HANDLERS


@functools.cache
def register() -> None:
    """Makes the handlers known to JAX, once. Importing `anabranch.jax` does it, so that exported programs find them.

    Raises:
      LibraryError: the C library cannot be loaded.
    """
    library = _library.load()
    for name in _HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    try:
        cuda = _library.load_cuda()
    except _library.LibraryError:
        return  # `python -m anabranch info` says why; a program for a GPU fails with the name of the target
    for name in _CUDA_HANDLERS:
        handler = getattr(cuda, name.replace("ab_xla_", "ab_cuda_xla_"))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="CUDA")


def cotangent(value: Any) -> jax.Array | None:
    """A cotangent of a rule with symbolic zeros: None where it is zero or belongs to integers."""
    if isinstance(value, jax.custom_derivatives.SymbolicZero) or value.dtype == jax.dtypes.float0:
        return None
    return value


def _like_operands(result: jax.ShapeDtypeStruct, operand: jax.Array) -> jax.ShapeDtypeStruct:
    """The result of a call: inside a jax.shard_map it differs between the shards where the operands do."""
    manual = jax.typeof(operand).manual_axis_type
    if not manual.varying:
        return result
    whole = NamedSharding(jax.typeof(operand).sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=whole, manual_axis_type=manual)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a handler: everything but the arrays."""

    target: str
    operands: tuple[str, ...]
    results: tuple[tuple[str, tuple[int, ...], str], ...]
    aliases: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[str, int | float], ...]


def _call(static: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    arrays = vary_alike(*arrays)
    results = tuple(jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in static.results)
    outputs = jax.ffi.ffi_call(
        static.target,
        tuple(_like_operands(result, arrays[0]) for result in results),
        vmap_method="sequential",
        input_output_aliases=dict(static.aliases),
    )(
        *arrays,
        operands=",".join(static.operands),
        results=",".join(name for name, *_ in static.results),
        **{n: np.float32(v) if isinstance(v, float) else np.int32(v) for n, v in static.attributes},
    )
    return tuple(outputs)


def call(
    target: str,
    operands: Mapping[str, jax.Array | None],
    results: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    aliases: Mapping[str, str] | None = None,
    workspace: int = 0,
    **attributes: int | float,
) -> dict[str, Any]:
    """Calls the handler `target`, on arrays that one device has whole.

    Args:
      target: exported symbol, for example "ab_xla_router_forward".
      operands: arrays by field name; None: not given.
      results: shapes and dtypes by field name; None: not wanted.
      aliases: result name for an operand name whose buffer it may take over.
      workspace: bytes of scratch memory for the CUDA handler, which allocates nothing itself; at least what
        ab_cuda_..._workspace says. The CPU's handler leaves it untouched.
      attributes: options by field name; int becomes int32, float float32.

    Returns:
      The results by name, None where not wanted. Batched by vmap one slice after another.

    Raises:
      ValueError: an operand is sharded, and this is not the call of a shard by itself (`_sharding.TokenCall`).
    """
    register()
    given = {name: array for name, array in operands.items() if array is not None}
    wanted = {name: result for name, result in results.items() if result is not None}
    if workspace:
        wanted["workspace"] = jax.ShapeDtypeStruct((workspace,), np.uint8)
    order = list(given)
    static = _Call(
        target,
        operands=tuple(given),
        results=tuple((name, tuple(r.shape), np.dtype(r.dtype).name) for name, r in wanted.items()),
        aliases=tuple((order.index(a), list(wanted).index(b)) for a, b in (aliases or {}).items()),
        attributes=tuple(attributes.items()),
    )
    name = target.removeprefix("ab_xla_")
    whole = (
        f"{name}: got {{got}}, expected whole arrays, since rows are counted over all tokens; "
        "use moe(), which takes sharded tokens, or call it inside jax.shard_map"
    )
    outputs = TokenCall(_call, static, (0,) * len(given), (0,) * len(wanted), whole)(*given.values())
    named = dict(zip(wanted, outputs, strict=True))
    return {name: named.get(name) for name in results}


def statistics_workspace(num_tokens: int, num_sequences: int, num_experts: int) -> int:
    """Bytes for the statistics of each block of tokens on CUDA (src/balance/statistics.cuh): counts and sums.

    A block has at least one token, and there are at most 396 of them, or one a sequence.
    """
    blocks = min(max(396, num_sequences), num_tokens)
    return 2 * (blocks * num_experts * 4 + 64) if blocks else 0


def plan_workspace(num_slots: int, num_experts: int) -> int:
    """Bytes for the counts of each block of slots on CUDA (src/dispatch/plan.cu)."""
    blocks = min(num_slots // 256, 2**22 // (num_experts + 1)) + 1
    return (blocks + 1) * (num_experts + 1) * 4


def sort_chunks_workspace(num_chunks: int) -> int:
    """Bytes for where every chunk begins on CUDA (src/dispatch/sort_chunks.cu)."""
    return (3 * num_chunks + 2) * 4

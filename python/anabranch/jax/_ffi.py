"""The bridge from JAX to the C library: registers the XLA FFI handlers and calls them.

A call names its operands and results as the C struct does (include/anabranch/*.h); None means "not given" or "not
wanted", so one handler serves every combination of optional tensors.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anabranch import _library
from anabranch.jax._sharding import TokenCall, vary_alike


def custom_calls() -> tuple[str, ...]:
    """Names of the custom calls that programs with our operations hold; `jax.export` must be told to allow them.

    >>> "ab_xla_plan" in custom_calls()
    True
    """
    return _library.HANDLERS


@functools.cache
def register() -> None:
    """Makes the handlers known to JAX, once. Importing `anabranch.jax` does it, so that exported programs find them.

    Raises:
      LibraryError: the C library cannot be loaded.
    """
    library = _library.load()
    for name in _library.HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    try:
        cuda = _library.load_cuda()
    except _library.LibraryError:
        return  # `python -m anabranch info` says why; a program for a GPU fails with the name of the target
    for name in _library.HANDLERS:
        handler = getattr(cuda, _library.on_cuda(name))
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
    workspace: int
    attributes: tuple[tuple[str, int | float], ...]


def _call(static: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    arrays = vary_alike(*arrays)
    return _where_it_runs(static, *arrays) if static.workspace else _run(static, *arrays, workspace=0)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _where_it_runs(static: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The call with a workspace; jitted so that it is known where: the CPU's memory need not grow by one."""
    on_cpu = functools.partial(_run, static, workspace=0)
    outputs: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, cpu=on_cpu, default=functools.partial(_run, static, workspace=static.workspace)
    )
    return outputs


def _run(static: _Call, *arrays: jax.Array, workspace: int) -> tuple[jax.Array, ...]:
    results = static.results + ((("workspace", (workspace,), "uint8"),) if workspace else ())
    types = (jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results)
    outputs = jax.ffi.ffi_call(
        static.target,
        tuple(_like_operands(result, arrays[0]) for result in types),
        vmap_method="sequential",
        input_output_aliases=dict(static.aliases),
    )(
        *arrays,
        operands=",".join(static.operands),
        results=",".join(name for name, *_ in results),
        **{n: np.float32(v) if isinstance(v, float) else np.int32(v) for n, v in static.attributes},
    )
    return tuple(outputs[: len(static.results)])


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
        ab_cuda_..._workspace says. The CPU's handler gets none.
      attributes: options by field name; int becomes int32, float float32.

    Returns:
      The results by name, None where not wanted. Batched by vmap one slice after another.

    Raises:
      ValueError: an operand is sharded, and this is not the call of a shard by itself (`_sharding.TokenCall`).
    """
    register()
    given = {name: array for name, array in operands.items() if array is not None}
    wanted = {name: result for name, result in results.items() if result is not None}
    order, names = list(given), list(wanted)
    static = _Call(
        target,
        operands=tuple(given),
        results=tuple((name, tuple(r.shape), np.dtype(r.dtype).name) for name, r in wanted.items()),
        aliases=tuple((order.index(a), names.index(b)) for a, b in (aliases or {}).items()),
        workspace=workspace,
        attributes=tuple(attributes.items()),
    )
    name = target.removeprefix("ab_xla_")
    whole = (
        f"{name}: got {{got}}, expected whole arrays, since rows are counted over all tokens; "
        "use moe(), which takes sharded tokens, or call it inside jax.shard_map"
    )
    outputs = TokenCall(_call, static, (0,) * len(given), (0,) * len(wanted), whole, tuple(given))(*given.values())
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


def _aligned(size: int, step: int = 64) -> int:
    return -(-size // step) * step


def weight_gradient_workspace(num_rows: int, num_experts: int, width: int, columns: int, *dtypes: Any) -> int:
    """Bytes for a gradient [E, width, columns] on CUDA (src/experts/cuda/segments.cu); dtypes: of its factors.

    The list of the segments that sums over rows are cut into, and their partial results; nothing where the tensor
    cores' kernel can't take the factors.
    """
    sizes = (num_rows, num_experts, width, columns)
    if any(np.dtype(dtype).itemsize != 2 for dtype in dtypes) or 0 in sizes:
        return 0
    rows = _aligned(num_rows)
    share = width * columns / (128 * 256 * 132 * 4)
    if share < 1:
        rows = min(rows, _aligned(max(int(num_rows * share) + 1, 512)))
    partials = 2 * num_rows // rows if rows < num_rows else 0
    lists = 256 + _aligned((num_experts + partials) * 16, 256) + _aligned(partials // 2 * 12, 256)
    return lists + partials * width * columns * 4


def ffn_forward_workspace(num_rows: int, hidden: int, dtype: Any) -> int:
    """Bytes for the activations [R, F] on CUDA (src/experts/cuda/ffn_forward.cu)."""
    return _aligned(num_rows * hidden * np.dtype(dtype).itemsize)


def grouped_matmul_combine_workspace(
    num_rows: int, num_experts: int, columns: int, terms: int, dtype: Any, *, transpose_w: bool = False
) -> int:
    """Bytes for a chunk of the columns of rows [R, columns] on CUDA (src/experts/column_chunks.h).

    Args:
      num_rows: R.
      num_experts: E.
      columns: N of w.
      terms: of each product: the columns of x.
      dtype: of x.
      transpose_w: w is [E, N, D].
    """
    tiles, rows = -(-columns // 192), float(max(num_rows, 1))
    in_w_in = not transpose_w and num_rows <= num_experts * columns
    w = (2.0 if in_w_in else 1.0) * num_experts * terms * columns
    room = max(w, 2**22) / rows
    if 2048 <= columns and room < columns:
        chunks = min(-(-tiles // max(int(room / 192), 1)), tiles // 4)
        columns = min(-(-tiles // chunks) * 192, columns)
    return _aligned(num_rows * columns * np.dtype(dtype).itemsize)


def ffn_backward_workspace(num_rows: int, w_in: Sequence[int], dtype: Any, d_dtype: Any) -> int:
    """Bytes for all gradients on CUDA where dh takes over the memory of h (src/experts/cuda/ffn_backward.cu).

    Args:
      num_rows: R.
      w_in: shape [E, D, P, F].
      dtype: of x.
      d_dtype: of the cotangent.
    """
    E, D, P, F = w_in
    of_w_in = matrix_gradient_workspace(num_rows, (E, D, P * F), dtype, dtype)
    of_w_out = matrix_gradient_workspace(num_rows, (E, F, D), dtype, d_dtype)
    return ffn_forward_workspace(num_rows, F, dtype) + max(dots_workspace(num_rows, F), of_w_in, of_w_out)


def dots_workspace(num_rows: int, hidden: int) -> int:
    """Bytes for the parts of the gradients of the rows' weights on CUDA."""
    return _aligned(-(-hidden // 64) * num_rows * 4)


def matrix_gradient_workspace(num_rows: int, shape: tuple[int, int, int], dtype: Any, d_dtype: Any) -> int:
    """Bytes for the gradient of the network's matrices, then that of their bias (src/experts/cuda/ffn_backward.cu).

    `weight_gradient_workspace`, or what the bias takes, if that is more.

    Args:
      num_rows: R.
      shape: of the matrices, [E, D, N].
      dtype: of the rows that they multiply.
      d_dtype: of the products' gradient.
    """
    E, _, N = shape
    bias = (-(-num_rows // 512) + E) * N * 4
    return _aligned(max(bias, weight_gradient_workspace(num_rows, *shape, dtype, d_dtype)))

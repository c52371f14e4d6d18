"""Chunk sort: permutes chunks of rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.arrays import flat
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import check_whole, vary_alike
from anabranch.jax.ops.dispatch import ANY_DTYPE
from anabranch.rows import check_num_rows


def sort_chunks(
    x: jax.Array, split_sizes: jax.Array, sorted_indices: jax.Array, *, inverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(sorted rows, row_id_map) of x [R, D]; inverse: restores the order before such a sort.

    row_id_map: int32[R], the sorted position of each unsorted row.
    """
    results = ffi.call(
        "ab_xla_sort_chunks",
        {"x": x, "split_sizes": split_sizes, "sorted_indices": sorted_indices},
        {
            "out": jax.ShapeDtypeStruct(x.shape, x.dtype),
            "row_id_map": jax.ShapeDtypeStruct(x.shape[:1], jnp.int32),
        },
        workspace=workspaces.sort_chunks(split_sizes.size),
        inverse=int(inverse),
    )
    return results["out"], results["row_id_map"]


@dataclasses.dataclass(frozen=True)
class _Options:
    dtype: str


@reverse_mode("sort_chunks_by_index", nondiff_argnums=(0,))
def _sort_chunks(
    options: _Options, x: jax.Array, split_sizes: jax.Array, sorted_indices: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return sort_chunks(x, split_sizes, sorted_indices)


def _sort_chunks_fwd(
    options: _Options, x: jax.Array, split_sizes: jax.Array, sorted_indices: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    return sort_chunks(x, split_sizes, sorted_indices), (split_sizes, sorted_indices)


def _sort_chunks_bwd(
    options: _Options, residuals: tuple[jax.Array, jax.Array], d: tuple[jax.Array, Any]
) -> tuple[jax.Array | None, None, None]:
    if options.dtype not in check.FLOATS:
        return None, None, None
    return sort_chunks(d[0].astype(options.dtype), *residuals, inverse=True)[0], None, None


_sort_chunks.defvjp(_sort_chunks_fwd, _sort_chunks_bwd)


def sort_chunks_by_index(inp: Any, split_sizes: Any, sorted_indices: Any, probs: Any = None) -> tuple[jax.Array, ...]:
    """Permutes chunks of rows: chunk i of the output is chunk sorted_indices[i] of the input.

    Args:
      inp: [..., D], leading dimensions flattened to R; float32, bfloat16, float16, or without a gradient bool, uint8,
        int16, int32, int64.
      split_sizes: integers [S], the number of rows per chunk. Rows past their sum do not move.
      sorted_indices: int16, int32 or int64 [S], a permutation of 0 ... S-1.
      probs: float32, bfloat16 or float16, R numbers that are permuted like the rows, or None.

    Returns:
      (output [R, D], dtype of inp; row_id_map int32[R]: the position of every input row in the output); with probs, the
      third result is probs [R] in the order of the output.
      The output is a permutation of the input for any integers: a negative size counts as 0, sizes are clipped to R, an
      index that is out of range or repeated is skipped, and chunks without an index follow in order.

    Gradient: the cotangents of a row and of its element of probs are gathered from the row's position in the output.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, or inp is sharded.

    Source: the function of this name in transformer_engine.jax.permutation.

    >>> rows, row_id_map = sort_chunks_by_index(jnp.arange(3.0)[:, None], jnp.array([1, 2]), jnp.array([1, 0]))
    >>> rows.ravel().tolist(), row_id_map.tolist()
    ([1.0, 2.0, 0.0], [2, 0, 1])
    """
    output, row_id_map = sort_by_index("sort_chunks_by_index", {"inp": inp}, split_sizes, sorted_indices)
    if probs is None:
        return output, row_id_map
    probs = check.array("probs", probs, check.FLOATS, (...,))
    R = row_id_map.shape[0]
    if probs.size != R or probs.ndim < 1:
        raise ValueError(f"probs: got {check.describe(probs)}, expected {R} numbers, one per row")
    columns = {"probs": probs.reshape(R, 1)}
    sorted_probs, _ = sort_by_index("sort_chunks_by_index", columns, split_sizes, sorted_indices)
    return output, row_id_map, sorted_probs[:, 0]


def sort_by_index(
    function: str, rows: dict[str, Any], split_sizes: Any, sorted_indices: Any, *, prefix: str = ""
) -> tuple[jax.Array, jax.Array]:
    """`sort_chunks_by_index` for a public function and its argument {name: rows}; prefix: of the integers' names."""
    ((name, inp),) = rows.items()
    inp = check.array(name, inp, ANY_DTYPE, (..., "R", "D"))
    split_sizes = check.sizes(f"{prefix}split_sizes", split_sizes, ("S",))
    sorted_indices = check.indices(f"{prefix}sorted_indices", sorted_indices, (("S", split_sizes.shape[0]),))
    check_whole(function, **{name: inp, "split_sizes": split_sizes, "sorted_indices": sorted_indices})
    x = flat(inp)
    check_num_rows(name, x.shape[0], 1)
    return _sort_chunks(_Options(str(x.dtype)), *vary_alike(x, split_sizes, sorted_indices))

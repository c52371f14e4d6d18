"""The grouped GEMM under the name and arguments of JAX's megablox."""

from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check
from anabranch.jax.ops.ragged_dot import ragged_gemm, refuse_argument


def _check_tiling(tiling: Any) -> None:
    """Accepts None, a function of (m, k, n), or tile sizes."""
    if tiling is None or callable(tiling):
        return
    if not isinstance(tiling, (tuple, list)) or not all(isinstance(size, int) and size > 0 for size in tiling):
        raise ValueError(f"tiling: got {check.shown(tiling)}, expected tile sizes, a function, or None")


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = (128, 128, 128),
    group_offset: None = None,
    existing_out: None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Drop-in for `gmm` of jax.experimental.pallas.ops.tpu.megablox: the rows of group g times rhs[g].

    Args:
      lhs: float32, bfloat16 or float16 [m, k]; rows of one group are contiguous, group 0 first.
      rhs: [g, k, n], or with transpose_rhs [g, n, k], any of these dtypes.
      group_sizes: integers [g], on the device. Sizes past m are clipped, negative ones count as 0.
      preferred_element_type: dtype of the result, float32 by default for all operand dtypes. The dtype of 16-bit
        operands is faster and needs less memory; see `ragged_dot`.
      tiling: tile sizes for a TPU: checked but unused, since the kernels here choose their own.
      group_offset, existing_out: must be None; the whole result is computed here.
      transpose_rhs: multiplies by rhs[g]^T; rhs is read in place.
      interpret: checked but unused, since no kernel here is a Pallas kernel.

    Returns:
      [m, n], accumulated in float32 and rounded once. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, an option is unsupported, or an array is sharded.

    Gradient: as in `ragged_dot`.

    Source: the function of this name in jax.experimental.pallas.ops.tpu.megablox.

    Example:
      >>> import jax.numpy as jnp
      >>> from anabranch.jax import gmm
      >>> gmm(jnp.ones((3, 2), jnp.bfloat16), jnp.ones((2, 2, 1), jnp.bfloat16), jnp.array([1, 2])).dtype
      dtype('float32')
    """
    _check_tiling(tiling)
    refuse_argument("group_offset", group_offset, "all groups are computed; slice group_sizes and the rows")
    refuse_argument("existing_out", existing_out, "the whole result is computed; add or select rows of it")
    check.boolean("interpret", interpret)
    if preferred_element_type is None:
        raise TypeError("preferred_element_type: got None, expected float32 or bfloat16 or float16")
    return ragged_gemm(
        "gmm",
        lhs,
        rhs,
        group_sizes,
        preferred_element_type=preferred_element_type,
        transpose_rhs=check.boolean("transpose_rhs", transpose_rhs),
    )

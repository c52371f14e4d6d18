"""`jax.lax.ragged_dot` and `ragged_dot_general`, with the same signatures, computed by this library's grouped GEMMs."""

from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import check_whole, vary_alike
from anabranch.jax.ops.experts import (
    GroupedGemm,
    GroupedOperands,
    grouped_gemm,
    grouped_matmul_rule,
    grouped_rows,
    grouped_weight_gradient,
)
from anabranch.precision import HIGHEST, TF32


def _as_precision(value: Any) -> jax.lax.Precision | None:
    """A `jax.lax.Precision`, given as one or by name; None stays None. Raises ValueError for other values."""
    if value is None or isinstance(value, jax.lax.Precision):
        return value
    if isinstance(value, str):
        return jax.lax.Precision(value)
    raise ValueError(value)


def operands_precision(precision: Any) -> int:
    """The precision number for JAX's argument: TF32 if both operands may be rounded to it."""
    pair = precision if isinstance(precision, (tuple, list)) else (precision, precision)
    try:
        requested = set(map(_as_precision, pair))
    except ValueError:
        requested = set()
    if len(pair) != 2 or not requested:
        raise ValueError(
            f"precision: got {check.shown(precision)}, expected None, a jax.lax.Precision or its name, or two: "
            "operands are multiplied as float32, or with HIGH as TF32, and accumulated in float32"
        )
    return TF32 if requested == {jax.lax.Precision.HIGH} else HIGHEST


def result_dtype(preferred_element_type: Any, *operands: jax.Array) -> Any:
    """The dtype of a GEMM's result: the argument, or if it is None the dtype that the operands promote to."""
    if preferred_element_type is None:
        first, *others = {operand.dtype for operand in operands}
        return jnp.dtype(jnp.float32) if others else first
    return jnp.dtype(check.dtype("preferred_element_type", preferred_element_type, check.FLOATS))


def refuse_argument(name: str, value: Any, instead: str) -> None:
    """Refuses an argument of another library's signature that must be None here."""
    if value is not None:
        raise ValueError(f"{name}: got {check.describe(value)}, expected None: {instead}")


def ragged_gemm(
    function: str,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    transpose_rhs: bool = False,
) -> jax.Array:
    """Rows of group g times rhs[g] [k, n], or with transpose_rhs [n, k]; `function`: its public name, for errors."""
    lhs = grouped_rows("lhs", lhs)
    sizes = check.sizes("group_sizes", group_sizes, ("g",))
    g, k = ("g", sizes.shape[0]), ("k", lhs.shape[1])
    rhs = check.array("rhs", rhs, check.FLOATS, (g, "n", k) if transpose_rhs else (g, k, "n"))
    dtype = result_dtype(preferred_element_type, lhs, rhs)
    options = GroupedGemm(transpose_rhs, operands_precision(precision), dtype=dtype)
    check_whole(function, lhs=lhs, rhs=rhs, group_sizes=sizes)
    return grouped_matmul_rule(options, GroupedOperands(*vary_alike(lhs, rhs, sizes)))


def _check_unused(group_offset: Any, out_sharding: Any) -> None:
    refuse_argument("group_offset", group_offset, "all groups are computed, as in JAX; slice group_sizes and the rows")
    refuse_argument("out_sharding", out_sharding, "arrays are whole; see jax.shard_map")


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    out_sharding: None = None,
) -> jax.Array:
    """Drop-in for `jax.lax.ragged_dot`: the rows of group g times rhs[g].

    Args:
      lhs: float32, bfloat16 or float16 [m, k]; rows of one group are contiguous, group 0 first.
      rhs: [g, k, n], any of these dtypes.
      group_sizes: integers [g], on the device. Sizes past m are clipped, negative ones count as 0.
      precision: how float32 operands are multiplied: None, a jax.lax.Precision or its name, or a pair of them. HIGH,
        also named "high" and "tensorfloat32", lets a GPU round both operands to TF32, like `precision="tf32"` of
        `grouped_matmul`. With all others they are multiplied as float32; DEFAULT means HIGHEST here, unlike in JAX. The
        more exact one of a pair applies. Algorithms are refused.
      preferred_element_type: dtype of the result, float32, bfloat16 or float16. None: the dtype that lhs and rhs
        promote to, which is float32 for bfloat16 with float16.
      group_offset: must be None; JAX's function supports no other value either.
      out_sharding: must be None; arrays are whole, or shards inside a jax.shard_map.

    Returns:
      [m, n], accumulated in float32 and rounded once. Rows past the sum of the sizes are zero. If lhs, rhs and the
      result differ in dtype, lhs and rhs are copied to float32; a GPU multiplies copies of 16-bit operands as TF32,
      which is exact.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, an option is unsupported, or an array is sharded.

    Gradient: for lhs and rhs in their dtypes, from the unrounded cotangent; that of rhs[g] is zero for a group without
    rows.

    Source: `grouped_matmul`, with the name and arguments of JAX's function.

    Example:
      >>> import jax.numpy as jnp
      >>> from anabranch.jax import ragged_dot
      >>> rhs = jnp.array([[[1.0], [1.0]], [[2.0], [3.0]]])
      >>> ragged_dot(jnp.ones((3, 2)), rhs, jnp.array([1, 2])).ravel().tolist()
      [2.0, 5.0, 5.0]
    """
    _check_unused(group_offset, out_sharding)
    options: dict[str, Any] = dict(precision=precision, preferred_element_type=preferred_element_type)
    return ragged_gemm("ragged_dot", lhs, rhs, group_sizes, **options)


@reverse_mode("ragged_dot_general", nondiff_argnums=(0, 1))
def _contract_rows(precision: int, dtype: Any, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """y[g] = lhs^T rhs over the rows of group g."""
    return grouped_weight_gradient(lhs, rhs, sizes, dtype, precision=precision)


def _contract_rows_forward(precision: int, dtype: Any, *operands: jax.Array) -> tuple[jax.Array, Any]:
    return _contract_rows(precision, dtype, *operands), operands


def _contract_rows_backward(precision: int, _: Any, operands: Any, d_y: jax.Array) -> tuple[Any, Any, None]:
    lhs, rhs, sizes = operands
    d_lhs = grouped_gemm(rhs, d_y, sizes, transpose_w=True, precision=precision, dtype=lhs.dtype)
    return d_lhs, grouped_gemm(lhs, d_y, sizes, transpose_w=False, precision=precision, dtype=rhs.dtype), None


_contract_rows.defvjp(_contract_rows_forward, _contract_rows_backward)


def _dimension_numbers(contracting: Any, rhs_group_dimensions: Any) -> jax.lax.RaggedDotDimensionNumbers:
    return jax.lax.RaggedDotDimensionNumbers((contracting, ((), ())), (0,), rhs_group_dimensions)


_ROWS = _dimension_numbers(((1,), (1,)), (0,))
_ROWS_TRANSPOSED = _dimension_numbers(((1,), (2,)), (0,))
_CONTRACTED_ROWS = _dimension_numbers(((0,), (0,)), ())


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    out_sharding: None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` for the three forms that an MoE layer needs, all without batch dimensions.

    | contracting dimensions, rhs group dimensions | lhs | rhs | result |
    |---|---|---|---|
    | ((1,), (1,)), (0,): `ragged_dot` | [m, k] | [g, k, n] | [m, n] |
    | ((1,), (2,)), (0,): rhs[g] transposed | [m, k] | [g, n, k] | [m, n] |
    | ((0,), (0,)), (): rows are contracted, a gradient of rhs | [m, k] | [m, n] | [g, k, n] |

    The ragged dimension of lhs is m, dimension 0, in all of them. Nothing is transposed in memory.

    Args:
      lhs, rhs: float32, bfloat16 or float16; shapes as in the table.
      group_sizes: integers [g], on the device. Sizes past m are clipped, negative ones count as 0.
      ragged_dot_dimension_numbers: one of the three forms.
      precision, preferred_element_type, group_offset, out_sharding: as in `ragged_dot`.

    Returns:
      As in the table, with dtypes as in `ragged_dot`. Rows past the sum of the sizes are zero, or are not contracted.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: another form, shapes do not fit, an option is unsupported, or an array is sharded.

    Gradient: for lhs and rhs in their dtypes, also for contracted rows, which JAX's function does not differentiate.

    Source: `grouped_matmul` and its gradients, under JAX's name.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from anabranch.jax import ragged_dot_general
      >>> rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
      >>> ragged_dot_general(jnp.ones((3, 1)), jnp.ones((3, 1)), jnp.array([1, 2]), rows).ravel().tolist()
      [1.0, 2.0]
    """
    numbers = ragged_dot_dimension_numbers
    if not isinstance(numbers, jax.lax.RaggedDotDimensionNumbers):
        raise TypeError(
            f"ragged_dot_dimension_numbers: got {check.describe(numbers)}, expected a jax.lax.RaggedDotDimensionNumbers"
        )
    _check_unused(group_offset, out_sharding)
    options: dict[str, Any] = dict(precision=precision, preferred_element_type=preferred_element_type)
    if numbers in (_ROWS, _ROWS_TRANSPOSED):
        options["transpose_rhs"] = numbers == _ROWS_TRANSPOSED
        return ragged_gemm("ragged_dot_general", lhs, rhs, group_sizes, **options)
    if numbers != _CONTRACTED_ROWS:
        raise ValueError(
            f"ragged_dot_dimension_numbers: got {check.shown(numbers)}, expected lhs_ragged_dimensions (0,), no batch "
            "dimensions, and contracting dimensions ((1,), (1,)) or ((1,), (2,)) with rhs_group_dimensions (0,), or "
            "((0,), (0,)) with ()"
        )
    lhs = grouped_rows("lhs", lhs)
    rhs = check.array("rhs", rhs, check.FLOATS, (("m", lhs.shape[0]), "n"))
    sizes = check.sizes("group_sizes", group_sizes, ("g",))
    number, dtype = operands_precision(precision), result_dtype(preferred_element_type, lhs, rhs)
    check_whole("ragged_dot_general", lhs=lhs, rhs=rhs, group_sizes=sizes)
    return _contract_rows(number, dtype, *vary_alike(lhs, rhs, sizes))

"""`jax.lax.ragged_dot` by this library's grouped product: the same call and the same gradients."""

from typing import Any

import jax

from anabranch.jax import _check
from anabranch.jax._sharding import check_whole, vary_alike
from anabranch.jax.experts import GroupedProduct, grouped_matmul_rule, grouped_rows
from anabranch.precision import HIGHEST, TF32


def _asked_for(value: Any) -> jax.lax.Precision | None:
    """The precision that a value is or names; None of None."""
    if value is None or isinstance(value, jax.lax.Precision):
        return value
    if isinstance(value, str):
        return jax.lax.Precision(value)
    raise ValueError(value)


def _precision_of_factors(precision: Any) -> int:
    """The number (anabranch.precision) of JAX's argument: TF32 where both factors may have so few digits."""
    of_factors = precision if isinstance(precision, (tuple, list)) else (precision, precision)
    try:
        asked = set(map(_asked_for, of_factors))
    except ValueError:
        asked = set()
    if len(of_factors) != 2 or not asked:
        raise ValueError(
            f"precision: got {_check.shown(precision)}, expected None, a jax.lax.Precision or its name, or two: "
            "factors multiply as float32, or with HIGH as TF32, and accumulate in float32"
        )
    return TF32 if asked == {jax.lax.Precision.HIGH} else HIGHEST


def check_product(dtype: Any, precision: Any, preferred_element_type: Any, group_offset: Any) -> int:
    """Refuses what asks for another product than one summed in float32 and rounded once.

    Args:
      dtype: of both factors.
      precision: None, a jax.lax.Precision, its name, or a pair of them.
      preferred_element_type: None or that dtype.
      group_offset: None.

    Returns:
      How float32 factors multiply, a number of anabranch.precision.
    """
    number = _precision_of_factors(precision)
    if preferred_element_type is not None:
        name = _check.dtype("preferred_element_type", preferred_element_type, (*_check.FLOATS, "float64"))
        if name != str(dtype):
            raise ValueError(
                f"preferred_element_type: got {name}, expected {dtype}, that of the factors, or None; products "
                "accumulate in float32 and are rounded once"
            )
    if group_offset is not None:
        raise ValueError(
            f"group_offset: got {_check.describe(group_offset)}, expected None: all groups are computed, as JAX's own "
            "ragged_dot does; slice group_sizes and the rows"
        )
    return number


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
      lhs: float32, bfloat16 or float16 [m, k]; rows of one group stand together, group 0 first.
      rhs: [g, k, n]; dtype of lhs.
      group_sizes: int16, int32 or int64 [g], on the device.
      precision: of float32 factors: None, a jax.lax.Precision or its name, or a pair of them. HIGH, whose names are
        "high" and "tensorfloat32", lets a GPU round both to TF32, `precision="tf32"` of `grouped_matmul`; all others
        multiply as float32: so does DEFAULT, which here, unlike in JAX's own, is HIGHEST. Of two the more exact one
        counts. Algorithms are refused.
      preferred_element_type: None, or the dtype of lhs.
      group_offset: None; JAX's own has no implementation of another either.
      out_sharding: None; arrays are whole, or a jax.shard_map's.

    Returns:
      [m, n] of lhs' dtype. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, an option asks for what is not done, or an array is sharded.

    Gradient: of lhs and rhs in their dtypes; that of rhs[g] is zero for a group without rows.

    Source: `grouped_matmul`, of which this is another name with JAX's arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> from anabranch.jax import ragged_dot
      >>> rhs = jnp.array([[[1.0], [1.0]], [[2.0], [3.0]]])
      >>> ragged_dot(jnp.ones((3, 2)), rhs, jnp.array([1, 2])).ravel().tolist()
      [2.0, 5.0, 5.0]
    """
    lhs = grouped_rows("lhs", lhs)
    sizes = _check.indices("group_sizes", group_sizes, ("g",))
    rhs = _check.array("rhs", rhs, (str(lhs.dtype),), (("g", sizes.shape[0]), ("k", lhs.shape[1]), "n"))
    number = check_product(lhs.dtype, precision, preferred_element_type, group_offset)
    if out_sharding is not None:
        raise ValueError(f"out_sharding: got {_check.shown(out_sharding)}, expected None; see jax.shard_map")
    check_whole("ragged_dot", lhs=lhs, rhs=rhs, group_sizes=sizes)
    return grouped_matmul_rule(GroupedProduct(precision=number), *vary_alike(lhs, rhs, sizes))

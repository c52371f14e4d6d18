"""A dense layer per group of rows, with TransformerEngine's name and arguments."""

from typing import Any, NamedTuple

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
    in_one_dtype,
)
from anabranch.jax.ops.ffn import SlotGemm
from anabranch.jax.ops.ragged_dot import operands_precision, refuse_argument, result_dtype
from anabranch.precision import HIGHEST


class _Config(NamedTuple):
    transpose: bool
    precision: int
    dtype: Any


@reverse_mode("grouped_dense", nondiff_argnums=(0,))
def _biased_gemm(
    config: _Config, x: jax.Array, kernel: jax.Array, group_sizes: jax.Array, bias: jax.Array
) -> jax.Array:
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)  # every row is its own token
    sum_dtype = config.dtype if bias.dtype == config.dtype else jnp.float32
    x, kernel, precision = in_one_dtype(sum_dtype, config.precision, x, kernel)
    gemm = SlotGemm(x, kernel, group_sizes, rows, precision, bias, transpose_w=config.transpose)
    return gemm.sum(rows[:, None], None, config.dtype)


def _biased_gemm_forward(config: _Config, *operands: jax.Array) -> tuple[jax.Array, Any]:
    return _biased_gemm(config, *operands), operands


def _biased_gemm_backward(config: _Config, operands: Any, d_y: jax.Array) -> tuple[Any, ...]:
    x, kernel, group_sizes, bias = operands
    transpose, precision, _ = config
    d_x = grouped_gemm(d_y, kernel, group_sizes, transpose_w=not transpose, precision=precision, dtype=x.dtype)
    left, right = (d_y, x) if transpose else (x, d_y)
    d_kernel = grouped_weight_gradient(left, right, group_sizes, kernel.dtype, precision=precision)
    ones = jnp.ones((x.shape[0], 1), d_y.dtype)  # sums the rows of every group of d_y
    d_bias = grouped_weight_gradient(ones, d_y, group_sizes, bias.dtype, precision=HIGHEST)[:, 0]
    return d_x, d_kernel, None, d_bias


_biased_gemm.defvjp(_biased_gemm_forward, _biased_gemm_backward)


def _transposes(contracting_dims: Any) -> bool:
    """Whether the kernel is stored transposed."""
    try:
        dims = tuple(tuple(int(d) for d in side) for side in contracting_dims)
    except (TypeError, ValueError):
        dims = ()
    if dims not in (((1,), (1,)), ((1,), (2,))):
        raise ValueError(
            f"contracting_dims: got {check.shown(contracting_dims)}, expected ((1,), (1,)) for a kernel [G, K, N], or "
            "((1,), (2,)) for one [G, N, K]"
        )
    return dims[1] == (2,)


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    contracting_dims: Any = ((1,), (1,)),
    bias: jax.Array | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    quantizer_set: None = None,
    kernel_fsdp_info: Any = (None, -1),
    kernel_amax: None = None,
) -> jax.Array:
    """The rows of group g times kernel[g], plus bias[g].

    Args:
      x: float32, bfloat16 or float16 [M, K]; rows of one group are contiguous, group 0 first.
      kernel: [G, K, N], any of these dtypes.
      group_sizes: integers [G], on the device. Sizes past M are clipped, negative ones count as 0.
      contracting_dims: ((1,), (1,)), or ((1,), (2,)) for a kernel [G, N, K], which is read in place.
      bias: [G, N], any of these dtypes, or None. It takes part in the promotion of dtypes.
      precision, preferred_element_type, group_offset: as in `ragged_dot`.
      quantizer_set: must be None; quantisation is unsupported.
      kernel_fsdp_info: must be (None, -1); arrays are whole, or shards inside a jax.shard_map.
      kernel_amax: must be None; other versions of TransformerEngine have it, before precision.

    Returns:
      [M, N], dtypes as in `ragged_dot`. Rows past the sum of the sizes are zero, even with a bias.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, an option is unsupported, or an array is sharded.

    Gradient: for x, kernel and bias, in their dtypes; zero for a group without rows.

    Source: the function of this name in transformer_engine.jax.dense.

    Example:
      >>> import jax.numpy as jnp
      >>> from anabranch.jax import grouped_dense
      >>> kernel, bias = jnp.ones((2, 3, 1)), jnp.array([[0.0], [10.0]])
      >>> grouped_dense(jnp.ones((4, 3)), kernel, jnp.array([1, 2]), bias=bias).ravel().tolist()
      [3.0, 13.0, 13.0, 0.0]
    """
    x = grouped_rows("x", x)
    sizes = check.sizes("group_sizes", group_sizes, ("G",))
    (_, K), G = x.shape, sizes.shape[0]
    transpose = _transposes(contracting_dims)
    shape = (("G", G), "N", ("K", K)) if transpose else (("G", G), ("K", K), "N")
    kernel = check.array("kernel", kernel, check.FLOATS, shape)
    N = kernel.shape[1 if transpose else 2]
    bias = check.optional_array("bias", bias, check.FLOATS, (("G", G), ("N", N)))
    number = operands_precision(precision)
    dtype = result_dtype(preferred_element_type, x, kernel, *(() if bias is None else (bias,)))
    refuse_argument("group_offset", group_offset, "all groups are computed; slice group_sizes and the rows")
    for name, value in (("kernel_amax", kernel_amax), ("quantizer_set", quantizer_set)):
        refuse_argument(name, value, "quantisation is unsupported")
    if not isinstance(kernel_fsdp_info, (tuple, list)) or tuple(kernel_fsdp_info) != (None, -1):
        raise ValueError(
            f"kernel_fsdp_info: got {check.shown(kernel_fsdp_info)}, expected (None, -1): gather the kernel, or use "
            "moe(..., parallel=...)"
        )
    check_whole("grouped_dense", x=x, kernel=kernel, group_sizes=sizes, bias=bias)
    if bias is None:
        return grouped_matmul_rule(
            GroupedGemm(transpose, number, dtype=dtype), GroupedOperands(*vary_alike(x, kernel, sizes))
        )
    return _biased_gemm(_Config(transpose, number, dtype), *vary_alike(x, kernel, sizes, bias))

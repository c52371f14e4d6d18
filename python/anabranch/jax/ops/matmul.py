"""GEMMs of the gate with operands of two dtypes or of reduced precision, on a CPU and on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnums=2, inline=True)
def matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Multiplies two matrices over one axis of each; the result is float32, accumulated in float32.

    Operands of equal dtype are multiplied as they are, except that a CPU converts float16 to float32, for which it has
    faster GEMMs. With one float32 and one bfloat16 operand, a CPU converts both to float32. A GPU, on which float32
    GEMMs are slow, splits the float32 operand into the sum of two bfloat16 ones, which represent 16 of its 24 bits.
    Other combinations are converted to float32.
    """
    in_float32 = functools.partial(_product_in_float32, contract=contract)
    dtypes = {str(a.dtype), str(b.dtype)}
    if dtypes == {"float16"}:
        on_gpu = functools.partial(_product, contract=contract)
    elif dtypes == {"float32", "bfloat16"}:
        on_gpu = functools.partial(_product_in_halves, contract=contract)
    else:
        return _product(a, b, contract) if len(dtypes) == 1 else in_float32(a, b)
    product: jax.Array = jax.lax.platform_dependent(a, b, cpu=in_float32, default=on_gpu)
    return product


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def bfloat16_matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int], result: Any) -> jax.Array:
    """Multiplies two matrices over one axis of each; the result has dtype `result`, accumulated in float32.

    A GPU rounds both operands to bfloat16. A CPU, where that is not faster, converts them to float32.
    """

    def in_float32(a: jax.Array, b: jax.Array) -> jax.Array:
        return _product_in_float32(a, b, contract=contract).astype(result)

    def rounded(a: jax.Array, b: jax.Array) -> jax.Array:
        return _product(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), contract, result)

    product: jax.Array = jax.lax.platform_dependent(a, b, cpu=in_float32, default=rounded)
    return product


@functools.partial(jax.jit, static_argnums=2, inline=True)
def halves_matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Multiplies two float32 matrices over one axis of each, with 16 bits of both operands.

    A GPU computes the sum of three bfloat16 GEMMs on tensor cores, where infinities become NaN. A CPU multiplies in
    float32.
    """
    in_float32 = functools.partial(_product_in_float32, contract=contract)
    in_halves = functools.partial(_product_of_halves, contract=contract)
    product: jax.Array = jax.lax.platform_dependent(a, b, cpu=in_float32, default=in_halves)
    return product


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int], result: Any = jnp.float32) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=result)


def _product_in_float32(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    return _product(a.astype(jnp.float32), b.astype(jnp.float32), contract)


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 arrays whose sum equals the float32 array to 16 bits."""
    high = jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)  # XLA would elide a pair of conversions
    low = jnp.where(jnp.isfinite(high), a - high, 0)
    return high.astype(jnp.bfloat16), low.astype(jnp.bfloat16)


def _product_of_halves(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    left = jnp.concatenate([a_high, a_low, a_high], axis=contract[0])  # omits the product of both low halves
    return _product(left, jnp.concatenate([b_high, b_high, b_low], axis=contract[1]), contract)


def _product_in_halves(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    left = a.dtype == jnp.float32  # whether a is the operand that is split; one GEMM multiplies both of its halves
    split, other = (a, b) if left else (b, a)
    terms, other_terms = contract if left else contract[::-1]

    def product(axis: int, other: jax.Array) -> jax.Array:
        both = jnp.concatenate(_halves(split), axis=axis)
        return _product(both, other, contract) if left else _product(other, both, contract)

    size = split.shape[1 - terms]
    if other.size <= size * other.shape[1 - other_terms]:  # smaller than the result: double the contraction length
        return product(terms, jnp.concatenate([other, other], axis=other_terms))
    result = product(1 - terms, other)
    return result[:size] + result[size:] if left else result[:, :size] + result[:, size:]

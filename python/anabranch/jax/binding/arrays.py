"""What several operations do with arrays before and behind their calls; each is traced, and differentiable by JAX."""

import math

import jax
import jax.numpy as jnp


def flat(array: jax.Array) -> jax.Array:
    """[..., n] as [T, n], of any dtype, also where T is 0."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], 0 where the index is out of range. values [n, ...] of any dtype, index of integers, any shape."""
    if values.size == 0:  # which a gather refuses
        return jnp.zeros(index.shape, values.dtype)
    return jnp.asarray(values).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)

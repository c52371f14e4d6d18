"""Array helpers that several operations use around their calls; JAX traces and differentiates them."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def flat(array: jax.Array) -> jax.Array:
    """Reshapes [..., n] to [T, n], for any dtype and also if T is 0."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def cast(array: jax.Array, dtype: Any) -> jax.Array:
    """array.astype(dtype), but the array itself if it has that dtype: outside of jit, `jax.grad` would copy it."""
    return array if array.dtype == dtype and not jax.typeof(array).weak_type else array.astype(dtype)


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], 0 where the index is out of range. values [n, ...] of any dtype, integer index of any shape."""
    if values.size == 0:  # a gather refuses empty operands
        return jnp.zeros(index.shape, values.dtype)
    return jnp.asarray(values).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)

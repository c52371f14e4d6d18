"""Arrays of integers and what they point at."""

import math

import jax
import jax.numpy as jnp


def flat(array: jax.Array) -> jax.Array:
    """[..., n] as [T, n], also where T is 0."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def as_int32(indices: jax.Array, low: int, high: int) -> jax.Array:
    """Integers as int32; wider ones are first clipped to [low, high], so that none wraps around into range."""
    if indices.dtype == jnp.int64:
        indices = jnp.clip(indices, low, high)
    return indices.astype(jnp.int32)


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], 0 where the index is out of range."""
    if values.size == 0:  # which a gather refuses
        return jnp.zeros(index.shape, values.dtype)
    return jnp.asarray(values).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)

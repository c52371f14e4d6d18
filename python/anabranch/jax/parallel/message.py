"""Quantised rows as one message: what a transport carries where tokens travel as FP8.

A row is D e4m3 numbers and the D/128 float32 scales of its blocks, 33 D / 32 bytes, as 32-bit integers: nothing on the
way computes with them, so every bit arrives, those of a NaN too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.ops.quantized import Factor
from anabranch.precision import BLOCK


def pack(rows: Factor) -> jax.Array:
    """int32 [T, D/4 + D/128] of quantised rows [T, D]: their numbers, then their scales."""
    T, D = rows.q.shape
    numbers = jax.lax.bitcast_convert_type(rows.q.reshape(T, D // 4, 4), jnp.int32)
    return jnp.concatenate([numbers, jax.lax.bitcast_convert_type(rows.scales, jnp.int32)], axis=1)


def unpack(message: jax.Array, D: int) -> Factor:
    """The quantised rows [T, D] that `pack` was given."""
    numbers, scales = message[:, : D // 4], message[:, D // 4 :]
    q = jax.lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn).reshape(message.shape[0], D)
    return Factor(q, jax.lax.bitcast_convert_type(scales, jnp.float32))


def dequantize(rows: Factor, dtype: Any) -> jax.Array:
    """q * scale [T, D], rounded to `dtype`, and to its largest number where a scale rounded up leads past that."""
    T, D = rows.q.shape
    blocks = rows.q.reshape(T, D // BLOCK, BLOCK).astype(jnp.float32) * rows.scales[:, :, None]
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(blocks, -largest, largest).astype(dtype).reshape(T, D)

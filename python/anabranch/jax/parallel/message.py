"""Quantised rows as one message of a transport, for exchanges in FP8.

A message row is D e4m3 numbers and D/128 float32 block scales, 33 D / 32 bytes, viewed as 32-bit integers. Integers
preserve every bit, including those of NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.ops.quantized import QuantizedOperand
from anabranch.precision import BLOCK


def pack(rows: QuantizedOperand) -> jax.Array:
    """int32 [T, D/4 + D/128] from quantised rows [T, D]: their numbers, then their scales."""
    T, D = rows.q.shape
    numbers = jax.lax.bitcast_convert_type(rows.q.reshape(T, D // 4, 4), jnp.int32)
    return jnp.concatenate([numbers, jax.lax.bitcast_convert_type(rows.scales, jnp.int32)], axis=1)


def unpack(message: jax.Array, D: int) -> QuantizedOperand:
    """The inverse of `pack`: quantised rows [T, D]."""
    numbers, scales = message[:, : D // 4], message[:, D // 4 :]
    q = jax.lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn).reshape(message.shape[0], D)
    return QuantizedOperand(q, jax.lax.bitcast_convert_type(scales, jnp.float32))


def dequantize(rows: QuantizedOperand, dtype: Any) -> jax.Array:
    """q * scale [T, D], rounded to `dtype`; clipped to its largest number if a rounded-up scale makes it overflow."""
    T, D = rows.q.shape
    blocks = rows.q.reshape(T, D // BLOCK, BLOCK).astype(jnp.float32) * rows.scales[:, :, None]
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(blocks, -largest, largest).astype(dtype).reshape(T, D)

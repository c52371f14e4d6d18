"""Packed weights (MXFP4 and FP8 blocks) in numpy.

`docs/semantics.md`, section 13, as code. Values that are exact in float64 are computed there and rounded once, so that
the bits do not depend on how a backend computes them.
"""

import ml_dtypes
import numpy as np

from anabranch.packed import MX_BLOCK, MX_BYTES, SCALE_RULES, Fp8Blocks, Mxfp4

from .fp8 import BLOCK, quantize_weights

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of e2m1, by bits 0 to 2 of the code
BIAS = 127  # of an e8m0 scale, 2^(byte - BIAS)
NAN_SCALE = 255


def scale_values(scales):
    """Scales as float64: e8m0 numbers, or bytes 2^(s - 127) with 255 as NaN, or floats."""
    scales = np.asarray(scales)
    if scales.dtype == ml_dtypes.float8_e8m0fnu:
        scales = scales.view(np.uint8)
    if scales.dtype != np.uint8:
        return scales.astype(np.float64)
    return np.where(scales == NAN_SCALE, np.nan, np.ldexp(1.0, scales.astype(np.int64) - BIAS))


def _rounded(values, dtype):
    """float64 values as float32 and then as a dtype. Where the float32 number is exact this rounds once."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype)


def unpack(packed, dtype=np.float64):
    """decode(packed, dtype): the weights [..., N, C]. float64 has the values as float32."""
    array, scales = packed
    values = scale_values(scales)
    if isinstance(packed, Mxfp4):
        codes = np.stack([array & 15, array >> 4], axis=-1)
        signs = np.where(codes & 8, -1.0, 1.0)
        blocks = (signs * MAGNITUDES[codes & 7]).reshape(*array.shape[:-1], MX_BLOCK) * values[..., None]
        return _rounded(blocks.reshape(*array.shape[:-2], array.shape[-2] * MX_BLOCK), dtype)
    spread = np.repeat(np.repeat(values, BLOCK, -2), BLOCK, -1)
    with np.errstate(invalid="ignore"):
        return _rounded(array.astype(np.float64) * spread, dtype)


def pack_mxfp4(w, scale_rule="floor"):
    """The weights w [..., C] as Mxfp4. Float32 holds them exactly.

    With m = max |v| of a block: k = floor(log2 m) - 2 ("floor") or ceil(log2(m / 6)) ("ceil"), clamped to [-127, 127].
    """
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"scale_rule: got {scale_rule!r}, expected one of {', '.join(map(repr, SCALE_RULES))}")
    w = np.asarray(w).astype(np.float64)
    blocks = w.reshape(*w.shape[:-1], w.shape[-1] // MX_BLOCK, MX_BLOCK)
    largest = np.abs(blocks).max(axis=-1, initial=0.0)
    finite = np.isfinite(largest)
    fraction, exponent = np.frexp(np.where(finite, largest, 1.0))  # largest = fraction 2^exponent, fraction in [1/2, 1)
    # 6 = 0.75 * 2^3: ceil(log2(m / 6)) is one more where the fraction exceeds that of 6.
    k = exponent - 3 + (fraction > 0.75 if scale_rule == "ceil" else 0)
    k = np.where(largest == 0, -BIAS, np.clip(k, -BIAS, BIAS))
    scaled = np.where(finite[..., None], np.abs(blocks), 0.0) / np.ldexp(1.0, k)[..., None]
    distance = np.abs(scaled[..., None] - MAGNITUDES)
    # The nearest magnitude; of two at the same distance that with the even code.
    nearest = distance == distance.min(axis=-1, keepdims=True)
    codes = np.argmax(np.where(nearest, 2 - np.arange(8) % 2, 0), axis=-1)
    codes = np.where(finite[..., None], codes | np.where(np.signbit(blocks), 8, 0), 0).astype(np.uint8)
    pairs = codes.reshape(*codes.shape[:-1], MX_BYTES, 2)
    scales = np.where(finite, k + BIAS, NAN_SCALE).astype(np.uint8)
    return Mxfp4(pairs[..., 0] | pairs[..., 1] << 4, scales)


def pack_fp8(w, fp8_scales="float32"):
    """The weights w [..., N, C] as Fp8Blocks: Q2 of section 11."""
    w = np.asarray(w)
    flat = w.reshape(-1, *w.shape[-2:])
    quantized = quantize_weights(flat, fp8_scales)
    q = quantized.values.astype(ml_dtypes.float8_e4m3fn).reshape(w.shape)
    return Fp8Blocks(q, quantized.scales.reshape(*w.shape[:-2], *quantized.scales.shape[-2:]))

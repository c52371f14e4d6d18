"""Quantised operands of the experts' GEMMs: e4m3 numbers with one float32 scale per block of 128.

`docs/semantics.md`, section 11, as code. Steps whose rounding decides the quantised bits are float32, as in the
library, so that both quantise to the same numbers.
"""

from typing import NamedTuple

import numpy as np

from .scores import as_float64

BLOCK = 128
LARGEST = np.float32(448)  # largest e4m3 (float8_e4m3fn) number, 1.75 * 2^8
SMALLEST_EXPONENT = -6  # the smallest exponent of a normal number; below it the spacing stays 2^-9
FRACTION_BITS = 3
SMALLEST_SCALE = np.float32(2.0**-126)  # the smallest normal number: denormal scales would lose digits
FP8_SCALES = ("float32", "power_of_two")


class Quantized(NamedTuple):
    """A quantised array.

    values: e4m3 numbers as float32, with the array's shape. scales: float32, one per block.
    block: the size of a block along every axis of the array.
    """

    values: np.ndarray
    scales: np.ndarray
    block: tuple[int, ...]

    def exact(self):
        """The array as a GEMM operand, values times scales, float64."""
        return self.values.astype(np.float64) * _spread(self.scales, self.block).astype(np.float64)


def e4m3(v):
    """v, |v| < 464, rounded to the nearest e4m3 number, ties to even. float32."""
    v = np.asarray(v, np.float32)
    _, exponent = np.frexp(v)  # |v| in [2^(exponent - 1), 2^exponent)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, SMALLEST_EXPONENT) - FRACTION_BITS)
    return np.rint(v / step) * step


def scales_of(largest, fp8_scales):
    """Scales of blocks by their largest absolute values; float32, the shape of `largest`.

    "float32": max(largest / 448, 2^-126), 1 if largest is 0, NaN if it is not finite. "power_of_two": the smallest
    power of two that is not below that.
    """
    if fp8_scales not in FP8_SCALES:
        raise ValueError(f"fp8_scales: got {fp8_scales!r}, expected one of {', '.join(map(repr, FP8_SCALES))}")
    largest = np.asarray(largest, np.float32)
    scales = np.where(largest == 0, np.float32(1), np.maximum(largest / LARGEST, SMALLEST_SCALE))
    scales = np.where(np.isfinite(scales), scales, np.float32(np.nan))
    if fp8_scales == "power_of_two":
        fraction, exponent = np.frexp(scales)  # fraction in [1/2, 1)
        scales = np.where(np.isfinite(scales), np.ldexp(np.float32(1), exponent - (fraction == 0.5)), scales)
    return scales.astype(np.float32)


def _spread(scales, block):
    """Repeats every block's scale for each element of the block."""
    for axis, size in enumerate(block):
        scales = np.repeat(scales, size, axis)
    return scales


def _quantize(array, block, fp8_scales):
    array = as_float64(array).astype(np.float32)
    for size, length in zip(array.shape, block, strict=True):
        if size % length:
            raise ValueError(f"array: got {list(array.shape)}, expected multiples of {list(block)}")
    counts = [size // length for size, length in zip(array.shape, block, strict=True)]
    parts = [part for pair in zip(counts, block, strict=True) for part in pair]
    # np.max propagates NaN; np.isfinite in scales_of detects infinities.
    largest = np.abs(array).reshape(parts).max(axis=tuple(range(1, 2 * len(block), 2)), initial=0.0)
    scales = scales_of(largest, fp8_scales)
    with np.errstate(invalid="ignore"):
        return Quantized(e4m3(array / _spread(scales, block)), scales, tuple(block))


def quantize_rows(x, fp8_scales="float32"):
    """Q1: one scale per 128 consecutive elements of a row. x [R, D], scales [R, D / 128]."""
    return _quantize(x, (1, BLOCK), fp8_scales)


def quantize_weights(w, fp8_scales="float32"):
    """Q2: one scale per 128 x 128 elements of an expert and part. w [E, D, (P,) N]; scales [E, D/128, (P,) N/128]."""
    return _quantize(w, (1, BLOCK, *(1,) * (np.ndim(w) - 3), BLOCK), fp8_scales)


def received(x, fp8_scales, dtype):
    """Rows x [R, D] that were sent as Q1(x), as operands that are not quantised. float64.

    That is q * scale in float32, rounded to dtype. Where a rounded-up scale makes it overflow: dtype's largest number.
    """
    sent = quantize_rows(x, fp8_scales)
    largest = np.nextafter(np.asarray(np.inf, dtype), np.asarray(0, dtype)).astype(np.float32)
    with np.errstate(over="ignore"):
        product = sent.values * _spread(sent.scales, sent.block)
    return np.clip(product, -largest, largest).astype(dtype).astype(np.float64)


def rows_operand(x, fp8_scales):
    """The rows x [R, D] as a GEMM operand: Q1(x), or x itself if fp8_scales is None. float64."""
    return as_float64(x, "x") if fp8_scales is None else quantize_rows(x, fp8_scales).exact()


def weights_operand(w, fp8_scales):
    """The weights w as a GEMM operand: Q2(w), or w itself if fp8_scales is None. float64."""
    return as_float64(w, "w") if fp8_scales is None else quantize_weights(w, fp8_scales).exact()

"""Quantised rows as one message of a transport, for exchanges in FP8.

A message row is D e4m3 numbers and D/128 float32 block scales, 33 D / 32 bytes, viewed as 32-bit integers. Integers
preserve every bit, including those of NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.precision import BLOCK
from anabranch.torch.binding.native import call
from anabranch.torch.ops import torch_ops


class QuantizedOperand(NamedTuple):
    """Quantised rows with their block scales."""

    q: Tensor
    """float8_e4m3fn [T, D]"""
    scales: Tensor
    """float32 [T, D/128]"""


def quantize_rows(x: Tensor, fp8_scales: int) -> QuantizedOperand:
    """Quantises x [T, D] with one scale per 128 consecutive elements of a row."""
    return QuantizedOperand(*call(torch_ops.quantize_rows, x, fp8_scales))


def pack(rows: QuantizedOperand) -> Tensor:
    """Packs quantised rows [T, D] into int32 [T, D/4 + D/128]: numbers, then scales."""
    return torch.cat([rows.q.view(torch.int32), rows.scales.view(torch.int32)], 1)


def unpack(message: Tensor, D: int) -> QuantizedOperand:
    """The inverse of `pack`."""
    numbers, scales = (part.contiguous() for part in message.split([D // 4, D // BLOCK], 1))
    return QuantizedOperand(numbers.view(torch.float8_e4m3fn), scales.view(torch.float32))


def dequantize(rows: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """q * scale [T, D], rounded to `dtype` and clamped to its finite range, which a rounded-up scale can exceed."""
    T, D = rows.q.shape
    blocks = rows.q.float().view(T, D // BLOCK, BLOCK) * rows.scales[:, :, None]
    largest = torch.finfo(dtype).max
    return blocks.clamp(-largest, largest).to(dtype).view(T, D)

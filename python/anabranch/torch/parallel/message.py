"""Quantised rows as one message: what a transport carries where tokens travel as FP8.

A row is D e4m3 numbers and the D/128 float32 scales of its blocks, 33 D / 32 bytes, as 32-bit integers: nothing on the
way computes with them, so every bit arrives, those of a NaN too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.precision import BLOCK
from anabranch.torch.ops import torch_ops


class QuantizedRows(NamedTuple):
    """Rows [T, D], and the scales of their blocks."""

    q: Tensor
    """float8_e4m3fn [T, D]"""
    scales: Tensor
    """float32 [T, D/128]"""


def quantize_rows(x: Tensor, fp8_scales: int) -> QuantizedRows:
    """Q1 of x [T, D]: a scale for 128 consecutive elements of a row."""
    return QuantizedRows(*torch_ops.quantize_rows(x, fp8_scales))


def pack(rows: QuantizedRows) -> Tensor:
    """int32 [T, D/4 + D/128] of quantised rows [T, D]: their numbers, then their scales."""
    return torch.cat([rows.q.view(torch.int32), rows.scales.view(torch.int32)], 1)


def unpack(message: Tensor, D: int) -> QuantizedRows:
    """The quantised rows [T, D] that `pack` was given."""
    numbers, scales = (part.contiguous() for part in message.split([D // 4, D // BLOCK], 1))
    return QuantizedRows(numbers.view(torch.float8_e4m3fn), scales.view(torch.float32))


def dequantize(rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """q * scale [T, D], rounded to `dtype`, and to its largest number where a scale rounded up leads past that."""
    T, D = rows.q.shape
    blocks = rows.q.float().view(T, D // BLOCK, BLOCK) * rows.scales[:, :, None]
    largest = torch.finfo(dtype).max
    return blocks.clamp(-largest, largest).to(dtype).view(T, D)

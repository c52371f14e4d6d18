"""Packed weights of the experts: packing, unpacking, and packed matrices as operands of the layer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.options import Network
from anabranch.packed import (
    BACKWARD_AXES,
    MX_BLOCK,
    MX_BYTES,
    Fp8Blocks,
    Mxfp4,
    axes_of,
    check_layout,
    check_packed,
    check_whole_blocks,
    is_packed,
    logical_shape,
    parts_of,
    refuse_without_scales,
    require_packed,
    scale_rule_number,
)
from anabranch.precision import BLOCK, FP8, fp8_scales_number
from anabranch.torch.binding import check
from anabranch.torch.binding.native import call
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.quantized import QuantizedExperts

Packed = Mxfp4 | Fp8Blocks


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _bytes(scales: Tensor) -> Tensor:
    """Scales of one byte as uint8, which operations take."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


# ---------------------------------------------------------------- operands of the layer


def check_weight(name: str, value: Any, dtypes: Sequence[torch.dtype], layouts: Layouts, **sizes: Any) -> Any:
    """Checks w_in or w_out, plain or packed. sizes: by letter, see `Layouts.shape`.

    Raises:
      TypeError, ValueError: by `check.tensor`; a layout that a packed matrix cannot have; a packed matrix that requires
        a gradient.
    """
    shape = layouts.shape(name, **sizes)
    if not is_packed(value):
        refuse_without_scales(name, value)
        return check.tensor(name, value, dtypes, shape)
    check_layout(name, value, layouts)
    packed = check_packed(check.tensor, _dtype, name, value, shape)
    check_frozen(name, packed)
    return packed


def check_frozen(name: str, value: Any) -> None:
    """Raises ValueError if a tensor of a packed matrix requires a gradient."""
    if not is_packed(value):
        return
    for field, part in zip(value._fields, value, strict=True):
        if part.requires_grad:
            raise ValueError(
                f"{name}.{field}: got a tensor that requires a gradient, expected one without: packed weights have no "
                "gradient"
            )


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of the weights, plain or packed."""
    array, _ = parts_of(value)
    return logical_shape(array.shape, mxfp4=isinstance(value, Mxfp4))


def describe_weight(value: Any) -> str:
    """The description of a weight for an error."""
    array, _ = parts_of(value)
    return check.describe(array)


def device_operands(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors of a weight by their names in errors."""
    if not is_packed(value):
        return {name: value}
    return {f"{name}.{field}": part for field, part in zip(value._fields, value, strict=True)}


def float_scales(scales: Tensor) -> Tensor:
    """Scales as float32."""
    if scales.dtype != torch.uint8:
        return scales.float()
    exponent = scales.to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is a denormal number
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def packed_operands(
    network: Network, w_in: Any, w_out: Any, quantized: QuantizedExperts | None
) -> tuple[Tensor, Tensor, QuantizedExperts | None]:
    """Checked weights as operands of the layer.

    Returns:
      The tensors that stand for w_in and w_out, and `quantized`. If weights are packed it has their scales, and with
      FP8 also the q of an Fp8Blocks as a quantised matrix.
    """
    if not (is_packed(w_in) or is_packed(w_out)):
        return w_in, w_out, quantized
    arrays, fields = [], []
    for name, value in (("w_in", w_in), ("w_out", w_out)):
        array, scales = parts_of(value)
        transposed = None
        if scales is not None:
            scales = _bytes(scales)
            if network.precision == FP8:
                transposed, scales = array, float_scales(scales).permute(BACKWARD_AXES[name]).contiguous()
        arrays.append(array)
        fields += [None, transposed, scales]
    return arrays[0], arrays[1], QuantizedExperts(*fields)


def oriented_backward(
    network: Network, w_in: Tensor, w_out: Tensor, quantized: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The quantised operands of a backward pass, with those of FP8 blocks added."""
    if network.precision != FP8:
        return tuple(quantized)
    w_in_q, w_in_scales, w_out_q, w_out_scales = quantized

    def transposed(name: str, w: Tensor, q: Tensor | None) -> Tensor | None:
        if q is not None or w.dtype != torch.float8_e4m3fn:
            return q
        return w.view(torch.uint8).permute(BACKWARD_AXES[name]).contiguous().view(torch.float8_e4m3fn)

    return transposed("w_in", w_in, w_in_q), w_in_scales, transposed("w_out", w_out, w_out_q), w_out_scales


# ---------------------------------------------------------------- packing


def pack_mxfp4(w: Tensor, scale_rule: str = "floor") -> Mxfp4:
    """Packs weights as MXFP4.

    Args:
      w: float32, bfloat16 or float16 [..., N, C], C a multiple of 32.
      scale_rule: "floor" or "ceil", see `Mxfp4`.

    Returns:
      An `Mxfp4`, 17/32 bytes per weight.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: none.

    >>> packed = pack_mxfp4(torch.full((2, 64), 3.0))
    >>> tuple(packed.codes.shape), tuple(packed.scales.shape), unpack(packed, torch.float32)[0, 0].item()
    ((2, 2, 16), (2, 2), 3.0)
    """
    w = check.tensor("w", w, check.FLOATS, (..., "N", "C")).detach()
    *leading, C = w.shape
    check_whole_blocks(w, MX_BLOCK, axes=1)
    rows = w.reshape(math.prod(leading), C)
    codes, scales = call(torch_ops.pack_mxfp4, rows, scale_rule_number(scale_rule))
    return Mxfp4(codes.view(*leading, C // MX_BLOCK, MX_BYTES), scales.view(*leading, C // MX_BLOCK))


def pack_fp8(w: Tensor, fp8_scales: str = "float32") -> Fp8Blocks:
    """Packs weights as FP8 blocks with float32 scales.

    Args:
      w: float32, bfloat16 or float16 [..., N, C], N and C multiples of 128.
      fp8_scales: "float32" or "power_of_two", see `moe`.

    Returns:
      An `Fp8Blocks`, one byte per weight and scales.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: none.

    >>> packed = pack_fp8(torch.full((3, 128, 256), 2.0))
    >>> packed.q.dtype, tuple(packed.scales.shape), unpack(packed, torch.float32)[0, 0, 0].item()
    (torch.float8_e4m3fn, (3, 1, 2), 2.0)
    """
    w = check.tensor("w", w, check.FLOATS, (..., "N", "C")).detach()
    *leading, N, C = w.shape
    check_whole_blocks(w, BLOCK, axes=2)
    matrices = w.reshape(math.prod(leading), N, C)
    q, scales = call(torch_ops.pack_fp8, matrices, fp8_scales_number(fp8_scales))
    return Fp8Blocks(q.view(w.shape), scales.view(*leading, N // BLOCK, C // BLOCK))


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weights that a packed matrix stands for.

    Args:
      packed: an `Mxfp4` or an `Fp8Blocks`.
      dtype: float32, bfloat16 or float16.

    Returns:
      [..., N, C], rounded as `Mxfp4` and `Fp8Blocks` describe.

    Raises:
      TypeError, ValueError: an argument is wrong, or a part of `packed` requires a gradient; the message names it.

    Gradient: none.

    >>> codes, scales = (torch.full(s, v, dtype=torch.uint8) for s, v in (((1, 1, 16), 0x21), ((1, 1), 128)))
    >>> unpack(Mxfp4(codes, scales), torch.float32)[0, :4].tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    require_packed("packed", packed)
    dtype = check.float_dtype("dtype", dtype)
    checked = check_packed(check.tensor, _dtype, "packed", packed, axes_of(packed))
    check_frozen("packed", checked)
    checked = type(checked)(*(part.detach() for part in checked))
    *leading, N, C = shape_of(checked)
    check.same_device("packed", checked[0], **{f"packed.{checked._fields[1]}": checked[1]})
    matrices = math.prod(leading)
    array, scales = checked[0], _bytes(checked[1])
    array = array.reshape(matrices, N, *array.shape[len(leading) + 1 :])
    w: Tensor = call(torch_ops.unpack, array, scales.reshape(matrices, *scales.shape[len(leading) :]), dtype)
    return w.view(*leading, N, C)

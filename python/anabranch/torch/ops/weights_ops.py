"""The weights of the experts as fields of C calls: plain, packed or quantised; and operations that pack and unpack.

An operation gets a packed matrix as one tensor: the codes uint8 [..., N, C/32, 16] of an Mxfp4, or the q float8_e4m3fn
[..., N, C] of an Fp8Blocks. The scales are passed as the scales of a quantised matrix whose q is None. With FP8 an
Fp8Blocks is the quantised matrix itself, so its q is passed as well.
"""

from typing import Any

import torch

from anabranch.layouts import Layouts
from anabranch.packed import MX_BLOCK, MX_BYTES, logical_shape
from anabranch.precision import BLOCK, FP8
from anabranch.torch.binding import calls
from anabranch.torch.binding.define import define
from anabranch.torch.binding.described import Described
from anabranch.torch.ops.quantize_ops import quantized_matrix

PACKED_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def weight_shape(w: Any) -> tuple[Any, ...]:
    """The shape of the weights that an argument stands for."""
    return logical_shape(w.shape, mxfp4=w.dtype == torch.uint8)


def viewed_weight(w: Any, shape: tuple[Any, ...]) -> Any:
    """A weight with other sizes, as a C call reads it."""
    if w.dtype != torch.uint8:
        return w.view(shape)
    return Described(shape, torch.float4_e2m1fn_x2, w.memory, w.offset)


def weight_fields(name: str, w: Any, q: Any, scales: Any, network: Any, *, transposed: bool) -> tuple[Any, list[Any]]:
    """Fields of a C call for "w_in" or "w_out", and the calls that fill them.

    Args:
      w, q, scales: the arguments of an operation.
      network: a Network.
      transposed: the orientation of a quantised matrix: True in the forward pass.
    """
    if network.precision == FP8:
        before = []
        if q is None:
            axes = Layouts(network.w_in_layout, network.w_out_layout).order(name)
            q, scales, quantize = quantized_matrix(w, axes, network.fp8_scales, transposed=transposed)
            before.append(quantize)
        plain = None if w.dtype in PACKED_DTYPES else w
        return {name: plain, f"{name}_q": q, f"{name}_scales": scales}, before
    if w.dtype in PACKED_DTYPES:
        return {name: viewed_weight(w, weight_shape(w)), f"{name}_block_scales": scales}, []
    return {name: w}, []


def sizes_only(name: str, w: Any, q: Any, scales: Any, network: Any) -> dict[str, Any]:
    """Fields of a C call of the backward pass that reads only the sizes of "w_in" or "w_out"."""
    if w.dtype not in PACKED_DTYPES:
        return {name: w}
    return weight_fields(name, w, q, scales, network, transposed=False)[0]


def _allocate_unpack(packed, scales, dtype):
    return packed.new_empty(weight_shape(packed), dtype=dtype)


def _unpack(w, packed, scales, dtype):
    return calls.unpack({"packed": viewed_weight(packed, weight_shape(packed)), "scales": scales, "w": w})


#: The weights [M, N, C] of a packed matrix.
unpack = define("unpack(Tensor packed, Tensor scales, ScalarType dtype) -> Tensor", _allocate_unpack, _unpack)


def _allocate_pack_mxfp4(w, scale_rule):
    M, C = w.shape
    codes = w.new_empty((M, C // MX_BLOCK, MX_BYTES), dtype=torch.uint8)
    return codes, w.new_empty((M, C // MX_BLOCK), dtype=torch.uint8)


def _pack_mxfp4(results, w, scale_rule):
    codes, scales = results
    tensors = {"w": w, "codes": viewed_weight(codes, w.shape), "scales": scales}
    return calls.pack_mxfp4(tensors, scale_rule=scale_rule)


#: Codes and scales of w [M, C].
pack_mxfp4 = define(
    "pack_mxfp4(Tensor w, int scale_rule) -> (Tensor codes, Tensor scales)", _allocate_pack_mxfp4, _pack_mxfp4
)


def _allocate_pack_fp8(w, fp8_scales):
    M, N, C = w.shape
    scales = w.new_empty((M, N // BLOCK, C // BLOCK), dtype=torch.float32)
    return w.new_empty((M, N, C), dtype=torch.float8_e4m3fn), scales


def _pack_fp8(results, w, fp8_scales):
    q, scales = results
    return calls.quantize_weights({"w": w, "q": q, "scales": scales}, fp8_scales=fp8_scales)


#: e4m3 numbers and the scales of blocks of w [M, N, C].
pack_fp8 = define("pack_fp8(Tensor w, int fp8_scales) -> (Tensor q, Tensor scales)", _allocate_pack_fp8, _pack_fp8)

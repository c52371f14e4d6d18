"""Packed weights of a module: buffers in the place of parameters, which keep their dtypes and have no gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.packed import KINDS, packed_shapes
from anabranch.torch.ops.packed import Packed, pack_fp8, pack_mxfp4

#: Functions that pack weights, by the choices of the option `packed` of a module.
_PACK: dict[str, Callable[[Tensor], Packed]] = {"mxfp4": pack_mxfp4, "fp8_blocks": pack_fp8}


def buffer_names(name: str, packed: str) -> tuple[str, ...]:
    """The buffers in the place of a parameter, for example gate_up_proj_codes and gate_up_proj_scales."""
    return tuple(f"{name}_{field}" for field in KINDS[packed]._fields)


def add_buffers(module: nn.Module, name: str, packed: str, shape: tuple[int, int, int], device: Any) -> None:
    """Registers the buffers for a matrix [E, N, C], without values."""
    for field, (part, dtype) in packed_shapes(packed, shape).items():
        module.register_buffer(f"{name}_{field}", torch.empty(part, dtype=getattr(torch, dtype), device=device))


def read_buffers(module: nn.Module, name: str, packed: str) -> Packed:
    """The packed matrix of a module."""
    value: Packed = KINDS[packed](*(getattr(module, buffer) for buffer in buffer_names(name, packed)))
    return value


@torch.no_grad()
def fill_buffers(module: nn.Module, name: str, packed: str, weights: Tensor) -> None:
    """Packs weights [E, N, C] into the buffers. Scales keep the dtype of their buffer."""
    for buffer, value in zip(buffer_names(name, packed), _PACK[packed](weights), strict=True):
        getattr(module, buffer).copy_(value)


def with_dtypes_kept(module: nn.Module, names: tuple[str, ...], apply: Callable[[], Any]) -> None:
    """Calls apply(), which may move and convert the buffers of a module, and restores their dtypes.

    A conversion such as `.to(torch.bfloat16)` applies to float8 tensors and float scales, too.
    """
    before = {name: getattr(module, name) for name in names}
    apply()
    for name, buffer in before.items():
        converted = getattr(module, name)
        if converted.dtype != buffer.dtype:
            same = torch.empty_like(converted, dtype=buffer.dtype) if buffer.is_meta else buffer.to(converted.device)
            setattr(module, name, same)

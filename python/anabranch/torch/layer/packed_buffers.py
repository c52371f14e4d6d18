"""Packed weights of a module: buffers in the place of parameters, which keep their dtypes and have no gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.packed import KINDS, packed_shapes
from anabranch.torch.ops.packed import Packed, float_scales, pack_fp8, pack_mxfp4

#: The dtypes of scales in a checkpoint that can be converted to that of the buffer.
_SCALES = {"mxfp4": (torch.float8_e8m0fnu,), "fp8_blocks": (torch.uint8, torch.float8_e8m0fnu, torch.bfloat16)}
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


def pack(packed: str, weights: Tensor) -> Packed:
    """Packs weights [E, N, C]."""
    return _PACK[packed](weights)


@torch.no_grad()
def write_buffers(module: nn.Module, name: str, packed: str, value: Packed) -> None:
    """Writes a packed matrix to the buffers. Scales keep the dtype of their buffer."""
    for buffer, part in zip(buffer_names(name, packed), value, strict=True):
        getattr(module, buffer).copy_(part)


def convert_state(
    module: nn.Module, name: str, packed: str, state: dict[str, Any], prefix: str, errors: list[str]
) -> None:
    """Converts the entries of a state dict for a packed matrix to the dtypes of its buffers, before they are loaded.

    Scales of a checkpoint have other dtypes: e8m0 is uint8 with another name; uint8 is 2^(byte - 127), not a number.
    For other dtypes it adds an error, and the entry is not loaded.
    """
    for buffer in buffer_names(name, packed):
        key, own = f"{prefix}{buffer}", getattr(module, buffer)
        value = state.get(key)
        if not isinstance(value, Tensor) or value.dtype == own.dtype:
            continue
        if buffer.endswith("_scales") and value.dtype in _SCALES[packed]:
            state[key] = value.view(torch.uint8) if packed == "mxfp4" else float_scales(value)
        else:
            state[key] = own
            errors.append(f"{key}: got {value.dtype}, expected {own.dtype}")


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

"""What torch.autocast means to functions of ours: float32 operands are rounded once, before anything else.

Inside of them nothing is rounded but by us.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor


def has_autocast(device: torch.device) -> bool:
    """Whether torch.autocast knows a device; of tensors on "meta" there is nothing to compute."""
    return device.type in ("cpu", "cuda")


def without_autocast(device: torch.device) -> Any:
    """A context in which nothing is rounded but by us."""
    if has_autocast(device) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def rounds(tensor: Any) -> bool:
    """Whether torch.autocast is on for the device of a float32 tensor."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or not has_autocast(tensor.device):
        return False
    return torch.is_autocast_enabled(tensor.device.type)


def as_autocast(x: Any) -> Any:
    """x in the dtype of torch.autocast, where that is on."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if rounds(x) else x


def in_dtype_of(x: Any, operand: Any) -> Any:
    """An operand that has to be of x's dtype, a bias for one, in that where torch.autocast is on."""
    return operand.to(x.dtype) if isinstance(x, Tensor) and rounds(operand) else operand

"""torch.autocast: float32 operands are rounded once on entry, and autocast is disabled inside our functions."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def has_autocast(device: torch.device) -> bool:
    """Whether torch.autocast supports the device; "meta" is excluded."""
    return device.type in ("cpu", "cuda")


def without_autocast(device: torch.device) -> Any:
    """A context without torch.autocast."""
    if has_autocast(device) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def rounds(tensor: Any) -> bool:
    """Whether the value is a float32 tensor on a device for which torch.autocast is enabled."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or not has_autocast(tensor.device):
        return False
    return torch.is_autocast_enabled(tensor.device.type)


def as_autocast(x: Any) -> Any:
    """Rounds a float32 x to the autocast dtype if torch.autocast is enabled."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if rounds(x) else x


def match_autocast(x: Any, operand: Any) -> Any:
    """Converts an operand that must have the dtype of x, such as a bias, if torch.autocast is enabled."""
    return operand.to(x.dtype) if isinstance(x, Tensor) and rounds(operand) else operand

"""torch.autocast: float32 operands are rounded once on entry, and autocast is disabled inside our functions."""

import contextlib
from typing import Any

import torch
from torch import Tensor

#: Device types that torch.autocast supports. "meta" is excluded.
AUTOCAST_TYPES = ("cpu", "cuda")


def _is_enabled(device: torch.device) -> bool:
    kind = device.type  # torch makes a new string each time
    return kind in AUTOCAST_TYPES and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> Any:
    """A context without torch.autocast."""
    return torch.autocast(device.type, enabled=False) if _is_enabled(device) else contextlib.nullcontext()


def rounds(tensor: Any) -> bool:
    """Whether the value is a float32 tensor on a device for which torch.autocast is enabled."""
    return isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and _is_enabled(tensor.device)


def as_autocast(x: Any) -> Any:
    """Rounds a float32 x to the autocast dtype if torch.autocast is enabled."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if rounds(x) else x


def match_autocast(x: Any, operand: Any) -> Any:
    """Converts an operand that must have the dtype of x, such as a bias, if torch.autocast is enabled."""
    return operand.to(x.dtype) if isinstance(x, Tensor) and rounds(operand) else operand

"""The plain eager case: torch runs a call on plain tensors and does nothing else with it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import private
from anabranch.torch.binding.autocast import AUTOCAST_TYPES

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain_eager(device: torch.device, tensors: Iterable[Any]) -> bool:
    """Whether a call on these tensors (or None) is neither traced nor transformed, and no mode observes it."""
    kind = device.type
    if (
        torch.compiler.is_compiling()
        or private.functorch_is_active()
        or private.forward_level() >= 0
        or private.num_dispatch_modes()
        or _has_function_mode()
        or kind not in AUTOCAST_TYPES
        or torch.is_autocast_enabled(kind)
    ):
        return False
    for tensor in tensors:  # a generator takes twice as long
        if tensor is not None and type(tensor) not in _PLAIN_TYPES:
            return False
    return True


def _has_function_mode() -> bool:
    """Whether a mode sees calls of torch's functions. A default device is one, but affects no call on given tensors."""
    number = private.num_function_modes()
    return number > 1 or (number == 1 and type(private.function_mode_at(0)) is not private.DeviceContext)


def needs_graph(tensors: Iterable[Any]) -> bool:
    """Whether autograd must record a call on these tensors (or None)."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # a generator takes twice as long
        if tensor is not None and tensor.requires_grad:
            return True
    return False

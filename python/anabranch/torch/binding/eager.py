"""The plain eager case: torch runs a call on plain tensors and does nothing else with it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from anabranch.torch.binding.autocast import has_autocast

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain_eager(device: torch.device, tensors: Iterable[Any]) -> bool:
    """Whether a call on these tensors (or None) is neither traced nor transformed, and no mode observes it."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or _has_function_mode()
        or not has_autocast(device)
        or torch.is_autocast_enabled(device.type)
    ):
        return False
    return all(tensor is None or type(tensor) in _PLAIN_TYPES for tensor in tensors)


def _has_function_mode() -> bool:
    """Whether a mode sees calls of torch's functions. A default device is one, but affects no call on given tensors."""
    number = torch._C._len_torch_function_stack()
    return number > 1 or (number == 1 and type(torch._C._get_function_stack_at(0)) is not DeviceContext)


def needs_graph(tensors: Iterable[Any]) -> bool:
    """Whether autograd must record a call on these tensors (or None)."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

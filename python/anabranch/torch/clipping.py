"""The norm of gradients of which ranks have different parts."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.torch import _check
from anabranch.torch._group import part_of, summed
from anabranch.torch.module import MoE


def _kinds(model: nn.Module) -> dict[Any, list[Tensor]]:
    """Gradients by what their norm is added up over: a (mesh, placements) of DTensors, a process group, or None."""
    groups = {
        id(parameter): layer.group
        for layer in model.modules()
        if isinstance(layer, MoE)
        for parameter in layer.expert_parameters().values()
    }
    kinds = defaultdict(list)
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        is_sharded = hasattr(gradient, "placements")
        over = (gradient.device_mesh, gradient.placements) if is_sharded else groups.get(id(parameter))
        kinds[over].append(gradient)
    return kinds


def _square(over: Any, gradients: list[Tensor]) -> Tensor:
    """The sum of squares of the whole of them, float32."""
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    if isinstance(over, tuple):
        norm = norm.full_tensor()
        over = None
    return summed(norm.float().square(), over)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a model whose experts are spread over ranks: the 2-norm is that of the whole.

    Of a `MoE` with a process group torch's own would take this rank's experts for all there are, and scale what ranks
    have together differently on each of them; of one with a DeviceMesh it is an error of torch's. All ranks call it,
    after the backward pass; the host does not wait for the device.

    Args:
      model: the module whose parameters' gradients are scaled, in place, if their norm is above `max_norm`.
      max_norm: a number > 0.

    Returns:
      The norm before, float32 scalar, the same on every rank.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: none. Source: as torch.nn.utils.clip_grad_norm_, 1e-6 is added to the norm that is divided by.

    >>> layer = MoE(8, 16, num_experts=4, topk=2)
    >>> layer(torch.ones(3, 8)).output.sum().backward()
    >>> bool(clip_grad_norm_(layer, 1e-3) > 0.01), bool(clip_grad_norm_(layer, 1.0) < 0.01)
    (True, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {_check.describe(model)}, expected a torch.nn.Module")
    if _check.number("max_norm", max_norm) <= 0:
        raise ValueError(f"max_norm: got {max_norm}, expected a number > 0")
    kinds = _kinds(model)
    if not kinds:
        return torch.zeros(())
    total = torch.stack([_square(over, gradients) for over, gradients in kinds.items()]).sum().sqrt()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradients in kinds.values():
        torch._foreach_mul_([part_of(gradient) for gradient in gradients], factor)
    return total

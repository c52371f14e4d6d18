"""Gradient clipping by the norm over all ranks, for gradients that are sharded over ranks."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.torch.binding import check, private
from anabranch.torch.binding.group import local_part, summed
from anabranch.torch.layer.expert_state import expert_groups


def _sharding_groups(gradient: Any, own: Any) -> tuple[Any, ...]:
    """The process groups over which a gradient is sharded. own: the group of a plain tensor, or None."""
    if not hasattr(gradient, "placements"):
        return () if own is None else (own,)
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError("model: got a gradient that is a part of a sum, expected a reduced gradient")
    divided = [dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(gradient.device_mesh.get_group(dim) for dim in divided)


def _by_groups(model: nn.Module) -> dict[tuple[Any, ...], list[Tensor]]:
    """The local part of every gradient, by the groups over which the gradients are sharded."""
    own = expert_groups(model)
    parts = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts[_sharding_groups(parameter.grad, own.get(id(parameter)))].append(local_part(parameter.grad))
    return parts


def _square(groups: tuple[Any, ...], parts: list[Tensor]) -> Tensor:
    """The sum of squares over all ranks, in float64: rounded to float32, it does not depend on the order of ranks."""
    square = torch.stack(private.foreach_norm(parts, 2, dtype=torch.float32)).double().square().sum()
    for group in groups:
        square = summed(square, group)
    return square


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ with the 2-norm over all ranks, for models whose experts are sharded over ranks.

    For a `MoE` with a process group, torch's function would only see this rank's experts and would scale replicated
    gradients differently on each rank; for a `MoE` with a DeviceMesh it raises. Call it on all ranks after the backward
    pass. The host does not wait for the device.

    Args:
      model: the module whose gradients are scaled in place if their norm exceeds `max_norm`.
      max_norm: a number > 0.

    Returns:
      The norm before clipping, float32 scalar, the same on every rank.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: none. Source: torch.nn.utils.clip_grad_norm_; as there, 1e-6 is added to the norm in the divisor.

    >>> from anabranch.torch import MoE
    >>> layer = MoE(8, 16, num_experts=4, topk=2)
    >>> layer(torch.ones(3, 8)).output.sum().backward()
    >>> bool(clip_grad_norm_(layer, 1e-3) > 0.01), bool(clip_grad_norm_(layer, 1.0) < 0.01)
    (True, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {check.describe(model)}, expected a torch.nn.Module")
    if check.number("max_norm", max_norm) <= 0:
        raise ValueError(f"max_norm: got {max_norm}, expected a number > 0")
    by_groups = _by_groups(model)
    if not by_groups:
        return torch.zeros(())
    total = torch.stack([_square(groups, parts) for groups, parts in by_groups.items()]).sum().sqrt().float()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parts in by_groups.values():
        private.foreach_mul_(parts, factor)
    return total

"""The norm of gradients of which ranks have different parts."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.torch.binding import check
from anabranch.torch.binding.group import part_of, summed
from anabranch.torch.layer.expert_state import expert_groups


def _groups_of(gradient: Any, own: Any) -> tuple[Any, ...]:
    """The process groups over whose ranks a gradient is divided; own: that of a plain tensor, or None."""
    if not hasattr(gradient, "placements"):
        return () if own is None else (own,)
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError("model: got a gradient that is a part of a sum, expected sums: reduce it first")
    divided = [dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(gradient.device_mesh.get_group(dim) for dim in divided)


def _by_groups(model: nn.Module) -> dict[tuple[Any, ...], list[Tensor]]:
    """What this process has of every gradient, by the groups over whose ranks the rest is."""
    own = expert_groups(model)
    found = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            found[_groups_of(parameter.grad, own.get(id(parameter)))].append(part_of(parameter.grad))
    return found


def _square(groups: tuple[Any, ...], parts: list[Tensor]) -> Tensor:
    """The sum of squares of the whole of them: in float64, so that no order of ranks shows in a float32."""
    square = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)).double().square().sum()
    for group in groups:
        square = summed(square, group)
    return square


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
        torch._foreach_mul_(parts, factor)
    return total

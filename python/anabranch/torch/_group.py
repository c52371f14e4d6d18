"""Sums over the ranks of a process group that share a batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.torch import _check
from anabranch.torch._autograd import Function


def check_group(name: str, value: Any) -> Any:
    """Returns a process group that this process is in, or None."""
    if value is not None and not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        raise TypeError(f"{name}: got {_check.describe(value)}, expected a torch.distributed.ProcessGroup or None")
    return value


def summed(value: Tensor, group: Any) -> Tensor:
    """A tensor's sum over the ranks of a group, None: the tensor itself; nothing is differentiated."""
    if group is None:
        return value
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total


class _SumOverRanks(Function):
    """The sum over the ranks; every rank computes the same of it, so that its gradient counts once for each rank."""

    @staticmethod
    def forward(sums, group):
        return summed(sums, group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.ranks = dist.get_world_size(inputs[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_sums):
        return d_sums * ctx.ranks, None


def sum_over_ranks(group: Any, *values: Tensor) -> list[Tensor]:
    """The sums of small tensors over the ranks of a group, float32, by one all-reduce: of counts below 2^53 exact."""
    packed = torch.cat([value.reshape(-1).double() for value in values])
    total = _SumOverRanks.apply(packed, group)
    parts = total.split([value.numel() for value in values])
    return [part.float().reshape(value.shape) for part, value in zip(parts, values, strict=True)]

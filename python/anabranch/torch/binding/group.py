"""Sums and means over the ranks of a process group that share a batch.

One convention for all gradients: what is differentiated is the mean of the ranks' losses, as data parallelism has it.
A tensor that ranks have whole gets on each of them a gradient whose mean over the ranks is that of the mean.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.torch.binding import check
from anabranch.torch.binding.autograd import Function


def check_group(name: str, value: Any) -> Any:
    """Returns a process group that this process is in, or None."""
    if value is not None and not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        raise TypeError(f"{name}: got {check.describe(value)}, expected a torch.distributed.ProcessGroup or None")
    return value


def part_of(tensor: Any) -> Tensor:
    """What this process has of a DTensor, as a tensor that shares its memory; a plain tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def summed(value: Tensor, group: Any) -> Tensor:
    """A tensor's sum over the ranks of a group, None: the tensor itself; nothing is differentiated."""
    if group is None:
        return value
    of_all = torch.ops._c10d_functional.all_reduce(value.detach().contiguous(), "sum", group.group_name)
    total: Tensor = torch.ops._c10d_functional.wait_tensor(of_all)
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
    def backward(ctx, d_sums):
        return d_sums * ctx.ranks, None


def sum_over_ranks(group: Any, *values: Tensor) -> list[Tensor]:
    """The sums of small tensors over the ranks of a group, by one all-reduce; of integers int64, exact below 2^53."""
    packed = torch.cat([value.reshape(-1).double() for value in values])
    total = _SumOverRanks.call(packed, group)
    parts = total.split([value.numel() for value in values])
    dtypes = [value.dtype if value.is_floating_point() else torch.int64 for value in values]
    return [p.to(dtype).reshape(v.shape) for p, dtype, v in zip(parts, dtypes, values, strict=True)]


class _WithMeanGradients(Function):
    @staticmethod
    def forward(group, *tensors):
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group = inputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        packed = torch.cat([d.reshape(-1).float() for d in gradients])
        means = summed(packed, ctx.group) / dist.get_world_size(ctx.group)
        parts = means.split([d.numel() for d in gradients])
        return None, *(part.reshape(d.shape).to(d.dtype) for part, d in zip(parts, gradients, strict=True))


def with_mean_gradients(group: Any, *tensors: Tensor | None) -> list[Any]:
    """Tensors that every rank of a group has whole, with the mean of the ranks' gradients as theirs on each of them.

    One all-reduce in the backward pass, in float32; none for tensors that need no gradient, which are the same ones on
    every rank.
    """
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    if group is None or not wanted or not torch.is_grad_enabled():
        return list(tensors)
    found = iter(_WithMeanGradients.call(group, *wanted))
    return [next(found) if t is not None and t.requires_grad else t for t in tensors]

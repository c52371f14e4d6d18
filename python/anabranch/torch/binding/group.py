"""Sums and means over the ranks of a process group that share a batch.

All gradients are those of the mean of the ranks' losses, as in data parallelism. For a replicated tensor, each rank
computes a gradient whose mean over the ranks is that gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.torch.binding import check, private
from anabranch.torch.binding.autograd import Function


def check_group(name: str, value: Any) -> Any:
    """Returns the value if it is a process group or None."""
    if value is not None and not (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        raise TypeError(f"{name}: got {check.describe(value)}, expected a torch.distributed.ProcessGroup or None")
    if value is not None:
        private.note_group(value)
    return value


def local_part(tensor: Any) -> Tensor:
    """The local tensor of a DTensor, sharing its memory; a plain tensor is returned unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def summed(value: Tensor, group: Any) -> Tensor:
    """The sum of a tensor over the ranks of a group, without a gradient; with group None the tensor itself."""
    if group is None:
        return value
    reduced = private.collectives.all_reduce(value.detach().contiguous(), "sum", group.group_name)
    total: Tensor = private.collectives.wait_tensor(reduced)
    return total


class _SumOverRanks(Function):
    """The sum over the ranks. Every rank computes the same loss from it, so the gradient is multiplied by the ranks."""

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
    """Sums small tensors over the ranks with one all-reduce. Integer sums are int64, exact below 2^53."""
    packed = torch.cat([value.reshape(-1).double() for value in values])
    total = _SumOverRanks.call(packed, group)
    parts = total.split([value.numel() for value in values])
    dtypes = [value.dtype if value.is_floating_point() else torch.int64 for value in values]
    return [p.to(dtype).reshape(v.shape) for p, dtype, v in zip(parts, dtypes, values, strict=True)]


class _WithReducedGradients(Function):
    @staticmethod
    def forward(group, divisor, *tensors):
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group, ctx.divisor = inputs[:2]

    @staticmethod
    def backward(ctx, *gradients):
        packed = torch.cat([d.reshape(-1).float() for d in gradients])
        reduced = summed(packed, ctx.group) / ctx.divisor
        parts = reduced.split([d.numel() for d in gradients])
        return None, None, *(part.reshape(d.shape).to(d.dtype) for part, d in zip(parts, gradients, strict=True))


def mean_gradient(group: Any, gradient: Tensor) -> Tensor:
    """The mean over the ranks of a gradient, as `with_mean_gradients` computes it."""
    return (summed(gradient.float(), group) / dist.get_world_size(group)).to(gradient.dtype)


def _with_reduced_gradients(group: Any, divisor: int, tensors: Sequence[Tensor | None]) -> list[Any]:
    selected = [t for t in tensors if t is not None and t.requires_grad]
    if not selected or not torch.is_grad_enabled():
        return list(tensors)
    reduced = iter(_WithReducedGradients.call(group, divisor, *selected))
    return [next(reduced) if t is not None and t.requires_grad else t for t in tensors]


def with_mean_gradients(group: Any, *tensors: Tensor | None) -> list[Any]:
    """The identity on replicated tensors. Their gradients are averaged over the ranks of the group.

    The backward pass has one float32 all-reduce. The same tensors must need a gradient on every rank.
    """
    return list(tensors) if group is None else _with_reduced_gradients(group, dist.get_world_size(group), tensors)


def with_summed_gradients(group: Any, *tensors: Tensor | None) -> list[Any]:
    """Like `with_mean_gradients`, for tensors whose gradient on a rank is that of a part of the mean of the losses."""
    return _with_reduced_gradients(group, 1, tensors)

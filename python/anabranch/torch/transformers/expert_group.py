"""Experts of a Transformers model that the ranks of a process group share.

`parallelize` gives every experts module an `ExpertGroup`. The module's weights are then DTensors that hold E/P experts
on each rank, and its forward pass is that of `routed_experts` with a group.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch.lora import Lora
from anabranch.torch.binding.autograd import Function
from anabranch.torch.layer.routed_experts import routed_experts
from anabranch.torch.ops.packed import Packed

_ATTRIBUTE = "_anabranch_group"


class ExpertGroup:
    """The ranks that share the experts of a model, and the options of their exchange.

    Attributes:
      group: the process group of the P ranks; rank r holds E/P experts, starting at r E/P.
      hosts: a group of the same ranks whose collectives run on the CPU, over which they compare numbers of tokens;
        None: the numbers are equal.
      options: `transport` and `capacity_factor` of `routed_experts`.
    """

    def __init__(self, group: Any, hosts: Any, options: dict[str, Any]):
        self.group, self.hosts, self.options = group, hosts, options
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertGroup":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("model: got a model with process groups to pickle, expected its state_dict()")

    def _most_tokens(self, tokens: int) -> int:
        """The largest number of tokens of a rank. The hosts exchange it, so no rank waits for its device."""
        if self.hosts is None or torch.compiler.is_compiling():
            return tokens
        most = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.hosts)
        return int(most)

    def local_factors(self, lora: Lora | None) -> Lora | None:
        """This rank's experts of the factors [E, ...] of all experts, with gradients for `_Scaled`."""
        if lora is None:
            return None
        local = next(f for f in lora if f is not None).shape[0] // self.ranks
        mine = slice(self.rank * local, (self.rank + 1) * local)
        return Lora(*(None if f is None else _Scaled.call(f[mine], self.ranks) for f in lora))

    def routed(
        self, x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor | Packed, w_out: Tensor | Packed, **options: Any
    ) -> Tensor:
        """The output of `routed_experts` for this rank's tokens [T, D]; T may differ between ranks.

        Every rank adds tokens without experts up to the largest T, because the exchange has blocks of one size.
        """
        T = x.shape[0]
        if padding := self._most_tokens(T) - T:
            x, weights = (nn.functional.pad(value, (0, 0, 0, padding)) for value in (x, weights))
            experts = nn.functional.pad(experts, (0, 0, 0, padding), value=-1)
        lora = self.local_factors(options.pop("lora", None))
        output = routed_experts(
            x, experts, weights, w_in, w_out, lora=lora, group=self.group, **self.options, **options
        ).output
        # FSDP2 cannot hook the backward pass of a view that a model changes in place.
        return output[:T].clone() if padding else output


class _Scaled(Function):
    """The identity, whose gradient is multiplied by a number.

    A factor of PEFT belongs to all experts and is sharded by FSDP over all N ranks, which average its gradients. The
    gradient of an expert is computed by one rank per group, N / P in total, and is already a mean over the group's P
    ranks. So it is multiplied by P before the average.
    """

    @staticmethod
    def forward(tensor, number):
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.number = inputs[1]

    @staticmethod
    def backward(ctx, d_tensor):
        return d_tensor * ctx.number, None


def group_of(module: nn.Module) -> ExpertGroup | None:
    """The group that shares the experts of a module, or None."""
    group: ExpertGroup | None = vars(module).get(_ATTRIBUTE)
    return group


def share(module: nn.Module, group: ExpertGroup) -> None:
    """Sets the group that shares the experts of a module."""
    setattr(module, _ATTRIBUTE, group)

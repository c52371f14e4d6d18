"""DistributedDataParallel with layers whose experts differ between ranks."""

from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from anabranch.torch.binding import check, private
from anabranch.torch.layer.expert_state import expert_tensors

Model = TypeVar("Model", bound=nn.Module)


class _Names:
    """The names that DistributedDataParallel ignores, computed when it iterates: adapters may be added until then."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.others = set(private.ignored_by_ddp(model))

    def __iter__(self) -> Iterator[str]:
        yield from self.others
        for name, value, _ in expert_tensors(self.model):
            private.mark_ignored(value)
            # If the layer itself is the model, DDP looks up names with and without a leading dot. A compiled model adds
            # a prefix.
            yield name
            yield name.removeprefix(".")
            yield f"_orig_mod.{name.removeprefix('.')}"


def ddp_ignore_experts(model: Model) -> Model:
    """Excludes each rank's experts from DistributedDataParallel, and returns the model.

        model = DistributedDataParallel(ddp_ignore_experts(model))

    The ranks of a `MoE` with `group` hold different experts, and their gradients are already means over the group's
    ranks. Call this function on the module that is passed to DistributedDataParallel, whose ranks must be those of one
    group. Layers without a group are not changed.

    Excluded are the layer's own parameters and buffers (pruning masks), their parametrizations, and PEFT's adapters of
    these parameters (`target_parameters`), as they are when DistributedDataParallel is constructed. If experts are
    computed from any other parameter of the model, the next eager forward pass raises.

    Args:
      model: a `MoE`, or a module that contains `MoE` layers.

    Returns:
      `model` itself.

    Raises:
      TypeError: the model is no torch.nn.Module.

    Gradients: not affected. Source: the attribute of ignored names in torch 2.13's DistributedDataParallel.

    >>> from anabranch.torch import MoE
    >>> layer = MoE(8, 16, num_experts=4, topk=2)
    >>> ddp_ignore_experts(layer) is layer
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {check.describe(model)}, expected a torch.nn.Module")
    private.ignore_in_ddp(model, _Names(model))
    return model

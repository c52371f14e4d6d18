"""What data parallelism has to know of layers whose experts are this rank's own."""

from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from anabranch.torch.binding import check
from anabranch.torch.layer.expert_state import expert_tensors

Model = TypeVar("Model", bound=nn.Module)


class _Names:
    """The names that DistributedDataParallel ignores, found when it asks for them: adapters may come late."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.others = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))

    def __iter__(self) -> Iterator[str]:
        yield from self.others
        for name, value, _ in expert_tensors(self.model):
            value._ddp_ignored = True  # type: ignore[attr-defined]
            # Where the layer is the model, DDP looks for names with a dot and without in different places; what
            # torch.compile returns of a model puts a name in front.
            yield name
            yield name.removeprefix(".")
            yield f"_orig_mod.{name.removeprefix('.')}"


def ddp_ignore_experts(model: Model) -> Model:
    """Tells DistributedDataParallel to leave each rank's experts alone, and returns the model that it is to wrap.

        model = DistributedDataParallel(ddp_ignore_experts(model))

    Experts of a `MoE` with `group` are different ones on every rank of it, and their gradients are means over the
    group's ranks already. Call it on the very module that DistributedDataParallel gets, whose ranks are to be those of
    one group; layers without a group stay as they are.

    What belongs to experts are the layer's own parameters and buffers (masks of pruning), their parametrizations, and
    PEFT's adapters of these parameters (`target_parameters`), as they are when DistributedDataParallel is made. Experts
    that are computed from any other parameter of the model are an error in the next forward pass in eager mode.

    Args:
      model: a module that has `MoE` layers in it, or is one.

    Returns:
      The same module.

    Raises:
      TypeError: no module.

    Source: the names that DistributedDataParallel is to ignore, as torch 2.13 keeps them.

    >>> from anabranch.torch import MoE
    >>> layer = MoE(8, 16, num_experts=4, topk=2)
    >>> ddp_ignore_experts(layer) is layer
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {check.describe(model)}, expected a torch.nn.Module")
    model._ddp_params_and_buffers_to_ignore = _Names(model)  # type: ignore[assignment]
    return model

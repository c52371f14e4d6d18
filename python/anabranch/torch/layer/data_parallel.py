"""What data parallelism has to know of layers whose experts are this rank's own."""

from typing import TypeVar

import torch
from torch import nn

from anabranch.torch.binding import check
from anabranch.torch.layer.module import MoE

Model = TypeVar("Model", bound=nn.Module)


def ddp_ignore_experts(model: Model) -> Model:
    """Tells DistributedDataParallel to leave each rank's experts alone, and returns the model that it is to wrap.

        model = DistributedDataParallel(ddp_ignore_experts(model))

    Experts of a `MoE` with `group` are different ones on every rank of it, and their gradients are means over the
    group's ranks already. Call it on the very module that DistributedDataParallel gets, whose ranks are to be those of
    one group; layers without a group stay as they are.

    Args:
      model: a module that has `MoE` layers in it, or is one.

    Returns:
      The same module.

    Raises:
      TypeError: no module.

    Source: the names that DistributedDataParallel is to ignore, as torch 2.13 keeps them.

    >>> layer = MoE(8, 16, num_experts=4, topk=2)
    >>> ddp_ignore_experts(layer) is layer
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {check.describe(model)}, expected a torch.nn.Module")
    names = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for prefix, layer in model.named_modules():
        if isinstance(layer, MoE) and layer.group is not None:
            for name in layer.expert_parameters():
                # Where the layer is the model, DDP looks for names with a dot and without in different places; what
                # torch.compile returns of a model puts a name in front.
                full = f"{prefix}.{name}"
                names |= {full, full.removeprefix("."), f"_orig_mod.{full.removeprefix('.')}"}
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, names)
    return model

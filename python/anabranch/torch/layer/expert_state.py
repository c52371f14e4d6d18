"""Tensors of a model that belong to experts of this rank only, including adapters."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from anabranch.torch.layer.module import MoE
from anabranch.torch.layer.wrapping import expert_leaves


def _adapted(module: nn.Module) -> Any:
    """The layer whose parameter the adapter `module` changes (PEFT's `target_parameters`), or None if it is no adapter.

    Adapters of several parameters are nested: each is the `base_layer` of the next.
    """
    if not isinstance(module.__dict__.get("parameter_name"), str):
        return None
    while (base := dict(module.named_children()).get("base_layer")) is not None:
        module = base
    return module


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def expert_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """(name in the model, parameter or buffer, process group) for all tensors of experts of one rank."""
    for prefix, module in model.named_modules():
        layer = module if isinstance(module, MoE) else _adapted(module)
        if not isinstance(layer, MoE) or layer.group is None:
            continue
        named = layer._expert_tensors() if layer is module else _tensors(module)
        for name, value in named.items():
            if not name.startswith("base_layer."):
                yield f"{prefix}.{name}", value, layer.group


def expert_groups(model: nn.Module) -> dict[int, Any]:
    """Process groups by the id of each parameter of experts of one rank."""
    leaves = {id(value): expert_leaves[value] for value in model.parameters() if value in expert_leaves}
    return leaves | {id(value): group for _, value, group in expert_tensors(model)}

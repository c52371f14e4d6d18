"""Packs the experts of existing layers."""

from typing import TypeVar

from torch import nn

from anabranch.packed import KINDS
from anabranch.torch.binding import check
from anabranch.torch.layer.module import MoE

Module = TypeVar("Module", bound=nn.Module)


def pack_experts(module: Module, packed: str) -> Module:
    """Packs the experts' weights of every `MoE` in a module, in place, and frees the plain weights.

    The weights become the buffers that a `MoE` has with the option `packed`: they have no gradient. Other parameters do
    not change. An optimizer that holds the plain weights must be made again.

    Args:
      module: a `MoE`, or a module that contains `MoE` layers.
      packed: "mxfp4", packed as by `pack_mxfp4`, or "fp8_blocks", as by `pack_fp8`.

    Returns:
      `module` itself.

    Raises:
      TypeError: module is no torch.nn.Module.
      ValueError: there is no `MoE`, or a layer cannot be packed: it is packed already, widths are not multiples of a
        block, or its weights are not plain parameters. Then nothing is changed.

    Gradients: none of the packed weights. Source: semantics, section 13.

    >>> layer = pack_experts(MoE(32, 64, num_experts=4, topk=2), "mxfp4")
    >>> [name for name, _ in layer.named_buffers()]
    ['gate_up_proj_codes', 'gate_up_proj_scales', 'down_proj_codes', 'down_proj_scales']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {check.describe(module)}, expected a torch.nn.Module")
    packed = check.choice("packed", packed, tuple(KINDS))
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    if not layers:
        raise ValueError(f"module: got a {type(module).__name__} without a MoE layer, expected one that has some")
    for layer in layers:
        layer._check_packable(packed)
    for layer in layers:
        layer._pack(packed)
    return module

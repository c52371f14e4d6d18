"""Checks that data parallelism does not average or shard the experts of one rank."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anabranch.torch.binding import check, private

#: Process groups by parameter, for parameters that experts of one rank are computed from.
expert_leaves = WeakTensorKeyDictionary()


def _ranks(group: Any) -> set[int]:
    return set(dist.get_process_group_ranks(group))


def _note_leaves(group: Any, weights: Iterable[Tensor | None]) -> list[Tensor]:
    """Finds the parameters that weights are computed from in the autograd graph, and adds them to `expert_leaves`."""
    nodes = [w.grad_fn for w in weights if w is not None and w.grad_fn is not None]
    found, seen = [], set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            expert_leaves[leaf] = group
            found.append(leaf)
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        nodes.extend(new)
    return found


def check_wrapping(
    layer: torch.nn.Module, group: Any, experts: list[Tensor], weights: Iterable[Tensor | None] = ()
) -> None:
    """Raises if a wrapper treats the experts of a group's ranks as replicated.

    Args:
      layer: the layer.
      group: the process group whose ranks share the experts.
      experts: parameters and buffers of this rank's experts.
      weights: the operands of the GEMMs, which parametrizations may compute from other parameters.

    Raises:
      ValueError: FSDP would shard the experts as if they were replicated, or DistributedDataParallel would average
        them.
    """
    plain = not any(hasattr(value, "to_local") for value in experts)
    if plain and private.is_fsdp_managed(layer):
        raise ValueError(
            "group: got a process group under fully_shard, expected a DeviceMesh: FSDP cannot tell that experts differ"
        )
    leaves = [] if torch.compiler.is_compiling() else _note_leaves(group, weights)
    ddp = private.active_ddp()
    if ddp is None:
        return
    # `ddp_ignore_experts` marks tensors and passes names. Names are lost if the module has been wrapped again since.
    marked = len(ddp.parameters_to_ignore) > 0 and all(private.is_marked_ignored(value) for value in experts)
    averaged = [leaf for leaf in leaves if not private.is_marked_ignored(leaf)]
    if (marked and not averaged) or len(_ranks(ddp.process_group) & _ranks(group)) < 2:
        return
    if not marked:
        raise ValueError(
            "group: got a layer inside DistributedDataParallel, which would average the experts of its ranks, expected "
            "DistributedDataParallel(ddp_ignore_experts(model))"
        )
    raise ValueError(
        f"group: got experts that depend on a parameter {check.describe(averaged[0])} which DistributedDataParallel "
        "averages, expected parameters of the layer, its parametrizations or PEFT's adapters, added before "
        "DistributedDataParallel(ddp_ignore_experts(model))"
    )

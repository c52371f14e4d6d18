"""What a layer with experts of its own can't be put into."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _ranks(group: Any) -> set[int]:
    return set(dist.get_process_group_ranks(group))


def check_wrapping(layer: torch.nn.Module, group: Any, experts: list[Tensor]) -> None:
    """Refuses to run a layer inside of what takes the experts of a group's ranks for the same ones on each.

    Args:
      layer: the layer; group: over whose ranks its experts are spread; experts: its parameters of this rank's.

    Raises:
      ValueError: FSDP would shard them as if they were whole, or DistributedDataParallel averages them.
    """
    plain = not any(hasattr(value, "to_local") for value in experts)
    if plain and getattr(layer, "_is_fsdp_managed_module", False):
        raise ValueError(
            "group: got a process group under fully_shard, expected a DeviceMesh: FSDP can't tell that experts differ"
        )
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    # `ddp_ignore_experts` marks experts, and leaves names that are gone where their module was wrapped since.
    if len(ddp.parameters_to_ignore) > 0 and all(getattr(value, "_ddp_ignored", False) for value in experts):
        return
    if len(_ranks(ddp.process_group) & _ranks(group)) > 1:
        raise ValueError(
            "group: got a layer inside DistributedDataParallel, which would average the experts of its ranks, expected "
            "DistributedDataParallel(ddp_ignore_experts(model))"
        )

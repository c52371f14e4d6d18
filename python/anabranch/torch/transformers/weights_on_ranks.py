"""Which ranks hold the values of a model before it is sharded, and how the others get them."""

import enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Holders(enum.Enum):
    """The ranks whose parameters have values; those of other ranks are on the meta device."""

    ALL_RANKS = "all ranks"
    FIRST_RANK = "rank 0"
    NO_RANK = "no rank"


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(value: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers. It does not depend on the order of summation."""
    return value.detach().contiguous().view(_INTEGERS[value.dtype.itemsize]).sum(dtype=torch.int64)


def _described(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """(dtype, shape, whether it is trained, sum of its bits or None on meta) by the name of each parameter and buffer.

    Buffers that are not saved are left out: the constructor computes them, perhaps on another device.
    """
    saved = model.state_dict().keys()
    named = {name: value for name, value in model.named_buffers() if name in saved} | dict(model.named_parameters())
    real = {name: _sum_of_bits(value) for name, value in named.items() if not value.is_meta}
    by_device: dict[torch.device, list[str]] = {}
    for name, total in real.items():
        by_device.setdefault(total.device, []).append(name)
    sums: dict[str, int] = {}
    for names in by_device.values():  # one transfer per device
        sums |= zip(names, torch.stack([real[name] for name in names]).tolist(), strict=True)
    return {
        name: (str(value.dtype), tuple(value.shape), value.requires_grad, sums.get(name))
        for name, value in named.items()
    }


def holders(model: nn.Module) -> Holders:
    """Compares the parameters and saved buffers of all ranks.

    Raises:
      ValueError: parameters differ between ranks, or only a part of them is on the meta device. Every rank raises.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, _described(model))
    first = every[0]
    for rank, theirs in enumerate(every):
        if theirs.keys() != first.keys():
            name = min(theirs.keys() ^ first.keys())
            raise ValueError(f"model: got {name} on rank 0 or rank {rank} only, expected the same model on all ranks")
        for name, (*kind, value) in theirs.items():
            if kind != list(first[name][:3]):
                raise ValueError(
                    f"model: got {name} {first[name][:3]} on rank 0 and {tuple(kind)} on rank {rank}, expected the "
                    "same dtype, shape and requires_grad on all ranks"
                )
            if value is not None and value != first[name][3] is not None:
                raise ValueError(
                    f"model: got different values of {name} on rank 0 and rank {rank}, expected the same on all ranks: "
                    "load one checkpoint, or set one seed before the model and its adapters are made"
                )
    parameters = dict(model.named_parameters())
    real = [{value is not None for name, (*_, value) in theirs.items() if name in parameters} for theirs in every]
    for kind, found in (
        (Holders.ALL_RANKS, [{True}] * len(real)),
        (Holders.FIRST_RANK, [{True}] + [{False}] * (len(real) - 1)),
        (Holders.NO_RANK, [{False}] * len(real)),
    ):
        if real == found:
            return kind
    raise ValueError(
        "model: got parameters on the meta device on some ranks or in some modules, expected values on all ranks, on "
        "rank 0 only, or on no rank"
    )


@torch.no_grad()
def materialise(model: nn.Module, device_type: str, *, from_first_rank: bool) -> None:
    """Gives parameters on the meta device memory, filled with NaN. Buffers get the values of rank 0.

    Raises:
      ValueError: a buffer is on the meta device and no rank has its values.
    """
    device = torch.device(device_type)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and not from_first_rank:
            raise ValueError(
                f"model: got the buffer {name} on the meta device on all ranks, expected buffers with values, as in "
                "accelerate.init_empty_weights()"
            )

    def allocated(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        empty = torch.empty_like(tensor, device=device)
        return empty.fill_(torch.nan) if empty.is_floating_point() else empty.zero_()

    model._apply(allocated)
    for _, buffer in model.named_buffers() if from_first_rank else ():
        dist.broadcast(buffer, 0)


def load_from_first_rank(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """Sends the parameters of rank 0 to the ranks that own their parts.

    Args:
      model: the sharded model.
      whole: the state dict of the model on rank 0 before it was sharded; not read on other ranks.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = dict(whole) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

"""Expert parallelism over a process group: argument checks, buffer sizes, choice of transport, counts."""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from anabranch.exchange_sizes import capacity_of
from anabranch.precision import check_fp8_exchange
from anabranch.torch.binding import check
from anabranch.torch.binding.group import check_group
from anabranch.torch.parallel.exchange import Ranks
from anabranch.torch.parallel.p2p import is_available, reason_against
from anabranch.torch.parallel.transports import TRANSPORTS, choose


class Parallel(NamedTuple):
    """Checked options of expert parallelism."""

    group: Any
    transport: str
    capacity_factor: float | None
    fp8_exchange: bool
    ranks: int
    """P."""
    rank: int
    """This process's rank in the group."""


def check_ranks(value: Any) -> tuple[Any, Any]:
    """(process group, mesh) from a process group (mesh None), a DeviceMesh, or None (both None)."""
    if value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        return value, None
    if not (dist.is_available() and isinstance(value, dist.DeviceMesh)):
        expected = "a torch.distributed.ProcessGroup, a DeviceMesh or None"
        raise TypeError(f"group: got {check.describe(value)}, expected {expected}")
    if value.ndim != 1:
        raise ValueError(
            f"group: got a DeviceMesh of {value.ndim} dimensions, expected one dimension, for example mesh['name']"
        )
    return value.get_group(), value


def sharded(value: Tensor, mesh: Any) -> Tensor:
    """A DTensor, sharded in the first dimension, from this rank's shard; without a mesh the shard itself."""
    if mesh is None:
        return value
    from torch.distributed.tensor import DTensor, Shard

    whole: Tensor = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
    return whole


def check_parallel(
    group: Any, transport: Any, capacity_factor: Any, fp8_exchange: Any, precision: int
) -> Parallel | None:
    """Checks the options for the given precision of the experts. Returns None without a group."""
    transport = check.choice("transport", transport, ("auto", *TRANSPORTS))
    if capacity_factor is not None and check.number("capacity_factor", capacity_factor) <= 0:
        raise ValueError(f"capacity_factor: got {capacity_factor}, expected a number > 0")
    fp8_exchange = check.boolean("fp8_exchange", fp8_exchange)
    check_fp8_exchange(precision, fp8_exchange)
    if group is None:
        if fp8_exchange:
            raise ValueError("fp8_exchange: got True without group, expected False")
        if transport != "auto" or capacity_factor is not None:
            name, value = ("transport", transport) if transport != "auto" else ("capacity_factor", capacity_factor)
            raise ValueError(f"{name}: got {value!r} without group, expected none")
        return None
    group = check_group("group", group)
    return Parallel(group, transport, capacity_factor, fp8_exchange, dist.get_world_size(group), dist.get_rank(group))


def place(
    parallel: Parallel,
    x: Tensor,
    tokens: int,
    topk: int,
    num_experts: int,
    local_experts: int,
    align_size: int,
    *,
    repeats: bool,
) -> tuple[Ranks, str]:
    """Computes buffer sizes and chooses the transport.

    Args:
      parallel: the options.
      x: of this rank.
      tokens: T of this rank.
      topk: K.
      num_experts: E.
      local_experts: experts of w_in.
      align_size: as in `plan`.
      repeats: whether an expert may repeat within a token.

    Raises:
      ValueError: local_experts times the ranks is not num_experts, or buffers are too large.
    """
    P = parallel.ranks
    if local_experts * P != num_experts:
        raise ValueError(
            f"w_in: got {local_experts} experts, expected {num_experts} / {P} on each of the group's {P} ranks"
        )
    slots_per_token = topk if repeats else min(topk, local_experts)
    ranks = Ranks(
        ranks=P,
        experts=num_experts,
        align_size=align_size,
        tokens=tokens,
        topk=topk,
        slots_per_token=slots_per_token,
        capacity=capacity_of(parallel.capacity_factor, tokens, topk, P, slots_per_token),
        group=parallel.group.group_name,
        rank=parallel.rank,
        capacity_factor=parallel.capacity_factor,
    )
    name = parallel.transport
    if name == "auto":
        # With fp8_exchange the steps of "p2p" do not overlap.
        p2p = not parallel.fp8_exchange and is_available(ranks, x)
        name = choose(x.device.type, ranks, x.dtype.itemsize, parallel.fp8_exchange, p2p)
    elif name == "p2p" and (reason := reason_against(ranks, x.device.type)):
        raise ValueError(f"transport: got 'p2p', expected another one here: {reason}")
    ranks.check(name, check.exceeds_int32)
    return ranks, name

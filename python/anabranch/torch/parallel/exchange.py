"""Transports of expert parallelism: tokens to the ranks that own their experts, and back.

A process group of P ranks, which hold E/P experts each, in contiguous equal ranges; a rank has T tokens of its own with
K slots. Every transport is one class with the same methods (`Transport`), and gives the experts what they read: tokens
as they arrived and the row maps into them, so that nothing is sorted a second time.

- `Ring`: all tokens go everywhere (all_gather), each rank computes what its experts add to every token, and an
  all_to_all brings these partial sums home, where they are added. No region of a buffer stays empty whatever the
  routing.
- `Padded`: a region of fixed size for every destination (all_to_all). One plan with (destination, local expert) groups
  lays them out.

Nothing waits for sizes on the device: buffers have static bounds, from T, K, E, P and the capacity. Collectives run on
the current stream, in the same order on every rank.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.exchange_sizes import ExchangeSizes, traffic
from anabranch.rows import num_rows_needed
from anabranch.torch.ops import torch_ops


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, copied only where it is not contiguous.

    Torch before 2.12 loses the gradient of an autograd function's result, in silence, where it compiles a
    `contiguous()` of that result which has nothing to do.
    """
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclasses.dataclass(frozen=True)
class Ranks(ExchangeSizes):
    """What the sizes of a rank's buffers follow from, the group by its name, and which of its ranks this is."""

    group: str = ""
    rank: int = 0
    capacity_factor: float | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """[n, ...] of every rank, [P n, ...]."""
        if tensor.shape[0] == 0:
            return tensor
        of_all = torch.ops._c10d_functional.all_gather_into_tensor(_dense(tensor), self.ranks, self.group)
        gathered: Tensor = torch.ops._c10d_functional.wait_tensor(of_all)
        return gathered

    def exchange(self, regions: Tensor) -> Tensor:
        """Region d [n, ...] of rank s's [P n, ...] becomes region s of rank d's."""
        if regions.numel() == 0:
            return regions
        splits = [regions.shape[0] // self.ranks] * self.ranks
        arriving = torch.ops._c10d_functional.all_to_all_single(_dense(regions), splits, splits, self.group)
        arrived: Tensor = torch.ops._c10d_functional.wait_tensor(arriving)
        return arrived


class Route(NamedTuple):
    """Where rows stand: what the experts' operations read, and what the way back needs. Kept for the backward pass."""

    row_of_slot: Tensor
    """int32 [tokens there, slots of one]: the row of every slot at the experts."""
    slot_of_row: Tensor
    """int32 [R]"""
    group_sizes: Tensor
    """int32 [E/P]"""
    sent_row_of_slot: Tensor
    """int32 [T, K]: rows of the buffer that leaves; [0] where whole tokens travel."""
    sent_slot_of_row: Tensor
    """int32 [rows that leave]; [0]"""


def keep_within(ranks: Ranks, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drops what is past a rank's capacity: the last in the order (source, token, slot), whatever the transport.

    Ranks with different capacities would lose slots that none of them counts: then all weights are NaN, on every rank.

    Returns:
      (experts int32 [T, K] with -1 for dropped slots; weights; how many of this rank's slots were dropped, int32 []).
    """
    if ranks.capacity is None:
        return experts, weights, experts.new_zeros(())
    destination = torch.where(experts >= 0, experts // ranks.local_experts, -1)
    # A plan's rows count the slots of each destination in the order of (token, slot).
    slots = experts.shape[0] * experts.shape[1]
    counts, _, offsets, row_of_slot, _, _ = torch_ops.plan(destination, ranks.ranks, slots, 0, 1)
    own = torch.cat([counts, counts.new_full((1,), ranks.capacity)])
    of_ranks = ranks.gather(own).view(ranks.ranks, ranks.ranks + 1)
    weights = torch.where((of_ranks[:, -1] == ranks.capacity).all(), weights, torch.nan)
    before = of_ranks[: ranks.rank, :-1].sum(0, dtype=torch.int32)
    position = row_of_slot + (before - offsets[:-1])[destination.clamp(min=0)]
    dropped = (destination >= 0) & (position >= ranks.capacity)
    return torch.where(dropped, -1, experts), weights, dropped.sum(dtype=torch.int32)


class Transport(abc.ABC):
    """What the layer asks of a transport."""

    topk: int
    """Slots of a token of the tensor that `send` returns."""
    returning: int
    """Rows that come back for a token."""
    weights_there: bool
    """Whether late weights are applied where the experts are; else at home."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    @abc.abstractmethod
    def plan(self, experts: Tensor) -> Route:
        """The route of experts int32 [T, K] of all ranks; -1: none."""

    @abc.abstractmethod
    def send(self, route: Route, tokens: Tensor) -> Tensor:
        """Tokens [T, D] to their experts: the tensor that these read through slot_of_row."""

    @abc.abstractmethod
    def send_weights(self, route: Route, weights: Tensor) -> Tensor:
        """Weights [T, K] along with the tokens of `send`: [tokens there, topk]."""

    @abc.abstractmethod
    def collect(
        self, route: Route, sums: Tensor, weights: Tensor | None, dtype: torch.dtype, addend: Tensor | None = None
    ) -> Tensor:
        """What the experts made of every token there, [tokens there, D], back and added up: [T, D] of `dtype`.

        weights float32 [T, returning]: they multiply what comes back; None: 1. The addend [T, D] is added before the
        sums are rounded.
        """

    @abc.abstractmethod
    def collect_weights(self, route: Route, weights: Tensor) -> Tensor:
        """Values [tokens there, topk], those of `send_weights`, back as [T, K]; 0 where a slot has none."""


class Ring(Transport):
    """All tokens to all ranks, partial sums back."""

    weights_there = True

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        self.topk, self.returning = ranks.topk, ranks.ranks

    def plan(self, experts: Tensor) -> Route:
        """See Transport."""
        r = self.ranks
        local = r.gather(experts) - r.rank * r.local_experts
        local = torch.where((local >= 0) & (local < r.local_experts), local, -1)
        rows = num_rows_needed(r.arriving_slots, r.local_experts, r.align_size)
        _, group_sizes, _, row_of_slot, slot_of_row, _ = torch_ops.plan(local, r.local_experts, rows, r.align_size, 1)
        # Partial sums of a token arrive in the order of their ranks.
        arrived = torch.arange(r.ranks * r.tokens, dtype=torch.int32, device=experts.device)
        home = arrived.view(r.ranks, r.tokens).t().contiguous()
        return Route(row_of_slot, slot_of_row, group_sizes, home, experts.new_empty((0,)))

    def send(self, route: Route, tokens: Tensor) -> Tensor:
        """See Transport; [P T, D]."""
        return self.ranks.gather(tokens)

    def send_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport; [P T, K]."""
        return self.ranks.gather(weights)

    def collect(
        self, route: Route, sums: Tensor, weights: Tensor | None, dtype: torch.dtype, addend: Tensor | None = None
    ) -> Tensor:
        """See Transport. Partial sums travel in their own dtype and are added up in float32."""
        out: Tensor = torch_ops.combine(self.ranks.exchange(sums), route.sent_row_of_slot, weights, addend, dtype)
        return out

    def collect_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport. At most one rank has a value for a slot; the others add 0."""
        arrived = self.ranks.exchange(weights)
        return arrived.view(self.ranks.ranks, self.ranks.tokens, self.topk).sum(0)


class Padded(Transport):
    """A region of fixed size for every destination."""

    topk = 1
    weights_there = False

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        self.returning = ranks.topk

    def plan(self, experts: Tensor) -> Route:
        """See Transport."""
        r = self.ranks
        arriving = r.ranks * r.region
        _, sizes, _, row_of_slot, sent_slot_of_row, _ = torch_ops.plan(
            experts, r.experts, arriving, r.align_size, r.ranks
        )
        chunks = r.exchange(sizes).view(r.ranks, r.local_experts)  # of every source, rows for every expert here
        tails = r.region - chunks.sum(1, dtype=torch.int32)
        rows = min(arriving, num_rows_needed(r.arriving_slots, r.experts, r.align_size))
        slot_of_row, row_of_arrived = _by_expert(chunks, tails, arriving, rows)
        group_sizes = chunks.sum(0, dtype=torch.int32)
        return Route(row_of_arrived, slot_of_row, group_sizes, row_of_slot, sent_slot_of_row)

    def send(self, route: Route, tokens: Tensor) -> Tensor:
        """See Transport; [rows that arrive, D]."""
        return self.ranks.exchange(torch_ops.dispatch(tokens, route.sent_row_of_slot, route.sent_slot_of_row, None))

    def send_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport; [rows that arrive, 1]."""
        return self.ranks.exchange(_taken(weights.reshape(-1), route.sent_slot_of_row)[:, None])

    def collect(
        self, route: Route, sums: Tensor, weights: Tensor | None, dtype: torch.dtype, addend: Tensor | None = None
    ) -> Tensor:
        """See Transport. Rows travel in their own dtype and are added here, k ascending."""
        out: Tensor = torch_ops.combine(self.ranks.exchange(sums), route.sent_row_of_slot, weights, addend, dtype)
        return out

    def collect_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport."""
        return _taken(self.ranks.exchange(weights)[:, 0], route.sent_row_of_slot)


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """values[index], 0 where the index is -1."""
    if values.shape[0] == 0:
        return values.new_zeros(index.shape)
    return torch.where(index >= 0, values[index.clamp(min=0)], 0)


def _by_expert(chunks: Tensor, tails: Tensor, arriving: int, rows: int) -> tuple[Tensor, Tensor]:
    """The maps between rows that arrived, by (source, local expert), and the same rows by expert.

    Args:
      chunks: int32 [P, E/P], rows of every chunk that arrived.
      tails: int32 [P]: rows behind the chunks of every source that hold nothing.
      arriving: rows of the buffer; rows: R.

    Returns:
      (slot_of_row [R], row_of_arrived [arriving, 1]); -1 where there is none.
    """
    P, E = chunks.shape
    sizes = torch.cat([chunks, tails[:, None]], 1).reshape(-1)
    # The tails come last.
    order = torch.arange(P * (E + 1), dtype=torch.int32, device=chunks.device).view(P, E + 1).t().reshape(-1)
    positions = torch.arange(arriving, dtype=torch.int32, device=chunks.device)
    by_expert, row_of_arrived = torch_ops.sort_chunks(positions[:, None], sizes, order, False)
    total = chunks.sum()
    slot_of_row = torch.where(positions < total, by_expert[:, 0], -1)[:rows]
    return slot_of_row, torch.where(row_of_arrived < total, row_of_arrived, -1)[:, None]


TRANSPORTS: dict[str, type[Transport]] = {"ring": Ring, "all_to_all": Padded}

#: Bytes a second and rank that collectives move, by kind of device. On GPUs: XLA's over NVLink, which
#: are NCCL's (docs/notes/expert_parallel.md). On the CPU only the ratio counts.
_RATES = {"cuda": {"ring": 220e9, "all_to_all": 240e9}, "cpu": {"ring": 1e10, "all_to_all": 1e10}}


def choose(device: str, sizes: ExchangeSizes, itemsize: int, fp8_exchange: bool = False) -> str:
    """The transport that transport="auto" stands for: the one of the shortest estimated time, bytes by rate."""
    rates, bytes_sent = _RATES.get(device, _RATES["cuda"]), traffic(sizes, itemsize, fp8_exchange)
    _, name = min([(bytes_sent[name] / rate, name) for name, rate in rates.items()])
    return name


def transport(name: str, ranks: Ranks) -> Any:
    """The transport of that name, one of TRANSPORTS."""
    return TRANSPORTS[name](ranks)

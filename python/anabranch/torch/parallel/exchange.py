"""Transports of expert parallelism: they send tokens to the ranks that own their experts, and return the results.

A process group has P ranks. Rank r holds E/P consecutive experts, and T tokens of its own with K experts per token.
All transports implement `Transport`. The experts read tokens as they arrived, through gather indices; rows are not
sorted again.

- `Ring`: an all-gather of tokens. Each rank computes partial sums of its experts for all tokens; an all-to-all returns
  them, and they are summed at the source. Buffers have no unused regions. p2p.py has the same without collectives of
  torch.
- `Padded`: a fixed-capacity all-to-all with one region per destination. One plan with (destination, local expert)
  groups assigns the rows.

Buffer sizes are static bounds from T, K, E, P and the capacity, so the host does not wait for the device. Collectives
run on the current stream, in the same order on every rank.
"""

import abc
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.exchange_sizes import ExchangeSizes
from anabranch.phases import EXCHANGE
from anabranch.rows import num_rows_needed
from anabranch.torch.binding import private
from anabranch.torch.binding.ranges import range_of
from anabranch.torch.ops import torch_ops


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, copied only if it is not contiguous.

    Before 2.12, torch.compile silently loses the gradient of an autograd function's result through a `contiguous()`
    that makes no copy.
    """
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclasses.dataclass(frozen=True)
class Ranks(ExchangeSizes):
    """Sizes of a rank's buffers, the name of the group, and this process's rank."""

    group: str = ""
    rank: int = 0
    capacity_factor: float | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gathers tensors [n, ...] to [P n, ...]."""
        if tensor.shape[0] == 0:
            return tensor
        if tensor.device.type == "cpu":
            # torch's all-gather over Gloo may corrupt the heap, see "Gloo" in docs/notes/expert_parallel.md.
            return self.exchange(tensor.expand(self.ranks, *tensor.shape).flatten(0, 1))
        with range_of(EXCHANGE):
            arriving = private.collectives.all_gather_into_tensor(_dense(tensor), self.ranks, self.group)
            gathered: Tensor = private.collectives.wait_tensor(arriving)
        return gathered

    def exchange(self, regions: Tensor) -> Tensor:
        """All-to-all of P regions [n, ...] in [P n, ...]: region d of rank s becomes region s of rank d."""
        if regions.numel() == 0:
            return regions
        splits = [regions.shape[0] // self.ranks] * self.ranks
        with range_of(EXCHANGE):
            arriving = private.collectives.all_to_all_single(_dense(regions), splits, splits, self.group)
            arrived: Tensor = private.collectives.wait_tensor(arriving)
        return arrived


class Route(NamedTuple):
    """Gather and scatter indices of one exchange; saved for backward."""

    row_of_slot: Tensor
    """int32 [arrived tokens, topk]: the row of every assignment at the experts."""
    slot_of_row: Tensor
    """int32 [R]"""
    group_sizes: Tensor
    """int32 [E/P]"""
    sent_row_of_slot: Tensor
    """int32 [T, K]: rows of the send buffer. `Ring`: int32 [T, P], rows of the returned partial sums."""
    sent_slot_of_row: Tensor
    """int32 [rows of the send buffer]; `Ring`: [0]."""


def drop_over_capacity(ranks: Ranks, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drops the assignments past a rank's capacity, the last in the order (source, token, k), for all transports.

    Ranks with different capacities would lose assignments without counting them. In that case all weights are NaN on
    every rank.

    Returns:
      (experts int32 [T, K] with -1 for dropped assignments; weights; the number of this rank's dropped assignments,
      int32 []).
    """
    if ranks.capacity is None:
        return experts, weights, experts.new_zeros(())
    destination = torch.where(experts >= 0, experts // ranks.local_experts, -1)
    # The rows of this plan number the assignments to each destination in the order (token, k).
    slots = experts.shape[0] * experts.shape[1]
    counts, _, offsets, row_of_slot, _, _ = torch_ops.plan(destination, ranks.ranks, slots, 0, 1)
    own = torch.cat([counts, counts.new_full((1,), ranks.capacity)])
    all_counts = ranks.gather(own).view(ranks.ranks, ranks.ranks + 1)
    weights = torch.where((all_counts[:, -1] == ranks.capacity).all(), weights, torch.nan)
    before = all_counts[: ranks.rank, :-1].sum(0, dtype=torch.int32)
    position = row_of_slot + (before - offsets[:-1])[destination.clamp(min=0)]
    dropped = (destination >= 0) & (position >= ranks.capacity)
    return torch.where(dropped, -1, experts), weights, dropped.sum(dtype=torch.int32)


class Sending(NamedTuple):
    """Tokens on their way to their experts."""

    tokens: Tensor
    arriving: Tensor | None = None
    """Where they arrive; None: `Transport.arrived` sends them."""
    number: int = 0


class Returning(NamedTuple):
    """Sums on their way to their tokens."""

    sums: Tensor
    arriving: Tensor | None = None
    """Where they arrive; None: `Transport.collect` sends them."""


class Passed(NamedTuple):
    """The results of the experts for the tokens of a rank; those after `counts` are kept for the backward pass."""

    output: Tensor
    """[T, D]"""
    counts: Tensor
    """int32 [n], sums over the ranks."""
    h: Tensor
    lora_u: Tensor
    lora_copies: Tensor
    there: Tensor
    """The weights of arrived tokens, float32 [arrived tokens, topk]; no elements if they were not sent."""
    route: Route


class Transport(abc.ABC):
    """The interface of a transport. A pass sends tokens, computes with those that arrive, and ends with `collect`."""

    overlaps = False
    """Whether work between the start and the end of a transfer overlaps with it."""
    fuses = False
    """Whether it has operations for whole halves of a pass, see layer/group_halves.py."""
    topk: int
    """Assignments per arrived token."""
    returning: int
    """Returned rows per token."""
    weights_there: bool
    """Whether the rank of the experts applies the weights. Otherwise the source rank does (unless weight_early)."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    @abc.abstractmethod
    def plan(self, experts: Tensor) -> Route:
        """The route for experts int32 [T, K], numbered over all ranks; -1: no expert."""

    def start(self, tokens: Tensor) -> Sending:
        """Starts to send tokens [T, D] to their experts, which may be unknown yet."""
        return Sending(tokens)

    def arrived(self, route: Route, sending: Sending) -> Tensor:
        """The arrived tokens, which slot_of_row indexes."""
        return self.send(route, sending.tokens)

    @abc.abstractmethod
    def send(self, route: Route, tokens: Tensor) -> Tensor:
        """`start` and `arrived`."""

    @abc.abstractmethod
    def send_weights(self, route: Route, weights: Tensor) -> Tensor:
        """Sends weights [T, K] in the order of `send` and returns [arrived tokens, topk]."""

    def start_return(self, sums: Tensor) -> Returning:
        """Starts to return sums [arrived tokens, D] to their source ranks."""
        return Returning(sums)

    @abc.abstractmethod
    def collect(
        self, route: Route, returning: Returning, weights: Tensor | None, dtype: torch.dtype,
        addend: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Adds up returned sums: [T, D] of `dtype`.

        weights float32 [T, returning] multiply the returned rows; None: 1. The addend [T, D] is added before rounding.
        """

    @abc.abstractmethod
    def collect_weights(self, route: Route, weights: Tensor) -> Tensor:
        """Returns values [arrived tokens, topk] to their source ranks as [T, K]; 0 for dropped assignments."""


class Ring(Transport):
    """All-gather of tokens, all-to-all of partial sums."""

    weights_there = True

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        self.topk, self.returning = ranks.topk, ranks.ranks

    def _gather(self, tensor: Tensor) -> Tensor:
        """All-gathers tensors [n, ...] to [P n, ...]."""
        return self.ranks.gather(tensor)

    def _exchange(self, regions: Tensor) -> Tensor:
        """All-to-all of P regions, see `Ranks.exchange`."""
        return self.ranks.exchange(regions)

    def plan(self, experts: Tensor) -> Route:
        """See Transport."""
        r = self.ranks
        local = self._gather(experts) - r.rank * r.local_experts
        local = torch.where((local >= 0) & (local < r.local_experts), local, -1)
        rows = num_rows_needed(r.arriving_slots, r.local_experts, r.align_size)
        _, group_sizes, _, row_of_slot, slot_of_row, _ = torch_ops.plan(local, r.local_experts, rows, r.align_size, 1)
        # Partial sums of a token are returned in the order of the ranks.
        arrived = torch.arange(r.ranks * r.tokens, dtype=torch.int32, device=experts.device)
        returned = arrived.view(r.ranks, r.tokens).t().contiguous()
        return Route(row_of_slot, slot_of_row, group_sizes, returned, experts.new_empty((0,)))

    def send(self, route: Route, tokens: Tensor) -> Tensor:
        """See Transport; [P T, D]."""
        return self._gather(tokens)

    def send_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport; [P T, K]."""
        return self._gather(weights)

    def collect(
        self, route: Route, returning: Returning, weights: Tensor | None, dtype: torch.dtype,
        addend: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See Transport. Partial sums are sent in their own dtype and added in float32."""
        out: Tensor = torch_ops.combine(self._exchange(returning.sums), route.sent_row_of_slot, weights, addend, dtype)
        return out

    def collect_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport. At most one rank has a value for an assignment; the others have 0."""
        arrived = self._exchange(weights)
        return arrived.view(self.ranks.ranks, self.ranks.tokens, self.topk).sum(0)


class Padded(Transport):
    """Fixed-capacity all-to-all: one region of fixed size per destination."""

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
        chunks = r.exchange(sizes).view(r.ranks, r.local_experts)  # rows per source and local expert
        tails = r.region - chunks.sum(1, dtype=torch.int32)
        rows = min(arriving, num_rows_needed(r.arriving_slots, r.experts, r.align_size))
        slot_of_row, row_of_arrived = _by_expert(chunks, tails, arriving, rows)
        group_sizes = chunks.sum(0, dtype=torch.int32)
        return Route(row_of_arrived, slot_of_row, group_sizes, row_of_slot, sent_slot_of_row)

    def send(self, route: Route, tokens: Tensor) -> Tensor:
        """See Transport; [arrived rows, D]."""
        return self.ranks.exchange(torch_ops.dispatch(tokens, route.sent_row_of_slot, route.sent_slot_of_row, None))

    def send_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport; [arrived rows, 1]."""
        return self.ranks.exchange(_gather(weights.reshape(-1), route.sent_slot_of_row)[:, None])

    def collect(
        self, route: Route, returning: Returning, weights: Tensor | None, dtype: torch.dtype,
        addend: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See Transport. Rows are sent in their own dtype and added in the order of k."""
        out: Tensor = torch_ops.combine(
            self.ranks.exchange(returning.sums), route.sent_row_of_slot, weights, addend, dtype
        )
        return out

    def collect_weights(self, route: Route, weights: Tensor) -> Tensor:
        """See Transport."""
        return _gather(self.ranks.exchange(weights)[:, 0], route.sent_row_of_slot)


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """values[index], or 0 where the index is -1."""
    if values.shape[0] == 0:
        return values.new_zeros(index.shape)
    return torch.where(index >= 0, values[index.clamp(min=0)], 0)


def _by_expert(chunks: Tensor, tails: Tensor, arriving: int, rows: int) -> tuple[Tensor, Tensor]:
    """Indices between arrived rows, ordered by (source, local expert), and the same rows ordered by expert.

    Args:
      chunks: int32 [P, E/P], arrived rows per source and local expert.
      tails: int32 [P], unused rows at the end of every source's region.
      arriving: rows of the receive buffer.
      rows: R.

    Returns:
      (slot_of_row [R], row_of_arrived [arriving, 1]); -1 for unused rows.
    """
    P, E = chunks.shape
    sizes = torch.cat([chunks, tails[:, None]], 1).reshape(-1)
    # The tails are sorted to the end.
    order = torch.arange(P * (E + 1), dtype=torch.int32, device=chunks.device).view(P, E + 1).t().reshape(-1)
    positions = torch.arange(arriving, dtype=torch.int32, device=chunks.device)
    by_expert, row_of_arrived = torch_ops.sort_chunks(positions[:, None], sizes, order, False)
    total = chunks.sum()
    slot_of_row = torch.where(positions < total, by_expert[:, 0], -1)[:rows]
    return slot_of_row, torch.where(row_of_arrived < total, row_of_arrived, -1)[:, None]

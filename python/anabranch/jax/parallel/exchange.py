"""Transports of expert parallelism: tokens to the devices that own their experts, and back.

Inside a jax.shard_map over the expert axis. P devices ("ranks") hold E/P experts each; a rank has T tokens of its own
with K slots. Every transport is one class with the same methods (`Transport`), and gives the experts what they read:
an array of tokens as it arrived and the row map into it, so that nothing is sorted a second time.

- `Ring`: all tokens go everywhere (all_gather), each rank computes what its experts add to every token, and an
  all_to_all brings these partial sums home, where they are added. No region of a buffer stays empty whatever the
  routing.
- `Padded`: a region of fixed size for every destination (all_to_all). One plan with (destination, local expert) groups
  lays them out.
- `Ragged`: only the rows there are (jax.lax.ragged_all_to_all). XLA has no such collective on the CPU: there
  the rows are taken from an all_gather of the buffers, at its cost in memory and traffic.

Nothing waits for sizes on the device: buffers have static bounds, from T, K, E, P and the capacity.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from anabranch.exchange_sizes import ExchangeSizes, traffic
from anabranch.jax.binding.arrays import take
from anabranch.jax.ops.chunk_sort import sort_chunks
from anabranch.jax.ops.dispatch import gather_sum, spread
from anabranch.jax.ops.ffn import SlotProduct
from anabranch.jax.ops.plan import plan
from anabranch.jax.parallel.ragged import (
    RaggedParams,
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
)
from anabranch.rows import num_rows_needed


@dataclasses.dataclass(frozen=True)
class Bounds(ExchangeSizes):
    """What the sizes of a rank's buffers follow from, and the expert axis; None: one rank."""

    axis: str | None = None


class Transport(Protocol):
    """What the layer asks of a transport. `route` is what its `plan` returned: integers, kept for the backward pass."""

    bounds: Bounds
    route: Any
    """The type of a route, a NamedTuple."""

    @property
    def topk(self) -> int:
        """Slots of a token of the array that `send` returns."""

    def plan(self, experts: jax.Array) -> Any:
        """The route of experts int32 [T, K], with fields slot_of_row [R] and group_sizes [E/P] for the experts."""

    def send(self, route: Any, tokens: jax.Array) -> jax.Array:
        """Tokens [T, D] to their experts: the array that these read through slot_of_row."""

    def send_weights(self, route: Any, weights: jax.Array) -> jax.Array:
        """Weights [T, K] along with the tokens of `send`: [tokens there, topk]."""

    def collect(
        self,
        route: Any,
        rows: SlotProduct,
        weights: jax.Array | None,
        dtype: Any,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """The experts' rows [R, D] back to their tokens: sum_k weights[t, k] rows, in float32, as [T, D] of `dtype`.

        The addend [T, D], of this rank's tokens, is added before the sums are rounded.
        """

    def collect_weights(self, route: Any, weights: jax.Array) -> jax.Array:
        """Values [tokens there, topk], those of `send_weights`, back as [T, K]; 0 where a slot has none."""


# ---------------------------------------------------------------- capacity


def keep_within(bounds: Bounds, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Drops what is past a rank's capacity: the last in the order (source, token, slot), whatever the transport.

    Returns:
      (experts int32 [T, K] with -1 for dropped slots; how many of this rank's were dropped, int32 []).
    """
    if bounds.capacity is None:
        return experts, jnp.zeros((), jnp.int32)
    destination = jnp.where(experts >= 0, experts // bounds.local_experts, -1)
    # A plan's rows count the slots of each destination in the order of (token, slot).
    layout = plan(destination, bounds.ranks)
    before = jnp.zeros(bounds.ranks, jnp.int32)
    if bounds.axis is not None:
        counts = jax.lax.all_gather(layout.tokens_per_expert, bounds.axis)
        earlier = jnp.arange(bounds.ranks) < jax.lax.axis_index(bounds.axis)
        before = jnp.sum(jnp.where(earlier[:, None], counts, 0), axis=0, dtype=jnp.int32)
    position = layout.row_of_slot + (before - layout.offsets[:-1])[jnp.maximum(destination, 0)]
    dropped = (destination >= 0) & (position >= bounds.capacity)
    return jnp.where(dropped, -1, experts), jnp.sum(dropped, dtype=jnp.int32)


# ---------------------------------------------------------------- ring


class RingRoute(NamedTuple):
    """Of the experts of this rank, over the tokens of all ranks."""

    row_of_slot: jax.Array
    """int32 [P*T, K]"""
    slot_of_row: jax.Array
    """int32 [R]"""
    group_sizes: jax.Array
    """int32 [E/P]"""


@dataclasses.dataclass(frozen=True)
class Ring:
    """All tokens to all ranks, partial sums back. Without an axis also the layer without expert parallelism."""

    bounds: Bounds
    route = RingRoute

    @property
    def topk(self) -> int:
        """K."""
        return self.bounds.topk

    @property
    def _alone(self) -> bool:
        # A collective refuses to divide nothing.
        return self.bounds.axis is None or self.bounds.tokens == 0

    def _gather(self, array: jax.Array) -> jax.Array:
        return array if self._alone else jax.lax.all_gather(array, self.bounds.axis, tiled=True)

    def _reduce(self, array: jax.Array) -> jax.Array:
        return array if self._alone else jax.lax.psum_scatter(array, self.bounds.axis, tiled=True)

    def plan(self, experts: jax.Array) -> RingRoute:
        """See Transport."""
        b = self.bounds
        experts = self._gather(experts)
        if b.axis is not None:
            local = experts - jax.lax.axis_index(b.axis) * b.local_experts
            experts = jnp.where((experts >= 0) & (local >= 0) & (local < b.local_experts), local, -1)
        rows = num_rows_needed(b.arriving_slots, b.local_experts, b.align_size)
        layout = plan(experts, b.local_experts, align_size=b.align_size, num_rows=rows)
        return RingRoute(layout.row_of_slot, layout.slot_of_row, layout.group_sizes)

    def send(self, route: RingRoute, tokens: jax.Array) -> jax.Array:
        """See Transport; [P*T, D]."""
        return self._gather(tokens)

    def send_weights(self, route: RingRoute, weights: jax.Array) -> jax.Array:
        """See Transport; [P*T, K]."""
        return self._gather(weights)

    def collect(
        self,
        route: RingRoute,
        rows: SlotProduct,
        weights: jax.Array | None,
        dtype: Any,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """See Transport. Partial sums are added up in float32 and travel in the dtype of the rows, as all rows do."""
        if self._alone:
            return rows.sum(route.row_of_slot, weights, dtype, addend)
        weights = None if weights is None else self._gather(weights)
        P, T = self.bounds.ranks, self.bounds.tokens
        sums = rows.sum(route.row_of_slot, weights, rows.dtype)
        width = sums.shape[1]
        arrived = _all_to_all(sums.reshape(P, T, width), self.bounds.axis).reshape(P * T, width)
        row_of_rank = jnp.arange(P * T, dtype=jnp.int32).reshape(P, T).T
        return gather_sum(arrived, row_of_rank, None, dtype, addend)

    def collect_weights(self, route: RingRoute, weights: jax.Array) -> jax.Array:
        """See Transport. At most one rank has a value for a slot; the others add 0."""
        return self._reduce(weights)


# ---------------------------------------------------------------- rows that travel by themselves


class RowRoute(NamedTuple):
    """Where rows stand here, on their way, and at their experts."""

    row_of_slot: jax.Array
    """int32 [T, K]: rows of the buffer that leaves."""
    sent_slot_of_row: jax.Array
    """int32 [rows that leave]"""
    slot_of_row: jax.Array
    """int32 [R]: the row that arrived for every row of an expert."""
    row_of_arrived: jax.Array
    """int32 [rows that arrive, 1]: the inverse."""
    group_sizes: jax.Array
    """int32 [E/P]"""
    sizes: jax.Array
    """int32 [P, E]: rows of every rank for every expert; [0, E] where regions make them needless."""


def _by_expert(chunks: jax.Array, tails: jax.Array, arriving: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """The maps between rows that arrived, by (source, local expert), and the same rows by expert.

    Args:
      chunks: int32 [P, E/P], rows of every chunk that arrived.
      tails: int32 [P]: rows behind the chunks of every source that hold nothing.
      arriving: rows of the buffer; rows: R.

    Returns:
      (slot_of_row [R], row_of_arrived [arriving, 1]); -1 where there is none.
    """
    P, E = chunks.shape
    sizes = jnp.concatenate([chunks, tails[:, None]], axis=1)
    order = jnp.arange(P * (E + 1), dtype=jnp.int32).reshape(P, E + 1).T.ravel()  # the tails come last
    positions = jnp.arange(arriving, dtype=jnp.int32)
    by_expert, row_of_arrived = sort_chunks(positions[:, None], sizes.ravel(), order)
    total = jnp.sum(chunks)
    slot_of_row = jnp.where(positions < total, by_expert[:, 0], -1)[:rows]
    return slot_of_row, jnp.where(row_of_arrived < total, row_of_arrived, -1)[:, None]


class _Rows(abc.ABC):
    """What Padded and Ragged share: they differ in the layout of buffers and in the collective."""

    bounds: Bounds
    route = RowRoute
    topk = 1

    @abc.abstractmethod
    def _exchange(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        """The rows that leave, where they arrive."""

    @abc.abstractmethod
    def _return(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        """The rows that arrived, back where they left."""

    def send(self, route: RowRoute, tokens: jax.Array) -> jax.Array:
        """See Transport; [rows that arrive, D]."""
        return self._exchange(route, spread(tokens, route.row_of_slot, route.sent_slot_of_row))

    def send_weights(self, route: RowRoute, weights: jax.Array) -> jax.Array:
        """See Transport; [rows that arrive, 1]."""
        return self._exchange(route, take(weights.ravel(), route.sent_slot_of_row)[:, None])

    def collect(
        self,
        route: RowRoute,
        rows: SlotProduct,
        weights: jax.Array | None,
        dtype: Any,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """See Transport. Rows travel in their own dtype and are added here, k ascending."""
        arrived = rows.sum(route.row_of_arrived, None, rows.dtype)
        return gather_sum(self._return(route, arrived), route.row_of_slot, weights, dtype, addend)

    def collect_weights(self, route: RowRoute, weights: jax.Array) -> jax.Array:
        """See Transport."""
        return take(self._return(route, weights)[:, 0], route.row_of_slot)


@dataclasses.dataclass(frozen=True)
class Padded(_Rows):
    """A region of fixed size for every destination."""

    bounds: Bounds

    def plan(self, experts: jax.Array) -> RowRoute:
        """See Transport."""
        b = self.bounds
        arriving = b.ranks * self.bounds.region
        layout = plan(experts, b.experts, align_size=b.align_size, num_rows=arriving, num_destinations=b.ranks)
        chunks = _all_to_all(layout.group_sizes.reshape(b.ranks, b.local_experts), b.axis)
        tails = self.bounds.region - jnp.sum(chunks, axis=1, dtype=jnp.int32)
        rows = min(arriving, num_rows_needed(b.arriving_slots, b.experts, b.align_size))
        slot_of_row, row_of_arrived = _by_expert(chunks, tails, arriving, rows)
        sizes = jnp.zeros((0, b.experts), jnp.int32)
        group_sizes = jnp.sum(chunks, axis=0, dtype=jnp.int32)
        return RowRoute(layout.row_of_slot, layout.slot_of_row, slot_of_row, row_of_arrived, group_sizes, sizes)

    def _exchange(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        regions = rows.reshape(self.bounds.ranks, self.bounds.region, rows.shape[1])
        return _all_to_all(regions, self.bounds.axis).reshape(rows.shape)

    _return = _exchange  # the region that came from a rank goes back to it


def _all_to_all(regions: jax.Array, axis: str | None) -> jax.Array:
    """Region d of every rank s becomes region s of rank d."""
    return regions if axis is None else jax.lax.all_to_all(regions, axis, 0, 0, tiled=True)


@dataclasses.dataclass(frozen=True)
class Ragged(_Rows):
    """Rows without gaps."""

    bounds: Bounds

    @property
    def _leaving(self) -> int:
        b = self.bounds
        return num_rows_needed(b.tokens * b.topk, b.experts, b.align_size)

    @property
    def _arriving(self) -> int:
        # Every (source, local expert) pair has padding of its own: P * E/P of them.
        return num_rows_needed(self.bounds.arriving_slots, self.bounds.experts, self.bounds.align_size)

    def plan(self, experts: jax.Array) -> RowRoute:
        """See Transport."""
        b = self.bounds
        layout = plan(experts, b.experts, align_size=b.align_size, num_rows=self._leaving)
        sizes = layout.group_sizes[None] if b.axis is None else jax.lax.all_gather(layout.group_sizes, b.axis)
        chunks = sizes.reshape(b.ranks, b.ranks, b.local_experts)[:, self._rank]
        no_tails = jnp.zeros(b.ranks, jnp.int32)
        slot_of_row, row_of_arrived = _by_expert(chunks, no_tails, self._arriving, self._arriving)
        group_sizes = jnp.sum(chunks, axis=0, dtype=jnp.int32)
        return RowRoute(layout.row_of_slot, layout.slot_of_row, slot_of_row, row_of_arrived, group_sizes, sizes)

    @property
    def _rank(self) -> Any:
        return jnp.int32(0) if self.bounds.axis is None else jax.lax.axis_index(self.bounds.axis)

    def _exchange(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        params = compute_ragged_all_to_all_params(route.sizes, self._rank, self.bounds.ranks)
        return _ragged_all_to_all(rows, self._arriving, params, self.bounds.axis)

    def _return(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        params = compute_reverse_ragged_all_to_all_params(route.sizes, self._rank, self.bounds.ranks)
        return _ragged_all_to_all(rows, self._leaving, params, self.bounds.axis)


def _ragged_all_to_all(rows: jax.Array, arriving: int, params: RaggedParams, axis: str | None) -> jax.Array:
    """Slices of `rows` [R, D] to every rank; [arriving, D], zero where nothing arrives."""
    out = jnp.zeros((arriving, rows.shape[1]), rows.dtype)
    if axis is None:
        return jax.lax.dynamic_update_slice(out, rows, (0, 0))

    def native(rows: jax.Array, out: jax.Array, *params: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(rows, out, *params, axis_name=axis)

    def gathered(rows: jax.Array, out: jax.Array, *params: jax.Array) -> jax.Array:
        return _slices_of_all(rows, out, RaggedParams(*params), axis)

    return jax.lax.platform_dependent(rows, out, *params, cpu=gathered, default=native)


def _slices_of_all(rows: jax.Array, out: jax.Array, params: RaggedParams, axis: str) -> jax.Array:
    """What ragged_all_to_all computes, from an all_gather; slices arrive one behind the other, by source."""
    me = jax.lax.axis_index(axis)
    everyone = jax.lax.all_gather(rows, axis)
    begin_there = jax.lax.all_gather(params.input_offsets, axis)[:, me]
    begin_here = jax.lax.all_gather(params.output_offsets, axis)[:, me]
    row = jnp.arange(out.shape[0], dtype=jnp.int32)
    source = jnp.searchsorted(begin_here + params.recv_sizes, row, side="right")
    source = jnp.minimum(source, params.recv_sizes.size - 1)
    offset = row - begin_here[source]
    taken = everyone.at[source, begin_there[source] + offset].get(mode="fill", fill_value=0)
    return jnp.where((offset < params.recv_sizes[source])[:, None], taken, out)


# ---------------------------------------------------------------- choice

TRANSPORTS: dict[str, Callable[[Bounds], Any]] = {"ring": Ring, "all_to_all": Padded, "ragged": Ragged}

#: Bytes a second and rank that XLA's collectives move, by platform. On GPUs: measured on two and four H200s over NVLink
#: (docs/notes/expert_parallel.md). Elsewhere only ratios count; on the CPU what stands in for the ragged exchange
#: gathers everything.
_RATES = {
    "gpu": {"ring": 220e9, "all_to_all": 240e9, "ragged": 4.5e9},
    "tpu": {"ring": 1e11, "all_to_all": 1e11, "ragged": 1e11},
    "cpu": {"ring": 1e10, "all_to_all": 1e10},
}


def choose(platform: str, bounds: Bounds, itemsize: int, fp8_exchange: bool = False) -> str:
    """The transport that `transport="auto"` stands for: the one of the shortest estimated time, bytes by rate.

    >>> tokens = dict(tokens=8192, topk=8, slots_per_token=8, align_size=0, capacity=None)
    >>> choose("gpu", Bounds(8, 128, **tokens), 2), choose("gpu", Bounds(512, 512, **tokens), 2)
    ('ring', 'ragged')
    """
    rates = _RATES.get(platform, _RATES["gpu"])
    bytes_sent = traffic(bounds, itemsize, fp8_exchange)
    return min(rates, key=lambda name: bytes_sent[name] / rates[name])


def transport(name: str, bounds: Bounds) -> Transport:
    """The transport of that name, one of TRANSPORTS."""
    chosen: Transport = TRANSPORTS[name](bounds)
    return chosen

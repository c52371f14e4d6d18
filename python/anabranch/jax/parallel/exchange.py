"""Transports of expert parallelism: they send tokens to the devices that own their experts, and return the results.

A transport runs inside a jax.shard_map over the expert axis. P devices ("ranks") hold E/P experts each; a rank has its
own T tokens with K assignments each. All transports have the same methods (`Transport`). The experts read tokens as
they arrived, through gather indices; rows are not sorted again.

- `Ring`: an all_gather of tokens. Each rank computes partial sums of its experts for all tokens; an all_to_all returns
  them, and they are summed at the source. Buffers have no unused regions. `PeerToPeer` (p2p.py) is a Ring without NCCL.
- `Padded`: a fixed-capacity all_to_all with one region per destination. One plan with (destination, local expert)
  groups assigns the rows.
- `Ragged`: jax.lax.ragged_all_to_all of the actual rows only. XLA has no such collective on the CPU; there the rows are
  gathered from an all_gather of the buffers, which costs more memory and traffic.

No transport reads sizes back from the device: buffers have static bounds, from T, K, E, P and the capacity.
"""

import abc
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from anabranch.exchange_sizes import ExchangeSizes
from anabranch.jax.binding.arrays import take
from anabranch.jax.ops.chunk_sort import sort_chunks
from anabranch.jax.ops.dispatch import gather_sum, spread
from anabranch.jax.ops.ffn import SlotGemm
from anabranch.jax.ops.plan import plan
from anabranch.jax.parallel.peers import Peers
from anabranch.jax.parallel.ragged import (
    RaggedParams,
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
)
from anabranch.phases import EXCHANGE
from anabranch.rows import num_rows_needed


@dataclasses.dataclass(frozen=True)
class Bounds(ExchangeSizes):
    """The quantities that determine the sizes of a rank's buffers, and which ranks exchange them.

    Attributes:
      ranks: P; experts: E; align_size: as for `plan`; tokens: T per rank; topk: K.
      slots_per_token: the most assignments of one token to one rank: min(K, E/P), or K if experts may repeat.
      capacity: the number of assignments that a rank accepts; None: all.
      axis: the expert axis; None: one rank.
      peers: the devices along that axis, for the transport "p2p".
    """

    axis: str | None = None
    peers: Peers | None = None


class Transport(Protocol):
    """The interface of a transport. A `route`, the result of `plan`, contains integers saved for the backward pass."""

    bounds: Bounds
    route: Any
    """The type of a route, a NamedTuple."""
    fuses: bool
    """Whether a half of a pass can be one call (p2p_passes.py)."""

    @property
    def topk(self) -> int:
        """The number of assignments per token of the array that `send` returns."""

    def plan(self, experts: jax.Array) -> Any:
        """The route of experts int32 [T, K]; it has slot_of_row [R] and group_sizes [E/P] for the local experts."""

    def send(self, route: Any, tokens: jax.Array) -> jax.Array:
        """Sends tokens [T, D] to their experts; returns the array into which slot_of_row points."""

    def send_weights(self, route: Any, weights: jax.Array) -> jax.Array:
        """Sends weights [T, K] in the order of `send`; returns [arrived tokens, topk]."""

    def collect(
        self,
        route: Any,
        rows: SlotGemm,
        weights: jax.Array | None,
        dtype: Any,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """Sends the experts' rows [R, D] back: sum_k weights[t, k] rows + addend[t], in float32, as [T, D] of `dtype`.

        The addend [T, D] belongs to this rank's tokens and is added before the sums are rounded.
        """

    def collect_weights(self, route: Any, weights: jax.Array) -> jax.Array:
        """Returns values [arrived tokens, topk] to their source ranks as [T, K]; 0 for an assignment without a row."""


# ---------------------------------------------------------------- capacity


def drop_over_capacity(bounds: Bounds, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Drops the assignments past a rank's capacity, the last in the order (source, token, slot), for all transports.

    Returns:
      (experts int32 [T, K] with -1 for dropped assignments; the number of this rank's dropped assignments, int32 []).
    """
    if bounds.capacity is None:
        return experts, jnp.zeros((), jnp.int32)
    destination = jnp.where(experts >= 0, experts // bounds.local_experts, -1)
    # A plan's rows count the assignments to each destination in the order (token, slot).
    routed = plan(destination, bounds.ranks)
    before = jnp.zeros(bounds.ranks, jnp.int32)
    if bounds.axis is not None:
        with jax.named_scope(EXCHANGE):
            counts = jax.lax.all_gather(routed.tokens_per_expert, bounds.axis)
        earlier = jnp.arange(bounds.ranks) < jax.lax.axis_index(bounds.axis)
        before = jnp.sum(jnp.where(earlier[:, None], counts, 0), axis=0, dtype=jnp.int32)
    position = routed.row_of_slot + (before - routed.offsets[:-1])[jnp.maximum(destination, 0)]
    dropped = (destination >= 0) & (position >= bounds.capacity)
    return jnp.where(dropped, -1, experts), jnp.sum(dropped, dtype=jnp.int32)


# ---------------------------------------------------------------- ring


class RingRoute(NamedTuple):
    """The indices between all ranks' assignments and the rows of this rank's experts."""

    row_of_slot: jax.Array
    """int32 [P*T, K]"""
    slot_of_row: jax.Array
    """int32 [R]"""
    group_sizes: jax.Array
    """int32 [E/P]"""


@dataclasses.dataclass(frozen=True)
class Ring:
    """All-gather of tokens, all-to-all of partial sums. Without an axis: no expert parallelism and no exchange."""

    bounds: Bounds
    route = RingRoute
    fuses = False

    @property
    def topk(self) -> int:
        """K."""
        return self.bounds.topk

    @property
    def _alone(self) -> bool:
        # Collectives refuse empty arrays.
        return self.bounds.axis is None or self.bounds.tokens == 0

    @jax.named_scope(EXCHANGE)
    def _gather(self, array: jax.Array) -> jax.Array:
        return array if self._alone else jax.lax.all_gather(array, self.bounds.axis, tiled=True)

    @jax.named_scope(EXCHANGE)
    def _reduce(self, array: jax.Array) -> jax.Array:
        return array if self._alone else jax.lax.psum_scatter(array, self.bounds.axis, tiled=True)

    def _exchange(self, blocks: jax.Array) -> jax.Array:
        """Block d of every rank s becomes block s of rank d; blocks [P*T, D]."""
        regions = blocks.reshape(self.bounds.ranks, self.bounds.tokens, *blocks.shape[1:])
        return _all_to_all(regions, self.bounds.axis).reshape(blocks.shape)

    def plan(self, experts: jax.Array) -> RingRoute:
        """See Transport."""
        b = self.bounds
        experts = self._gather(experts)
        if b.axis is not None:
            local = experts - jax.lax.axis_index(b.axis) * b.local_experts
            experts = jnp.where((experts >= 0) & (local >= 0) & (local < b.local_experts), local, -1)
        rows = num_rows_needed(b.arriving_slots, b.local_experts, b.align_size)
        routed = plan(experts, b.local_experts, align_size=b.align_size, num_rows=rows)
        return RingRoute(routed.row_of_slot, routed.slot_of_row, routed.group_sizes)

    def send(self, route: RingRoute, tokens: jax.Array) -> jax.Array:
        """See Transport; [P*T, D]."""
        return self._gather(tokens)

    def send_weights(self, route: RingRoute, weights: jax.Array) -> jax.Array:
        """See Transport; [P*T, K]."""
        return self._gather(weights)

    def collect(
        self,
        route: RingRoute,
        rows: SlotGemm,
        weights: jax.Array | None,
        dtype: Any,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """See Transport. Partial sums accumulate in float32 and are sent in the dtype of the rows."""
        if self._alone:
            return rows.sum(route.row_of_slot, weights, dtype, addend)
        weights = None if weights is None else self._gather(weights)
        P, T = self.bounds.ranks, self.bounds.tokens
        sums = rows.sum(route.row_of_slot, weights, rows.dtype)
        row_of_rank = jnp.arange(P * T, dtype=jnp.int32).reshape(P, T).T
        return gather_sum(self._exchange(sums), row_of_rank, None, dtype, addend)

    def collect_weights(self, route: RingRoute, weights: jax.Array) -> jax.Array:
        """See Transport. At most one rank has a value for an assignment; the others add 0."""
        return self._reduce(weights)


# ---------------------------------------------------------------- one row per assignment


class RowRoute(NamedTuple):
    """The rows of assignments on this rank, in the exchanged buffers, and at their experts."""

    row_of_slot: jax.Array
    """int32 [T, K]: rows of the outgoing buffer."""
    sent_slot_of_row: jax.Array
    """int32 [outgoing rows]"""
    slot_of_row: jax.Array
    """int32 [R]: the incoming row for every row of an expert."""
    row_of_arrived: jax.Array
    """int32 [incoming rows, 1]: the inverse."""
    group_sizes: jax.Array
    """int32 [E/P]"""
    sizes: jax.Array
    """int32 [P, E]: rows of every rank for every expert; [0, E] if regions make them redundant."""


def _by_expert(chunks: jax.Array, tails: jax.Array, arriving: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """The indices between incoming rows, ordered by (source, local expert), and the same rows by expert.

    Args:
      chunks: int32 [P, E/P], rows of every incoming chunk.
      tails: int32 [P]: unused rows after the chunks of every source.
      arriving: rows of the buffer; rows: R.

    Returns:
      (slot_of_row [R], row_of_arrived [arriving, 1]); -1 for unused rows.
    """
    P, E = chunks.shape
    sizes = jnp.concatenate([chunks, tails[:, None]], axis=1)
    order = jnp.arange(P * (E + 1), dtype=jnp.int32).reshape(P, E + 1).T.ravel()  # all tails after all chunks
    positions = jnp.arange(arriving, dtype=jnp.int32)
    by_expert, row_of_arrived = sort_chunks(positions[:, None], sizes.ravel(), order)
    total = jnp.sum(chunks)
    slot_of_row = jnp.where(positions < total, by_expert[:, 0], -1)[:rows]
    return slot_of_row, jnp.where(row_of_arrived < total, row_of_arrived, -1)[:, None]


class _Rows(abc.ABC):
    """The common part of Padded and Ragged, which differ in buffer layout and collective."""

    bounds: Bounds
    route = RowRoute
    fuses = False
    topk = 1

    @abc.abstractmethod
    def _exchange(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        """Sends outgoing rows; returns the incoming ones."""

    @abc.abstractmethod
    def _return(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        """Sends incoming rows back to their sources."""

    def send(self, route: RowRoute, tokens: jax.Array) -> jax.Array:
        """See Transport; [incoming rows, D]."""
        return self._exchange(route, spread(tokens, route.row_of_slot, route.sent_slot_of_row))

    def send_weights(self, route: RowRoute, weights: jax.Array) -> jax.Array:
        """See Transport; [incoming rows, 1]."""
        return self._exchange(route, take(weights.ravel(), route.sent_slot_of_row)[:, None])

    def collect(
        self,
        route: RowRoute,
        rows: SlotGemm,
        weights: jax.Array | None,
        dtype: Any,
        addend: jax.Array | None = None,
    ) -> jax.Array:
        """See Transport. Rows are sent in their own dtype and summed at the source in ascending order of k."""
        arrived = rows.sum(route.row_of_arrived, None, rows.dtype)
        return gather_sum(self._return(route, arrived), route.row_of_slot, weights, dtype, addend)

    def collect_weights(self, route: RowRoute, weights: jax.Array) -> jax.Array:
        """See Transport."""
        return take(self._return(route, weights)[:, 0], route.row_of_slot)


@dataclasses.dataclass(frozen=True)
class Padded(_Rows):
    """Fixed-capacity all-to-all: one region of fixed size per destination."""

    bounds: Bounds

    def plan(self, experts: jax.Array) -> RowRoute:
        """See Transport."""
        b = self.bounds
        arriving = b.ranks * self.bounds.region
        routed = plan(experts, b.experts, align_size=b.align_size, num_rows=arriving, num_destinations=b.ranks)
        chunks = _all_to_all(routed.group_sizes.reshape(b.ranks, b.local_experts), b.axis)
        tails = self.bounds.region - jnp.sum(chunks, axis=1, dtype=jnp.int32)
        rows = min(arriving, num_rows_needed(b.arriving_slots, b.experts, b.align_size))
        slot_of_row, row_of_arrived = _by_expert(chunks, tails, arriving, rows)
        sizes = jnp.zeros((0, b.experts), jnp.int32)
        group_sizes = jnp.sum(chunks, axis=0, dtype=jnp.int32)
        return RowRoute(routed.row_of_slot, routed.slot_of_row, slot_of_row, row_of_arrived, group_sizes, sizes)

    def _exchange(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        regions = rows.reshape(self.bounds.ranks, self.bounds.region, rows.shape[1])
        return _all_to_all(regions, self.bounds.axis).reshape(rows.shape)

    _return = _exchange  # a region returns to the rank that it came from


@jax.named_scope(EXCHANGE)
def _all_to_all(regions: jax.Array, axis: str | None) -> jax.Array:
    """Region d of every rank s becomes region s of rank d."""
    return regions if axis is None else jax.lax.all_to_all(regions, axis, 0, 0, tiled=True)


@dataclasses.dataclass(frozen=True)
class Ragged(_Rows):
    """Ragged all-to-all: buffers have no unused regions."""

    bounds: Bounds

    @property
    def _outgoing_rows(self) -> int:
        b = self.bounds
        return num_rows_needed(b.tokens * b.topk, b.experts, b.align_size)

    @property
    def _incoming_rows(self) -> int:
        # Every (source, local expert) pair has its own padding, P * E/P of them.
        return num_rows_needed(self.bounds.arriving_slots, self.bounds.experts, self.bounds.align_size)

    def plan(self, experts: jax.Array) -> RowRoute:
        """See Transport."""
        b = self.bounds
        routed = plan(experts, b.experts, align_size=b.align_size, num_rows=self._outgoing_rows)
        with jax.named_scope(EXCHANGE):
            sizes = routed.group_sizes[None] if b.axis is None else jax.lax.all_gather(routed.group_sizes, b.axis)
        chunks = sizes.reshape(b.ranks, b.ranks, b.local_experts)[:, self._rank]
        no_tails = jnp.zeros(b.ranks, jnp.int32)
        slot_of_row, row_of_arrived = _by_expert(chunks, no_tails, self._incoming_rows, self._incoming_rows)
        group_sizes = jnp.sum(chunks, axis=0, dtype=jnp.int32)
        return RowRoute(routed.row_of_slot, routed.slot_of_row, slot_of_row, row_of_arrived, group_sizes, sizes)

    @property
    def _rank(self) -> Any:
        return jnp.int32(0) if self.bounds.axis is None else jax.lax.axis_index(self.bounds.axis)

    def _exchange(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        params = compute_ragged_all_to_all_params(route.sizes, self._rank, self.bounds.ranks)
        return _ragged_all_to_all(rows, self._incoming_rows, params, self.bounds.axis)

    def _return(self, route: RowRoute, rows: jax.Array) -> jax.Array:
        params = compute_reverse_ragged_all_to_all_params(route.sizes, self._rank, self.bounds.ranks)
        return _ragged_all_to_all(rows, self._outgoing_rows, params, self.bounds.axis)


@jax.named_scope(EXCHANGE)
def _ragged_all_to_all(rows: jax.Array, arriving: int, params: RaggedParams, axis: str | None) -> jax.Array:
    """Sends slices of `rows` [R, D] to every rank; [arriving, D], zero where nothing arrives."""
    out = jnp.zeros((arriving, rows.shape[1]), rows.dtype)
    if axis is None:
        return jax.lax.dynamic_update_slice(out, rows, (0, 0))

    def native(rows: jax.Array, out: jax.Array, *params: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(rows, out, *params, axis_name=axis)

    def gathered(rows: jax.Array, out: jax.Array, *params: jax.Array) -> jax.Array:
        return _slices_of_all(rows, out, RaggedParams(*params), axis)

    return jax.lax.platform_dependent(rows, out, *params, cpu=gathered, default=native)


def _slices_of_all(rows: jax.Array, out: jax.Array, params: RaggedParams, axis: str) -> jax.Array:
    """ragged_all_to_all emulated by an all_gather; incoming slices are contiguous, ordered by source."""
    rank = jax.lax.axis_index(axis)
    all_rows = jax.lax.all_gather(rows, axis)
    source_begin = jax.lax.all_gather(params.input_offsets, axis)[:, rank]
    begin = jax.lax.all_gather(params.output_offsets, axis)[:, rank]
    row = jnp.arange(out.shape[0], dtype=jnp.int32)
    source = jnp.searchsorted(begin + params.recv_sizes, row, side="right")
    source = jnp.minimum(source, params.recv_sizes.size - 1)
    offset = row - begin[source]
    taken = all_rows.at[source, source_begin[source] + offset].get(mode="fill", fill_value=0)
    return jnp.where((offset < params.recv_sizes[source])[:, None], taken, out)

"""The plan: where the rows of every expert's tokens stand.

Sizes: T tokens (all leading dimensions together), K experts a token, E experts, R rows. Slot t*K + k is the k-th expert
of token t.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.arrays import flat
from anabranch.jax.binding.sharding import TokenCall, axes_of_shard
from anabranch.rows import check_num_rows, check_num_slots, num_rows_needed


class Plan(NamedTuple):
    """Where every slot goes; what `plan` returns and `dispatch` and `combine` take.

    Rows of one expert stand together, in order of (token, slot); expert e owns group_sizes[e] rows from offsets[e] on.
    """

    tokens_per_expert: jax.Array
    """int32[E]: slots of every expert, before any dropping."""
    group_sizes: jax.Array
    """int32[E]: rows of every expert, tokens_per_expert rounded up to align_size and clipped to R."""
    offsets: jax.Array
    """int32[E + 1]: the first row of every expert's group, and the end of the last."""
    row_of_slot: jax.Array
    """int32[..., K]: -1 where a slot has no row."""
    slot_of_row: jax.Array
    """int32[R]: -1 in padding and past the last group."""
    dropped: jax.Array
    """int32[]: slots that found no room in R rows, and indices outside [-1, E)."""

    @property
    def expert_of_row(self) -> jax.Array:
        """int32[R]: the expert of every row, -1 in padding and past the last group; computed where it is asked for."""
        return _experts_of_rows(self.offsets, self.slot_of_row)


@functools.partial(jnp.vectorize, signature="(n),(r)->(r)")  # plans of a vmap, too
def _experts_of_rows(offsets: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    rows = jnp.arange(slot_of_row.shape[0], dtype=jnp.int32)
    # Of groups that begin at one row all but the last are empty.
    experts = jnp.searchsorted(offsets[:-1], rows, side="right").astype(jnp.int32) - 1
    return jnp.where(slot_of_row >= 0, experts, -1)


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    num_experts: int
    align_size: int
    num_rows: int
    num_destinations: int


def _plan_whole(options: _PlanOptions, experts: jax.Array) -> Plan:
    """The plan of what one device has."""
    E, R = options.num_experts, options.num_rows
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    slots = flat(experts)
    results = ffi.call(
        "ab_xla_plan",
        {"experts": slots},
        {
            "tokens_per_expert": int32((E,)),
            "group_sizes": int32((E,)),
            "offsets": int32((E + 1,)),
            "row_of_slot": int32(slots.shape),
            "slot_of_row": int32((R,)),
            "dropped": int32(()),
        },
        num_experts=E,
        workspace=workspaces.plan(slots.size, E),
        align_size=options.align_size,
        num_destinations=options.num_destinations,
    )
    return Plan(**results | {"row_of_slot": results["row_of_slot"].reshape(experts.shape)})


def _layout(options: _PlanOptions, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """begin and end of every expert's group [E], for so many slots of each."""
    E, P, R = options.num_experts, options.num_destinations, options.num_rows
    a, region = max(options.align_size, 1), jnp.uint32(R // P)
    counts = counts.astype(jnp.uint32)
    sizes = jnp.minimum((counts + (a - 1)) // a * a, region).reshape(P, E // P)  # an aligned count is below 2^32
    ends = jax.lax.associative_scan(lambda x, y: jnp.minimum(x + y, region), sizes, axis=1)
    begins = jnp.concatenate([jnp.zeros((P, 1), jnp.uint32), ends[:, :-1]], axis=1)
    first = jnp.arange(P, dtype=jnp.uint32)[:, None] * region
    return (first + begins).reshape(E).astype(jnp.int32), (first + ends).reshape(E).astype(jnp.int32)


def _plan_shard(options: _PlanOptions, experts: jax.Array) -> Plan:
    """The plan of all tokens; of what is not the shard's own, parts that add up over the shards.

    An expert's rows of one shard stand behind those of the shards before it, so it only has to know their counts.
    """
    axes = axes_of_shard("experts", experts.shape[:-1])
    if not axes:
        return _plan_whole(options, experts)
    E, R, P = options.num_experts, options.num_rows, options.num_destinations
    shards, index = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
    own = _plan_whole(_PlanOptions(E, 0, experts.size, 1), experts)
    counts = own.tokens_per_expert
    mine = jnp.arange(shards)[:, None] == index
    of_shards = jax.lax.psum(jnp.where(mine, counts, 0), axes)
    before = jnp.sum(jnp.where(jnp.arange(shards)[:, None] < index, of_shards, 0), axis=0)
    begin, end = _layout(options, jnp.sum(of_shards, axis=0))

    expert = jnp.clip(experts, 0, E - 1)
    last = (expert // (E // P) + 1) * (R // P)
    rank = own.row_of_slot - own.offsets[expert] + before[expert]
    # begin + rank may pass 2^31, last - begin does not
    has_row = (own.row_of_slot >= 0) & (rank < last - begin[expert])
    row_of_slot = jnp.where(has_row, begin[expert] + rank, -1)
    slots = index * experts.size + jnp.arange(experts.size, dtype=jnp.int32)
    is_first = index == 0
    rows = jnp.where(has_row, row_of_slot, R).ravel()
    return Plan(
        tokens_per_expert=counts,
        group_sizes=jnp.where(is_first, end - begin, 0),
        offsets=jnp.where(is_first, jnp.append(begin, end[-1:]), 0),
        row_of_slot=row_of_slot,
        slot_of_row=jnp.where(is_first, -1, 0) + jnp.zeros(R, jnp.int32).at[rows].set(slots + 1, mode="drop"),
        dropped=own.dropped + jnp.sum((own.row_of_slot >= 0) & ~has_row, dtype=jnp.int32),
    )


# Integers have no gradient, but an ffi_call refuses their empty tangents; a custom_vjp takes them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plan(options: _PlanOptions, experts: jax.Array) -> Plan:
    t = experts.ndim - 1
    return Plan(*TokenCall(_plan_shard, options, operands=(t,), results=(0, 0, 0, t, 0, 0))(experts))


_plan.defvjp(lambda options, experts: (_plan(options, experts), None), lambda options, _, d_plan: (None,))


def plan(
    experts: Any, num_experts: int, *, align_size: int = 0, num_rows: int | None = None, num_destinations: int = 1
) -> Plan:
    """Lays out the rows of the dispatched tokens: experts in order, within one expert by (token, slot).

    Args:
      experts: int16, int32 or int64 [..., K], K >= 1. -1: no expert. An index outside [-1, E) is treated as -1 and
        counted in `dropped`. An index may be repeated; every slot gets a row of its own.
      num_experts: E.
      align_size: every expert's group of rows is rounded up to a multiple of it; 0 or 1: no padding.
      num_rows: R, a multiple of align_size. Slots past it are dropped and counted. Default: `num_rows_needed`, with
        which nothing is dropped.
      num_destinations: P, a divisor of E. Rows are P regions of R/P, one for each destination of an exchange, which
        owns E/P neighbouring experts: its groups start at its first row and are clipped to it. The default R then
        holds every slot in any region.

    Sharded tokens, divided along their first dimension: the plan of all tokens; row_of_slot is sharded like them, the
    rest whole. Inside a jax.shard_map: the plan of the shard.

    Returns:
      A `Plan` of integer arrays, exact and the same on every run. It carries no gradient.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument is out of range, T*K or R reaches 2^31, or tokens are sharded along another dimension
        than the first.

    Source: semantics, section 5.

    >>> p = plan(jnp.array([[1], [0], [1]], jnp.int32), 2)
    >>> p.row_of_slot.ravel().tolist(), p.offsets.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    E = check.integer("num_experts", num_experts, 1, check.INDEX_LIMIT - 1)
    align_size = check.integer("align_size", align_size, 0, check.INDEX_LIMIT - 1)
    experts = check.indices("experts", experts, (..., "K"))
    *leading, K = experts.shape
    T = math.prod(leading)
    if K < 1:
        raise ValueError(f"experts: got {check.describe(experts)}, expected [..., K] with K >= 1")
    check_num_slots("experts", T, K)
    P = check.integer("num_destinations", num_destinations, 1, E)
    if E % P:
        raise ValueError(f"num_destinations: got {P}, expected a divisor of {E} experts")
    needed = P * num_rows_needed(T * K, E // P, align_size)
    if num_rows is None and needed >= check.INDEX_LIMIT:
        raise ValueError(
            f"num_rows: got None, which align_size {align_size} and num_destinations {P} make {needed}, expected "
            "fewer than 2^31"
        )
    R = check_num_rows("num_rows", needed if num_rows is None else num_rows, P * max(align_size, 1))
    return _plan(_PlanOptions(E, align_size, R, P), experts)

"""The plan: the gather and scatter indices between assignments and rows grouped by expert.

Sizes: T tokens (all leading dimensions together), K experts per token, E experts, R rows. Slot t*K + k is the
assignment of token t to its k-th expert.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.arrays import flat
from anabranch.jax.binding.eager import compiled
from anabranch.jax.binding.sharding import TokenCall, token_shard_axes
from anabranch.rows import check_num_rows, check_num_slots, check_rows_needed, num_rows_needed


class Plan(NamedTuple):
    """The rows of all assignments: the result of `plan`, an argument of `dispatch` and `combine`.

    Rows of one expert are contiguous, in the order (token, slot); expert e owns group_sizes[e] rows from offsets[e].

    Attributes:
      tokens_per_expert: int32[E]: assignments to every expert, before any dropping.
      group_sizes: int32[E]: rows of every expert, tokens_per_expert rounded up to align_size and clipped to R.
      offsets: int32[E + 1]: the first row of every expert's group, and the end of the last.
      row_of_slot: int32[..., K]: -1 if the assignment has no row.
      slot_of_row: int32[R]: -1 in padding and past the last group.
      dropped: int32[]: assignments that exceed R rows, and indices outside [-1, E).
    """

    tokens_per_expert: jax.Array
    group_sizes: jax.Array
    offsets: jax.Array
    row_of_slot: jax.Array
    slot_of_row: jax.Array
    dropped: jax.Array

    @property
    def expert_of_row(self) -> jax.Array:
        """int32[R]: the expert of every row, -1 in padding and past the last group; computed on access."""
        return _experts_of_rows(self.offsets, self.slot_of_row)


@compiled()
@functools.partial(jnp.vectorize, signature="(n),(r)->(r)")  # also for the plans of a vmap
def _experts_of_rows(offsets: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    rows = jnp.arange(slot_of_row.shape[0], dtype=jnp.int32)
    # If several groups begin at one row, all but the last are empty.
    experts = jnp.searchsorted(offsets[:-1], rows, side="right").astype(jnp.int32) - 1
    return jnp.where(slot_of_row >= 0, experts, -1)


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    num_experts: int
    align_size: int
    num_rows: int
    num_destinations: int


def _plan_whole(options: _PlanOptions, experts: jax.Array) -> Plan:
    """The plan of whole arrays on one device."""
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
    """The begin and end of every expert's group [E], from the number of assignments to each."""
    E, P, R = options.num_experts, options.num_destinations, options.num_rows
    a, region = max(options.align_size, 1), jnp.uint32(R // P)
    counts = counts.astype(jnp.uint32)
    sizes = jnp.minimum((counts + (a - 1)) // a * a, region).reshape(P, E // P)  # an aligned count is below 2^32
    ends = jax.lax.associative_scan(lambda x, y: jnp.minimum(x + y, region), sizes, axis=1)
    begins = jnp.concatenate([jnp.zeros((P, 1), jnp.uint32), ends[:, :-1]], axis=1)
    first = jnp.arange(P, dtype=jnp.uint32)[:, None] * region
    return (first + begins).reshape(E).astype(jnp.int32), (first + ends).reshape(E).astype(jnp.int32)


def _plan_shard(options: _PlanOptions, experts: jax.Array) -> Plan:
    """The plan of all tokens, computed on a shard; replicated results are returned as parts to sum over the shards.

    An expert's rows for one shard follow those for the shards before it, so a shard only needs the others' counts.
    """
    axes = token_shard_axes("experts", experts.shape[:-1])
    if not axes:
        return _plan_whole(options, experts)
    E, R, P = options.num_experts, options.num_rows, options.num_destinations
    shards, index = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
    own = _plan_whole(_PlanOptions(E, 0, experts.size, 1), experts)
    counts = own.tokens_per_expert
    is_own = jnp.arange(shards)[:, None] == index
    shard_counts = jax.lax.psum(jnp.where(is_own, counts, 0), axes)
    before = jnp.sum(jnp.where(jnp.arange(shards)[:, None] < index, shard_counts, 0), axis=0)
    begin, end = _layout(options, jnp.sum(shard_counts, axis=0))

    expert = jnp.clip(experts, 0, E - 1)
    last = (expert // (E // P) + 1) * (R // P)
    rank = own.row_of_slot - own.offsets[expert] + before[expert]
    # begin + rank may exceed 2^31; last - begin does not.
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


# Integers have no gradient, but an ffi_call refuses their empty tangents; a custom_vjp accepts them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plan(options: _PlanOptions, experts: jax.Array) -> Plan:
    t = experts.ndim - 1
    return Plan(*TokenCall(_plan_shard, options, operands=(t,), results=(0, 0, 0, t, 0, 0))(experts))


_plan.defvjp(lambda options, experts: (_plan(options, experts), None), lambda options, _, d_plan: (None,))

_compiled_plan = compiled(static_argnums=(0,))(_plan)


def plan(
    experts: Any, num_experts: int, *, align_size: int = 0, num_rows: int | None = None, num_destinations: int = 1
) -> Plan:
    """Gives every assignment a row: rows are grouped by expert, and within an expert ordered by (token, slot).

    Args:
      experts: int16, int32 or int64 [..., K], K >= 1. -1: no expert. An index outside [-1, E) is treated as -1 and
        counted in `dropped`. An index may be repeated; every assignment has a row of its own.
      num_experts: E.
      align_size: every expert's group of rows is padded to a multiple of it; 0 or 1: no padding.
      num_rows: R, a multiple of align_size. Assignments past it are dropped and counted. Default: the smallest R with
        which no routing drops anything.
      num_destinations: P, a divisor of E. The rows form P regions of R/P, one per destination of an exchange, which
        owns E/P consecutive experts. Their groups start at the region's first row and are clipped to its end. With the
        default R each region can hold all assignments.

    With tokens sharded along their first dimension, this is the plan of all tokens; row_of_slot is sharded like them,
    the other fields are replicated. Inside a jax.shard_map it is the plan of the shard.

    Returns:
      A `Plan` of integer arrays, exact and identical on every run. It has no gradient.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument is out of range, T*K or R reaches 2^31, or tokens are sharded along a dimension other
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
    if num_rows is None:
        check_rows_needed(needed, align_size, P)
    R = needed if num_rows is None else check_num_rows("num_rows", num_rows, align_size, P)
    return _compiled_plan(_PlanOptions(E, align_size, R, P), experts)

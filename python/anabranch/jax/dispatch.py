"""Plan, dispatch, combine: from the experts of every token to rows that stand together by expert, and back.

Sizes: T tokens (all leading dimensions together), K experts a token, E experts, D width, R rows. Slot t*K + k is the
k-th expert of token t.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax import _check, _ffi
from anabranch.jax._sharding import TokenCall, axes_of_shard, vary_alike

ANY_DTYPE = (*_check.FLOATS, "bool", "uint8", *_check.INDICES)
_INDEX_LIMIT = 2**31


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


class CombineGradients(NamedTuple):
    """What `combine_backward` returns."""

    rows: jax.Array
    """[R, D], dtype of the combined rows."""
    weights: jax.Array | None
    """[..., K], dtype of the weights; None without weights."""


def num_rows_needed(num_slots: int, num_experts: int, align_size: int = 0) -> int:
    """Rows that hold every slot whatever the routing: floor((N + min(E, N) (a - 1)) / a) a, a = max(align_size, 1)."""
    a = max(align_size, 1)
    return (num_slots + min(num_experts, num_slots) * (a - 1)) // a * a


def flat(array: jax.Array) -> jax.Array:
    """[..., n] as [T, n], also where T is 0."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def as_int32(indices: jax.Array, low: int, high: int) -> jax.Array:
    """Integers as int32; wider ones are first clipped to [low, high], so that none wraps around into range."""
    if indices.dtype == jnp.int64:
        indices = jnp.clip(indices, low, high)
    return indices.astype(jnp.int32)


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], 0 where the index is out of range."""
    if values.size == 0:  # which a gather refuses
        return jnp.zeros(index.shape, values.dtype)
    return jnp.asarray(values).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def check_num_slots(name: str, num_tokens: int, slots_per_token: int) -> None:
    """Raises ValueError unless there are fewer than 2^31 slots."""
    if num_tokens * slots_per_token >= _INDEX_LIMIT:
        raise ValueError(f"{name}: got {num_tokens} x {slots_per_token} slots, expected fewer than 2^31")


def check_num_rows(name: str, num_rows: Any, align_size: int) -> int:
    """Returns a number of rows that is a multiple of align_size and below 2^31."""
    num_rows = _check.integer(name, num_rows, 0, _INDEX_LIMIT - 1)
    if num_rows % max(align_size, 1):
        raise ValueError(f"{name}: got {num_rows}, expected a multiple of align_size {align_size}")
    return num_rows


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
    results = _ffi.call(
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
        workspace=_ffi.plan_workspace(slots.size, E),
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

    >>> p = plan(jnp.array([[1], [0], [1]], jnp.int32), 2)
    >>> p.row_of_slot.ravel().tolist(), p.offsets.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    E = _check.integer("num_experts", num_experts, 1, _INDEX_LIMIT - 1)
    align_size = _check.integer("align_size", align_size, 0, _INDEX_LIMIT - 1)
    experts = _check.array("experts", experts, _check.INDICES, (..., "K"))
    *leading, K = experts.shape
    T = math.prod(leading)
    if K < 1:
        raise ValueError(f"experts: got {_check.describe(experts)}, expected [..., K] with K >= 1")
    check_num_slots("experts", T, K)
    P = _check.integer("num_destinations", num_destinations, 1, E)
    if E % P:
        raise ValueError(f"num_destinations: got {P}, expected a divisor of {E} experts")
    needed = P * num_rows_needed(T * K, E // P, align_size)
    R = check_num_rows("num_rows", needed if num_rows is None else num_rows, P * max(align_size, 1))
    return _plan(_PlanOptions(E, align_size, R, P), as_int32(experts, -2, E))


# ---------------------------------------------------------------- rules on flat maps: row_of_slot [T, K]


def spread(x: jax.Array, row_of_slot: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    """rows[row_of_slot[t, k]] = x[t], zero elsewhere. x [T, D] -> [R, D] of the same dtype."""
    (R,), D = slot_of_row.shape, x.shape[1]
    operands = {"x": x, "row_of_slot": row_of_slot, "slot_of_row": slot_of_row}
    return _ffi.call("ab_xla_dispatch", operands, {"rows": jax.ShapeDtypeStruct((R, D), x.dtype)})["rows"]


def gather_sum(
    rows: jax.Array,
    row_of_slot: jax.Array,
    weights: jax.Array | None,
    dtype: Any,
    addend: jax.Array | None = None,
) -> jax.Array:
    """out[t] = sum_k weights[t, k] rows[row_of_slot[t, k]] + addend[t], in float32. rows [R, D] -> [T, D] of `dtype`.

    The addend, [T, D] of any float dtype, is added last; then the sum is rounded once.
    """
    out = jax.ShapeDtypeStruct((row_of_slot.shape[0], rows.shape[1]), dtype)
    operands = {"rows": rows, "row_of_slot": row_of_slot, "weights": weights, "addend": addend}
    return _ffi.call("ab_xla_combine", operands, {"out": out})["out"]


def gather_sum_backward(
    d_out: jax.Array,
    rows: jax.Array | None,
    row_of_slot: jax.Array,
    slot_of_row: jax.Array,
    weights: jax.Array | None,
    dtype: Any,
) -> CombineGradients:
    """The gradients of `gather_sum`: of the rows, in `dtype`, and of the weights; `rows` is needed for these only."""
    d_rows = jax.ShapeDtypeStruct((slot_of_row.shape[0], d_out.shape[1]), dtype)
    results = _ffi.call(
        "ab_xla_combine_backward",
        {
            "d_out": d_out,
            "rows": rows if weights is not None else None,
            "row_of_slot": row_of_slot,
            "slot_of_row": slot_of_row,
            "weights": weights,
        },
        {
            "d_rows": d_rows,
            "d_weights": None if weights is None else jax.ShapeDtypeStruct(weights.shape, weights.dtype),
        },
    )
    return CombineGradients(results["d_rows"], results["d_weights"])


# ---------------------------------------------------------------- dispatch


_WHOLE_ROWS = "{name}: got {{got}}, expected whole rows, since those of a token stand anywhere among them"


def _own_slots(name: str, row_of_slot: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    """slot_of_row in the slots of a shard of tokens; -1 for those of others."""
    axes = axes_of_shard(name, row_of_slot.shape[:-1])
    if not axes:
        return slot_of_row
    own = slot_of_row - jax.lax.axis_index(axes) * row_of_slot.size
    return jnp.where((slot_of_row >= 0) & (own >= 0) & (own < row_of_slot.size), own, -1)


def _spread_shard(_: None, x: jax.Array, row_of_slot: jax.Array, slot_of_row: jax.Array) -> tuple[jax.Array]:
    return (spread(flat(x), flat(row_of_slot), _own_slots("x", row_of_slot, slot_of_row)),)


def dispatch_forward(x: jax.Array, plan: Plan) -> jax.Array:
    """rows [R, D] from x [..., D]; needs nothing but the plan for its backward pass."""
    t = x.ndim - 1
    call = TokenCall(_spread_shard, None, (t, t, 0), (0,), _WHOLE_ROWS.format(name="dispatch"))
    return call(x, plan.row_of_slot, plan.slot_of_row)[0]


def _gather_sum_shard(
    dtype: Any, row_of_slot: jax.Array, rows: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array]:
    out = gather_sum(rows, flat(row_of_slot), None if weights is None else flat(weights), dtype)
    return (out.reshape(*row_of_slot.shape[:-1], out.shape[1]),)


def dispatch_backward(d_rows: jax.Array, plan: Plan, dtype: Any) -> jax.Array:
    """d_x[t] = sum_k d_rows[row(t, k)], in float32, k ascending. d_rows [R, D] of any float -> [..., D] of `dtype`."""
    t = plan.row_of_slot.ndim - 1
    call = TokenCall(_gather_sum_shard, jnp.dtype(dtype), (t, 0, t), (t,), _WHOLE_ROWS.format(name="dispatch backward"))
    return call(plan.row_of_slot, d_rows, None)[0]


@dataclasses.dataclass(frozen=True)
class _Options:
    dtype: str  # of the differentiated input


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(options: _Options, x: jax.Array, plan: Plan) -> jax.Array:
    return dispatch_forward(x, plan)


def _dispatch_fwd(options: _Options, x: jax.Array, plan: Plan) -> tuple[jax.Array, Plan]:
    return dispatch_forward(x, plan), plan


def _dispatch_bwd(options: _Options, plan: Plan, d_rows: jax.Array) -> tuple[jax.Array | None, None]:
    if options.dtype not in _check.FLOATS:
        return None, None
    return dispatch_backward(d_rows, plan, options.dtype), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {_check.describe(plan)}, expected a Plan")
    row_of_slot = _check.array("plan.row_of_slot", plan.row_of_slot, ("int32",), (..., "K"))
    if row_of_slot.shape[-1] < 1:
        raise ValueError(f"plan.row_of_slot: got {_check.describe(row_of_slot)}, expected [..., K] with K >= 1")
    slot_of_row = _check.array("plan.slot_of_row", plan.slot_of_row, ("int32",), ("R",))
    check_num_slots("plan.row_of_slot", math.prod(row_of_slot.shape[:-1]), row_of_slot.shape[-1])
    check_num_rows("plan.slot_of_row", slot_of_row.shape[0], 0)


def dispatch(x: Any, plan: Plan) -> jax.Array:
    """Copies every token to the rows of its slots: rows[row_of_slot[t, k]] = x[t].

    Args:
      x: [..., D] with the leading dimensions of plan.row_of_slot; float32, bfloat16, float16, or without a gradient
        bool, uint8, int16, int32, int64.
      plan: from `plan`.

    Sharded tokens: rows are those of all tokens, whole on every device, by a sum of [R, D] over the shards.

    Returns:
      rows [R, D], dtype of x. Rows without a slot are zero.

    Gradient: d_x[t] = sum over k of d_rows[row(t, k)], added in float32, k ascending.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: x does not have the plan's leading dimensions, or tokens are sharded as in `plan`'s errors.

    >>> p = plan(jnp.array([[1], [0]], jnp.int32), 2)
    >>> dispatch(jnp.array([[1.0], [2.0]]), p).ravel().tolist()
    [2.0, 1.0]
    """
    _check_plan(plan)
    x = _check.array("x", x, ANY_DTYPE, (*plan.row_of_slot.shape[:-1], "D"))
    x, *maps = vary_alike(x, *plan)
    return _dispatch(_Options(str(x.dtype)), x, Plan(*maps))


# ---------------------------------------------------------------- combine


def combine_forward(rows: jax.Array, plan: Plan, weights: jax.Array | None) -> jax.Array:
    """out [..., D] from rows [R, D]; the backward pass needs the plan and, with weights, the weights and rows."""
    t = plan.row_of_slot.ndim - 1
    call = TokenCall(_gather_sum_shard, rows.dtype, (t, 0, t), (t,), _WHOLE_ROWS.format(name="combine"))
    return call(plan.row_of_slot, rows, weights)[0]


def _gather_sum_backward_shard(
    dtype: Any,
    row_of_slot: jax.Array,
    d_out: jax.Array,
    rows: jax.Array | None,
    slot_of_row: jax.Array,
    weights: jax.Array | None,
) -> tuple[jax.Array, ...]:
    own = _own_slots("weights", row_of_slot, slot_of_row)
    w = None if weights is None else flat(weights)
    gradients = gather_sum_backward(flat(d_out), rows, flat(row_of_slot), own, w, dtype)
    if gradients.weights is None:
        return (gradients.rows,)
    return gradients.rows, gradients.weights.reshape(row_of_slot.shape)


def combine_backward(
    d_out: jax.Array, rows: jax.Array | None, plan: Plan, weights: jax.Array | None, dtype: Any
) -> CombineGradients:
    """d_rows[row] = w[t, k] d_out[t] and d_w[t, k] = <d_out[t], rows[row]>; zero where there is no slot or no row.

    d_out [..., D] of any float; rows [R, D], needed with weights only; d_rows comes in `dtype`, d_w as the weights.
    """
    t = plan.row_of_slot.ndim - 1
    results = (0,) if weights is None else (0, t)
    name = _WHOLE_ROWS.format(name="combine backward")
    call = TokenCall(_gather_sum_backward_shard, jnp.dtype(dtype), (t, t, 0, 0, t), results, name)
    d_rows, *d_weights = call(plan.row_of_slot, d_out, rows, plan.slot_of_row, weights)
    return CombineGradients(d_rows, d_weights[0] if d_weights else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(options: _Options, rows: jax.Array, plan: Plan, weights: jax.Array | None) -> jax.Array:
    return combine_forward(rows, plan, weights)


class _CombineResiduals(NamedTuple):
    rows: jax.Array | None
    plan: Plan
    weights: jax.Array | None


def _combine_fwd(
    options: _Options, rows: jax.Array, plan: Plan, weights: jax.Array | None
) -> tuple[jax.Array, _CombineResiduals]:
    residuals = _CombineResiduals(None if weights is None else rows, plan, weights)
    return combine_forward(rows, plan, weights), residuals


def _combine_bwd(
    options: _Options, residuals: _CombineResiduals, d_out: jax.Array
) -> tuple[jax.Array, None, jax.Array | None]:
    gradients = combine_backward(d_out, residuals.rows, residuals.plan, residuals.weights, options.dtype)
    return gradients.rows, None, gradients.weights


_combine.defvjp(_combine_fwd, _combine_bwd)


def combine(rows: Any, plan: Plan, weights: Any = None) -> jax.Array:
    """Brings the rows of every token together: out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]].

    Args:
      rows: [R, D] float32, bfloat16 or float16.
      plan: from `plan`.
      weights: float32, bfloat16 or float16, of the shape of plan.row_of_slot, [..., K]; None: ones.

    Sharded tokens: out is sharded like the plan; rows are whole, and so is their gradient, a sum over the shards.

    Returns:
      out [..., D], dtype of rows, added in float32, k ascending. Slots without a row are skipped, never multiplied.

    Gradient: d_rows[row] = w[t, k] d_out[t], zero in rows without a slot; d_w[t, k] = <d_out[t], rows[row]>, also where
    w is 0, zero in slots without a row.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: rows or weights do not fit the plan, or rows are sharded.

    >>> p = plan(jnp.array([[1, 0]], jnp.int32), 2)
    >>> combine(jnp.array([[10.0], [20.0]]), p, jnp.array([[0.5, 0.25]])).tolist()
    [[12.5]]
    """
    _check_plan(plan)
    rows = _check.array("rows", rows, _check.FLOATS, (("R", plan.slot_of_row.shape[0]), "D"))
    weights = _check.optional_array("weights", weights, _check.FLOATS, plan.row_of_slot.shape)
    rows, weights, *maps = vary_alike(rows, weights, *plan)
    return _combine(_Options(str(rows.dtype)), rows, Plan(*maps), weights)

"""Dispatch and combine: gathers tokens into rows grouped by expert, and sums rows back into tokens.

Sizes: T tokens (all leading dimensions together), K experts per token, E experts, D width, R rows. Slot t*K + k is the
assignment of token t to its k-th expert.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi
from anabranch.jax.binding.arrays import flat
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import TokenCall, check_whole, token_shard_axes, vary_alike
from anabranch.jax.ops.plan import Plan
from anabranch.rows import check_num_rows, check_num_slots

ANY_DTYPE = (*check.FLOATS, "bool", "uint8", *check.INDICES)


class CombineGradients(NamedTuple):
    """The result of `combine_backward`."""

    rows: jax.Array
    """[R, D], dtype of the combined rows."""
    weights: jax.Array | None
    """[..., K], dtype of the weights; None without weights."""


# ---------------------------------------------------------------- rules on one device: x [T, D], row_of_slot [T, K]


def spread(x: jax.Array, row_of_slot: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    """rows[row_of_slot[t, k]] = x[t], zero in other rows. x [T, D] -> [R, D] of the same dtype."""
    (R,), D = slot_of_row.shape, x.shape[1]
    operands = {"x": x, "row_of_slot": row_of_slot, "slot_of_row": slot_of_row}
    return ffi.call("ab_xla_dispatch", operands, {"rows": jax.ShapeDtypeStruct((R, D), x.dtype)})["rows"]


def gather_sum(
    rows: jax.Array,
    row_of_slot: jax.Array,
    weights: jax.Array | None,
    dtype: Any,
    addend: jax.Array | None = None,
) -> jax.Array:
    """out[t] = sum_k weights[t, k] rows[row_of_slot[t, k]] + addend[t], in float32. rows [R, D] -> [T, D] of `dtype`.

    The addend, [T, D] of any float dtype, is added last; the sum is then rounded once.
    """
    out = jax.ShapeDtypeStruct((row_of_slot.shape[0], rows.shape[1]), dtype)
    operands = {"rows": rows, "row_of_slot": row_of_slot, "weights": weights, "addend": addend}
    return ffi.call("ab_xla_combine", operands, {"out": out})["out"]


def gather_sum_backward(
    d_out: jax.Array,
    rows: jax.Array | None,
    row_of_slot: jax.Array,
    slot_of_row: jax.Array,
    weights: jax.Array | None,
    dtype: Any,
) -> CombineGradients:
    """The gradients of `gather_sum`: of the rows, in `dtype`, and of the weights, which alone need `rows`."""
    d_rows = jax.ShapeDtypeStruct((slot_of_row.shape[0], d_out.shape[1]), dtype)
    results = ffi.call(
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


_WHOLE_ROWS = "{name}: got {{got}}, expected whole rows, since a token's rows may be anywhere"


def _own_slots(name: str, row_of_slot: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    """slot_of_row relative to a shard of tokens; -1 for assignments of other shards."""
    axes = token_shard_axes(name, row_of_slot.shape[:-1])
    if not axes:
        return slot_of_row
    own = slot_of_row - jax.lax.axis_index(axes) * row_of_slot.size
    return jnp.where((slot_of_row >= 0) & (own >= 0) & (own < row_of_slot.size), own, -1)


def _spread_shard(_: None, x: jax.Array, row_of_slot: jax.Array, slot_of_row: jax.Array) -> tuple[jax.Array]:
    return (spread(flat(x), flat(row_of_slot), _own_slots("x", row_of_slot, slot_of_row)),)


def dispatch_forward(x: jax.Array, plan: Plan) -> jax.Array:
    """rows [R, D] from x [..., D]; the backward pass needs only the plan."""
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
    dtype: str  # dtype of the differentiated input


@reverse_mode("dispatch", nondiff_argnums=(0,))
def _dispatch(options: _Options, x: jax.Array, plan: Plan) -> jax.Array:
    return dispatch_forward(x, plan)


def _dispatch_fwd(options: _Options, x: jax.Array, plan: Plan) -> tuple[jax.Array, Plan]:
    return dispatch_forward(x, plan), plan


def _dispatch_bwd(options: _Options, plan: Plan, d_rows: jax.Array) -> tuple[jax.Array | None, None]:
    if options.dtype not in check.FLOATS:
        return None, None
    return dispatch_backward(d_rows, plan, options.dtype), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {check.describe(plan)}, expected a Plan")
    row_of_slot = check.array("plan.row_of_slot", plan.row_of_slot, ("int32",), (..., "K"))
    if row_of_slot.shape[-1] < 1:
        raise ValueError(f"plan.row_of_slot: got {check.describe(row_of_slot)}, expected [..., K] with K >= 1")
    slot_of_row = check.array("plan.slot_of_row", plan.slot_of_row, ("int32",), ("R",))
    check_num_slots("plan.row_of_slot", math.prod(row_of_slot.shape[:-1]), row_of_slot.shape[-1])
    check_num_rows("plan.slot_of_row", slot_of_row.shape[0], 0)


def dispatch(x: Any, plan: Plan) -> jax.Array:
    """Copies every token to the rows of its assignments: rows[row_of_slot[t, k]] = x[t].

    Args:
      x: [..., D] with the leading dimensions of plan.row_of_slot; float32, bfloat16, float16, or without a gradient
        bool, uint8, int16, int32, int64.
      plan: from `plan`.

    With sharded tokens, the result contains the rows of all tokens and is replicated: it is a sum over the shards.

    Returns:
      rows [R, D], dtype of x. Rows without an assignment are zero.

    Gradient: d_x[t] = sum over k of d_rows[row(t, k)], accumulated in float32, k ascending.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: x does not have the plan's leading dimensions, or tokens are sharded as in `plan`'s errors.

    Source: semantics, section 5.

    >>> from anabranch.jax import plan
    >>> p = plan(jnp.array([[1], [0]], jnp.int32), 2)
    >>> dispatch(jnp.array([[1.0], [2.0]]), p).ravel().tolist()
    [2.0, 1.0]
    """
    _check_plan(plan)
    x = check.array("x", x, ANY_DTYPE, (*plan.row_of_slot.shape[:-1], "D"))
    x, *maps = vary_alike(x, *plan)
    return _dispatch(_Options(str(x.dtype)), x, Plan(*maps))


# ---------------------------------------------------------------- combine


def combine_forward(rows: jax.Array, plan: Plan, weights: jax.Array | None) -> jax.Array:
    """out [..., D] from rows [R, D]; the backward pass needs the plan, and with weights also weights and rows."""
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
    """d_rows[row] = w[t, k] d_out[t] and d_w[t, k] = <d_out[t], rows[row]>; zero without an assignment or row.

    d_out [..., D] of any float dtype; rows [R, D], needed with weights only; d_rows has `dtype`, d_w that of weights.
    """
    t = plan.row_of_slot.ndim - 1
    results = (0,) if weights is None else (0, t)
    name = _WHOLE_ROWS.format(name="combine backward")
    call = TokenCall(_gather_sum_backward_shard, jnp.dtype(dtype), (t, t, 0, 0, t), results, name)
    d_rows, *d_weights = call(plan.row_of_slot, d_out, rows, plan.slot_of_row, weights)
    return CombineGradients(d_rows, d_weights[0] if d_weights else None)


@reverse_mode("combine", nondiff_argnums=(0,))
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
    """Sums the rows of every token: out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]].

    Args:
      rows: [R, D] float32, bfloat16 or float16.
      plan: from `plan`.
      weights: float32, bfloat16 or float16, with the shape of plan.row_of_slot, [..., K]; None: ones.

    With sharded tokens, out is sharded like the plan. Rows are replicated, and so is their gradient, a sum over shards.

    Returns:
      out [..., D], dtype of rows, accumulated in float32, k ascending. Assignments without a row are skipped.

    Gradient: d_rows[row] = w[t, k] d_out[t], zero in rows without an assignment; d_w[t, k] = <d_out[t], rows[row]>,
    also if w is 0, and zero for assignments without a row.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: rows or weights do not fit the plan, or rows are sharded.

    Source: semantics, section 5.

    >>> from anabranch.jax import plan
    >>> p = plan(jnp.array([[1, 0]], jnp.int32), 2)
    >>> combine(jnp.array([[10.0], [20.0]]), p, jnp.array([[0.5, 0.25]])).tolist()
    [[12.5]]
    """
    _check_plan(plan)
    rows = check.array("rows", rows, check.FLOATS, (("R", plan.slot_of_row.shape[0]), "D"))
    weights = check.optional_array("weights", weights, check.FLOATS, plan.row_of_slot.shape)
    check_whole("combine", rows=rows)
    rows, weights, *maps = vary_alike(rows, weights, *plan)
    return _combine(_Options(str(rows.dtype)), rows, Plan(*maps), weights)

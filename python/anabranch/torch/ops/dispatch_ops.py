"""Operations on rows: plan, dispatch, combine and chunk sort."""

import torch

from anabranch.torch.binding import calls
from anabranch.torch.binding.define import define


def _allocate_plan(experts, num_experts, rows, align_size, num_destinations):
    empty = experts.new_empty
    sizes = ((num_experts,), (num_experts,), (num_experts + 1,), experts.shape, (rows,), ())
    return tuple(empty(size, dtype=torch.int32) for size in sizes)


def plan_calls(results, experts, num_experts, rows, align_size, num_destinations):
    """The C call of `plan`."""
    names = ("tokens_per_expert", "group_sizes", "offsets", "row_of_slot", "slot_of_row", "dropped")
    return calls.plan(
        {"experts": experts, **dict(zip(names, results, strict=True))},
        num_experts=num_experts,
        align_size=align_size,
        num_destinations=num_destinations,
    )


plan = define(
    "plan(Tensor experts, int num_experts, SymInt rows, int align_size, int num_destinations) -> "
    "(Tensor tokens_per_expert, Tensor group_sizes, Tensor offsets, Tensor row_of_slot, Tensor slot_of_row, "
    "Tensor dropped)",
    _allocate_plan,
    plan_calls,
)


def _allocate_plan_of_map(routing_map, rows, align_size):
    T, E = routing_map.shape
    return tuple(routing_map.new_empty(size, dtype=torch.int32) for size in ((E,), (T, E), (rows,), (T, 2 * E + 1)))


def _plan_of_map(results, routing_map, rows, align_size):
    names = ("tokens_per_expert", "row_of_slot", "slot_of_row", "row_id_map")
    return calls.plan(
        {"routing_map": routing_map, **dict(zip(names, results, strict=True))},
        num_experts=routing_map.shape[1],
        align_size=align_size,
        num_destinations=1,
    )


#: The plan of a bool map [T, E]; every true entry is a slot.
plan_of_map = define(
    "plan_of_map(Tensor routing_map, SymInt rows, int align_size) -> "
    "(Tensor tokens_per_expert, Tensor row_of_slot, Tensor slot_of_row, Tensor row_id_map)",
    _allocate_plan_of_map,
    _plan_of_map,
)


def _expand_row_id_map(results, row_id_map, pad_offsets, rows):
    row_of_slot, slot_of_row = results
    tensors = {"row_id_map": row_id_map, "pad_offsets": pad_offsets}
    return calls.expand_row_id_map(tensors | {"row_of_slot": row_of_slot, "slot_of_row": slot_of_row})


#: Gather and scatter indices from a row_id_map [T, 2E+1]; slots are all pairs (token, expert).
expand_row_id_map = define(
    "expand_row_id_map(Tensor row_id_map, Tensor? pad_offsets, SymInt rows) -> "
    "(Tensor row_of_slot, Tensor slot_of_row)",
    lambda row_id_map, pad_offsets, rows: (
        row_id_map.new_empty((row_id_map.shape[0], row_id_map.shape[1] // 2)),
        row_id_map.new_empty((rows,)),
    ),
    _expand_row_id_map,
)


def _dispatch(rows, x, row_of_slot, slot_of_row, weights):
    return calls.dispatch(
        {"x": x, "row_of_slot": row_of_slot, "slot_of_row": slot_of_row, "weights": weights, "rows": rows}
    )


dispatch = define(
    "dispatch(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor? weights) -> Tensor",
    lambda x, row_of_slot, slot_of_row, weights: x.new_empty((slot_of_row.shape[0], x.shape[1])),
    _dispatch,
)


def _combine(out, rows, row_of_slot, weights, addend, dtype):
    return calls.combine({"rows": rows, "row_of_slot": row_of_slot, "weights": weights, "out": out, "addend": addend})


combine = define(
    "combine(Tensor rows, Tensor row_of_slot, Tensor? weights, Tensor? addend, ScalarType dtype) -> Tensor",
    lambda rows, row_of_slot, weights, addend, dtype: rows.new_empty(
        (row_of_slot.shape[0], rows.shape[1]), dtype=dtype
    ),
    _combine,
)


def _allocate_combine_backward(d_out, rows, row_of_slot, slot_of_row, weights, rows_dtype, needs_weights):
    d_rows = d_out.new_empty((slot_of_row.shape[0], d_out.shape[1]), dtype=rows_dtype)
    return d_rows, d_out.new_empty(row_of_slot.shape if needs_weights else (0,), dtype=torch.float32)


def _combine_backward(results, d_out, rows, row_of_slot, slot_of_row, weights, rows_dtype, needs_weights):
    d_rows, d_weights = results
    return calls.combine_backward(
        {
            "d_out": d_out,
            "rows": rows if needs_weights else None,
            "row_of_slot": row_of_slot,
            "slot_of_row": slot_of_row,
            "weights": weights,
            "d_rows": d_rows,
            "d_weights": d_weights if needs_weights else None,
        }
    )


#: The gradients of rows, in rows_dtype, and of weights, in float32; [0] if not requested.
combine_backward = define(
    "combine_backward(Tensor d_out, Tensor? rows, Tensor row_of_slot, Tensor slot_of_row, Tensor? weights, "
    "ScalarType rows_dtype, bool needs_weights) -> (Tensor d_rows, Tensor d_weights)",
    _allocate_combine_backward,
    _combine_backward,
)


def _sort_chunks(results, x, split_sizes, sorted_indices, inverse):
    out, row_id_map = results
    tensors = {"x": x, "split_sizes": split_sizes, "sorted_indices": sorted_indices, "out": out}
    return calls.sort_chunks(tensors | {"row_id_map": row_id_map}, inverse=inverse)


sort_chunks = define(
    "sort_chunks(Tensor x, Tensor split_sizes, Tensor sorted_indices, bool inverse) -> (Tensor out, Tensor row_id_map)",
    lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.int32)),
    _sort_chunks,
)

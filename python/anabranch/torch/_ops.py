"""The operations as torch knows them, `torch.ops.anabranch.*`: functional, of fixed arity, without gradients.

An operation is an allocation of its results, from shapes and options alone, and a call that fills them. The allocation
by itself is what torch.compile traces. What differentiates stands outside, in autograd functions that call these.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.torch import _calls

_ops = torch.library.Library("anabranch", "DEF")

_LAYOUT_FIELDS = ("w_in", "d_w_in", "w_out", "d_w_out", "h", "dh", "b_in", "d_b_in")


def _define(schema: str, allocate: Callable[..., Any], fill: Callable[..., None]) -> Any:
    """Registers an operation: `allocate(*arguments)` makes its results, `fill(results, *arguments)` computes them."""
    name = schema.split("(")[0]

    def run(*arguments: Any) -> Any:
        inputs = [a.contiguous() if isinstance(a, Tensor) else a for a in arguments]
        results = allocate(*inputs)
        fill(results, *inputs)
        return results

    _ops.define(schema)
    for key in ("CPU", "CUDA"):
        _ops.impl(name, run, key)
    torch.library.register_fake(f"anabranch::{name}", allocate, lib=_ops)
    return getattr(torch.ops.anabranch, name).default


@functools.cache
def _orders(w_in: str, w_out: str) -> dict[str, tuple[int, ...]] | None:
    """Of all tensors that are not in our own layouts, for the calls."""
    layouts = Layouts(w_in, w_out)
    orders = {name: layouts.order(name) for name in _LAYOUT_FIELDS}
    return {name: order for name, order in orders.items() if list(order) != sorted(order)} or None


@functools.cache
def _axes(layout: str) -> tuple[int, ...]:
    """The axes of w_in that E, D, P and F are."""
    return Layouts(layout).order("w_in")


def _sizes(w_in: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(E, D, P, F) of w_in."""
    E, D, P, F = (w_in.shape[axis] for axis in _axes(layout))
    return E, D, P, F


def _hidden(w_in_layout: str, R: int, P: int, F: int) -> tuple[int, int, int]:
    """The shape of h."""
    axes = _axes(w_in_layout)
    return (R, P, F) if axes[2] < axes[3] else (R, F, P)


# ---------------------------------------------------------------- router

_ROUTING = "int topk, int score_function, bool normalize, float scaling_factor"


def _allocate_route(
    logits, expert_bias, token_mask, forced_experts, qb_bin_bounds,
    topk, score_function, normalize, scaling_factor, num_groups, group_topk, group_score_topk, sequences, qb_bins,
):  # fmt: skip
    (T, E), empty = logits.shape, logits.new_empty
    stats = (sequences, E) if sequences >= 0 else (E,)
    return (
        empty((T, topk), dtype=torch.float32),
        empty((T, topk), dtype=torch.int32),
        empty(stats, dtype=torch.int32),
        empty(stats, dtype=torch.float32),
        empty((T,), dtype=torch.float32),
        empty((E, qb_bins), dtype=torch.int32),
    )


def _route(
    results, logits, expert_bias, token_mask, forced_experts, qb_bin_bounds,
    topk, score_function, normalize, scaling_factor, num_groups, group_topk, group_score_topk, sequences, qb_bins,
):  # fmt: skip
    weights, experts, tokens_per_expert, score_sum, lse, histogram = results
    _calls.router_forward(
        {
            "logits": logits,
            "expert_bias": expert_bias,
            "token_mask": token_mask,
            "forced_experts": forced_experts,
            "weights": weights,
            "experts": experts,
            "tokens_per_expert": tokens_per_expert,
            "score_sum": score_sum,
            "lse": lse,
            "qb_bin_bounds": qb_bin_bounds,
            "qb_histogram": histogram if qb_bins else None,
        },
        topk=topk,
        score_function=score_function,
        normalize=normalize,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        group_score_topk=group_score_topk,
    )


#: Statistics are [E], with sequences >= 0 [sequences, E]; the histogram is [E, qb_bins].
route = _define(
    "route(Tensor logits, Tensor? expert_bias, Tensor? token_mask, Tensor? forced_experts, Tensor? qb_bin_bounds, "
    f"{_ROUTING}, int num_groups, int group_topk, int group_score_topk, SymInt sequences, int qb_bins) -> "
    "(Tensor weights, Tensor experts, Tensor tokens_per_expert, Tensor score_sum, Tensor lse, Tensor qb_histogram)",
    _allocate_route,
    _route,
)


def _route_backward(
    d_logits, logits, experts, token_mask, lse, d_weights, d_score_sum, d_lse,
    topk, score_function, normalize, scaling_factor,
):  # fmt: skip
    _calls.router_backward(
        {
            "logits": logits,
            "experts": experts,
            "token_mask": token_mask,
            "lse": lse,
            "d_weights": d_weights,
            "d_score_sum": d_score_sum,
            "d_lse": d_lse,
            "d_logits": d_logits,
        },
        topk=topk,
        score_function=score_function,
        normalize=normalize,
        scaling_factor=scaling_factor,
    )


route_backward = _define(
    "route_backward(Tensor logits, Tensor? experts, Tensor? token_mask, Tensor? lse, Tensor? d_weights, "
    f"Tensor? d_score_sum, Tensor? d_lse, {_ROUTING}) -> Tensor",
    lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    _route_backward,
)


def _allocate_map(logits, map_format):
    T, E = logits.shape
    shape = {"bytemap": (T, E), "bitmap_u8": (T, -(-E // 8)), "": (0,)}[map_format]
    return logits.new_empty(shape, dtype=torch.uint8 if map_format == "bitmap_u8" else torch.bool)


def _allocate_route_dense(
    logits, expert_bias, qb_bin_bounds,
    topk, score_function, normalize, scaling_factor, num_groups, group_topk, map_format, qb_bins,
):  # fmt: skip
    (T, E), empty = logits.shape, logits.new_empty
    return (
        empty((T, E)),
        _allocate_map(logits, map_format),
        empty((T, topk), dtype=torch.int32),
        empty((E, qb_bins), dtype=torch.int32),
    )


def _route_dense(
    results, logits, expert_bias, qb_bin_bounds,
    topk, score_function, normalize, scaling_factor, num_groups, group_topk, map_format, qb_bins,
):  # fmt: skip
    probs, routing_map, experts, histogram = results
    _calls.router_forward(
        {
            "logits": logits,
            "expert_bias": expert_bias,
            "experts": experts,
            "probs": probs,
            "routing_map": routing_map if map_format else None,
            "qb_bin_bounds": qb_bin_bounds,
            "qb_histogram": histogram if qb_bins else None,
        },
        topk=topk,
        score_function=score_function,
        normalize=normalize,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
    )


#: Probabilities [T, E], the map in a RoutingMapFormat by its name ("": none, [0]), experts [T, K], and the histogram.
route_dense = _define(
    f"route_dense(Tensor logits, Tensor? expert_bias, Tensor? qb_bin_bounds, {_ROUTING}, int num_groups, "
    "int group_topk, str map_format, int qb_bins) -> "
    "(Tensor probs, Tensor routing_map, Tensor experts, Tensor qb_histogram)",
    _allocate_route_dense,
    _route_dense,
)


def _route_dense_backward(d_logits, logits, experts, d_probs, topk, score_function, normalize, scaling_factor):
    _calls.router_backward(
        {"logits": logits, "experts": experts, "d_probs": d_probs, "d_logits": d_logits},
        topk=topk,
        score_function=score_function,
        normalize=normalize,
        scaling_factor=scaling_factor,
    )


route_dense_backward = _define(
    f"route_dense_backward(Tensor logits, Tensor experts, Tensor d_probs, {_ROUTING}) -> Tensor",
    lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    _route_dense_backward,
)


def _aux_scores(results, logits, topk, score_function, map_format):
    scores, routing_map = results
    _calls.router_forward(
        {"logits": logits, "aux_scores": scores, "routing_map": routing_map},
        topk=topk,
        score_function=score_function,
        normalize=1,
        scaling_factor=1.0,
    )


#: Auxiliary scores [T, E], float32, and the map of the topk best logits.
aux_scores = _define(
    "aux_scores(Tensor logits, int topk, int score_function, str map_format) -> (Tensor scores, Tensor routing_map)",
    lambda logits, topk, score_function, map_format: (
        logits.new_empty(logits.shape, dtype=torch.float32),
        _allocate_map(logits, map_format),
    ),
    _aux_scores,
)


def _aux_scores_backward(d_logits, logits, d_scores, score_function):
    _calls.router_backward(
        {"logits": logits, "d_aux_scores": d_scores, "d_logits": d_logits},
        topk=1,
        score_function=score_function,
        normalize=1,
        scaling_factor=1.0,
    )


aux_scores_backward = _define(
    "aux_scores_backward(Tensor logits, Tensor d_scores, int score_function) -> Tensor",
    lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    _aux_scores_backward,
)


def _moe_aux_loss(loss, probs, tokens_per_expert, num_tokens, topk, num_experts, coeff):
    _calls.moe_aux_loss(
        {"probs": probs, "tokens_per_expert": tokens_per_expert, "num_tokens": num_tokens, "loss": loss},
        topk=topk,
        num_experts=num_experts,
        coeff=coeff,
    )


moe_aux_loss = _define(
    "moe_aux_loss(Tensor probs, Tensor tokens_per_expert, Tensor num_tokens, int topk, int num_experts, float coeff) "
    "-> Tensor",
    lambda probs, *_: probs.new_empty((), dtype=torch.float32),
    _moe_aux_loss,
)


def _moe_aux_loss_backward(
    d_probs, d_loss, tokens_per_expert, num_tokens, rows, dtype, topk, num_experts, coeff
):  # fmt: skip
    _calls.moe_aux_loss(
        {"tokens_per_expert": tokens_per_expert, "num_tokens": num_tokens, "d_loss": d_loss, "d_probs": d_probs},
        topk=topk,
        num_experts=num_experts,
        coeff=coeff,
    )


#: The gradient of probs, [rows, C] of a dtype.
moe_aux_loss_backward = _define(
    "moe_aux_loss_backward(Tensor d_loss, Tensor tokens_per_expert, Tensor num_tokens, SymInt rows, ScalarType dtype, "
    "int topk, int num_experts, float coeff) -> Tensor",
    lambda d_loss, tokens_per_expert, num_tokens, rows, dtype, *_: d_loss.new_empty(
        (rows, tokens_per_expert.shape[0]), dtype=dtype
    ),
    _moe_aux_loss_backward,
)

# ---------------------------------------------------------------- plan, dispatch, combine


def _allocate_plan(experts, num_experts, rows, align_size, num_destinations):
    empty = experts.new_empty
    sizes = ((num_experts,), (num_experts,), (num_experts + 1,), experts.shape, (rows,), ())
    return tuple(empty(size, dtype=torch.int32) for size in sizes)


def _plan(results, experts, num_experts, rows, align_size, num_destinations):
    names = ("tokens_per_expert", "group_sizes", "offsets", "row_of_slot", "slot_of_row", "dropped")
    _calls.plan(
        {"experts": experts, **dict(zip(names, results, strict=True))},
        num_experts=num_experts,
        align_size=align_size,
        num_destinations=num_destinations,
    )


plan = _define(
    "plan(Tensor experts, int num_experts, SymInt rows, int align_size, int num_destinations) -> "
    "(Tensor tokens_per_expert, Tensor group_sizes, Tensor offsets, Tensor row_of_slot, Tensor slot_of_row, "
    "Tensor dropped)",
    _allocate_plan,
    _plan,
)


def _allocate_plan_of_map(routing_map, rows, align_size):
    T, E = routing_map.shape
    return tuple(routing_map.new_empty(size, dtype=torch.int32) for size in ((E,), (T, E), (rows,), (T, 2 * E + 1)))


def _plan_of_map(results, routing_map, rows, align_size):
    names = ("tokens_per_expert", "row_of_slot", "slot_of_row", "row_id_map")
    _calls.plan(
        {"routing_map": routing_map, **dict(zip(names, results, strict=True))},
        num_experts=routing_map.shape[1],
        align_size=align_size,
        num_destinations=1,
    )


#: The plan of a bool map [T, E], every true entry of which is a slot.
plan_of_map = _define(
    "plan_of_map(Tensor routing_map, SymInt rows, int align_size) -> "
    "(Tensor tokens_per_expert, Tensor row_of_slot, Tensor slot_of_row, Tensor row_id_map)",
    _allocate_plan_of_map,
    _plan_of_map,
)


def _expand_row_id_map(results, row_id_map, pad_offsets, rows):
    row_of_slot, slot_of_row = results
    tensors = {"row_id_map": row_id_map, "pad_offsets": pad_offsets}
    _calls.expand_row_id_map(tensors | {"row_of_slot": row_of_slot, "slot_of_row": slot_of_row})


#: The maps between slots, every token and expert, and rows that a row_id_map [T, 2E+1] stands for.
expand_row_id_map = _define(
    "expand_row_id_map(Tensor row_id_map, Tensor? pad_offsets, SymInt rows) -> "
    "(Tensor row_of_slot, Tensor slot_of_row)",
    lambda row_id_map, pad_offsets, rows: (
        row_id_map.new_empty((row_id_map.shape[0], row_id_map.shape[1] // 2)),
        row_id_map.new_empty((rows,)),
    ),
    _expand_row_id_map,
)


def _dispatch(rows, x, row_of_slot, slot_of_row, weights):
    _calls.dispatch({"x": x, "row_of_slot": row_of_slot, "slot_of_row": slot_of_row, "weights": weights, "rows": rows})


dispatch = _define(
    "dispatch(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor? weights) -> Tensor",
    lambda x, row_of_slot, slot_of_row, weights: x.new_empty((slot_of_row.shape[0], x.shape[1])),
    _dispatch,
)


def _combine(out, rows, row_of_slot, weights, addend, dtype):
    _calls.combine({"rows": rows, "row_of_slot": row_of_slot, "weights": weights, "out": out, "addend": addend})


combine = _define(
    "combine(Tensor rows, Tensor row_of_slot, Tensor? weights, Tensor? addend, ScalarType dtype) -> Tensor",
    lambda rows, row_of_slot, weights, addend, dtype: rows.new_empty(
        (row_of_slot.shape[0], rows.shape[1]), dtype=dtype
    ),
    _combine,
)


def _allocate_combine_backward(d_out, rows, row_of_slot, slot_of_row, weights, rows_dtype, wants_weights):
    d_rows = d_out.new_empty((slot_of_row.shape[0], d_out.shape[1]), dtype=rows_dtype)
    return d_rows, d_out.new_empty(row_of_slot.shape if wants_weights else (0,), dtype=torch.float32)


def _combine_backward(results, d_out, rows, row_of_slot, slot_of_row, weights, rows_dtype, wants_weights):
    d_rows, d_weights = results
    _calls.combine_backward(
        {
            "d_out": d_out,
            "rows": rows if wants_weights else None,
            "row_of_slot": row_of_slot,
            "slot_of_row": slot_of_row,
            "weights": weights,
            "d_rows": d_rows,
            "d_weights": d_weights if wants_weights else None,
        }
    )


#: The gradients of rows, of a dtype, and of weights, float32; not wanted: [0].
combine_backward = _define(
    "combine_backward(Tensor d_out, Tensor? rows, Tensor row_of_slot, Tensor slot_of_row, Tensor? weights, "
    "ScalarType rows_dtype, bool wants_weights) -> (Tensor d_rows, Tensor d_weights)",
    _allocate_combine_backward,
    _combine_backward,
)


def _sort_chunks(results, x, split_sizes, sorted_indices, inverse):
    out, row_id_map = results
    tensors = {"x": x, "split_sizes": split_sizes, "sorted_indices": sorted_indices, "out": out}
    _calls.sort_chunks(tensors | {"row_id_map": row_id_map}, inverse=inverse)


sort_chunks = _define(
    "sort_chunks(Tensor x, Tensor split_sizes, Tensor sorted_indices, bool inverse) -> (Tensor out, Tensor row_id_map)",
    lambda x, *_: (torch.empty_like(x), x.new_empty(x.shape[:1], dtype=torch.int32)),
    _sort_chunks,
)

# ---------------------------------------------------------------- grouped products


def _grouped_matmul(y, x, w, group_sizes, transpose_w):
    _calls.grouped_matmul({"x": x, "w": w, "group_sizes": group_sizes, "y": y}, transpose_w=transpose_w)


grouped_matmul = _define(
    "grouped_matmul(Tensor x, Tensor w, Tensor group_sizes, bool transpose_w) -> Tensor",
    lambda x, w, group_sizes, transpose_w: x.new_empty((x.shape[0], w.shape[1 if transpose_w else 2])),
    _grouped_matmul,
)


def _grouped_matmul_dw(d_w, x, d_y, group_sizes, dtype):
    _calls.grouped_matmul_dw({"x": x, "d_y": d_y, "group_sizes": group_sizes, "d_w": d_w}, accumulate=0)


grouped_matmul_dw = _define(
    "grouped_matmul_dw(Tensor x, Tensor d_y, Tensor group_sizes, ScalarType dtype) -> Tensor",
    lambda x, d_y, group_sizes, dtype: x.new_empty((group_sizes.shape[0], x.shape[1], d_y.shape[1]), dtype=dtype),
    _grouped_matmul_dw,
)

# ---------------------------------------------------------------- experts

_NETWORK = (
    "int activation, float activation_alpha, float activation_limit, bool weight_early, int topk, "
    "str w_in_layout, str w_out_layout"
)


def _allocate_ffn(
    x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    _, _, P, F = _sizes(w_in, w_in_layout)
    R = (x if slot_of_row is None else slot_of_row).shape[0]
    return x.new_empty((R, x.shape[1])), x.new_empty(_hidden(w_in_layout, R, P, F))


def _ffn(
    results, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    y, h = results
    _calls.expert_ffn_forward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "w_in": w_in,
            "b_in": b_in,
            "w_out": w_out,
            "b_out": b_out,
            "weights": weights,
            "y": y,
            "h": h,
        },
        _orders(w_in_layout, w_out_layout),
        activation=activation,
        weight_early=weight_early,
        topk=topk,
        activation_alpha=activation_alpha,
        activation_limit=activation_limit,
    )


#: y [R, D] and h [R, P, F] of rows, or of tokens that slot_of_row gathers.
ffn = _define(
    "ffn(Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"Tensor? weights, {_NETWORK}) -> (Tensor y, Tensor h)",
    _allocate_ffn,
    _ffn,
)


def _allocate_ffn_backward(
    d_out, h, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights, w_in_dtype, w_out_dtype,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    nothing = x.new_empty((0,))
    return (
        x.new_empty((h.shape[0], x.shape[1])),
        torch.empty_like(w_in, dtype=w_in_dtype),
        nothing.clone() if b_in is None else torch.empty_like(b_in),
        torch.empty_like(w_out, dtype=w_out_dtype),
        nothing.clone() if b_out is None else torch.empty_like(b_out),
        x.new_empty((0,) if weights is None else weights.shape, dtype=torch.float32),
    )


def _ffn_backward(
    results, d_out, h, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights, w_in_dtype, w_out_dtype,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    dx_rows, d_w_in, d_b_in, d_w_out, d_b_out, d_weights = results
    _calls.expert_ffn_backward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "w_in": w_in,
            "w_out": w_out,
            "b_out": b_out,
            "weights": weights,
            "h": h,
            "d_out": d_out,
            "dx_rows": dx_rows,
            "d_w_in": d_w_in,
            "d_b_in": None if b_in is None else d_b_in,
            "d_w_out": d_w_out,
            "d_b_out": None if b_out is None else d_b_out,
            "d_weights": None if weights is None else d_weights,
        },
        _orders(w_in_layout, w_out_layout),
        activation=activation,
        topk=topk,
        activation_alpha=activation_alpha,
        activation_limit=activation_limit,
    )


#: Gradients of the rows, w_in, b_in, w_out, b_out and weights; [0]: none.
ffn_backward = _define(
    "ffn_backward(Tensor d_out, Tensor h, Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, "
    "Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor? weights, ScalarType w_in_dtype, ScalarType w_out_dtype, "
    f"{_NETWORK}) -> (Tensor dx_rows, Tensor d_w_in, Tensor d_b_in, Tensor d_w_out, Tensor d_b_out, Tensor d_weights)",
    _allocate_ffn_backward,
    _ffn_backward,
)


def _allocate_experts(
    x, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    _, _, P, F = _sizes(w_in, w_in_layout)
    return torch.empty_like(x), x.new_empty(_hidden(w_in_layout, slot_of_row.shape[0], P, F))


def _experts(
    results, x, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    out, h = results
    F = _sizes(w_in, w_in_layout)[3]
    a = x.new_empty((slot_of_row.shape[0], F))
    _calls.expert_ffn_forward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "w_in": w_in,
            "b_in": b_in,
            "weights": weights if weight_early else None,
            "h": h,
            "a": a,
        },
        _orders(w_in_layout, w_out_layout),
        activation=activation,
        weight_early=weight_early and weights is not None,
        topk=topk,
        skip_rest=1,
        activation_alpha=activation_alpha,
        activation_limit=activation_limit,
    )
    _calls.grouped_matmul_combine(
        {
            "x": a,
            "w": w_out,
            "group_sizes": group_sizes,
            "bias": b_out,
            "slot_of_row": slot_of_row,
            "row_of_slot": row_of_slot,
            "weights": weights,
            "out": out,
        },
        transpose_w=w_out_layout == "df",
        weight_early=weight_early and weights is not None,
        skip_rest=1,
    )


#: The experts of tokens [T, D] by the rows of a plan, summed with their weights, if there are any: the output, and h.
experts = _define(
    "experts(Tensor x, Tensor? weights, Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes, Tensor w_in, "
    f"Tensor? b_in, Tensor w_out, Tensor? b_out, {_NETWORK}) -> (Tensor output, Tensor h)",
    _allocate_experts,
    _experts,
)


def _allocate_experts_hidden(
    d_out, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, w_out_dtype, wants_w_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    return (
        torch.empty_like(h),
        torch.empty_like(w_out, dtype=w_out_dtype) if wants_w_out else x.new_empty((0,)),
        x.new_empty((0,)) if b_out is None else torch.empty_like(b_out),
        torch.empty_like(weights, dtype=torch.float32),
    )


def _experts_hidden(
    results, d_out, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, w_out_dtype, wants_w_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    dh, d_w_out, d_b_out, d_weights = results
    _calls.expert_ffn_backward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "w_in": w_in,
            "w_out": w_out,
            "b_out": b_out,
            "weights": weights,
            "h": h,
            "d_out": d_out,
            "dh": dh,
            "d_w_out": d_w_out if wants_w_out else None,
            "d_b_out": None if b_out is None else d_b_out,
            "d_weights": d_weights,
        },
        _orders(w_in_layout, w_out_layout),
        activation=activation,
        topk=topk,
        skip_rest=1,
        activation_alpha=activation_alpha,
        activation_limit=activation_limit,
    )


#: The first half of the backward pass of `experts`: dh, and the gradients of w_out, b_out, weights; [0]: not wanted.
experts_hidden = _define(
    "experts_hidden(Tensor d_out, Tensor h, Tensor x, Tensor weights, Tensor slot_of_row, Tensor group_sizes, "
    "Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, ScalarType w_out_dtype, bool wants_w_out, "
    f"{_NETWORK}) -> (Tensor dh, Tensor d_w_out, Tensor d_b_out, Tensor d_weights)",
    _allocate_experts_hidden,
    _experts_hidden,
)


def _allocate_experts_inputs(
    dh, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, w_in_dtype, wants_x, wants_w_in,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    nothing = x.new_empty((0,))
    return (
        torch.empty_like(x) if wants_x else nothing,
        torch.empty_like(w_in, dtype=w_in_dtype) if wants_w_in else nothing.clone(),
        nothing.clone() if b_in is None else torch.empty_like(b_in),
    )


def _experts_inputs(
    results, dh, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, w_in_dtype, wants_x, wants_w_in,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout,
):  # fmt: skip
    d_x, d_w_in, d_b_in = results
    E, D, P, F = _sizes(w_in, w_in_layout)
    if wants_x:
        transposed = w_in_layout.startswith("d")
        _calls.grouped_matmul_combine(
            {
                "x": dh.view(dh.shape[0], P * F),
                "w": w_in.view((E, D, P * F) if transposed else (E, P * F, D)),
                "group_sizes": group_sizes,
                "slot_of_row": slot_of_row,
                "row_of_slot": row_of_slot,
                "addend": addend,
                "out": d_x,
            },
            transpose_w=transposed,
            skip_rest=1,
            backward=1,
        )
    if not wants_w_in and b_in is None:
        return
    _calls.expert_ffn_backward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "w_in": w_in,
            "w_out": w_out,
            "dh": dh,
            "d_w_in": d_w_in if wants_w_in else None,
            "d_b_in": None if b_in is None else d_b_in,
        },
        _orders(w_in_layout, w_out_layout),
        activation=activation,
        topk=topk,
        activation_alpha=activation_alpha,
        activation_limit=activation_limit,
    )


#: The second half: the gradients of x, to which `addend` is added, of w_in and of b_in; [0]: none, not wanted.
experts_inputs = _define(
    "experts_inputs(Tensor dh, Tensor x, Tensor? addend, Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes, "
    "Tensor w_in, Tensor? b_in, Tensor w_out, ScalarType w_in_dtype, bool wants_x, bool wants_w_in, "
    f"{_NETWORK}) -> (Tensor d_x, Tensor d_w_in, Tensor d_b_in)",
    _allocate_experts_inputs,
    _experts_inputs,
)

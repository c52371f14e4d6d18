"""The experts' operations: grouped products, and the feed-forward network on rows and on tokens."""

import functools

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.torch import _calls
from anabranch.torch._define import define

_LAYOUT_FIELDS = ("w_in", "d_w_in", "w_out", "d_w_out", "h", "dh", "b_in", "d_b_in")


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


def _grouped_matmul(y, x, w, group_sizes, transpose_w, precision):
    tensors = {"x": x, "w": w, "group_sizes": group_sizes, "y": y}
    return _calls.grouped_matmul(tensors, transpose_w=transpose_w, precision=precision)


grouped_matmul = define(
    "grouped_matmul(Tensor x, Tensor w, Tensor group_sizes, bool transpose_w, int precision) -> Tensor",
    lambda x, w, group_sizes, transpose_w, precision: x.new_empty((x.shape[0], w.shape[1 if transpose_w else 2])),
    _grouped_matmul,
)


def _grouped_matmul_dw(d_w, x, d_y, group_sizes, dtype, precision):
    tensors = {"x": x, "d_y": d_y, "group_sizes": group_sizes, "d_w": d_w}
    return _calls.grouped_matmul_dw(tensors, accumulate=0, precision=precision)


def _allocate_grouped_matmul_dw(x, d_y, group_sizes, dtype, precision):
    return x.new_empty((group_sizes.shape[0], x.shape[1], d_y.shape[1]), dtype=dtype)


grouped_matmul_dw = define(
    "grouped_matmul_dw(Tensor x, Tensor d_y, Tensor group_sizes, ScalarType dtype, int precision) -> Tensor",
    _allocate_grouped_matmul_dw,
    _grouped_matmul_dw,
)


_NETWORK = (
    "int activation, float activation_alpha, float activation_limit, bool weight_early, int topk, "
    "str w_in_layout, str w_out_layout, int precision"
)


def _allocate_ffn(
    x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    _, _, P, F = _sizes(w_in, w_in_layout)
    R = (x if slot_of_row is None else slot_of_row).shape[0]
    return x.new_empty((R, x.shape[1])), x.new_empty(_hidden(w_in_layout, R, P, F))


def _ffn(
    results, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    y, h = results
    return _calls.expert_ffn_forward(
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
        precision=precision,
    )


#: y [R, D] and h [R, P, F] of rows, or of tokens that slot_of_row gathers.
ffn = define(
    "ffn(Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"Tensor? weights, {_NETWORK}) -> (Tensor y, Tensor h)",
    _allocate_ffn,
    _ffn,
)


def _allocate_ffn_backward(
    d_out, h, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights, w_in_dtype, w_out_dtype,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
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
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    dx_rows, d_w_in, d_b_in, d_w_out, d_b_out, d_weights = results
    return _calls.expert_ffn_backward(
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
        precision=precision,
    )


#: Gradients of the rows, w_in, b_in, w_out, b_out and weights; [0]: none.
ffn_backward = define(
    "ffn_backward(Tensor d_out, Tensor h, Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, "
    "Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor? weights, ScalarType w_in_dtype, ScalarType w_out_dtype, "
    f"{_NETWORK}) -> (Tensor dx_rows, Tensor d_w_in, Tensor d_b_in, Tensor d_w_out, Tensor d_b_out, Tensor d_weights)",
    _allocate_ffn_backward,
    _ffn_backward,
)


def allocate_experts(
    x, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    _, _, P, F = _sizes(w_in, w_in_layout)
    return torch.empty_like(x), x.new_empty(_hidden(w_in_layout, slot_of_row.shape[0], P, F))


def calls_of_experts(
    results, x, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    out, h = results
    F = _sizes(w_in, w_in_layout)[3]
    a = x.new_empty((slot_of_row.shape[0], F))
    up = _calls.expert_ffn_forward(
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
        precision=precision,
    )
    down = _calls.grouped_matmul_combine(
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
        precision=precision,
    )
    return up, down


#: The experts of tokens [T, D] by the rows of a plan, summed with their weights, if there are any: the output, and h.
experts = define(
    "experts(Tensor x, Tensor? weights, Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes, Tensor w_in, "
    f"Tensor? b_in, Tensor w_out, Tensor? b_out, {_NETWORK}) -> (Tensor output, Tensor h)",
    allocate_experts,
    calls_of_experts,
)


def allocate_experts_hidden(
    d_out, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, w_out_dtype, wants_w_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    return (
        torch.empty_like(h),
        torch.empty_like(w_out, dtype=w_out_dtype) if wants_w_out else x.new_empty((0,)),
        x.new_empty((0,)) if b_out is None else torch.empty_like(b_out),
        torch.empty_like(weights, dtype=torch.float32),
    )


def calls_of_experts_hidden(
    results, d_out, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, w_out_dtype, wants_w_out,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    dh, d_w_out, d_b_out, d_weights = results
    return _calls.expert_ffn_backward(
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
        precision=precision,
    )


#: The first half of the backward pass of `experts`: dh, and the gradients of w_out, b_out, weights; [0]: not wanted.
experts_hidden = define(
    "experts_hidden(Tensor d_out, Tensor h, Tensor x, Tensor weights, Tensor slot_of_row, Tensor group_sizes, "
    "Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, ScalarType w_out_dtype, bool wants_w_out, "
    f"{_NETWORK}) -> (Tensor dh, Tensor d_w_out, Tensor d_b_out, Tensor d_weights)",
    allocate_experts_hidden,
    calls_of_experts_hidden,
)


def _allocate_experts_inputs(
    dh, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, w_in_dtype, wants_x, wants_w_in,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    nothing = x.new_empty((0,))
    return (
        torch.empty_like(x) if wants_x else nothing,
        torch.empty_like(w_in, dtype=w_in_dtype) if wants_w_in else nothing.clone(),
        nothing.clone() if b_in is None else torch.empty_like(b_in),
    )


def _experts_inputs(
    results, dh, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, w_in_dtype, wants_x, wants_w_in,
    activation, activation_alpha, activation_limit, weight_early, topk, w_in_layout, w_out_layout, precision,
):  # fmt: skip
    d_x, d_w_in, d_b_in = results
    E, D, P, F = _sizes(w_in, w_in_layout)
    calls = []
    if wants_x:
        transposed = w_in_layout.startswith("d")
        of_x = _calls.grouped_matmul_combine(
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
            precision=precision,
        )
        calls.append(of_x)
    if not wants_w_in and b_in is None:
        return calls
    of_weights = _calls.expert_ffn_backward(
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
        precision=precision,
    )
    return [*calls, of_weights]


#: The second half: the gradients of x, to which `addend` is added, of w_in and of b_in; [0]: none, not wanted.
experts_inputs = define(
    "experts_inputs(Tensor dh, Tensor x, Tensor? addend, Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes, "
    "Tensor w_in, Tensor? b_in, Tensor w_out, ScalarType w_in_dtype, bool wants_x, bool wants_w_in, "
    f"{_NETWORK}) -> (Tensor d_x, Tensor d_w_in, Tensor d_b_in)",
    _allocate_experts_inputs,
    _experts_inputs,
)

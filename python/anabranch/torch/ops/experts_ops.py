"""The experts' operations: grouped GEMM, and the feed-forward network on rows and on tokens."""

import functools

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.options import Network, schema_of
from anabranch.precision import BLOCK, FP8
from anabranch.torch.binding import calls
from anabranch.torch.binding.define import define

_LAYOUT_FIELDS = ("w_in", "d_w_in", "w_out", "d_w_out", "h", "dh", "b_in", "d_b_in")


@functools.cache
def _orders(w_in: str, w_out: str) -> dict[str, tuple[int, ...]] | None:
    """Axis orders of the tensors that are not in the default layouts, or None."""
    layouts = Layouts(w_in, w_out)
    orders = {name: layouts.order(name) for name in _LAYOUT_FIELDS}
    return {name: order for name, order in orders.items() if list(order) != sorted(order)} or None


@functools.cache
def _axes(layout: str) -> tuple[int, ...]:
    """The axes of w_in for E, D, P and F."""
    return Layouts(layout).order("w_in")


def sizes_of_w_in(w_in: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(E, D, P, F) of w_in."""
    E, D, P, F = (w_in.shape[axis] for axis in _axes(layout))
    return E, D, P, F


def _hidden(w_in_layout: str, R: int, P: int, F: int) -> tuple[int, int, int]:
    """The shape of h."""
    axes = _axes(w_in_layout)
    return (R, P, F) if axes[2] < axes[3] else (R, F, P)


def _e4m3(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float8_e4m3fn)


def _scales(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def quantize_calls(results, w, axes, fp8_scales):
    """The C call that quantises a matrix."""
    q, q_transposed, scales = results
    order = None if list(axes) == sorted(axes) else {"w": axes}
    tensors = {"w": w, "q": q, "q_transposed": q_transposed, "scales": scales}
    return calls.quantize_weights(tensors, order, fp8_scales=fp8_scales)


def allocate_quantize(w, axes, plain, transposed):
    """Empty results of `quantize_experts` for one matrix."""
    E, D, *parts, N = (w.shape[axis] for axis in axes)
    return (
        _e4m3(w, E, D, *parts, N) if plain else None,
        _e4m3(w, E, *parts, N, D) if transposed else None,
        _scales(w, E, D // BLOCK, *parts, N // BLOCK),
    )


def _quantized(w, axes, fp8_scales, *, transposed):
    """(q in one orientation, its scales, the C call that fills both)."""
    results = allocate_quantize(w, axes, not transposed, transposed)
    return results[int(transposed)], results[2], quantize_calls(results, w, axes, fp8_scales)


def _quantized_operand(name, w, q, scales, network, *, transposed):
    """Fields of a C call for a quantised "w_in" or "w_out", and the calls that fill them; both empty without FP8."""
    if network.precision != FP8:
        return {}, []
    calls_before = []
    if q is None:
        axes = Layouts(network.w_in_layout, network.w_out_layout).order(name)
        q, scales, quantize = _quantized(w, axes, network.fp8_scales, transposed=transposed)
        calls_before.append(quantize)
    return {f"{name}_q": q, f"{name}_scales": scales}, calls_before


def _allocate_quantize_rows(x, fp8_scales):
    R, D = x.shape
    return _e4m3(x, R, D), _scales(x, R, D // BLOCK)


def _quantize_rows(results, x, fp8_scales):
    q, scales = results
    return calls.quantize_rows({"x": x, "q": q, "scales": scales}, fp8_scales=fp8_scales)


#: Quantised rows [R, D] and the scales of their blocks [R, D/128].
quantize_rows = define(
    "quantize_rows(Tensor x, int fp8_scales) -> (Tensor q, Tensor scales)", _allocate_quantize_rows, _quantize_rows
)


def _allocate_quantize_experts(w_in, w_out, w_in_layout, w_out_layout, gradients, fp8_scales):
    layouts, results = Layouts(w_in_layout, w_out_layout), []
    for name, w in (("w_in", w_in), ("w_out", w_out)):
        q, q_transposed, scales = allocate_quantize(w, layouts.order(name), gradients, True)
        results += [w.new_empty((0,)) if q is None else q, q_transposed, scales]
    return tuple(results)


def _quantize_experts(results, w_in, w_out, w_in_layout, w_out_layout, gradients, fp8_scales):
    layouts = Layouts(w_in_layout, w_out_layout)
    results_in, results_out = ((q if gradients else None, *others) for q, *others in (results[:3], results[3:]))
    return (
        quantize_calls(results_in, w_in, layouts.order("w_in"), fp8_scales),
        quantize_calls(results_out, w_out, layouts.order("w_out"), fp8_scales),
    )


#: Both weights quantised, in their own orientation ([0] without gradients) and transposed, each with its scales.
quantize_experts = define(
    "quantize_experts(Tensor w_in, Tensor w_out, str w_in_layout, str w_out_layout, bool gradients, int fp8_scales) "
    "-> (Tensor w_in_q, Tensor w_in_transposed, Tensor w_in_scales, Tensor w_out_q, Tensor w_out_transposed, "
    "Tensor w_out_scales)",
    _allocate_quantize_experts,
    _quantize_experts,
)


def _allocate_grouped_matmul(x, w, group_sizes, transpose_w, precision, fp8_scales):
    return x.new_empty((x.shape[0], w.shape[1 if transpose_w else 2]))


def _grouped_matmul(y, x, w, group_sizes, transpose_w, precision, fp8_scales):
    options = dict(transpose_w=transpose_w, precision=precision, fp8_scales=fp8_scales)
    if precision != FP8:
        return calls.grouped_matmul({"x": x, "w": w, "group_sizes": group_sizes, "y": y}, **options)
    R, D = x.shape
    q, scales = _e4m3(x, R, D), _scales(x, R, D // BLOCK)
    rows = calls.quantize_rows({"x": x, "q": q, "scales": scales}, fp8_scales=fp8_scales)
    w_q, w_scales, weights = _quantized(w, (0, 1, 2), fp8_scales, transposed=not transpose_w)
    operands = {"x": q, "x_scales": scales, "w_q": w_q, "w_scales": w_scales}
    return rows, weights, calls.grouped_matmul({**operands, "group_sizes": group_sizes, "y": y}, **options)


grouped_matmul = define(
    "grouped_matmul(Tensor x, Tensor w, Tensor group_sizes, bool transpose_w, int precision, int fp8_scales) -> Tensor",
    _allocate_grouped_matmul,
    _grouped_matmul,
)


def _grouped_matmul_dw(d_w, x, d_y, group_sizes, dtype, precision):
    tensors = {"x": x, "d_y": d_y, "group_sizes": group_sizes, "d_w": d_w}
    return calls.grouped_matmul_dw(tensors, accumulate=0, precision=precision)


def _allocate_grouped_matmul_dw(x, d_y, group_sizes, dtype, precision):
    return x.new_empty((group_sizes.shape[0], x.shape[1], d_y.shape[1]), dtype=dtype)


grouped_matmul_dw = define(
    "grouped_matmul_dw(Tensor x, Tensor d_y, Tensor group_sizes, ScalarType dtype, int precision) -> Tensor",
    _allocate_grouped_matmul_dw,
    _grouped_matmul_dw,
)


#: Quantised experts in the orientation of the pass; None: with FP8 the operation quantises them.
QUANTIZED = "Tensor? w_in_q, Tensor? w_in_scales, Tensor? w_out_q, Tensor? w_out_scales"

_NETWORK = schema_of(Network)


def _allocate_ffn(
    x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    o = Network(*options)
    _, _, P, F = sizes_of_w_in(w_in, o.w_in_layout)
    R = (x if slot_of_row is None else slot_of_row).shape[0]
    return x.new_empty((R, x.shape[1])), x.new_empty(_hidden(o.w_in_layout, R, P, F))


def _ffn(
    results, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    o = Network(*options)
    y, h = results
    operands_in, quantize_in = _quantized_operand("w_in", w_in, w_in_q, w_in_scales, o, transposed=True)
    operands_out, quantize_out = _quantized_operand("w_out", w_out, w_out_q, w_out_scales, o, transposed=True)
    network = calls.expert_ffn_forward(
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
            **operands_in,
            **operands_out,
        },
        _orders(o.w_in_layout, o.w_out_layout),
        weight_early=o.weight_early,
        **o.attributes(),
    )
    return [*quantize_in, *quantize_out, network]


#: y [R, D] and h [R, P, F] from rows, or from tokens gathered by slot_of_row.
ffn = define(
    "ffn(Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"Tensor? weights, {QUANTIZED}, {_NETWORK}) -> (Tensor y, Tensor h)",
    _allocate_ffn,
    _ffn,
)


def _allocate_ffn_backward(
    d_out, h, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights, w_in_dtype, w_out_dtype,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    return (
        x.new_empty((h.shape[0], x.shape[1])),
        w_in.new_empty(w_in.shape, dtype=w_in_dtype),
        x.new_empty((0,)) if b_in is None else b_in.new_empty(b_in.shape),
        w_out.new_empty(w_out.shape, dtype=w_out_dtype),
        x.new_empty((0,)) if b_out is None else b_out.new_empty(b_out.shape),
        x.new_empty((0,) if weights is None else weights.shape, dtype=torch.float32),
    )


def _ffn_backward(
    results, d_out, h, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights, w_in_dtype, w_out_dtype,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    o = Network(*options)
    dx_rows, d_w_in, d_b_in, d_w_out, d_b_out, d_weights = results
    operands_in, quantize_in = _quantized_operand("w_in", w_in, w_in_q, w_in_scales, o, transposed=False)
    operands_out, quantize_out = _quantized_operand("w_out", w_out, w_out_q, w_out_scales, o, transposed=False)
    network = calls.expert_ffn_backward(
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
            **operands_in,
            **operands_out,
        },
        _orders(o.w_in_layout, o.w_out_layout),
        **o.attributes(),
    )
    return [*quantize_in, *quantize_out, network]


#: Gradients of rows, w_in, b_in, w_out, b_out and weights; [0] for an absent operand.
ffn_backward = define(
    "ffn_backward(Tensor d_out, Tensor h, Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, "
    "Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor? weights, ScalarType w_in_dtype, ScalarType w_out_dtype, "
    f"{QUANTIZED}, {_NETWORK}) "
    "-> (Tensor dx_rows, Tensor d_w_in, Tensor d_b_in, Tensor d_w_out, Tensor d_b_out, Tensor d_weights)",
    _allocate_ffn_backward,
    _ffn_backward,
)


def allocate_experts(
    x, x_q, x_scales, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """Empty results of `experts`."""
    o = Network(*options)
    _, _, P, F = sizes_of_w_in(w_in, o.w_in_layout)
    read = x if x_q is None else x_q
    return x.new_empty(read.shape), x.new_empty(_hidden(o.w_in_layout, slot_of_row.shape[0], P, F))


def experts_calls(
    results, x, x_q, x_scales, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """The C calls of `experts`."""
    o = Network(*options)
    out, h = results
    R, F = slot_of_row.shape[0], sizes_of_w_in(w_in, o.w_in_layout)[3]
    operands_in, quantize_in = _quantized_operand("w_in", w_in, w_in_q, w_in_scales, o, transposed=True)
    operands_out, quantize_out = _quantized_operand("w_out", w_out, w_out_q, w_out_scales, o, transposed=True)
    fp8 = o.precision == FP8
    a, a_scales = (_e4m3(x, R, F), _scales(x, R, F // BLOCK)) if fp8 else (x.new_empty((R, F)), None)
    up = calls.expert_ffn_forward(
        {
            "x": x if x_q is None else None,
            "x_q": x_q,
            "x_scales": x_scales,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "w_in": w_in,
            "b_in": b_in,
            "weights": weights if o.weight_early else None,
            "h": h,
            "a": a,
            "a_scales": a_scales,
            **operands_in,
        },
        _orders(o.w_in_layout, o.w_out_layout),
        weight_early=o.weight_early and weights is not None,
        skip_rest=1,
        **o.attributes(),
    )
    down = calls.grouped_matmul_combine(
        {
            "x": a,
            "x_scales": a_scales,
            "w": None if fp8 else w_out,
            "w_q": operands_out.get("w_out_q"),
            "w_scales": operands_out.get("w_out_scales"),
            "group_sizes": group_sizes,
            "bias": b_out,
            "slot_of_row": slot_of_row,
            "row_of_slot": row_of_slot,
            "weights": weights,
            "out": out,
        },
        transpose_w=o.w_out_layout == "df" and not fp8,
        weight_early=o.weight_early and weights is not None,
        skip_rest=1,
        precision=o.precision,
        fp8_scales=o.fp8_scales,
    )
    return *quantize_in, *quantize_out, up, down


#: The experts on tokens [T, D] by the rows of a plan: the weighted sum per token, and h. With FP8, tokens may be given
#: quantised; then x only determines the dtype of the results.
experts = define(
    "experts(Tensor x, Tensor? x_q, Tensor? x_scales, Tensor? weights, Tensor row_of_slot, Tensor slot_of_row, "
    f"Tensor group_sizes, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, {QUANTIZED}, {_NETWORK}) -> "
    "(Tensor output, Tensor h)",
    allocate_experts,
    experts_calls,
)


def allocate_experts_hidden(
    d_out, d_out_q, d_out_scales, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    w_out_dtype, needs_w_out, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """Empty results of `experts_hidden`."""
    o = Network(*options)
    _, _, P, F = sizes_of_w_in(w_in, o.w_in_layout)
    R, fp8 = h.shape[0], o.precision == FP8
    return (
        h.new_empty(h.shape),
        w_out.new_empty(w_out.shape, dtype=w_out_dtype) if needs_w_out else x.new_empty((0,)),
        x.new_empty((0,)) if b_out is None else b_out.new_empty(b_out.shape),
        weights.new_empty(weights.shape, dtype=torch.float32),
        _e4m3(x, R, P, F) if fp8 else x.new_empty((0,)),
        _scales(x, R, P, F // BLOCK) if fp8 else x.new_empty((0,)),
    )


def experts_hidden_calls(
    results, d_out, d_out_q, d_out_scales, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    w_out_dtype, needs_w_out, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """The C calls of `experts_hidden`."""
    o = Network(*options)
    dh, d_w_out, d_b_out, d_weights, dh_q, dh_scales = results
    fp8 = o.precision == FP8
    operands_out, quantize_out = _quantized_operand("w_out", w_out, w_out_q, w_out_scales, o, transposed=False)
    hidden = calls.expert_ffn_backward(
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
            "d_out_q": d_out_q,
            "d_out_scales": d_out_scales,
            "dh": dh,
            "d_w_out": d_w_out if needs_w_out else None,
            "d_b_out": None if b_out is None else d_b_out,
            "d_weights": d_weights,
            "dh_q": dh_q if fp8 else None,
            "dh_scales": dh_scales if fp8 else None,
            **operands_out,
        },
        _orders(o.w_in_layout, o.w_out_layout),
        skip_rest=1,
        **o.attributes(),
    )
    return *quantize_out, hidden


#: The arguments of `experts_hidden`.
EXPERTS_HIDDEN = (
    "(Tensor d_out, Tensor? d_out_q, Tensor? d_out_scales, Tensor h, Tensor x, Tensor weights, "
    "Tensor slot_of_row, Tensor group_sizes, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"ScalarType w_out_dtype, bool needs_w_out, {QUANTIZED}, {_NETWORK})"
)
#: The first half of the backward pass of `experts`: dh, and the gradients of w_out, b_out, weights; [0] if not
#: requested. With FP8 also dh quantised, with its scales. d_out may be given quantised in addition.
experts_hidden = define(
    f"experts_hidden{EXPERTS_HIDDEN} -> (Tensor dh, Tensor d_w_out, Tensor d_b_out, Tensor d_weights, Tensor dh_q, "
    "Tensor dh_scales)",
    allocate_experts_hidden,
    experts_hidden_calls,
)


def allocate_experts_inputs(
    dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out,
    w_in_dtype, d_x_dtype, needs_w_in, w_in_q, w_in_scales, w_out_q, w_out_scales,
    *options,
):  # fmt: skip
    """Empty results of `experts_inputs`."""
    return (
        x.new_empty((0,)) if d_x_dtype is None else x.new_empty(x.shape, dtype=d_x_dtype),
        w_in.new_empty(w_in.shape, dtype=w_in_dtype) if needs_w_in else x.new_empty((0,)),
        x.new_empty((0,)) if b_in is None else b_in.new_empty(b_in.shape),
    )


def experts_inputs_calls(
    results, dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out,
    w_in_dtype, d_x_dtype, needs_w_in, w_in_q, w_in_scales, w_out_q, w_out_scales,
    *options,
):  # fmt: skip
    """The C calls of `experts_inputs`."""
    o = Network(*options)
    d_x, d_w_in, d_b_in = results
    E, D, P, F = sizes_of_w_in(w_in, o.w_in_layout)
    R, fp8, prepared = dh.shape[0], o.precision == FP8, []
    if d_x_dtype is not None:
        transposed = o.w_in_layout.startswith("d") or fp8
        if fp8:
            operands_in, quantize_in = _quantized_operand("w_in", w_in, w_in_q, w_in_scales, o, transposed=False)
            prepared += quantize_in
            operands = {
                "x": dh_q.view(R, P * F),
                "x_scales": dh_scales.view(R, P * F // BLOCK),
                "w_q": operands_in["w_in_q"].view(E, D, P * F),
                "w_scales": operands_in["w_in_scales"].view(E, D // BLOCK, P * F // BLOCK),
            }
        else:
            w = w_in.view((E, D, P * F) if transposed else (E, P * F, D))
            operands = {"x": dh.view(R, P * F), "w": w}
        precision = {"precision": o.precision, "fp8_scales": o.fp8_scales}
        operands["group_sizes"] = group_sizes
        sum_tensors = {"row_of_slot": row_of_slot, "addend": addend, "out": d_x}
        if fp8 and d_x_dtype != x.dtype:  # the fused call would round rows to the dtype of d_x
            rows = x.new_empty((R, D))
            prepared.append(calls.grouped_matmul({**operands, "y": rows}, transpose_w=transposed, **precision))
            prepared.append(calls.combine({"rows": rows, **sum_tensors}))
        else:
            tensors = {**operands, "slot_of_row": slot_of_row, **sum_tensors}
            options = {"transpose_w": transposed, "skip_rest": 1, "backward": 1, **precision}
            prepared.append(calls.grouped_matmul_combine(tensors, **options))
    if not needs_w_in and b_in is None:
        return prepared
    weight_gradients = calls.expert_ffn_backward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "w_in": w_in,
            "w_out": w_out,
            "dh": dh,
            "d_w_in": d_w_in if needs_w_in else None,
            "d_b_in": None if b_in is None else d_b_in,
        },
        _orders(o.w_in_layout, o.w_out_layout),
        **o.attributes(),
    )
    return [*prepared, weight_gradients]


#: The arguments of `experts_inputs`.
EXPERTS_INPUTS = (
    "(Tensor dh, Tensor dh_q, Tensor dh_scales, Tensor x, Tensor? addend, Tensor row_of_slot, "
    "Tensor slot_of_row, Tensor group_sizes, "
    "Tensor w_in, Tensor? b_in, Tensor w_out, ScalarType w_in_dtype, ScalarType? d_x_dtype, bool needs_w_in, "
    f"{QUANTIZED}, {_NETWORK})"
)
#: The second half of the backward pass of `experts`: the gradients of x (plus `addend`, in `d_x_dtype`), w_in and b_in;
#: [0] if not requested.
experts_inputs = define(
    f"experts_inputs{EXPERTS_INPUTS} -> (Tensor d_x, Tensor d_w_in, Tensor d_b_in)",
    allocate_experts_inputs,
    experts_inputs_calls,
)

"""The operations of the experts' feed-forward network, on rows and on tokens."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.lora import NAMES
from anabranch.options import Network, schema_of
from anabranch.precision import BLOCK, FP8
from anabranch.torch.binding import calls
from anabranch.torch.binding.define import define
from anabranch.torch.ops.factors import FACTORS, NO_FACTORS, Factors
from anabranch.torch.ops.gradients import FROM_DH, OPERANDS, allocate, gradient_fields, requested_names
from anabranch.torch.ops.quantize_ops import empty_e4m3, empty_scales
from anabranch.torch.ops.weights_ops import sizes_only, viewed_weight, weight_fields, weight_shape

_LAYOUT_FIELDS = ("w_in", "d_w_in", "w_out", "d_w_out", "h", "dh", "b_in", "d_b_in")


@functools.cache
def _orders(w_in: str, w_out: str) -> dict[str, tuple[int, ...]] | None:
    """Axis orders of the tensors that are not in the default layouts, or None."""
    layouts = Layouts(w_in, w_out)
    orders = {name: layouts.order(name) for name in _LAYOUT_FIELDS}
    orders |= {f"{name}_block_scales": orders[name] for name in ("w_in", "w_out")}
    return {name: order for name, order in orders.items() if list(order) != sorted(order)} or None


@functools.cache
def _axes(layout: str) -> tuple[int, ...]:
    """The axes of w_in for E, D, P and F."""
    return Layouts(layout).order("w_in")


def sizes_of_w_in(w_in: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(E, D, P, F) of w_in."""
    shape = weight_shape(w_in)
    E, D, P, F = (shape[axis] for axis in _axes(layout))
    return E, D, P, F


def _hidden(w_in_layout: str, R: int, P: int, F: int) -> tuple[int, int, int]:
    """The shape of h."""
    axes = _axes(w_in_layout)
    return (R, P, F) if axes[2] < axes[3] else (R, F, P)


#: Quantised experts in the orientation of the pass; None: with FP8 the operation quantises them. Scales alone are those
#: of packed weights, see `weights_ops`.
QUANTIZED = "Tensor? w_in_q, Tensor? w_in_scales, Tensor? w_out_q, Tensor? w_out_scales"

#: The factors of adapters and the options of a network.
_OPTIONS = f"{FACTORS}, {schema_of(Network)}"
QUANTIZED_NETWORK = f"{QUANTIZED}, {_OPTIONS}"
#: The weights of the experts and the options of their network.
NETWORK = f"Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, {QUANTIZED_NETWORK}"


class _Options(NamedTuple):
    """The last arguments of the operations of the feed-forward network."""

    factors: Factors
    copies: Any
    """The argument `lora_copies`."""
    network: Network

    @property
    def stored(self) -> Factors:
        """The factors as C calls of the backward pass read them: from `copies`, if that is given."""
        return self.factors.replaced(self.factors.copied(self.copies, self.network))

    def orders(self, factors: Factors) -> dict[str, Any]:
        """The orders of axes for C calls."""
        return factors.orders(_orders(self.network.w_in_layout, self.network.w_out_layout))

    def low_rank(self, like: Any, rows: Any, a_name: str) -> Any:
        """Empty rows of an adapter, such as u = s x A; None without the adapter."""
        return like.new_empty((rows, self.factors.rank(a_name))) if a_name in self.factors else None

    def gradients(self, names: frozenset[str], like: Any, *operands: str) -> tuple[Any, ...]:
        """Empty gradients of factors; without elements if they are not requested."""
        return tuple(
            allocate(self.factors[name].tensor, True, self.factors[name].shape)
            if name in names
            else like.new_empty((0,))
            for name in operands
        )


def _options(arguments):
    """`_Options` from the arguments of FACTORS and of a network."""
    number = len(NO_FACTORS)
    *tensors, copies, orders = arguments[:number]
    return _Options(Factors(tensors, orders), copies, Network(*arguments[number:]))


def local_experts(w_in, b_in, w_out, b_out, w_in_q, w_in_scales, w_out_q, w_out_scales, *options):
    """E of the arguments NETWORK."""
    return sizes_of_w_in(w_in, _options(options).network.w_in_layout)[0]


def has_adapters(*arguments):
    """Whether the last arguments, as in ARGUMENTS_OF_HIDDEN, have factors."""
    return "lora_a_in" in _options(arguments[11:]).factors or "lora_a_out" in _options(arguments[11:]).factors


def _result(tensor, like):
    """A tensor as a result: one without elements stands for None."""
    return like.new_empty((0,)) if tensor is None else tensor


def _allocate_ffn(
    x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    o = _options(options)
    layout = o.network.w_in_layout
    _, _, P, F = sizes_of_w_in(w_in, layout)
    R = (x if slot_of_row is None else slot_of_row).shape[0]
    u = _result(o.low_rank(x, R, "lora_a_in"), x)
    return x.new_empty((R, x.shape[1])), x.new_empty(_hidden(layout, R, P, F)), u


def _ffn(
    results, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    o = _options(options)
    y, h, u = results
    operands_in, quantize_in = weight_fields("w_in", w_in, w_in_q, w_in_scales, o.network, transposed=True)
    operands_out, quantize_out = weight_fields("w_out", w_out, w_out_q, w_out_scales, o.network, transposed=True)
    network = calls.expert_ffn_forward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "b_in": b_in,
            "b_out": b_out,
            "weights": weights,
            "y": y,
            "h": h,
            "lora_u": u if "lora_a_in" in o.factors else None,
            **o.factors.tensors(),
            **operands_in,
            **operands_out,
        },
        o.orders(o.factors),
        weight_early=o.network.weight_early,
        **o.network.attributes(),
    )
    return [*quantize_in, *quantize_out, network]


#: y [R, D], h [R, P, F] and u [R, r] from rows, or from tokens gathered by slot_of_row. u has no elements without an
#: adapter of w_in, here and below.
ffn = define(
    "ffn(Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"Tensor? weights, {QUANTIZED}, {_OPTIONS}) -> (Tensor y, Tensor h, Tensor lora_u)",
    _allocate_ffn,
    _ffn,
)


def _allocate_ffn_backward(
    d_out, h, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights, lora_u, w_in_dtype, w_out_dtype,
    requested, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    names = requested_names(requested)
    return (
        allocate(x, "x" in names, (h.shape[0], x.shape[1])),
        allocate(w_in, "w_in" in names, w_in.shape, w_in_dtype),
        allocate(x, "b_in" in names, () if b_in is None else b_in.shape),
        allocate(w_out, "w_out" in names, w_out.shape, w_out_dtype),
        allocate(x, "b_out" in names, () if b_out is None else b_out.shape),
        allocate(x, "weights" in names, () if weights is None else weights.shape, torch.float32),
        *_options(options).gradients(names, x, *NAMES),
    )


def _ffn_backward(
    results, d_out, h, x, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, weights, lora_u, w_in_dtype, w_out_dtype,
    requested, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    o, names = _options(options), requested_names(requested)
    dx_rows, *others = results
    operands_in, quantize_in = weight_fields("w_in", w_in, w_in_q, w_in_scales, o.network, transposed=False)
    operands_out, quantize_out = weight_fields("w_out", w_out, w_out_q, w_out_scales, o.network, transposed=False)
    network = calls.expert_ffn_backward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "b_out": b_out,
            "weights": weights,
            "h": h,
            "d_out": d_out,
            "dx_rows": dx_rows if "x" in names else None,
            **gradient_fields(names, zip(OPERANDS[1:], others, strict=True)),
            "lora_u": lora_u,
            **o.stored.tensors(),
            **operands_in,
            **operands_out,
        },
        o.orders(o.stored),
        **o.network.attributes(),
    )
    return [*quantize_in, *quantize_out, network]


#: The requested gradients of rows, w_in, b_in, w_out, b_out, weights and the factors; [0] for the others.
ffn_backward = define(
    "ffn_backward(Tensor d_out, Tensor h, Tensor x, Tensor? slot_of_row, Tensor group_sizes, Tensor w_in, "
    "Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor? weights, Tensor? lora_u, ScalarType w_in_dtype, "
    f"ScalarType w_out_dtype, int requested, {QUANTIZED}, {_OPTIONS}) "
    "-> (Tensor dx_rows, Tensor d_w_in, Tensor d_b_in, Tensor d_w_out, Tensor d_b_out, Tensor d_weights, "
    f"{', '.join(f'Tensor d_{name}' for name in NAMES)})",
    _allocate_ffn_backward,
    _ffn_backward,
)


def _gemm_weights(name, fields):
    """The fields of a grouped GEMM for those of a network's matrix."""
    plain = {} if f"{name}_q" in fields else {"w": fields[name]}
    ends = ("_q", "_scales", "_block_scales")
    return plain | {f"w{end}": value for end in ends if (value := fields.get(f"{name}{end}")) is not None}


def allocate_experts(
    x, x_q, x_scales, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """Empty results of `experts`."""
    o = _options(options)
    layout, R = o.network.w_in_layout, slot_of_row.shape[0]
    _, _, P, F = sizes_of_w_in(w_in, layout)
    read = x if x_q is None else x_q
    u = _result(o.low_rank(x, R, "lora_a_in"), x)
    copies = x.new_empty((o.factors.size_of_copies(x.dtype),))
    return x.new_empty(read.shape), x.new_empty(_hidden(layout, R, P, F)), u, copies


def experts_calls(
    results, x, x_q, x_scales, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """The C calls of `experts`."""
    given = _options(options)
    factors, o = given.factors, given.network
    out, h, u, copies = results
    copied = factors.copied(copies, o)
    stored = factors.replaced(copied)
    R, F = slot_of_row.shape[0], sizes_of_w_in(w_in, o.w_in_layout)[3]
    operands_in, quantize_in = weight_fields("w_in", w_in, w_in_q, w_in_scales, o, transposed=True)
    operands_out, quantize_out = weight_fields("w_out", w_out, w_out_q, w_out_scales, o, transposed=True)
    fp8 = o.precision == FP8
    a, a_scales = (empty_e4m3(x, R, F), empty_scales(x, R, F // BLOCK)) if fp8 else (x.new_empty((R, F)), None)
    z = given.low_rank(x, R, "lora_a_out")
    up = calls.expert_ffn_forward(
        {
            "x": x if x_q is None or "lora_a_in" in factors else None,
            "x_q": x_q,
            "x_scales": x_scales,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            "b_in": b_in,
            "weights": weights if o.weight_early else None,
            "h": h,
            "a": a,
            "a_scales": a_scales,
            "lora_u": u if "lora_a_in" in factors else None,
            "lora_z": z,
            **factors.tensors(),
            **{f"{name}_copy": copy.tensor for name, copy in copied.items()},
            **operands_in,
        },
        given.orders(factors) | {f"{name}_copy": copy.order for name, copy in copied.items()},
        weight_early=o.weight_early and weights is not None,
        skip_rest=1,
        **o.attributes(),
    )
    down = calls.grouped_matmul_combine(
        {
            "x": a,
            "x_scales": a_scales,
            **_gemm_weights("w_out", operands_out),
            "group_sizes": group_sizes,
            "bias": b_out,
            "slot_of_row": slot_of_row,
            "row_of_slot": row_of_slot,
            "weights": weights,
            "out": out,
            "lora_u": z,
            "lora_b": None if z is None else stored["lora_b_out"].tensor,
        },
        None if z is None else {"lora_b": stored["lora_b_out"].order},
        transpose_w=o.w_out_layout == "df" and not fp8,
        weight_early=o.weight_early and weights is not None,
        skip_rest=1,
        precision=o.precision,
        fp8_scales=o.fp8_scales,
    )
    return *quantize_in, *quantize_out, up, down


#: The experts on tokens [T, D] by the rows of a plan: the weighted sum per token, h, u, and the copies of the factors
#: for the backward pass (without elements if all factors have the dtype of x). With FP8, tokens may be given quantised;
#: then x only determines the dtype of the results and, with an adapter of w_in, contains the same tokens for it.
experts = define(
    "experts(Tensor x, Tensor? x_q, Tensor? x_scales, Tensor? weights, Tensor row_of_slot, Tensor slot_of_row, "
    f"Tensor group_sizes, {NETWORK}) -> "
    "(Tensor output, Tensor h, Tensor lora_u, Tensor lora_copies)",
    allocate_experts,
    experts_calls,
)


def allocate_experts_hidden(
    d_out, d_out_q, d_out_scales, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, lora_u,
    w_out_dtype, requested, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """Empty results of `experts_hidden`."""
    o, names = _options(options), requested_names(requested)
    _, _, P, F = sizes_of_w_in(w_in, o.network.w_in_layout)
    R, quantizes = h.shape[0], o.network.precision == FP8 and "x" in names
    return (
        allocate(h, not names.isdisjoint(FROM_DH), h.shape),
        allocate(w_out, "w_out" in names, w_out.shape, w_out_dtype),
        allocate(x, "b_out" in names, () if b_out is None else b_out.shape),
        allocate(x, "weights" in names, weights.shape, torch.float32),
        empty_e4m3(x, R, P, F) if quantizes else x.new_empty((0,)),
        empty_scales(x, R, P, F // BLOCK) if quantizes else x.new_empty((0,)),
        _result(o.low_rank(x, R, "lora_a_in") if "x" in names else None, x),
        *o.gradients(names, x, *NAMES),
    )


def experts_hidden_calls(
    results, d_out, d_out_q, d_out_scales, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, lora_u,
    w_out_dtype, requested, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """The C calls of `experts_hidden`."""
    given, names = _options(options), requested_names(requested)
    factors, o = given.stored, given.network
    dh, d_w_out, d_b_out, d_weights, dh_q, dh_scales, v_in, *of_factors = results
    quantizes = o.precision == FP8 and "x" in names
    operands_out, quantize_out = weight_fields("w_out", w_out, w_out_q, w_out_scales, o, transposed=False)
    of_operands = zip(
        ("w_out", "b_out", "weights", *NAMES),
        (d_w_out, d_b_out, d_weights, *of_factors),
        strict=True,
    )
    hidden = calls.expert_ffn_backward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            **sizes_only("w_in", w_in, w_in_q, w_in_scales, o),
            "b_out": b_out,
            "weights": weights,
            "h": h,
            "d_out": d_out,
            "d_out_q": d_out_q,
            "d_out_scales": d_out_scales,
            "dh": None if names.isdisjoint(FROM_DH) else dh,
            **gradient_fields(names, of_operands),
            "dh_q": dh_q if quantizes else None,
            "dh_scales": dh_scales if quantizes else None,
            "lora_u": lora_u if "lora_b_in" in names else None,
            "lora_v_in": v_in if "x" in names and "lora_a_in" in factors else None,
            **factors.tensors(),
            **operands_out,
        },
        given.orders(factors),
        skip_rest=1,
        **o.attributes(),
    )
    return *quantize_out, hidden


#: The last arguments of `experts_hidden`, and its results.
ARGUMENTS_OF_HIDDEN = (
    "Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor? lora_u, ScalarType w_out_dtype, int requested, "
    f"{QUANTIZED_NETWORK}"
)
RESULTS_OF_HIDDEN = (
    "Tensor dh, Tensor d_w_out, Tensor d_b_out, Tensor d_weights, Tensor dh_q, Tensor dh_scales, Tensor lora_v_in, "
    f"{', '.join(f'Tensor d_{name}' for name in NAMES)}"
)
#: The arguments of `experts_hidden`.
EXPERTS_HIDDEN = (
    "(Tensor d_out, Tensor? d_out_q, Tensor? d_out_scales, Tensor h, Tensor x, Tensor weights, Tensor slot_of_row, "
    f"Tensor group_sizes, {ARGUMENTS_OF_HIDDEN})"
)
#: The first half of the backward pass of `experts`: dh, and the gradients of w_out, b_out, weights and all factors; [0]
#: for what the requested gradients do not need. For the gradient of x also dh quantised with FP8, and v_in with an
#: adapter of w_in. d_out may be given quantised in addition.
experts_hidden = define(
    f"experts_hidden{EXPERTS_HIDDEN} -> ({RESULTS_OF_HIDDEN})",
    allocate_experts_hidden,
    experts_hidden_calls,
)


def allocate_experts_inputs(
    dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, lora_v_in,
    w_in_dtype, d_x_dtype, requested, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """Empty results of `experts_inputs`."""
    names = requested_names(requested)
    return (
        allocate(x, "x" in names, x.shape, d_x_dtype),
        allocate(w_in, "w_in" in names, w_in.shape, w_in_dtype),
        allocate(x, "b_in" in names, () if b_in is None else b_in.shape),
    )


def _d_x_calls(
    given, d_x, dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, lora_v_in, quantized
):
    """The C calls for d_x = dh W_in^T + v_in A_in^T, summed per token."""
    factors, o = given.stored, given.network
    E, D, P, F = sizes_of_w_in(w_in, o.w_in_layout)
    R, fp8, prepared = dh.shape[0], o.precision == FP8, []
    transposed = o.w_in_layout.startswith("d") or fp8
    if fp8:
        operands_in, quantize_in = weight_fields("w_in", w_in, *quantized, o, transposed=False)
        prepared += quantize_in
        operands = {
            "x": dh_q.view(R, P * F),
            "x_scales": dh_scales.view(R, P * F // BLOCK),
            "w_q": operands_in["w_in_q"].view(E, D, P * F),
            "w_scales": operands_in["w_in_scales"].view(E, D // BLOCK, P * F // BLOCK),
        }
    else:
        operands = {"x": dh.view(R, P * F), "w": viewed_weight(w_in, (E, D, P * F) if transposed else (E, P * F, D))}
        if quantized[1] is not None:
            *leading, n, c = quantized[1].shape  # [E, P, F, D/32], [E, F, P, D/32] or [E, P, F/128, D/128]
            operands["w_block_scales"] = quantized[1].view(leading[0], leading[1] * n, c)
    orders, precision = None, {"precision": o.precision, "fp8_scales": o.fp8_scales}
    operands["group_sizes"] = group_sizes
    if "lora_a_in" in factors:
        a_in = factors["lora_a_in"]
        operands |= {"lora_u": lora_v_in, "lora_b": a_in.tensor}
        orders = {"lora_b": tuple(a_in.order[axis] for axis in (0, 2, 1))}
    sum_tensors = {"row_of_slot": row_of_slot, "addend": addend, "out": d_x}
    if fp8 and d_x.dtype != x.dtype:  # the fused call would round rows to the dtype of d_x
        rows = x.new_empty((R, D))
        tensors = {**operands, "y": rows}
        prepared.append(calls.grouped_matmul(tensors, orders, transpose_w=transposed, **precision))
        prepared.append(calls.combine({"rows": rows, **sum_tensors}))
    else:
        tensors = {**operands, "slot_of_row": slot_of_row, **sum_tensors}
        options = {"transpose_w": transposed, "skip_rest": 1, "backward": 1, **precision}
        prepared.append(calls.grouped_matmul_combine(tensors, orders, **options))
    return prepared


def experts_inputs_calls(
    results, dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, lora_v_in,
    w_in_dtype, d_x_dtype, requested, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """The C calls of `experts_inputs`."""
    given, names, prepared = _options(options), requested_names(requested), []
    d_x, *of_weights = results
    if "x" in names:
        prepared += _d_x_calls(
            given, d_x, dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, lora_v_in,
            (w_in_q, w_in_scales),
        )  # fmt: skip
    operands = ("w_in", "b_in")
    if names.isdisjoint(operands):
        return prepared
    weight_gradients = calls.expert_ffn_backward(
        {
            "x": x,
            "slot_of_row": slot_of_row,
            "group_sizes": group_sizes,
            **sizes_only("w_in", w_in, w_in_q, w_in_scales, given.network),
            **sizes_only("w_out", w_out, w_out_q, w_out_scales, given.network),
            "dh": dh,
            **gradient_fields(names, zip(operands, of_weights, strict=True)),
            **given.stored.tensors(),
        },
        given.orders(given.stored),
        **given.network.attributes(),
    )
    return [*prepared, weight_gradients]


#: The arguments of `experts_inputs`.
EXPERTS_INPUTS = (
    "(Tensor dh, Tensor dh_q, Tensor dh_scales, Tensor x, Tensor? addend, Tensor row_of_slot, "
    "Tensor slot_of_row, Tensor group_sizes, "
    "Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? lora_v_in, ScalarType w_in_dtype, "
    f"ScalarType d_x_dtype, int requested, {QUANTIZED_NETWORK})"
)
#: The second half of the backward pass of `experts`: the gradients of x (plus `addend`, in `d_x_dtype`), w_in and b_in;
#: [0] if not requested.
experts_inputs = define(
    f"experts_inputs{EXPERTS_INPUTS} -> (Tensor d_x, Tensor d_w_in, Tensor d_b_in)",
    allocate_experts_inputs,
    experts_inputs_calls,
)

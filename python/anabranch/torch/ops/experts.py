"""The experts: grouped GEMM and the feed-forward network, gated or ungated.

Sizes: T tokens, R rows, E experts, K experts per token, D model width, F expert width, P parts of w_in: 2 (gate and up)
for a gated expert, 1 for an ungated one.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.lora import NAMES, Lora, check_lora, check_pair
from anabranch.options import EXPERTS_NAMES, ExpertsKeywords, ExpertsOptions, Network, check_names, takes_options
from anabranch.precision import FP8, HIGHEST, check_fp8, check_fp8_widths, precision_number
from anabranch.torch.binding import check
from anabranch.torch.binding.autocast import as_autocast, match_autocast
from anabranch.torch.binding.autograd import Function
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.factors import factor_arguments, stored_factors
from anabranch.torch.ops.gradients import OPERANDS, request
from anabranch.torch.ops.packed import (
    Packed,
    check_weight,
    describe_weight,
    device_operands,
    oriented_backward,
    packed_operands,
    shape_of,
)
from anabranch.torch.ops.quantized import (
    QuantizedExperts,
    as_quantized_experts,
    backward_operands,
    check_current,
    check_fp8_operands,
    forward_operands,
)
from anabranch.torch.ops.weights_ops import PACKED_DTYPES


def check_experts(
    layouts: Layouts,
    x: Tensor,
    weight_dtypes: Sequence[torch.dtype],
    w_in: Any,
    w_out: Any,
    b_in: Any,
    b_out: Any,
    num_experts: int | None = None,
) -> tuple[int, int, int, int]:
    """Checks weights and biases of the experts against x [..., D] and returns (E, D, P, F)."""
    experts = "E" if num_experts is None else ("E", num_experts)
    D, dtype = ("D", x.shape[-1]), (x.dtype,)
    w_in = check_weight("w_in", w_in, weight_dtypes, layouts, e=experts, d=D, p="2 or 1", f="F")
    sizes = layouts.sizes("w_in", shape_of(w_in))
    if sizes["p"] not in (1, 2):
        gated, plain = (", ".join(layouts.shape("w_in", e="E", d="D", p=p, f="F")) for p in "21")
        raise ValueError(f"w_in: got {describe_weight(w_in)}, expected [{gated}] (gate, up) or [{plain}]")
    E, P, F = (("E", sizes["e"]), ("P", sizes["p"]), ("F", sizes["f"]))
    w_out = check_weight("w_out", w_out, weight_dtypes, layouts, e=E, f=F, d=D)
    if b_in is not None:
        b_in = check.tensor("b_in", b_in, dtype, layouts.shape("b_in", e=E, p=P, f=F))
    b_out = check.optional_tensor("b_out", b_out, dtype, (E, D))
    check.same_device(
        "x", x, **device_operands("w_in", w_in), **device_operands("w_out", w_out), b_in=b_in, b_out=b_out
    )
    return sizes["e"], sizes["d"], sizes["p"], sizes["f"]


def grouped_rows(name: str, value: Any) -> Tensor:
    """Checks rows [R, D]."""
    rows = check.tensor(name, value, check.FLOATS, ("R", "D"))
    if check.exceeds_int32(rows.shape[0]):
        raise ValueError(f"{name}: got {check.describe(rows)}, expected fewer than 2^31 rows")
    return rows


def check_network_lora(lora: Any, x: Tensor, sizes: tuple[int, int, int, int]) -> Lora | None:
    """Checks the argument `lora` of a layer against x and the sizes (E, D, P, F)."""
    dtypes = tuple(dict.fromkeys((x.dtype, torch.float32)))
    checked = check_lora(check.tensor, dtypes, lora, dict(zip("edpf", sizes, strict=True)))
    if checked is not None:
        check.same_device("x", x, **{f"lora.{name}": factor for name, factor in checked._asdict().items()})
    return checked


# ---------------------------------------------------------------- grouped matmul


class _GroupedMatmul(Function):
    """y of rows, and u with an adapter."""

    @staticmethod
    def forward(x, w, group_sizes, lora_a, lora_b, transpose_w, precision, fp8_scales, lora_scale):
        options = transpose_w, precision, fp8_scales
        if lora_a is None:
            return torch_ops.grouped_matmul(x, w, group_sizes, *options)
        factors = stored_factors((lora_a, lora_b))
        return torch_ops.grouped_matmul_lora(x, w, group_sizes, *factors, *options, lora_scale, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, group_sizes, lora_a, lora_b, ctx.transpose_w, *ctx.precision, ctx.lora_scale = inputs
        ctx.dtypes = x.dtype, w.dtype
        needs_x, needs_w, _, needs_a, needs_b = ctx.needs_input_grad[:5]
        u = None
        if lora_a is not None:
            u = output[1]
            ctx.mark_non_differentiable(u)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            x if needs_w or needs_a else None,
            w if needs_x or needs_a else None,
            group_sizes,
            lora_a,
            lora_b,
            u if needs_b else None,
        )

    @staticmethod
    def backward(ctx, d_y, _=None):
        if d_y is None:
            return (None,) * 9
        x, w, group_sizes, lora_a, lora_b, u = ctx.saved_tensors
        needs_x, needs_w, _, needs_a, needs_b = ctx.needs_input_grad[:5]
        d_x = d_w = d_a = d_b = v = None
        options = not ctx.transpose_w, *ctx.precision
        d_rows = d_y.to(ctx.dtypes[0])
        if lora_a is not None and (needs_x or needs_a):
            factors = stored_factors((lora_b.mT, lora_a.mT))
            d_x, v = torch_ops.grouped_matmul_lora(d_rows, w, group_sizes, *factors, *options, ctx.lora_scale, needs_x)
        elif needs_x:
            d_x = torch_ops.grouped_matmul(d_rows, w, group_sizes, *options)
        precision = HIGHEST if ctx.precision[0] == FP8 else ctx.precision[0]
        if needs_w:
            left, right = (d_y, x) if ctx.transpose_w else (x, d_y)
            d_w = torch_ops.grouped_matmul_dw(left, right, group_sizes, ctx.dtypes[1], precision, False)
        if needs_a:
            d_a = torch_ops.grouped_matmul_dw(x, v, group_sizes, lora_a.dtype, precision, lora_a.shape[0] == 1)
        if needs_b:
            d_b = torch_ops.grouped_matmul_dw(u, d_y, group_sizes, lora_b.dtype, precision, lora_b.shape[0] == 1)
        return d_x if needs_x else None, d_w, None, d_a, d_b, None, None, None, None


def _check_pair(lora: Any, x: Tensor, E: int, N: int) -> tuple[Tensor | None, Tensor | None]:
    """Checks the argument `lora` of `grouped_matmul`."""
    if lora is None:
        return None, None
    if not isinstance(lora, tuple | list) or len(lora) != 2:
        raise TypeError(f"lora: got {check.describe(lora)}, expected a pair of tensors (A, B)")
    names = ("lora[0]", "lora[1]")
    dtypes = tuple(dict.fromkeys((x.dtype, torch.float32)))
    a, b = check_pair(check.tensor, dtypes, names, tuple(lora), E, ("D", x.shape[1]), (("N", N),))
    check.same_device("x", x, **dict(zip(names, (a, b), strict=True)))
    return a, b


def grouped_matmul(
    x: Tensor,
    w: Tensor,
    group_sizes: Tensor,
    *,
    transpose_w: bool = False,
    precision: str = "highest",
    fp8_scales: str = "float32",
    lora: tuple[Tensor, Tensor] | None = None,
    lora_scale: float = 1.0,
) -> Tensor:
    """Multiplies the rows of each expert by that expert's matrix: y = x w[e].

    With an adapter (LoRA) y = x w[e] + u B[e], where u = lora_scale x A[e] is rounded to the dtype of x.

    Args:
      x: float32, bfloat16 or float16 [R, D]; rows are grouped by expert, expert 0 first.
      w: [E, D, N], or with transpose_w [E, N, D]; dtype of x.
      group_sizes: int16, int32 or int64 [E]: rows of each expert, on the device. Sizes are clipped to R rows in total;
        negative ones count as 0.
      transpose_w: y = x w[e]^T, without a copy of w.
      precision: "highest" or "tf32" for float32 x and w, forward and backward; see `moe`. "fp8" quantises x and w, and
        for the gradient of x d_y and w; D and N must be multiples of 128.
      fp8_scales: with "fp8", "float32" or "power_of_two"; see `moe`.
      lora: LoRA factors (A, B), [E or 1, D, r] and [E or 1, r, N], or None; dtype of x, or float32. A first dimension
        of 1 is one factor for all experts. Axes are in this order also with transpose_w. Transposed views are not
        copied. "fp8" does not quantise A, B and u.
      lora_scale: with `lora`, a finite number. It has no gradient.

    Returns:
      [R, N], dtype of x, accumulated in float32. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match, an unknown precision, or devices differ.

    Gradient: d_x = d_y w[e]^T, zero past the sizes; d_w[e] = x^T d_y, zero for an expert without rows; dtypes of x and
    w. With an adapter d_x += v A[e]^T, d_A[e] = x^T v and d_B[e] = u^T d_y, where v = lora_scale d_y B[e]^T; dtypes of
    A and B. Operands without requires_grad cost nothing. No double backward. Under torch.autocast float32 x and w are
    rounded to the autocast dtype first. Source: semantics, sections 6, 11 and 12.

    >>> w = torch.tensor([[[1.0], [1.0]], [[2.0], [3.0]]])
    >>> grouped_matmul(torch.ones(3, 2), w, torch.tensor([1, 2])).ravel().tolist()
    [2.0, 5.0, 5.0]
    """
    x = grouped_rows("x", as_autocast(x))
    w = match_autocast(x, w)
    sizes = check.indices("group_sizes", group_sizes, ("E",))
    E, D = sizes.shape[0], x.shape[1]
    transpose_w = check.boolean("transpose_w", transpose_w)
    w = check.tensor("w", w, (x.dtype,), (("E", E), "N", ("D", D)) if transpose_w else (("E", E), ("D", D), "N"))
    check.same_device("x", x, w=w, group_sizes=sizes)
    number = precision_number(precision)
    precision_options = number, check_fp8(number, fp8_scales)
    if number == FP8:
        check_fp8_widths("w", check.describe(w), D=D, N=w.shape[1 if transpose_w else 2])
    scale = check.number("lora_scale", lora_scale)
    a, b = _check_pair(lora, x, E, w.shape[1 if transpose_w else 2])
    if a is None:
        y: Tensor = _GroupedMatmul.call(x, w, sizes, None, None, transpose_w, *precision_options, 0.0)
        return y
    result: Tensor = _GroupedMatmul.call(x, w, sizes, a, b, transpose_w, *precision_options, scale)[0]
    return result


# ---------------------------------------------------------------- feed-forward network


def cast_weight(options: Network, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a weight to the dtype of x, unless it is packed or FP8 is used, where the operation quantises it."""
    keeps = options.precision == FP8 or weight.dtype == dtype or weight.dtype in PACKED_DTYPES
    return weight if keeps else weight.to(dtype)


_NUM_QUANTIZED = len(QuantizedExperts._fields)


class _ExpertFfn(Function):
    """y and h of rows. Float32 w_in and w_out beside 16-bit rows get unrounded float32 gradients."""

    tensors = (*(f"quantized_{name}" for name in QuantizedExperts._fields), *NAMES)

    @staticmethod
    def forward(options, rows, group_sizes, w_in, b_in, w_out, b_out, weights, *tensors):
        up, down = (cast_weight(options, w, rows.dtype) for w in (w_in, w_out))
        quantized, factors = tensors[:_NUM_QUANTIZED], factor_arguments(tensors[_NUM_QUANTIZED:])
        operands = forward_operands(as_quantized_experts(quantized))
        return torch_ops.ffn(rows, None, group_sizes, up, b_in, down, b_out, weights, *operands, *factors, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, *tensors = inputs
        _, h, u = output
        ctx.mark_non_differentiable(h, u)
        ctx.set_materialize_grads(False)
        operands, quantized, factors = tensors[:7], tensors[7:-4], tensors[-4:]
        ctx.save_for_backward(
            h, *operands, *backward_operands(as_quantized_experts(quantized)), u if factors[0] is not None else None,
            *factors,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, d_y, *_):
        names = ("", "x", "", "w_in", "b_in", "w_out", "b_out", "weights", *[""] * _NUM_QUANTIZED, *NAMES)
        if d_y is None:
            return (None,) * len(names)
        h, rows, group_sizes, w_in, b_in, w_out, b_out, weights, *others = ctx.saved_tensors
        *quantized, u = others[:5]
        quantized = oriented_backward(ctx.options, w_in, w_out, quantized)
        up, down = (cast_weight(ctx.options, w, rows.dtype) for w in (w_in, w_out))
        needs = dict(zip(names, ctx.needs_input_grad, strict=True))
        results = torch_ops.ffn_backward(
            d_y, h, rows, None, group_sizes, up, b_in, down, b_out, weights, u, w_in.dtype, w_out.dtype, request(needs),
            *quantized, *factor_arguments(others[5:]), *ctx.options,
        )  # fmt: skip
        gradients = dict(zip(OPERANDS, results, strict=True))
        if needs["weights"]:
            gradients["weights"] = gradients["weights"].to(weights.dtype)
        return tuple(gradients[name] if name and needs[name] else None for name in names)


def run_ffn(
    options: Network,
    rows: Tensor,
    group_sizes: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    weights: Tensor | None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
) -> Tensor:
    """`expert_ffn` on checked arguments."""
    fields = (None,) * _NUM_QUANTIZED if quantized is None else quantized
    factors = Lora() if lora is None else lora
    y: Tensor = _ExpertFfn.call(options, rows, group_sizes, w_in, b_in, w_out, b_out, weights, *fields, *factors)[0]
    return y


@takes_options(ExpertsKeywords)
def expert_ffn(
    rows: Tensor,
    w_in: Tensor | Packed,
    w_out: Tensor | Packed,
    group_sizes: Tensor,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    weights: Tensor | None = None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
    **options: Unpack[ExpertsKeywords],
) -> Tensor:
    """The feed-forward network of each expert on its rows: y = w (a W_out[e] + b_out[e]).

    h = x W_in[e] + b_in[e]; gated (P = 2): a = phi(h_gate, h_up), ungated (P = 1): a = act(h).

    Args:
      rows: float32, bfloat16 or float16 [R, D]; rows are grouped by expert, expert 0 first.
      w_in: [E, D, 2, F] (gate, up) or [E, D, 1, F]; dtype of rows, or float32. A float32 weight beside 16-bit rows is
        rounded for the GEMM; its gradient is not rounded.
      w_out: [E, F, D]; dtype of rows, or float32, as for w_in. w_in and w_out, each by itself, may be packed: an
        `Mxfp4` or an `Fp8Blocks`.
      group_sizes: int16, int32 or int64 [E]: rows of each expert, on the device. Sizes are clipped to R rows in total;
        negative ones count as 0.
      b_in: [E, 2 or 1, F], or None.
      b_out: [E, D], or None.
      weights: w, float [R]; None: 1.
      quantized: with precision "fp8", the result of `quantize_experts` for w_in and w_out; None: they are quantised in
        every call.
      lora: low-rank adapters of w_in and w_out, or None; see `Lora`.
      {options}

    Returns:
      y [R, D], dtype of rows. GEMMs accumulate in float32. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match, an unknown activation or precision, weight_early without weights, or devices
        differ.

    Gradient: of rows, w_in, w_out, b_in, b_out, weights and the LoRA factors, each in its own dtype; exact also where a
    weight is 0. It is zero for an expert without rows. Operands without requires_grad cost nothing. Saved for backward:
    the arguments, h [R, P, F], and u [R, r] of an adapter of w_in. No double backward. Under torch.autocast float32
    rows and biases are rounded to the autocast dtype first. Source: semantics, sections 6, 11 and 12.

    >>> w_in, w_out = torch.ones(1, 1, 1, 3), torch.ones(1, 3, 1)
    >>> expert_ffn(torch.ones(2, 1), w_in, w_out, torch.tensor([1]), activation="relu").tolist()
    [[3.0], [0.0]]
    """
    rows = grouped_rows("rows", as_autocast(rows))
    b_in, b_out = match_autocast(rows, b_in), match_autocast(rows, b_out)
    sizes = check.indices("group_sizes", group_sizes, ("E",))
    check_names("expert_ffn", EXPERTS_NAMES, options)
    given = ExpertsOptions(**options)
    layouts = given.layouts()
    dtypes = tuple(dict.fromkeys((rows.dtype, torch.float32)))
    of_w_in = check_experts(layouts, rows, dtypes, w_in, w_out, b_in, b_out, num_experts=sizes.shape[0])
    lora = check_network_lora(lora, rows, of_w_in)
    weights = check.optional_tensor("weights", weights, check.FLOATS, (("R", rows.shape[0]),))
    network = given.experts(of_w_in[2], 0, lora).network()
    quantized = check_fp8_operands(network.precision, layouts, "rows", rows, w_in, w_out, quantized)
    check_current(quantized, w_in, w_out)
    w_in, w_out, quantized = packed_operands(network, w_in, w_out, quantized)
    if network.weight_early and weights is None:
        raise ValueError("weight_early: got True without weights, expected weights [R]")
    check.same_device("rows", rows, group_sizes=sizes, weights=weights)
    return run_ffn(network, rows, sizes, w_in, w_out, b_in, b_out, weights, quantized, lora)

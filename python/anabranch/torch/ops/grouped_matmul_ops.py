"""Operations of grouped GEMMs, with and without an adapter, and of the gradients of their matrices."""

from anabranch.precision import BLOCK, FP8, HIGHEST
from anabranch.torch.binding import calls
from anabranch.torch.binding.define import define
from anabranch.torch.ops.factors import Factors
from anabranch.torch.ops.quantize_ops import empty_e4m3, empty_scales, quantized_matrix

_LORA_FIELDS = ("lora_a", "lora_b")


def _grouped_matmul_calls(results, x, w, group_sizes, factors, transpose_w, precision, fp8_scales, lora_scale):
    y, u = results
    options = dict(transpose_w=transpose_w, precision=precision, fp8_scales=fp8_scales)
    lora = {**factors.tensors(), "lora_u": u, "group_sizes": group_sizes, "y": y}
    orders = factors.orders()
    if precision != FP8:
        return calls.grouped_matmul({"x": x, "w": w, **lora}, orders, **options, lora_scale=lora_scale)
    R, D = x.shape
    q, scales = empty_e4m3(x, R, D), empty_scales(x, R, D // BLOCK)
    prepared = [calls.quantize_rows({"x": x, "q": q, "scales": scales}, fp8_scales=fp8_scales)]
    w_q, w_scales, weights = quantized_matrix(w, (0, 1, 2), fp8_scales, transposed=not transpose_w)
    prepared.append(weights)
    if u is not None:  # quantised rows take u, which another call computes from the rows
        prepared.append(_low_rank_call(u, x, group_sizes, factors, lora_scale))
        del lora["lora_a"], orders["lora_a"]
    operands = {"x": q, "x_scales": scales, "w_q": w_q, "w_scales": w_scales}
    return *prepared, calls.grouped_matmul({**operands, **lora}, orders, **options)


def _low_rank_call(u, x, group_sizes, factors, lora_scale, precision=HIGHEST):
    """The C call that computes u = s x A alone: a GEMM with matrices without columns."""
    a, b = factors["lora_a"], factors["lora_b"]
    E, D, r = group_sizes.shape[0], x.shape[1], a.shape[2]
    tensors = {
        "x": x,
        "w": x.new_empty((E, D, 0)),
        "group_sizes": group_sizes,
        "y": x.new_empty((x.shape[0], 0)),
        "lora_a": a.tensor,
        "lora_b": b.tensor.new_empty((1, r, 0)),
        "lora_u": u,
    }
    return calls.grouped_matmul(tensors, {"lora_a": a.order}, lora_scale=lora_scale, precision=precision)


def _allocate_grouped_matmul(x, w, group_sizes, transpose_w, precision, fp8_scales):
    return x.new_empty((x.shape[0], w.shape[1 if transpose_w else 2]))


def _grouped_matmul(y, x, w, group_sizes, *options):
    return _grouped_matmul_calls((y, None), x, w, group_sizes, Factors((None, None), 0, _LORA_FIELDS), *options, 0.0)


grouped_matmul = define(
    "grouped_matmul(Tensor x, Tensor w, Tensor group_sizes, bool transpose_w, int precision, int fp8_scales) -> Tensor",
    _allocate_grouped_matmul,
    _grouped_matmul,
)


def _allocate_grouped_matmul_lora(
    x, w, group_sizes, lora_a, lora_b, lora_orders, transpose_w, precision, fp8_scales, lora_scale, needs_y
):
    factors = Factors((lora_a, lora_b), lora_orders, _LORA_FIELDS)
    y = _allocate_grouped_matmul(x, w, group_sizes, transpose_w, precision, fp8_scales)
    return y if needs_y else x.new_empty((0,)), x.new_empty((x.shape[0], factors.rank("lora_a")))


def _grouped_matmul_lora(
    results, x, w, group_sizes, lora_a, lora_b, lora_orders, transpose_w, precision, fp8_scales, lora_scale, needs_y
):
    factors = Factors((lora_a, lora_b), lora_orders, _LORA_FIELDS)
    if not needs_y:
        return _low_rank_call(
            results[1], x, group_sizes, factors, lora_scale, HIGHEST if precision == FP8 else precision
        )
    return _grouped_matmul_calls(results, x, w, group_sizes, factors, transpose_w, precision, fp8_scales, lora_scale)


#: y = x w + u B, and u = s x A; without needs_y u alone.
grouped_matmul_lora = define(
    "grouped_matmul_lora(Tensor x, Tensor w, Tensor group_sizes, Tensor lora_a, Tensor lora_b, int lora_orders, "
    "bool transpose_w, int precision, int fp8_scales, float lora_scale, bool needs_y) -> (Tensor y, Tensor u)",
    _allocate_grouped_matmul_lora,
    _grouped_matmul_lora,
)


def _grouped_matmul_dw(d_w, x, d_y, group_sizes, dtype, precision, shared):
    tensors = {"x": x, "d_y": d_y, "group_sizes": group_sizes, "d_w": d_w}
    return calls.grouped_matmul_dw(tensors, accumulate=0, precision=precision)


def _allocate_grouped_matmul_dw(x, d_y, group_sizes, dtype, precision, shared):
    E = 1 if shared else group_sizes.shape[0]
    return x.new_empty((E, x.shape[1], d_y.shape[1]), dtype=dtype)


#: The gradient of the matrices [E, D, N], or of one that all experts share [1, D, N].
grouped_matmul_dw = define(
    "grouped_matmul_dw(Tensor x, Tensor d_y, Tensor group_sizes, ScalarType dtype, int precision, bool shared) "
    "-> Tensor",
    _allocate_grouped_matmul_dw,
    _grouped_matmul_dw,
)

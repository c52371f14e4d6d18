"""Operations that quantise rows and weights for FP8 GEMMs."""

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.precision import BLOCK
from anabranch.torch.binding import calls
from anabranch.torch.binding.define import define


def empty_e4m3(like: Tensor, *shape: int) -> Tensor:
    """An empty quantised tensor."""
    return like.new_empty(shape, dtype=torch.float8_e4m3fn)


def empty_scales(like: Tensor, *shape: int) -> Tensor:
    """Empty scales of a quantised tensor."""
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
        empty_e4m3(w, E, D, *parts, N) if plain else None,
        empty_e4m3(w, E, *parts, N, D) if transposed else None,
        empty_scales(w, E, D // BLOCK, *parts, N // BLOCK),
    )


def quantized_matrix(w, axes, fp8_scales, *, transposed):
    """(q in one orientation, its scales, the C call that fills both)."""
    results = allocate_quantize(w, axes, not transposed, transposed)
    return results[int(transposed)], results[2], quantize_calls(results, w, axes, fp8_scales)


def _allocate_quantize_rows(x, fp8_scales):
    R, D = x.shape
    return empty_e4m3(x, R, D), empty_scales(x, R, D // BLOCK)


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

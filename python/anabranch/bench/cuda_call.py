"""Calls of libanabranch_cuda.so on torch's tensors and current stream."""

import ctypes
from collections.abc import Callable
from typing import Any

from anabranch import _library
from anabranch.bench import c_call
from anabranch.bench.gpu import torch_with_gpu

# Names in the order of the C structs: options, then tensors; _LATER: what came later.
FIELDS = {
    "ab_cuda_router_forward": (
        "topk score_function normalize num_groups group_topk scaling_factor",
        "logits expert_bias token_mask forced_experts weights experts tokens_per_expert score_sum lse probs "
        "routing_map aux_scores",
    ),
    "ab_cuda_router_backward": (
        "topk score_function normalize scaling_factor",
        "logits experts token_mask lse d_weights d_probs d_score_sum d_aux_scores d_lse d_logits",
    ),
    "ab_cuda_load_balance_loss": ("topk coeff", "score_sum tokens_per_expert num_tokens loss d_score_sum"),
    "ab_cuda_score_sum": ("", "scores score_sum"),
    "ab_cuda_plan": (
        "num_experts align_size num_destinations",
        "experts routing_map tokens_per_expert group_sizes offsets row_of_slot slot_of_row dropped row_id_map",
    ),
    "ab_cuda_dispatch": ("", "x row_of_slot slot_of_row weights rows"),
    "ab_cuda_combine": ("", "rows row_of_slot weights out addend"),
    "ab_cuda_combine_backward": ("", "d_out rows row_of_slot slot_of_row weights d_rows d_weights"),
    "ab_cuda_sort_chunks": ("inverse", "x split_sizes sorted_indices out row_id_map"),
    "ab_cuda_grouped_matmul": ("transpose_w", "x w group_sizes y"),
    "ab_cuda_grouped_matmul_dw": ("accumulate", "x d_y group_sizes d_w"),
    "ab_cuda_grouped_matmul_combine": (
        "transpose_w weight_early skip_rest",
        "x w group_sizes bias slot_of_row row_of_slot weights addend out",
    ),
    "ab_cuda_expert_ffn_forward": (
        "activation weight_early topk skip_rest",
        "x slot_of_row group_sizes w_in b_in w_out b_out weights y h a",
    ),
    "ab_cuda_expert_ffn_backward": (
        "activation topk accumulate skip_rest",
        "x slot_of_row group_sizes w_in w_out b_out weights h d_out dh dx_rows d_w_in d_b_in d_w_out d_b_out d_weights"
        " weighted_a",
    ),
}
_LATER: dict[str, tuple[tuple[str, Any], ...]] = {
    "ab_cuda_router_forward": (
        ("group_score_topk", ctypes.c_int32),
        ("qb_bin_bounds", ctypes.POINTER(c_call.Tensor)),
        ("qb_histogram", ctypes.POINTER(c_call.Tensor)),
    ),
    "ab_cuda_grouped_matmul_combine": (
        ("backward", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("fp8_scales", ctypes.c_int32),
        ("x_scales", ctypes.POINTER(c_call.Tensor)),
        ("w_q", ctypes.POINTER(c_call.Tensor)),
        ("w_scales", ctypes.POINTER(c_call.Tensor)),
    ),
}
_WITHOUT_WORKSPACE = (
    "ab_cuda_router_backward",
    "ab_cuda_load_balance_loss",
    "ab_cuda_dispatch",
    "ab_cuda_combine",
    "ab_cuda_combine_backward",
)


def options_of(function: str) -> list[tuple[str, Any]]:
    """Names and ctypes of a function's options."""
    floats = ("scaling_factor", "coeff")
    return [(name, ctypes.c_float if name in floats else ctypes.c_int32) for name in FIELDS[function][0].split()]


def tensors_of(function: str) -> list[str]:
    """Names of a function's tensors."""
    return FIELDS[function][1].split()


def later_of(function: str) -> tuple[tuple[str, Any], ...]:
    """Names and ctypes of the fields that came later."""
    return _LATER.get(function, ())


def cuda_call(function: str, **values: Any) -> Callable[[], None]:
    """A call of `function` with these options and tensors, ready to be made often."""
    torch = torch_with_gpu()
    return c_call.call(
        _library.load_cuda(),
        function,
        options_of(function),
        tensors_of(function),
        values,
        later=later_of(function),
        has_workspace=function not in _WITHOUT_WORKSPACE,
        allocate=lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        stream=lambda: torch.cuda.current_stream().cuda_stream,
    )

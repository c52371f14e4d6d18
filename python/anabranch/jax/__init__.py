"""Anabranch for JAX: route, plan, dispatch, experts, combine, and the whole layer as one differentiable function."""

import contextlib

from anabranch._library import LibraryError
from anabranch._packages import needed_by
from anabranch.activation import Activation

with needed_by("anabranch.jax"):
    from anabranch.jax.binding import ffi
from anabranch.jax.binding.ffi import custom_calls
from anabranch.jax.layer.lora import init_lora, join_lora, merge_lora
from anabranch.jax.layer.moe import MoEOutput, moe
from anabranch.jax.layer.quantize_experts import quantize_experts
from anabranch.jax.layer.routed_experts import RoutedExpertsOutput, routed_experts
from anabranch.jax.layer.shared_expert import shared_expert
from anabranch.jax.ops.balance import fused_moe_aux_loss, load_balance_loss, z_loss
from anabranch.jax.ops.chunk_sort import sort_chunks_by_index
from anabranch.jax.ops.dispatch import combine, dispatch
from anabranch.jax.ops.experts import expert_ffn, grouped_matmul
from anabranch.jax.ops.megablox import gmm
from anabranch.jax.ops.packed import pack_fp8, pack_mxfp4, unpack
from anabranch.jax.ops.plan import Plan, plan
from anabranch.jax.ops.quantile import quantile_bias
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.ops.ragged_dot import ragged_dot, ragged_dot_general
from anabranch.jax.ops.router import Routing, route
from anabranch.jax.parallel.parallel import Parallel
from anabranch.jax.parallel.ragged import (
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    local_permute_after_a2a,
    local_unpermute_before_a2a,
)
from anabranch.jax.te.grouped_dense import grouped_dense
from anabranch.jax.te.permutation import routing_map_to_selected_experts, token_combine, token_dispatch
from anabranch.jax.te.pure_jax import PureJaxPermState, pure_jax_token_combine, pure_jax_token_dispatch
from anabranch.jax.te.router import (
    RoutingMapFormat,
    ScoreFunction,
    fused_compute_score_for_moe_aux_loss,
    fused_topk_with_score_function,
)
from anabranch.lora import Lora
from anabranch.packed import Fp8Blocks, Mxfp4
from anabranch.replay import Replay

__all__ = [
    "Activation",
    "Fp8Blocks",
    "Lora",
    "MoEOutput",
    "Mxfp4",
    "Parallel",
    "Plan",
    "PureJaxPermState",
    "QuantizedExperts",
    "Replay",
    "RoutedExpertsOutput",
    "Routing",
    "RoutingMapFormat",
    "ScoreFunction",
    "combine",
    "compute_ragged_all_to_all_params",
    "compute_reverse_ragged_all_to_all_params",
    "custom_calls",
    "dispatch",
    "expert_ffn",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "gmm",
    "grouped_dense",
    "grouped_matmul",
    "init_lora",
    "join_lora",
    "load_balance_loss",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "merge_lora",
    "moe",
    "pack_fp8",
    "pack_mxfp4",
    "plan",
    "pure_jax_token_combine",
    "pure_jax_token_dispatch",
    "quantile_bias",
    "quantize_experts",
    "ragged_dot",
    "ragged_dot_general",
    "route",
    "routed_experts",
    "routing_map_to_selected_experts",
    "shared_expert",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
    "unpack",
    "z_loss",
]

# Without a library the import succeeds, and the first operation raises the error.
with contextlib.suppress(LibraryError):
    ffi.register()

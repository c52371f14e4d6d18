"""Anabranch for PyTorch: the MoE layer and its operations (route, plan, dispatch, experts, combine)."""

from anabranch._library import LibraryError
from anabranch._packages import needed_by
from anabranch.activation import Activation
from anabranch.dense_router import RoutingMapFormat
from anabranch.lora import Lora
from anabranch.packed import Fp8Blocks, Mxfp4
from anabranch.replay import Replay

with needed_by("anabranch.torch"):
    from anabranch.torch.ops.balance import fused_moe_aux_loss, load_balance_loss, z_loss
from anabranch.torch.layer.clipping import clip_grad_norm_
from anabranch.torch.layer.data_parallel import ddp_ignore_experts
from anabranch.torch.layer.lora import add_lora, init_lora, join_lora, merge_lora
from anabranch.torch.layer.module import MoE
from anabranch.torch.layer.moe import MoEOutput, moe
from anabranch.torch.layer.pack_experts import pack_experts
from anabranch.torch.layer.routed_experts import RoutedExpertsOutput, routed_experts
from anabranch.torch.layer.shared_expert import shared_expert
from anabranch.torch.ops.chunk_sort import moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs
from anabranch.torch.ops.dispatch import combine, dispatch
from anabranch.torch.ops.experts import expert_ffn, grouped_matmul
from anabranch.torch.ops.packed import pack_fp8, pack_mxfp4, unpack
from anabranch.torch.ops.plan import Plan, plan
from anabranch.torch.ops.quantile import quantile_bias
from anabranch.torch.ops.quantized import QuantizedExperts, quantize_experts
from anabranch.torch.ops.router import Routing, route
from anabranch.torch.te.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_unpermute,
)
from anabranch.torch.te.router import fused_compute_score_for_moe_aux_loss, fused_topk_with_score_function

__all__ = [
    "Activation",
    "Fp8Blocks",
    "LibraryError",
    "Lora",
    "MoE",
    "MoEOutput",
    "Mxfp4",
    "Plan",
    "QuantizedExperts",
    "Replay",
    "RoutedExpertsOutput",
    "Routing",
    "RoutingMapFormat",
    "add_lora",
    "clip_grad_norm_",
    "combine",
    "ddp_ignore_experts",
    "dispatch",
    "expert_ffn",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "grouped_matmul",
    "init_lora",
    "join_lora",
    "load_balance_loss",
    "merge_lora",
    "moe",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "pack_experts",
    "pack_fp8",
    "pack_mxfp4",
    "plan",
    "quantile_bias",
    "quantize_experts",
    "route",
    "routed_experts",
    "shared_expert",
    "unpack",
    "z_loss",
]

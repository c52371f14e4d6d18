"""All registered operations."""

from anabranch.torch.ops.dispatch_ops import (
    combine,
    combine_backward,
    dispatch,
    expand_row_id_map,
    plan,
    plan_of_map,
    sort_chunks,
)
from anabranch.torch.ops.experts_ops import (
    experts,
    experts_hidden,
    experts_inputs,
    ffn,
    ffn_backward,
)
from anabranch.torch.ops.grouped_matmul_ops import grouped_matmul, grouped_matmul_dw, grouped_matmul_lora
from anabranch.torch.ops.layer_ops import layer, layer_hidden
from anabranch.torch.ops.quantize_ops import quantize_experts, quantize_rows
from anabranch.torch.ops.router_ops import (
    aux_scores,
    aux_scores_backward,
    moe_aux_loss,
    moe_aux_loss_backward,
    route,
    route_backward,
    route_dense,
    route_dense_backward,
)
from anabranch.torch.ops.weights_ops import pack_fp8, pack_mxfp4, unpack

__all__ = (
    "aux_scores",
    "aux_scores_backward",
    "combine",
    "combine_backward",
    "dispatch",
    "expand_row_id_map",
    "experts",
    "experts_hidden",
    "experts_inputs",
    "ffn",
    "ffn_backward",
    "grouped_matmul",
    "grouped_matmul_dw",
    "grouped_matmul_lora",
    "layer",
    "layer_hidden",
    "moe_aux_loss",
    "moe_aux_loss_backward",
    "pack_fp8",
    "pack_mxfp4",
    "plan",
    "plan_of_map",
    "quantize_experts",
    "quantize_rows",
    "route",
    "route_backward",
    "route_dense",
    "route_dense_backward",
    "sort_chunks",
    "unpack",
)

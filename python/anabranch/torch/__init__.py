"""Anabranch for PyTorch: route, plan, dispatch, experts, combine, and the whole layer, on the same two libraries."""

from anabranch._library import LibraryError
from anabranch.activation import Activation
from anabranch.torch.balance import load_balance_loss, z_loss
from anabranch.torch.dispatch import combine, dispatch
from anabranch.torch.experts import expert_ffn, grouped_matmul
from anabranch.torch.module import MoE
from anabranch.torch.moe import MoEOutput, moe
from anabranch.torch.plan import Plan, plan
from anabranch.torch.quantile import quantile_bias
from anabranch.torch.routed_experts import RoutedExpertsOutput, routed_experts
from anabranch.torch.router import Routing, route
from anabranch.torch.shared_expert import shared_expert

__all__ = [
    "Activation",
    "LibraryError",
    "MoE",
    "MoEOutput",
    "Plan",
    "RoutedExpertsOutput",
    "Routing",
    "combine",
    "dispatch",
    "expert_ffn",
    "grouped_matmul",
    "load_balance_loss",
    "moe",
    "plan",
    "quantile_bias",
    "route",
    "routed_experts",
    "shared_expert",
    "z_loss",
]

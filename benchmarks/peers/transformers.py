"""The Qwen3-MoE layer of transformers, with a choice of its experts' implementations."""

import importlib.util
from typing import Any

from benchmarks.shapes import LayerShape


def installed() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def block(implementation: str, shape: LayerShape) -> Any:
    """Returns the layer on the meta device, without values. implementation: that of its experts, "grouped_mm"."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    options: dict[str, Any] = {
        "hidden_size": shape.D,
        "moe_intermediate_size": shape.F,
        "num_experts": shape.E,
        "num_experts_per_tok": shape.K,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "experts_implementation": implementation,
    }
    with torch.device("meta"):
        return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**options))

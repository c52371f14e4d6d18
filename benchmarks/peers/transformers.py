"""The Qwen3-MoE layer of transformers, with a choice of its experts' implementations."""

import importlib.util
from typing import Any

from benchmarks.shapes import LayerShape

#: "eager" synchronises with the device; "batched_mm" copies the expert's weights for every assignment.
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


def installed() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def batched_bytes(shape: LayerShape, itemsize: int) -> int:
    """Returns the bytes of weights that "batched_mm" copies: one expert's weights per assignment.

    >>> batched_bytes(LayerShape(256, 64, 32, 8, 2), 4)
    12582912
    """
    return 3 * shape.T * shape.K * shape.D * shape.F * itemsize


def block(implementation: str, shape: LayerShape) -> Any:
    """Returns the layer on the meta device, without values."""
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

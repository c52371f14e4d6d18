"""Checkpoints of models: from the tensors of a Mixture-of-Experts block to the arrays of `moe`, and back, bit for bit.

numpy alone. What is one tensor in the checkpoint is a view of it, in the layout that it has there, which `moe` and
`routed_experts` take as it is; what the checkpoint has in pieces, an expert each or gate and up apart, is put together
by the one copy that this needs.

    family = FAMILIES["qwen3_moe"]
    block = load(family, tensors, prefix="model.layers.0.mlp.")
    y = moe(x, **block.router, **block.experts, **family.options, topk=8).output
"""

from anabranch.checkpoints.block import Block, load, store
from anabranch.checkpoints.families import FAMILIES
from anabranch.checkpoints.family import Family, Stored

__all__ = ["FAMILIES", "Block", "Family", "Stored", "load", "store"]

"""Model checkpoints: converts the tensors of a Mixture-of-Experts block to the arrays of `moe` and back, bit for bit.

Needs numpy only. An array that is one tensor in the checkpoint is a view of that tensor in its own layout, which `moe`
and `routed_experts` accept. An array that the checkpoint splits, by expert or into gate and up, is assembled with one
copy.

    family = FAMILIES["qwen3_moe"]
    block = load(family, tensors, prefix="model.layers.0.mlp.")
    y = moe(x, **block.router, **block.experts, **family.options, topk=8).output
"""

from anabranch.checkpoints.block import Block, load, store
from anabranch.checkpoints.families import FAMILIES
from anabranch.checkpoints.family import Family, Stored

__all__ = ["FAMILIES", "Block", "Family", "Stored", "load", "store"]

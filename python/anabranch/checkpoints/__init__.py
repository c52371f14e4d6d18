"""Model checkpoints: converts the tensors of a Mixture-of-Experts block to the arrays of `moe` and back, bit for bit.

Needs numpy only. An array that is one tensor in the checkpoint is a view of that tensor in its own layout, which `moe`
and `routed_experts` accept. An array that the checkpoint splits, by expert or into gate and up, is assembled with one
copy. MXFP4 and FP8 experts stay packed. `check` finds missing experts, `convert` packs the experts of a checkpoint.

    family = FAMILIES["qwen3_moe"]
    block = load(family, tensors, prefix="model.layers.0.mlp.")
    y = moe(x, **block.router, **block.experts, **family.options, topk=8).output
"""

from anabranch.checkpoints.block import Block, load, store
from anabranch.checkpoints.complete import Report, check
from anabranch.checkpoints.convert import convert
from anabranch.checkpoints.families import FAMILIES
from anabranch.checkpoints.family import Family, Stored
from anabranch.checkpoints.files import Files, write_file

__all__ = [
    "FAMILIES",
    "Block",
    "Family",
    "Files",
    "Report",
    "Stored",
    "check",
    "convert",
    "load",
    "store",
    "write_file",
]

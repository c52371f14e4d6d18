"""Hugging Face Transformers: the experts of its models, computed by `routed_experts`.

After `register()` every model whose experts follow the interface of Transformers accepts
`experts_implementation="anabranch"`. Its parameters and its router do not change. `packed_config()` loads checkpoints
with MXFP4 or FP8 experts as they are. `parallelize()` shards the experts and all other parameters over many devices.
"""

from anabranch.torch.transformers.adapter import NAME, Experts, check, load_balancing_loss_func, register
from anabranch.torch.transformers.packed_config import packed_config
from anabranch.torch.transformers.packed_modules import Fp8Linear, PackedExperts
from anabranch.torch.transformers.parallelize import parallelize

__all__ = [
    "NAME",
    "Experts",
    "Fp8Linear",
    "PackedExperts",
    "check",
    "load_balancing_loss_func",
    "packed_config",
    "parallelize",
    "register",
]

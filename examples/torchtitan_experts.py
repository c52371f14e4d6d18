"""torchtitan's experts on anabranch: overrides of its configuration (torchtitan 0.3).

Put this file on the Python path and name the override for the model's experts:

    torchrun ... -m torchtitan.train ... --override.imports torchtitan_experts.grouped_experts

- `grouped_experts`: `GroupedExperts`, which most models have. Every call stacks the gate and up weights.
- `fused_grouped_experts`: `GroupedExperts` with both in one parameter, as in torchtitan's own override of that name;
  it makes no copy. Checkpoints are those of `GroupedExperts`.
- `gpt_oss_experts`: `GptOssGroupedExperts`.

Names of parameters, initialisation, sharding, checkpoints and the use of bfloat16 are those of torchtitan. An override
replaces exactly the class that it names; quantised experts (MXFP8, Float8) are subclasses and are not replaced.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.overrides import fused_swiglu

from anabranch.torch import Activation, expert_ffn


def _refuse_subclass(module: Any, expected: type) -> None:
    """Refuses a quantised subclass: it replaces the grouped GEMM of torchtitan's experts, which is not called here."""
    if type(module) is not expected:
        raise TypeError(f"experts: got {type(module).__qualname__}, expected {expected.__qualname__} and no subclass")


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class AnabranchExperts(GroupedExperts):
    """`w1_EFD` gate, `w3_EFD` up, `w2_EDF` down."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The configuration of GroupedExperts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _refuse_subclass(self, AnabranchExperts)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Rows in expert order, possibly followed by padding."""
        w1_EFD, w3_EFD, w2_EDF = (_local(w) for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        w_in_E2FD = torch.stack((w1_EFD, w3_EFD), 1)
        y_RD = expert_ffn(
            x_RD.bfloat16(), w_in_E2FD, w2_EDF, num_tokens_per_expert_E, w_in_layout="pfd", w_out_layout="df"
        )
        return y_RD.type_as(x_RD)


class AnabranchFusedExperts(fused_swiglu.FusedGroupedExperts):
    """`w13` [E, F, 2, D] gate and up, `w2_EDF` down."""

    @dataclass(kw_only=True, slots=True)
    class Config(fused_swiglu.FusedGroupedExperts.Config):
        """The configuration of FusedGroupedExperts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _refuse_subclass(self, AnabranchFusedExperts)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Rows in expert order, possibly followed by padding."""
        w13_EF2D, w2_EDF = _local(self.w13), _local(self.w2_EDF)
        y_RD = expert_ffn(
            x_RD.bfloat16(), w13_EF2D, w2_EDF, num_tokens_per_expert_E, w_in_layout="fpd", w_out_layout="df"
        )
        return y_RD.type_as(x_RD)


class AnabranchGptOssExperts(GptOssGroupedExperts):
    """`mlp1_weight_EGD` [E, 2F, D], gate and up interleaved, `mlp2_weight_EDF`, and their biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """The configuration of GptOssGroupedExperts."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _refuse_subclass(self, AnabranchGptOssExperts)
        self.activation = Activation.swiglu_oai(alpha=1.702, limit=config.swiglu_limit)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Rows in expert order, possibly followed by padding.

        Raises:
          NotImplementedError: tensor parallelism, which would add the second bias once per rank.
        """
        w_in = self.mlp1_weight_EGD
        if isinstance(w_in, DTensor) and "tp" in w_in.device_mesh.mesh_dim_names:
            raise NotImplementedError('experts: got a mesh with a dimension "tp", expected none')
        w_in, b_in, w_out, b_out = (
            _local(p) for p in (w_in, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        )
        return expert_ffn(
            x_RD.bfloat16(),
            w_in.unflatten(1, (-1, 2)),
            w_out,
            num_tokens_per_expert_E,
            b_in=b_in.bfloat16().unflatten(1, (-1, 2)),
            b_out=b_out.bfloat16(),
            activation=self.activation,
            w_in_layout="fpd",
            w_out_layout="df",
        )


@override(target=GroupedExperts.Config, exact=True, description="Grouped experts computed by anabranch.")
def grouped_experts(cfg: GroupedExperts.Config) -> AnabranchExperts.Config:
    """Keeps the parameters w1_EFD, w2_EDF and w3_EFD."""
    return derive(cfg, AnabranchExperts.Config)


@override(target=GroupedExperts.Config, exact=True, description="Grouped experts computed by anabranch, gate+up fused.")
def fused_grouped_experts(cfg: GroupedExperts.Config) -> AnabranchFusedExperts.Config:
    """Stores w1_EFD and w3_EFD in one parameter."""
    return derive(fused_swiglu.fused_grouped_experts(cfg), AnabranchFusedExperts.Config)


@override(target=GptOssGroupedExperts.Config, exact=True, description="gpt-oss experts computed by anabranch.")
def gpt_oss_experts(cfg: GptOssGroupedExperts.Config) -> AnabranchGptOssExperts.Config:
    """Keeps the parameters of GptOssGroupedExperts."""
    return derive(cfg, AnabranchGptOssExperts.Config)

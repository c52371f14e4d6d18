"""Megatron-Core's mixture of experts on anabranch: grouped experts and TransformerEngine's functions.

Put this file on the Python path. Experts are a module of the layer's specification:

    experts = layer_spec.submodules.mlp.submodules.experts
    experts.module = AnabranchTEGroupedMLP  # replaces TEGroupedMLP; AnabranchGroupedMLP replaces GroupedMLP

Parameters, their names and checkpoints are those of Megatron. Experts are gated with silu and have no biases; any other
option that changes their result is an error. `use_fused_functions()` replaces the eight functions of TransformerEngine
that `moe_router_fusion` and `moe_permute_fusion` call.
"""

import dataclasses
import inspect
import re
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import GroupedMLP, TEGroupedMLP
from torch import Tensor

import anabranch.torch as ab
from anabranch.torch import expert_ffn

EXPECTED = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "delay_wgrad_compute": False,  # weight gradients are computed with the others
}
"""The required values of these options. Other relevant options must have their defaults."""

IRRELEVANT = frozenset(
    # options of shapes and parameters, which the module determines
    "hidden_size ffn_hidden_size moe_ffn_hidden_size moe_latent_size params_dtype bf16 expert_model_parallel_size "
    "init_method output_layer_init_method perform_initialization use_cpu_initialization "
    # options without effect on results: the activation is always fused, and recomputed in the backward pass
    "bias_activation_fusion bias_dropout_fusion recompute_granularity recompute_modules "
    # has an effect only with moe_apply_probs_on_input
    "moe_router_topk".split()
)
"""Options that the replaced classes read, without effect on results."""


def check_config(config: Any, replaced: type) -> None:
    """Refuses a configuration for which `replaced` would compute other results.

    The relevant options are those that the source of `replaced` reads, and all quantisation options by name. This
    includes options of a newer Megatron, which must have their default values.

    Raises:
      ValueError: names the option, its value and what is expected.
    """
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }
    read = set(re.findall(r"\bconfig\.([a-z]\w*)", inspect.getsource(replaced))) - IRRELEVANT
    quantised = {name for name in defaults if re.search(r"fp\d(?!\d)|quant", name)}
    for name in sorted(read | quantised | EXPECTED.keys()):
        expected = EXPECTED.get(name, defaults.get(name))
        if (found := getattr(config, name, expected)) != expected:
            raise ValueError(f"{name}: got {found}, expected {expected}")


def _counts(tokens_per_expert: Tensor, rows: Tensor) -> Tensor:
    """Moves the counts, which may be on the host, to the rows' device without synchronisation."""
    return torch.as_tensor(tokens_per_expert).to(rows.device, non_blocking=True)


class AnabranchGroupedMLP(GroupedMLP):
    """Megatron's GroupedMLP: `weight1` [D, E 2F] holds [E, D, 2F], `weight2` [E F, D] holds [E, F, D]."""

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        check_config(config, GroupedMLP)
        super().__init__(num_local_experts, config, *args, **kwargs)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows [R, D] in expert order. Their probabilities [R] are applied before the second GEMM."""
        rows, E, D = permuted_local_hidden_states, self.num_local_experts, self.config.hidden_size
        w_in, w_out = self.weight1.view(E, D, 2, -1), self.weight2.view(E, -1, D)
        counts = _counts(tokens_per_expert, rows)
        return expert_ffn(rows, w_in, w_out, counts, weights=permuted_probs, weight_early=True), None


class AnabranchTEGroupedMLP(TEGroupedMLP):
    """Megatron's TEGroupedMLP: one parameter per expert, which every call stacks.

    Expert e has the parameters `linear_fc1.weight{e}` [2F, D] and `linear_fc2.weight{e}` [D, F].
    """

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        check_config(config, TEGroupedMLP)
        super().__init__(num_local_experts, config, *args, **kwargs)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows [R, D] in expert order. Their probabilities [R] are applied before the second GEMM.

        Raises:
          ValueError: `linear_fc1` or `linear_fc2` has hooks on its forward pass, which is not called
            (`overlap_param_gather` sets some).
        """
        rows, weights = permuted_local_hidden_states, []
        for name in ("linear_fc1", "linear_fc2"):
            linear = getattr(self, name)
            if linear._forward_pre_hooks or linear._forward_hooks:
                raise ValueError(f"{name}: got a module with forward hooks, expected none: they would not run")
            weights.append(torch.stack([getattr(linear, f"weight{e}") for e in range(self.num_local_experts)]))
        y = expert_ffn(
            rows,
            weights[0].unflatten(1, (2, -1)),
            weights[1],
            _counts(tokens_per_expert, rows),
            weights=permuted_probs,
            weight_early=True,
            w_in_layout="pfd",
            w_out_layout="df",
        )
        return y, None


FUSED_FUNCTIONS = {
    "fused_topk_with_score_function": ab.fused_topk_with_score_function,
    "fused_compute_score_for_moe_aux_loss": ab.fused_compute_score_for_moe_aux_loss,
    "fused_moe_aux_loss": ab.fused_moe_aux_loss,
    "fused_permute": ab.moe_permute,
    "fused_permute_with_probs": ab.moe_permute_with_probs,
    "fused_unpermute": ab.moe_unpermute,
    "fused_sort_chunks_by_index": ab.moe_sort_chunks_by_index,
    "fused_sort_chunks_by_index_with_probs": ab.moe_sort_chunks_by_index_with_probs,
}
"""The TransformerEngine functions for routing and permutation, by the names in Megatron."""


def use_fused_functions() -> None:
    """Makes Megatron call anabranch's functions instead of TransformerEngine's, which need not be installed."""
    for name, function in FUSED_FUNCTIONS.items():
        setattr(moe_utils, name, function)
    if not moe_utils.HAVE_TE:  # without TransformerEngine, moe_utils also lacks te_general_gemm
        moe_utils.te_general_gemm = None
        moe_utils.HAVE_TE = True

"""Functions, arguments and attributes have the names of TransformerEngine's JAX front end, release 2.20.2."""

import dataclasses
import inspect
import pathlib

import pytest

import anabranch.jax as ab
from anabranch.jax.linen import MoEBlock

RAGGED = ("all_shards_tokens_per_expert", "shard_id", "num_expert_shards")
FUNCTIONS = {
    "compute_ragged_all_to_all_params": RAGGED,
    "compute_reverse_ragged_all_to_all_params": RAGGED,
    "fused_moe_aux_loss": ("probs", "tokens_per_expert", "topk", "coeff"),
    "fused_topk_with_score_function": (
        "logits",
        "topk",
        "use_pre_softmax",
        "num_groups",
        "group_topk",
        "scaling_factor",
        "score_function",
        "expert_bias",
        "compute_aux_scores",
        "routing_map_format",
    ),
    "grouped_dense": (
        "x",
        "kernel",
        "group_sizes",
        "contracting_dims",
        "bias",
        "precision",
        "preferred_element_type",
        "group_offset",
        "quantizer_set",
        "kernel_fsdp_info",
    ),
    "local_permute_after_a2a": ("x_recv", *RAGGED),
    "local_unpermute_before_a2a": ("expert_outputs", "state"),
    "pure_jax_token_combine": (
        "expert_outputs",
        "perm_state",
        "routing_weights",
        "num_experts_per_tok",
        "batch_size",
        "sequence_length",
    ),
    "pure_jax_token_dispatch": (
        "inputs",
        "selected_experts",
        "num_experts",
        "num_experts_per_tok",
        "align_size",
        "roll_to_expert_id",
    ),
    "routing_map_to_selected_experts": ("sparse_probs", "routing_map", "topk"),
    "sort_chunks_by_index": ("inp", "split_sizes", "sorted_indices"),
    "token_combine": ("inp", "row_id_map", "merging_probs", "pad_offsets"),
    "token_dispatch": ("inp", "routing_map", "num_out_tokens", "probs", "align_size"),
}
ENUMS = {
    "RoutingMapFormat": {"BYTEMAP": 0, "BITMAP_U8": 1},
    "ScoreFunction": {"SIGMOID": 0, "SOFTMAX": 1, "SQRTSOFTPLUS": 2},
}
#: Attributes of its block in order, with their defaults; ...: initialisers, which are not compared.
BLOCK = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 2048,
    "activation_type": "silu",
    "score_function": "softmax",
    "use_pre_softmax": False,
    "num_groups": None,
    "group_topk": None,
    "scaling_factor": 1.0,
    "use_expert_routing_bias": False,
    "aux_loss_coeff": 0.0,
    "gate_kernel_axes": (),
    "wi_kernel_axes": ("exp", "embed", "mlp"),
    "wo_kernel_axes": ("exp", "mlp", "embed"),
    "input_axes": (),
    "data_parallelism_axes": (),
    "apply_topk_weights_early": False,
    "recv_capacity_per_rank": None,
    "dtype": ...,
    "kernel_init": None,
    "bias_init": ...,
    "expert_bias_init": ...,
    "use_ffn_bias": False,
    "quantization_recipe": None,
}
GUIDE = (pathlib.Path(__file__).parents[3] / "docs" / "jax.md").read_text()
SECTION = GUIDE.split("\n## Coming from TransformerEngine\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_its_arguments_in_its_order(name):
    ours = tuple(inspect.signature(getattr(ab, name)).parameters)
    assert ours[: len(FUNCTIONS[name])] == FUNCTIONS[name]
    assert f"`{name}`" in SECTION or name == "compute_reverse_ragged_all_to_all_params"
    for more in ours[len(FUNCTIONS[name]) :]:
        assert f"`{more}`" in SECTION, f"{name} has an argument of its own, {more}, which the guide does not name"


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_its_values(name):
    assert {member.name: member.value for member in getattr(ab, name)} == ENUMS[name]


def test_the_block_has_its_attributes_in_its_order_with_its_defaults():
    ours = {field.name: field.default for field in dataclasses.fields(MoEBlock)}
    assert tuple(ours)[: len(BLOCK)] == tuple(BLOCK)
    for name, default in BLOCK.items():
        assert default is ... or ours[name] == default, name
        assert f"`{name}`" in SECTION, name


def test_the_guide_names_our_own_attributes_of_the_block():
    own = {field.name for field in dataclasses.fields(MoEBlock)} - BLOCK.keys() - {"parent", "name"}
    assert own and all(f"`{name}`" in SECTION for name in own), own

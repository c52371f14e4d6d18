"""All models of Transformers with experts, in a size for tests."""

import functools
import importlib

import torch

#: Values for fields of configurations; each configuration gets those of its own fields.
SIZES = dict(
    vocab_size=96,
    unpadded_vocab_size=96,
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=20,
    shared_expert_intermediate_size=20,
    moe_shared_expert_intermediate_size=20,
    num_hidden_layers=2,
    num_dense_layers=1,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    index_head_dim=8,
    index_n_heads=2,
    index_topk=8,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    moe_topk=2,
    moe_k=2,
    top_k=2,
    top_k_experts=2,
    n_group=2,
    topk_group=1,
    num_expert_group=2,
    mamba_d_state=8,
    mamba_expand=2,
    mamba_d_conv=4,
    mamba_dt_rank=8,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_head_dim=8,
    linear_num_heads=2,
    linear_conv_kernel_dim=2,
    max_position_embeddings=128,
    sliding_window=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

_DEFAULT = object()
"""Stands for the value that the configuration computes from other fields."""
_SAME_HEADS = dict(num_key_value_heads=4)
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4}

#: (class, fields) by the folder in transformers.models. None: the class for causal language modelling.
MODELS: dict[str, tuple[str | None, dict]] = {
    "afmoe": (None, {}),
    "aria": (None, {}),
    "axk1": (None, dict(num_key_value_heads=4, head_dim=4)),
    "axk2": (None, _SAME_HEADS),
    "bailing_hybrid": (None, {}),
    "beam": (None, {}),
    "cohere2_moe": (None, {}),
    "deepseek_ocr2": ("DeepseekOcr2TextModel", dict(mlp_layer_types=["dense", "sparse"])),
    "deepseek_v2": (None, {}),
    "deepseek_v3": (None, dict(num_key_value_heads=4, head_dim=4)),
    "deepseek_v32": (None, _SAME_HEADS),
    "deepseek_v4": (None, dict(mlp_layer_types=["moe", "moe"], o_groups=2, o_lora_rank=8, num_key_value_heads=1)),
    "diffusion_gemma": ("DiffusionGemmaEncoderTextModel", {}),
    "dots1": (None, dict(n_shared_experts=1, num_key_value_heads=4)),
    "dots3_note": (
        None,
        dict(num_key_value_heads=4, shared_experts_intermediate_size=20, layer_types=["indexed_attention"] * 2),
    ),
    "ernie4_5_moe": (None, {}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextModel",
        dict(
            moe_intermediate_size=[20, 12],
            rope_parameters=_SECTIONS | {"mrope_section": [1, 1, 2]},
            moe_layer_start_index=0,
            mlp_layer_types=_DEFAULT,
            head_dim=_DEFAULT,
        ),
    ),
    "exaone_moe": (None, {}),
    "flex_olmo": (None, {}),
    "flint": (None, dict(mlp_only_layers=[], layer_types=_DEFAULT)),
    "gemma4": (
        None,
        dict(
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=2,
            moe_intermediate_size=20,
            hidden_size_per_layer_input=0,
        ),
    ),
    "glm4_moe": (None, {}),
    "glm4_moe_lite": (None, _SAME_HEADS),
    "glm4v_moe": ("Glm4vMoeTextModel", dict(rope_parameters=_SECTIONS | {"mrope_section": [2, 1, 1]}, head_dim=16)),
    "glm5_next": ("Glm5NextTextModel", dict(index_kpool=4, qk_rope_head_dim=0, num_key_value_heads=4)),
    "glm_moe_dsa": (None, _SAME_HEADS),
    "gpt_oss": (None, {}),
    "granitemoe": (None, {}),
    "granitemoe_swa": (None, {}),
    "granitemoehybrid": (None, dict(mamba_n_heads=8, layer_types=["linear_attention", "full_attention"])),
    "granitemoeshared": (None, {}),
    "hunyuan_v1_moe": (None, {}),
    "hy_v3": (None, {}),
    "hy_v4": (None, {}),
    "hy_v4_vl": (
        "HYV4VLTextModel",
        dict(rope_parameters=_SECTIONS | {"mrope_section": [2, 1, 1]}, qk_rope_head_dim=8),
    ),
    "inkling": (None, {}),
    "inkling2": (None, {}),
    "inkling2_loop": (None, {}),
    "jamba": (None, dict(layer_types=_DEFAULT, attn_layer_offset=1, attn_layer_period=2)),
    "kimi_linear": (None, {}),
    "kolibri1": (None, {}),
    "laguna": (None, {}),
    "lara_mini": (None, {}),
    "lfm2_moe": (None, dict(layer_types=["conv", "full_attention"])),
    "mellum": (None, {}),
    "mimo_v2_flash": (None, {}),
    "minimax": (None, {}),
    "minimax_m2": (None, {}),
    "minimax_m3_vl": (None, {}),
    "mistral4": (None, {}),
    "mistral_large4": ("MistralLarge4TextModel", _SAME_HEADS),
    "mixtral": (None, {}),
    "muse_spark": ("MuseSparkTextModel", {}),
    "nemotron_h": (None, dict(layer_types=_DEFAULT, layers_block_type=["full_attention", "moe"])),
    "olmoe": (None, {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterModel", {}),
    "phimoe": (None, {}),
    "qwen2_moe": (None, {}),
    "qwen3_5_moe": (None, {}),
    "qwen3_moe": (None, {}),
    "qwen3_next": (None, {}),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextModel", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextModel", {}),
    "qwen4_exp": (
        None,
        dict(
            layer_types=["linear_attention", "full_attention"],
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=8,
            indexer_compress_ratio=2,
        ),
    ),
    "solar_open": (None, {}),
    "unlimited_ocr": ("UnlimitedOcrTextModel", {}),
    "zaya": (None, dict(num_experts_per_tok=1)),
}

#: Models whose experts do not follow the interface, so Transformers ignores the experts implementation: (model type,
#: fields) by the folder in transformers.models.
WITHOUT_INTERFACE: dict[str, tuple[str, dict]] = {
    "dbrx": (
        "dbrx",
        dict(
            d_model=32,
            n_heads=4,
            n_layers=1,
            vocab_size=64,
            ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
            attn_config=dict(kv_n_heads=2, rope_theta=1e4),
        ),
    ),
    "doge": (
        "doge",
        dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, num_experts=9),
    ),
    "jetmoe": (
        "jetmoe",
        dict(hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8, vocab_size=64),
    ),
    "llama4": (
        "llama4_text",
        dict(
            hidden_size=32,
            intermediate_size=16,
            intermediate_size_mlp=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            vocab_size=64,
        ),
    ),
    "longcat_flash": (
        "longcat_flash",
        dict(hidden_size=32, num_layers=1, num_attention_heads=2, vocab_size=64, n_routed_experts=4),
    ),
    "nllb_moe": (
        "nllb-moe",
        dict(
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            encoder_sparse_step=1,
            decoder_sparse_step=1,
            num_experts=4,
            vocab_size=64,
        ),
    ),
    "step3p7": (
        "step3p7",
        dict(
            text_config=dict(
                hidden_size=32,
                intermediate_size=16,
                moe_intermediate_size=16,
                share_expert_dim=16,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                n_routed_experts=4,
                num_local_experts=4,
                num_experts_per_tok=2,
                mlp_layer_types=["sparse"],
                vocab_size=64,
                pad_token_id=0,
            ),
            vision_config=dict(hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
        ),
    ),
    "switch_transformers": (
        "switch_transformers",
        dict(d_model=32, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, vocab_size=64),
    ),
}

#: Models with modules named experts but without a router.
WITHOUT_ROUTER = {"vitpose_backbone"}


def module_of(folder):
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def class_of(folder, name):
    """The class with this name, or for None the one for causal language modelling."""
    module = module_of(folder)
    if name is not None:
        return getattr(module, name)
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    return next(value for value in own if value.__name__.endswith("ForCausalLM"))


def configuration(kind, fields):
    """A small configuration of this class."""
    names = {*kind.__dataclass_fields__, *kind.attribute_map}
    values = {name: value for name, value in SIZES.items() if name in names}
    layers, default = SIZES["num_hidden_layers"], kind()
    if types := getattr(default, "layer_types", None):
        values["layer_types"] = (sorted(set(types), key=list(types).index) * layers)[:layers]
    if getattr(default, "mlp_layer_types", None):
        values["mlp_layer_types"] = ["sparse"] * layers
    values |= fields
    return kind(**{name: value for name, value in values.items() if value is not _DEFAULT})


@functools.lru_cache(maxsize=1)
def small_model(folder, device):
    """A model with random parameters, large enough to reach the limits of activations."""
    name, fields = MODELS[folder]
    kind = class_of(folder, name)
    torch.manual_seed(0)
    model = kind(configuration(kind.config_class, fields)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "experts" in path and path.endswith(("_proj", "_bias")):
                parameter.normal_(std=0.4)
    return model.to(device)


def tokens(model, batch=2, length=12):
    ids = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device)

"""The model families whose blocks `load` supports, by the model_type of their config.json.

Names and shapes are those of the published checkpoints, after the prefix of the block. The prefix is
"model.layers.3.mlp." for most families; others have "block_sparse_moe" (Mixtral, MiniMax, Kimi, Granite, Phi),
"feed_forward" (Llama 4, Jamba, LFM2), "ffn" (DeepSeek-V4, DBRX) or "mixer" (Nemotron-H) in place of "mlp". For a
family with several `roots`, the prefix is the layer's.
"""

from dataclasses import replace
from typing import Any

from anabranch.activation import Activation
from anabranch.checkpoints.family import Family, Stored

SOFTMAX: dict[str, Any] = {"score_function": "softmax", "normalize": True}
SOFTMAX_RAW: dict[str, Any] = {"score_function": "softmax", "normalize": False}
SIGMOID: dict[str, Any] = {"score_function": "sigmoid", "normalize": True}

_GATE = Stored("gate.weight", "e d")
_ROUTER = Stored("router.weight", "e d")
_CORRECTION = Stored("gate.e_score_correction_bias", "e")

# Storage of the experts: stacked as in PyTorch's Linear, stacked and transposed, or one tensor per expert.
_STACKED: dict[str, Any] = {
    "w_in": Stored("experts.gate_up_proj", "e pf d"),
    "w_out": Stored("experts.down_proj", "e d f"),
}
_STACKED_TRANSPOSED: dict[str, Any] = {
    "w_in": Stored("experts.gate_up_proj", "e d pf"),
    "w_out": Stored("experts.down_proj", "e f d"),
}
_EACH: dict[str, Any] = {
    "w_in": Stored(("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight"), "f d"),
    "w_out": Stored("experts.{e}.down_proj.weight", "d f"),
}
_EACH_W123: dict[str, Any] = {
    "w_in": Stored(("experts.{e}.w1.weight", "experts.{e}.w3.weight"), "f d"),
    "w_out": Stored("experts.{e}.w2.weight", "d f"),
}
_LINEAR_PAIR: dict[str, Any] = {
    "w_in": Stored("input_linear.weight", "e pf d"),
    "w_out": Stored("output_linear.weight", "e d f"),
}


def _shared(name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, Any]:
    """A shared expert, by the names of its module ("" for none) and of its three matrices."""
    weights = (f"{name}.{gate}.weight", f"{name}.{up}.weight")
    return {"shared_in": Stored(weights, "s d"), "shared_out": Stored(f"{name}.{down}.weight", "d s")}


_SHARED: dict[str, Any] = _shared("shared_experts")
_SHARED_GATED: dict[str, Any] = {**_shared("shared_expert"), "shared_gate": Stored("shared_expert_gate.weight", "1 d")}

_MIXTRAL = Family(_GATE, **_EACH_W123, router_options=SOFTMAX)
_QWEN2 = Family(_GATE, **_EACH, **_SHARED_GATED, router_options=SOFTMAX_RAW)
_QWEN3 = Family(_GATE, **_EACH, router_options=SOFTMAX)
_DEEPSEEK_V3 = Family(_GATE, **_EACH, **_SHARED, expert_bias=_CORRECTION, router_options=SIGMOID)
_MINIMAX_M2 = replace(_MIXTRAL, expert_bias=Stored("e_score_correction_bias", "e"), router_options=SIGMOID)
_DEEPSEEK_V4 = Family(
    _GATE,
    **_EACH_W123,
    **_shared("shared_experts", "w1", "w3", "w2"),
    expert_bias=Stored("gate.bias", "e"),
    router_options={"score_function": "sqrtsoftplus", "normalize": True},
    activation=Activation.swiglu_clamped(10.0),
)
_HY_V4 = replace(_DEEPSEEK_V3, **_STACKED, activation=Activation.swiglu_clamped(10.0))
_GRANITE = Family(Stored("router.layer.weight", "e d"), **_LINEAR_PAIR, router_options=SOFTMAX)
_GPT_OSS = Family(
    _ROUTER,
    w_in=Stored("experts.gate_up_proj", "e d fp"),
    w_out=Stored("experts.down_proj", "e f d"),
    gate_bias=Stored("router.bias", "e"),
    b_in=Stored("experts.gate_up_proj_bias", "e fp"),
    b_out=Stored("experts.down_proj_bias", "e d"),
    router_options=SOFTMAX,
    activation=Activation.swiglu_oai(1.702, 7.0),
)
_KIMI_LINEAR = Family(_GATE, **_EACH_W123, **_SHARED, expert_bias=_CORRECTION, router_options=SIGMOID)
_INKLING2 = Family(
    _GATE,
    w_in=Stored("experts.w13_weight", "e fp d"),
    w_out=Stored("experts.w2_weight", "e d f"),
    expert_bias=Stored("gate.bias", "e"),
    router_options=SIGMOID,
    activation=Activation.situ(4.0, 25.0),
)
_GEMMA4 = Family(
    Stored("router.proj.weight", "e d"),
    **_STACKED,
    others={"router.scale": "d", "router.per_expert_scale": "e"},
    activation="gelu",
    roots=("router.", "experts."),
)
_SWITCH = Family(
    Stored("router.classifier.weight", "e d"),
    w_in=Stored("experts.expert_{e}.wi.weight", "f d"),
    w_out=Stored("experts.expert_{e}.wo.weight", "d f"),
    activation="relu",
)

FAMILIES: dict[str, Family] = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "qwen2_moe": _QWEN2,
    "qwen3_moe": _QWEN3,
    "qwen3_omni_moe": _QWEN3,
    "mellum": _QWEN3,
    "qwen3_vl_moe": replace(_QWEN3, **_STACKED_TRANSPOSED),
    "qwen3_next": replace(_QWEN2, router_options=SOFTMAX),
    "qwen3_5_moe": replace(_QWEN2, router_options=SOFTMAX),
    "olmoe": replace(_QWEN3, router_options=SOFTMAX_RAW),
    "flex_olmo": replace(_QWEN3, router_options=SOFTMAX_RAW),
    "jamba": Family(_ROUTER, **_EACH, router_options=SOFTMAX_RAW),
    "dbrx": Family(
        Stored("router.layer.weight", "e d"),
        w_in=Stored(("experts.mlp.w1", "experts.mlp.v1"), "ef d"),
        w_out=Stored("experts.mlp.w2", "ef d"),
        router_options=SOFTMAX,
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": replace(
        _GRANITE,
        gate=Stored("block_sparse_moe.router.layer.weight", "e d"),
        w_in=Stored("block_sparse_moe.input_linear.weight", "e pf d"),
        w_out=Stored("block_sparse_moe.output_linear.weight", "e d f"),
        shared_in=Stored("shared_mlp.input_linear.weight", "ps d"),
        shared_out=Stored("shared_mlp.output_linear.weight", "d s"),
        roots=("block_sparse_moe.", "shared_mlp."),
    ),
    "jetmoe": replace(_GRANITE, others={"bias": "d"}),
    "aria": Family(
        _ROUTER,
        w_in=Stored("experts.fc1.weight", "e d pf"),
        w_out=Stored("experts.fc2.weight", "e f d"),
        **_SHARED,
        router_options=SOFTMAX,
    ),
    "hunyuan_v1_moe": Family(Stored("gate.wg.weight", "e d"), **_EACH, **_shared("shared_mlp"), router_options=SOFTMAX),
    "cohere2_moe": Family(_GATE, **_EACH, **_SHARED, router_options=SOFTMAX),
    "ernie4_5_moe": Family(
        _GATE,
        **_EACH,
        **_SHARED,
        expert_bias=Stored("moe_statics.e_score_correction_bias", "1 e"),
        router_options=SOFTMAX,
    ),
    "deepseek_v2": Family(_GATE, **_EACH, **_SHARED, router_options=SOFTMAX_RAW),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k25": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm_moe_dsa": _DEEPSEEK_V3,
    "dots1": _DEEPSEEK_V3,
    "solar_open": _DEEPSEEK_V3,
    "mimo_v2_flash": replace(_DEEPSEEK_V3, shared_in=None, shared_out=None),
    "exaone_moe": replace(_DEEPSEEK_V3, expert_bias=Stored("e_score_correction_bias", "e")),
    "bailing_hybrid": replace(_DEEPSEEK_V3, expert_bias=Stored("gate.expert_bias", "e")),
    "afmoe": replace(_DEEPSEEK_V3, gate=Stored("router.gate.weight", "e d"), expert_bias=Stored("expert_bias", "e")),
    "glm5_next": replace(_DEEPSEEK_V3, activation=Activation.swiglu_clamped(10.0)),
    "hy_v3": replace(
        _DEEPSEEK_V3,
        **_shared("shared_mlp"),
        gate=Stored("router.gate.weight", "e d"),
        expert_bias=Stored("expert_bias", "e"),
    ),
    "hy_v4": _HY_V4,
    "hy_v4_vl": _HY_V4,
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v4_hash": replace(_DEEPSEEK_V4, expert_bias=None, others={"gate.tid2eid": "v k"}),
    "axk1": _DEEPSEEK_V3,
    "axk2": _DEEPSEEK_V3,
    "flint": Family(_GATE, **_EACH, **_shared("shared_expert"), router_options=SIGMOID),
    "beam": replace(_DEEPSEEK_V3, shared_in=None, shared_out=None),
    "mistral4": Family(_GATE, **_STACKED, **_SHARED, router_options=SOFTMAX),
    "lara_mini": Family(_GATE, **_STACKED, **_shared("shared_expert"), router_options=SOFTMAX),
    "minimax_m2": _MINIMAX_M2,
    "minimax_m3_vl": replace(_MINIMAX_M2, **_SHARED, activation=Activation.swiglu_oai(1.702, 7.0)),
    "step3p7": Family(
        Stored("moe.gate.weight", "e d"),
        w_in=Stored(("moe.gate_proj.weight", "moe.up_proj.weight"), "e f d"),
        w_out=Stored("moe.down_proj.weight", "e d f"),
        **_shared("share_expert"),
        expert_bias=Stored("moe.router_bias", "e"),
        router_options=SIGMOID,
        activation=None,
        roots=("moe.", "share_expert."),
    ),
    "gpt_oss": _GPT_OSS,
    "openai_privacy_filter": replace(
        _GPT_OSS, w_in=Stored("experts.gate_up_proj", "e d pf"), b_in=Stored("experts.gate_up_proj_bias", "e pf")
    ),
    "kimi_linear": _KIMI_LINEAR,
    "kimi_k3": Family(
        Stored("gate.weight", "e c"),
        **_EACH_W123,
        shared_in=Stored(("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"), "s c"),
        shared_out=Stored("shared_experts.down_proj.weight", "c s"),
        expert_bias=_CORRECTION,
        others={
            "routed_expert_down_proj.weight": "d c",
            "routed_expert_norm.weight": "d",
            "routed_expert_up_proj.weight": "c d",
        },
        activation=Activation.situ(4.0, 25.0),
    ),
    "inkling2": _INKLING2,
    "inkling2_loop": _INKLING2,
    "nemotron_h": Family(
        _GATE,
        w_in=Stored("experts.{e}.up_proj.weight", "f d"),
        w_out=Stored("experts.{e}.down_proj.weight", "d f"),
        shared_in=Stored("shared_experts.up_proj.weight", "s d"),
        shared_out=Stored("shared_experts.down_proj.weight", "d s"),
        expert_bias=_CORRECTION,
        router_options=SIGMOID,
        activation="relu2",
    ),
    "lfm2_moe": Family(_GATE, **_EACH_W123, expert_bias=Stored("expert_bias", "e"), router_options=SIGMOID),
    "switch_transformers": _SWITCH,
    "nllb_moe": Family(
        Stored("router.classifier.weight", "e d"),
        w_in=Stored("experts.expert_{e}.fc1.weight", "f d"),
        w_out=Stored("experts.expert_{e}.fc2.weight", "d f"),
        b_in=Stored("experts.expert_{e}.fc1.bias", "f"),
        b_out=Stored("experts.expert_{e}.fc2.bias", "d"),
        router_options=SOFTMAX,
        activation="relu",
    ),
    # Families whose routing the options of `moe` do not describe.
    "llama4": Family(_ROUTER, **_STACKED_TRANSPOSED, **_shared("shared_expert")),
    "phimoe": Family(_GATE, **_EACH_W123),
    "laguna": replace(
        _DEEPSEEK_V3,
        **_shared("shared_expert"),
        expert_bias=Stored("experts.e_score_correction_bias", "e"),
        router_options={},
    ),
    "kolibri1": Family(
        Stored("mlp.gate.weight", "e d"),
        w_in=Stored(("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"), "f d"),
        w_out=Stored("mlp.experts.{e}.down_proj.weight", "d f"),
        **_shared("mlp.shared_experts"),
        expert_bias=Stored("moe.router.expert_bias", "e"),
        roots=("mlp.", "moe."),
    ),
    "zaya": Family(
        Stored("gate.router_mlp.out_proj.weight", "r c"),
        **_STACKED,
        expert_bias=Stored("gate.balancing_biases", "r"),
        others={
            "gate.down_proj.weight": "c d",
            "gate.down_proj.bias": "c",
            "gate.router_states_scale": "c",
            "gate.router_mlp.norm.weight": "c",
            "gate.router_mlp.fc1.weight": "c c",
            "gate.router_mlp.fc1.bias": "c",
            "gate.router_mlp.fc2.weight": "c c",
            "gate.router_mlp.fc2.bias": "c",
        },
        extra_logits=1,
    ),
    "muse_spark": Family(
        Stored("gate.weight", "e c"),
        **_STACKED,
        expert_bias=_CORRECTION,
        others={
            "pre_expert_proj.weight": "d c",
            "pre_expert_norm.weight": "d",
            "experts.post_expert_norm.weight": "d",
            "post_expert_proj.weight": "c d",
        },
    ),
    "gemma4": _GEMMA4,
    "diffusion_gemma": _GEMMA4,
    "longcat_flash": Family(
        Stored("router.classifier.weight", "r d"),
        **_EACH,
        expert_bias=Stored("router.e_score_correction_bias", "r"),
    ),
    "inkling": Family(
        Stored("gate.weight", "r d"),
        w_in=Stored("experts.w13_weight", "e fp d"),
        w_out=Stored("experts.w2_weight", "e d f"),
        expert_bias=Stored("gate.bias", "e"),
        others={
            "gate.global_scale": "1",
            "shared_experts.shared_w13_weight": "n sp d",
            "shared_experts.shared_w2_weight": "n d s",
        },
        extra_logits="n",
    ),
}

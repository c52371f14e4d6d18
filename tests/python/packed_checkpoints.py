"""Small checkpoints in the formats of gpt-oss, DeepSeek-V3 and Qwen3-MoE-FP8, with random weights."""

import json
import re
import warnings

import torch
import transformers
from safetensors.torch import load_file, save_file

from anabranch.torch import pack_fp8, pack_mxfp4

E = 4
_COMMON = dict(vocab_size=96, num_hidden_layers=2, num_attention_heads=4, num_experts_per_tok=2, pad_token_id=0)
_FP8 = _COMMON | dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
CONFIGS = {
    "gpt_oss": transformers.GptOssConfig(
        **_COMMON,
        hidden_size=64,
        intermediate_size=32,
        num_local_experts=E,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=2,
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**_FP8, num_experts=E, num_key_value_heads=2, head_dim=64),
    # kv_a_proj_with_mqa has 128 columns here, since Transformers cannot decode parts of a block.
    "deepseek_v3": transformers.DeepseekV3Config(
        **_FP8,
        n_routed_experts=E,
        n_group=2,
        topk_group=1,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=1,
    ),
}
_MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
#: Tensors that stay plain in FP8 checkpoints.
_PLAIN = re.compile(r"norm|embed|lm_head|mlp\.gate\.|bias")


def write(name, folder, dtype=torch.bfloat16):
    """Writes the checkpoint of a model into a folder, in two files, and returns the tensors by name."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype)
    for path, parameter in model.named_parameters():
        if "norm" not in path:
            torch.nn.init.normal_(parameter, std=0.1)
    plain = folder / "plain"
    model.save_pretrained(plain)
    packed = {}
    for path, tensor in load_file(plain / "model.safetensors").items():
        if name == "gpt_oss" and path.endswith("_proj"):
            codes, scales = pack_mxfp4(tensor.mT.contiguous())
            packed |= {f"{path}_blocks": codes, f"{path}_scales": scales}
        elif name != "gpt_oss" and not _PLAIN.search(path):
            packed |= dict(zip((path, f"{path}_scale_inv"), fp8(tensor), strict=True))
            if name == "qwen3_moe":
                packed[f"{path}_scale_inv"] = packed[f"{path}_scale_inv"].bfloat16()
        else:
            packed[path] = tensor
    config = json.loads((plain / "config.json").read_text())
    quantization = dict(_MXFP4_CONFIG if name == "gpt_oss" else _FP8_CONFIG)
    if name == "qwen3_moe":
        quantization["modules_to_not_convert"] = [
            "lm_head",
            *(f"model.layers.{layer}.mlp.gate" for layer in range(2)),
        ]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save(folder, packed)
    return packed


def fp8(weight):
    """FP8 blocks of a matrix whose last blocks may be smaller."""
    N, C = weight.shape
    packed = pack_fp8(torch.nn.functional.pad(weight, (0, -C % 128, 0, -N % 128)))
    return packed.q.view(torch.uint8)[:N, :C].contiguous().view(torch.float8_e4m3fn), packed.scales


def save(folder, tensors):
    """Writes the tensors in two files with their index."""
    names = sorted(tensors)
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    of = {name: files[len(names) // 2 <= i] for i, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if of[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_plain(folder, dtype=torch.float32):
    """The model by Transformers' own loading, decoded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = {"mxfp4": transformers.Mxfp4Config, "fp8": transformers.FineGrainedFP8Config}
        quantization = kind[config.quantization_config["quant_method"]](dequantize=True)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, dtype=dtype, experts_implementation="eager"
        )

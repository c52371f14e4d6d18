"""Packed checkpoints in Transformers: the results of its own loading with decoding, the same bytes when saved, LoRA."""

import copy
import json
import re
import sys

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.quantizers import auto

import anabranch.torch.transformers as adapter
import packed_checkpoints
from anabranch._versions import packed_is_supported
from anabranch.checkpoints import check, convert
from anabranch.torch import add_lora, pack_mxfp4, unpack
from anabranch.torch.transformers import quantizers
from anabranch.torch.transformers.packed_config import packed_config

if not packed_is_supported(transformers.__version__):
    pytest.skip(
        f"TRANSFORMERS {transformers.__version__} IS TOO OLD: packed checkpoints were not tested",
        allow_module_level=True,
    )

FP8 = ("qwen3_moe", "deepseek_v3")
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.arange(2 * 12).reshape(2, 12) % 90


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    transformers.logging.set_verbosity_error()
    yield
    adapter.register()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder and the tensors of each checkpoint, written once."""
    found = {}

    def get(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = folder, packed_checkpoints.write(name, folder)
        return found[name]

    return get


def load(folder, dtype=torch.float32, **options):
    config = packed_config(transformers.AutoConfig.from_pretrained(folder))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **options)


def close(found, expected, tolerance=2e-5):
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, float(error)


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", packed_checkpoints.CONFIGS)
def test_results_are_those_of_the_decoded_model(name, checkpoints, device):
    folder, _ = checkpoints(name)
    model, plain = load(folder).to(device), packed_checkpoints.load_plain(folder).to(device)
    ids = IDS.to(device)
    with torch.no_grad():
        close(model(ids).logits, plain(ids).logits)
    options = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    experts = [part for part in model.modules() if isinstance(part, adapter.PackedExperts)]
    assert len(experts) == (1 if name == "deepseek_v3" else 2)
    linear = [part for part in model.modules() if isinstance(part, adapter.Fp8Linear)]
    assert bool(linear) == (name in FP8)
    assert adapter.check(model).keys() == {
        f"model.layers.{2 - len(experts) + i}.mlp.experts" for i in range(len(experts))
    }


@pytest.mark.parametrize("name", packed_checkpoints.CONFIGS)
def test_a_saved_checkpoint_has_the_names_and_bytes_of_the_loaded_one(name, checkpoints, tmp_path):
    folder, tensors = checkpoints(name)
    model = load(folder, "auto").to(torch.float32).to(torch.bfloat16)  # codes and scales keep their dtypes
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for tensor in tensors:
        assert same_bytes(saved[tensor], tensors[tensor]), tensor
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def fill(model):
    generator = torch.Generator().manual_seed(3)
    for name, value in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(value, std=0.1, generator=generator)


def results(model):
    """Logits, and the gradients of all trained parameters for a random cotangent."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    logits = model(IDS, use_cache=False).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(logits, list(trained.values()), cotangent)
    return {"logits": logits.detach()} | dict(zip(trained, gradients, strict=True))


def with_peft(model, **options):
    config = dict(r=2, lora_alpha=3, target_modules=[], target_parameters=TARGETS) | options
    return peft.get_peft_model(model, peft.LoraConfig(**config))


@pytest.mark.parametrize("name", FP8)
def test_adapters_of_peft_have_the_gradients_of_the_decoded_model(name, checkpoints):
    folder, _ = checkpoints(name)
    found = []
    for model in (load(folder), packed_checkpoints.load_plain(folder)):
        model = with_peft(model, target_modules=["o_proj"])
        assert all(value.dtype == torch.float32 for n, value in model.named_parameters() if "lora" in n)
        fill(model)
        found.append(results(model))
        with torch.no_grad(), model.disable_adapter():
            found[-1]["disabled"] = model(IDS).logits
    assert found[0].keys() == found[1].keys() and len(found[0]) > 5
    for key in found[0]:
        close(found[0][key], found[1][key], 1e-4)
    assert not torch.allclose(found[0]["logits"], found[0]["disabled"], atol=1e-2)


def test_own_adapters_have_the_gradients_of_the_decoded_model(checkpoints):
    """PEFT adapts the decoded model with the same factors in its own order."""
    folder, _ = checkpoints("gpt_oss")
    model = add_lora(load(folder), rank=2, alpha=3)
    assert [name for name, value in model.named_parameters() if value.requires_grad][-1].endswith("lora_b_out")
    fill(model)
    plain = with_peft(packed_checkpoints.load_plain(folder))

    def as_peft(factor, value):
        if factor.startswith("a"):
            return value.mT.flatten(0, 1)
        if factor == "b_in":
            value = value.transpose(2, 3).flatten(2)  # gate and up alternate
        return value.permute(2, 1, 0).flatten(1)

    factors = {
        "a_in": "base_layer.lora_A.default.weight",
        "b_in": "base_layer.lora_B.default.weight",
        "a_out": "lora_A.default.weight",
        "b_out": "lora_B.default.weight",
    }
    own, of_peft = (dict(m.named_parameters()) for m in (model, plain))
    names = {}
    for layer in range(2):
        for factor, ending in factors.items():
            here, there = (f"{start}model.layers.{layer}.mlp.experts." for start in ("", "base_model.model."))
            names[f"{here}lora_{factor}"] = factor, there + ending
            with torch.no_grad():
                of_peft[there + ending].copy_(as_peft(factor, own[f"{here}lora_{factor}"]))
    found, expected = results(model), results(plain)
    close(found["logits"], expected["logits"], 1e-4)
    for name, (factor, there) in names.items():
        close(as_peft(factor, found[name]), expected[there], 1e-4)


def test_sums_of_peft_with_packed_weights_are_errors(checkpoints):
    folder, _ = checkpoints("qwen3_moe")
    model = with_peft(load(folder))
    before = {name: value.clone() for name, value in model.named_parameters() if "experts" in name}
    with pytest.raises(NotImplementedError, match="got a merge of PackedExperts of qwen3_moe with packed weights"):
        model.merge_and_unload()
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(NotImplementedError, match="expected one active adapter"):
        model(IDS)
    model.set_adapter("default")
    adapter.register(peft=False)
    with pytest.raises(NotImplementedError, match="got a parametrization of packed weights"):
        model(IDS)
    adapter.register()
    model(IDS)
    after = dict(model.named_parameters())
    assert all(same_bytes(value, after[name]) for name, value in before.items())
    folder, _ = checkpoints("gpt_oss")
    model = load(folder)
    for targets in (TARGETS, ["0.mlp.experts.down_proj"], ["gate_up_proj_blocks"], ["down_proj_scales"]):
        with pytest.raises(NotImplementedError, match=f"target_parameters: got '{targets[0]}', the MXFP4 weights"):
            with_peft(model, target_modules=["q_proj"], target_parameters=targets)
    with_peft(model, target_modules=["q_proj"], target_parameters=["router.weight"])
    with pytest.raises(ValueError, match="expected experts without adapters"):
        add_lora(add_lora(load(folder), 2), 2)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_trainer_trains_adapters(name, checkpoints, tmp_path):
    folder, _ = checkpoints(name)
    model = with_peft(load(folder)) if name in FP8 else add_lora(load(folder), 2)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    data = [{"input_ids": row, "labels": row} for row in IDS]
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    changed = {name for name, value in model.named_parameters() if not same_bytes(value, before[name])}
    assert changed and all("lora" in name for name in changed)


@pytest.mark.parametrize(
    "entries, message",
    [
        (None, "quantization_config: got none"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"quant_method: got 'modelopt' \(NVFP4\)"),
        ({"quant_method": "mxfp8"}, "quant_method: got 'mxfp8'"),
        ({"quant_method": "gguf"}, "quant_method: got 'gguf'"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r"'compressed-tensors' \(pack-quantized\)",
        ),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, r"weight_block_size: got \[1, 32\] \(MXFP8\)"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size: got None"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme: got 'static'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype: got 'fp4'"),
        ({"quant_method": "fp8", "modules_to_convert": ["embed"]}, "modules_to_convert: got"),
    ],
)
def test_other_formats_are_refused_by_name(entries, message):
    config = transformers.Qwen3MoeConfig(**({} if entries is None else {"quantization_config": entries}))
    with pytest.raises(ValueError, match=message):
        packed_config(config)


def rewritten(checkpoints, tmp_path, name, tensors):
    folder, _ = checkpoints(name)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    packed_checkpoints.save(tmp_path, tensors)
    return tmp_path


def test_incomplete_checkpoints_are_errors_when_loaded(checkpoints, tmp_path):
    for name, missing in (
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_scales"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("qwen3_moe", "model.layers.0.self_attn.q_proj.weight"),
    ):
        rest = {key: value for key, value in checkpoints(name)[1].items() if key != missing}
        with pytest.raises(ValueError, match=f"{missing}: got no such tensor"):
            load(rewritten(checkpoints, tmp_path, name, rest))
    tensors = checkpoints("qwen3_moe")[1]
    query = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=f"{query}: got torch.bfloat16, expected torch.float8_e4m3fn"):
        load(rewritten(checkpoints, tmp_path, "qwen3_moe", tensors | {query: tensors[query].bfloat16()}))


def test_experts_that_are_missing_or_surplus_are_errors_when_loaded(checkpoints, tmp_path):
    """Stacked by Transformers, they would shift the numbers of others without an error."""

    def renamed(tensors, before, after):
        return {name.replace(before, after): value for name, value in tensors.items()}

    def refused(folder, tensors, name, got):
        packed_checkpoints.save(folder, tensors)
        with pytest.raises(
            ValueError, match=f"^{re.escape(name)}: got {got} in the checkpoint, expected the experts 0"
        ):
            load(folder)

    tensors = checkpoints("qwen3_moe")[1]
    folder = rewritten(checkpoints, tmp_path, "qwen3_moe", tensors)
    experts = "model.layers.1.mlp.experts"
    missing, surplus = "no such tensor", "a tensor of no expert"
    refused(folder, renamed(tensors, f"{experts}.1.", f"{experts}.4."), f"{experts}.1.down_proj.weight", missing)
    for name in ("1.down_proj.weight", "2.up_proj.weight", "2.up_proj.weight_scale_inv"):
        name = f"{experts}.{name}"
        rest = {key: value for key, value in tensors.items() if key != name}
        refused(folder, rest, name, missing)
        refused(folder, rest | {re.sub(r"\.\d\.(?=\w+_)", ".9.", name): tensors[name]}, name, missing)
    fifth = {name: value.clone() for name, value in renamed(tensors, ".experts.3.", ".experts.4.").items()}
    refused(folder, tensors | fifth, "model.layers.0.mlp.experts.4.down_proj.weight", surplus)
    rest = {key: value for key, value in tensors.items() if f"{experts}." not in key or "gate_proj" not in key}
    refused(folder, rest, f"{experts}.0.gate_proj.weight", missing)
    # The names of Mixtral's matrices have digits, and the model has other names.
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=4)
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "mixtral", "mxfp4", progress=None)
    tensors = load_file(tmp_path / "mixtral" / "model.safetensors")
    (tmp_path / "mixtral" / "model.safetensors").unlink()
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight_blocks"
    refused(tmp_path / "mixtral", renamed(tensors, name, name.replace(".1.", ".4.")), name, missing)


def test_codes_and_scales_are_never_converted_by_value(checkpoints, tmp_path):
    gate = "model.layers.1.mlp.gate.weight"
    tensors = checkpoints("qwen3_moe")[1]
    q, scales = packed_checkpoints.fp8(tensors[gate])
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight: got F8_E4M3 in the checkpoint, expected plain weights"):
        load(rewritten(checkpoints, tmp_path, "qwen3_moe", tensors | {gate: q, f"{gate}_scale_inv": scales}))
    for name, tensor, given in (
        ("qwen3_moe", "model.layers.0.self_attn.o_proj.weight", torch.float32),
        ("qwen3_moe", "model.layers.0.mlp.experts.down_proj_scale_inv", torch.float16),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_scales", torch.float32),
    ):
        model = load(checkpoints(name)[0])
        before = model.state_dict()[tensor].clone()
        with pytest.raises(RuntimeError, match=rf"{tensor}: got {given}, expected {before.dtype}"):
            model.load_state_dict({tensor: torch.ones(before.shape, dtype=given)}, strict=False)
        assert same_bytes(model.state_dict()[tensor], before)
        model.load_state_dict({tensor: before}, strict=False)


def test_a_packed_configuration_is_left_as_it_is(checkpoints):
    config = packed_config(transformers.AutoConfig.from_pretrained(checkpoints("gpt_oss")[0]))
    assert packed_config(config).to_dict() == config.to_dict()


def test_both_formats_are_registered_in_every_process(checkpoints, tmp_path, monkeypatch):
    """A new process gets a configuration that another one made, or a folder whose own format is MXFP4 of `convert`."""
    config = packed_config(transformers.AutoConfig.from_pretrained(checkpoints("qwen3_moe")[0]))
    convert(checkpoints("qwen3_moe")[0] / "plain", tmp_path / "packed", "mxfp4", progress=None)
    for folder, options, prepare in (
        (checkpoints("qwen3_moe")[0], {"config": config}, lambda: packed_config(config)),
        (checkpoints("qwen3_moe")[0], {"config": config}, adapter.register),
        (tmp_path / "packed", {}, adapter.register),
    ):
        for name in (quantizers.MXFP4, quantizers.FP8):  # as in a process that has not called a function of ours
            monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, name, raising=False)
            monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, name, raising=False)
        prepare()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        assert all(isinstance(layer.mlp.experts, adapter.PackedExperts) for layer in model.model.layers)
    monkeypatch.setattr(quantizers, "packed_is_supported", lambda version: False)
    with pytest.raises(ImportError, match="packed checkpoints: got transformers"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    monkeypatch.delattr(adapter, "quantizers")
    monkeypatch.setitem(sys.modules, quantizers.__name__, None)  # its import fails, as with unknown releases
    with pytest.warns(RuntimeWarning, match="transformers: got no support for packed checkpoints"):
        adapter.register()


def test_models_that_cannot_be_packed_are_errors(checkpoints, tmp_path):
    config = transformers.Qwen3Config(hidden_size=128, quantization_config={"quant_method": "fp8"})
    tensors = checkpoints("gpt_oss")[1]
    packed_checkpoints.save(tmp_path, tensors)
    with pytest.raises(NotImplementedError, match="has no packed experts"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=packed_config(config))
    for width, message in ((64, "hidden_size: got 64"), (128, "'fp8_blocks' with w_in_layout 'fpd'")):
        config = transformers.GptOssConfig(
            hidden_size=width, intermediate_size=128, num_local_experts=2, quantization_config={"quant_method": "fp8"}
        )
        with pytest.raises(ValueError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=packed_config(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_linear_layers_accept_parts_of_blocks(dtype):
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows, four and a half blocks."""
    torch.manual_seed(0)
    q, scales = packed_checkpoints.fp8(torch.randn(192, 160))
    scales = scales if dtype == torch.float32 else scales.to(dtype)
    layer = adapter.Fp8Linear(nn.Linear(160, 192, device="meta"))
    layer.load_state_dict({"weight": q, "weight_scale_inv": scales, "bias": torch.randn(192)}, assign=True)
    layer.weight.requires_grad_(False), layer.weight_scale_inv.requires_grad_(False)
    decoded = q.float() * scales.float().repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :160]
    x = torch.randn(3, 160, requires_grad=True)
    y, expected = layer(x), nn.functional.linear(x, decoded, layer.bias)
    close(y, expected)
    cotangent = torch.randn(3, 192)
    close(*(torch.autograd.grad(value, x, cotangent)[0] for value in (y, expected)))


@pytest.mark.parametrize("name, packed", [("qwen3_moe", "fp8_blocks"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "mxfp4")])
def test_converted_checkpoints_load(name, packed, checkpoints, tmp_path):
    """The same results as by Transformers' decoding. For formats that it lacks, experts are those that we pack."""
    source = checkpoints(name)[0] / "plain"
    convert(source, tmp_path / "packed", packed, progress=None)
    model = load(tmp_path / "packed")
    if (name, packed) != ("qwen3_moe", "mxfp4"):
        plain = packed_checkpoints.load_plain(tmp_path / "packed")
    else:
        plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        for layer in plain.model.layers:
            for parameter in layer.mlp.experts.parameters():
                parameter.data = unpack(pack_mxfp4(parameter.data), torch.float32)
    with torch.no_grad():
        close(model(IDS).logits, plain(IDS).logits)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == load_file(tmp_path / "packed" / "model.safetensors").keys()
    assert check(tmp_path / "saved", progress=None).packed == packed


def test_new_heads_and_routers_are_plain_layers(checkpoints, tmp_path):
    """A layer on top of the base model is FP8 only if the checkpoint has its scales. A router is never FP8."""
    folder, tensors = checkpoints("qwen3_moe")
    config = packed_config(transformers.AutoConfig.from_pretrained(folder, num_labels=3))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    assert type(model.score) is nn.Linear and 0 < model.score.weight.std() < 0.1
    with torch.no_grad():
        hidden = model.model(IDS).last_hidden_state
        close(model(IDS).logits, model.score(hidden[:, -1]))
        close(hidden, packed_checkpoints.load_plain(folder).model(IDS).last_hidden_state)

    rewritten(checkpoints, tmp_path, "qwen3_moe", tensors)
    entries = json.loads((tmp_path / "config.json").read_text())
    entries["quantization_config"]["modules_to_not_convert"].remove("lm_head")
    (tmp_path / "config.json").write_text(json.dumps(entries))
    q, scales = packed_checkpoints.fp8(tensors["lm_head.weight"])
    packed_checkpoints.save(tmp_path, tensors | {"lm_head.weight": q, "lm_head.weight_scale_inv": scales})
    assert isinstance(load(tmp_path).lm_head, adapter.Fp8Linear)
    packed_checkpoints.save(tmp_path, tensors | {"lm_head.weight": q})
    with pytest.raises(ValueError, match=r"lm_head\.weight: got F8_E4M3 in the checkpoint, expected plain weights"):
        load(tmp_path)

    # Phi's router is a subclass of Linear, and modules_to_not_convert has its name in the checkpoint.
    sizes = dict(vocab_size=96, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_local_experts=4)
    config = transformers.PhimoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "phi", "fp8_blocks", progress=None)
    with torch.no_grad():
        close(load(tmp_path / "phi")(IDS).logits, packed_checkpoints.load_plain(tmp_path / "phi")(IDS).logits)


@pytest.mark.parametrize("name", packed_checkpoints.CONFIGS)
def test_float64_is_refused(name, checkpoints):
    with pytest.raises(TypeError, match="x: got float64"):
        load(checkpoints(name)[0]).double()(IDS)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_generate_with_a_static_cache_compiles_the_model(name, checkpoints):
    torch.compiler.reset()
    graphs = []
    compiled = transformers.CompileConfig(
        backend=lambda graph, inputs: graphs.append(graph) or graph.forward, mode=None, fullgraph=True
    )
    compiled._compile_all_devices = True  # generate itself compiles on GPUs only
    model, options = load(checkpoints(name)[0]), dict(max_new_tokens=3, min_new_tokens=3, do_sample=False)
    options["attention_mask"] = torch.ones_like(IDS)
    tokens = model.generate(IDS, cache_implementation="static", compile_config=compiled, **options)
    assert graphs and torch.equal(tokens, model.generate(IDS, **options))


def test_packed_modules_compile_to_one_graph(checkpoints):
    torch.compiler.reset()
    experts = add_lora(load(checkpoints("gpt_oss")[0]).model.layers[0].mlp.experts, rank=2)
    linear = load(checkpoints("qwen3_moe")[0]).model.layers[0].self_attn.q_proj
    fill(experts)
    routing = torch.arange(10).reshape(5, 2) % 4, torch.rand(5, 2)
    for module, width, arguments in ((experts, 64, routing), (linear, 128, ())):
        x = torch.randn(5, width, requires_grad=True)
        outputs = [f(x, *arguments) for f in (torch.compile(module, fullgraph=True, backend="aot_eager"), module)]
        close(*outputs)
        close(*(torch.autograd.grad(output.sum(), x)[0] for output in outputs))

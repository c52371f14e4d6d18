"""PEFT's adapters of experts computed in the layer: no folded weights, and the results of PEFT's own way."""

import copy
import subprocess
import sys

import peft
import pytest
import small_models
import torch
import transformers
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

import anabranch.torch.transformers as adapter

MODELS = ("qwen3_moe", "gpt_oss")  # layouts, interleaved columns, biases
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    transformers.logging.set_verbosity_error()
    torch.compiler.reset()
    yield
    adapter.register()


@pytest.fixture
def folds(monkeypatch):
    """Counts the calls in which PEFT computes an adapter's sum or its factors."""
    calls = []
    for name in ("get_delta_factors", "get_delta_weight"):
        original = getattr(ParamWrapper, name)

        def counted(self, *arguments, original=original, name=name, **options):
            calls.append(name)
            return original(self, *arguments, **options)

        monkeypatch.setattr(ParamWrapper, name, counted)
    return calls


def adapted(name, **options):
    """A small model with adapters as large as the weights."""
    torch.manual_seed(0)
    model = copy.deepcopy(small_models.small_model(name, "cpu")).eval()
    config = dict(r=3, lora_alpha=5, target_modules=[], target_parameters=TARGETS) | options
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    fill(model)
    return model


def fill(model):
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.05)


IDS = torch.arange(2 * 12).reshape(2, 12) % 90


def logits_of(model, implementation):
    model.base_model.model.set_experts_implementation(implementation)
    with torch.no_grad():
        return {"logits": model(IDS, use_cache=False).logits}


def results(model, implementation):
    """Logits, and the gradients of all trained parameters for a random cotangent."""
    model.base_model.model.set_experts_implementation(implementation)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    logits = model(IDS, use_cache=False).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(logits, list(trained.values()), cotangent, allow_unused=True)
    named = {name: g for name, g in zip(trained, found, strict=True) if g is not None}
    return {"logits": logits.detach()} | named


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in got.items():
        error = (value - want[name]).norm() / want[name].norm()
        assert error < 2e-5, (name, float(error))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_results_without_folds(name, use_rslora, folds):
    model = adapted(name, use_rslora=use_rslora)
    want = results(model, "eager")
    assert folds
    folds.clear()
    got = results(model, "anabranch")
    assert not folds
    assert_same(got, want)
    assert sum("lora_" in key for key in got) == 4 * 2


@pytest.mark.parametrize("target", TARGETS)
def test_one_projection(target, folds):
    model = adapted("qwen3_moe", target_parameters=[target])
    want = results(model, "eager")
    folds.clear()
    assert_same(results(model, "anabranch"), want)
    assert not folds


def test_disabled_merged_and_two_adapters(folds):
    model = adapted("qwen3_moe")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=[], target_parameters=TARGETS, use_rslora=True))
    fill(model)
    first = results(model, "eager")
    model.set_adapter("other")
    other = results(model, "eager")
    folds.clear()
    assert_same(results(model, "anabranch"), other)
    assert not folds
    with model.disable_adapter():
        assert_same(logits_of(model, "anabranch"), logits_of(model, "eager"))
    model.merge_adapter()
    assert_same(logits_of(model, "anabranch"), {"logits": other["logits"]})
    model.unmerge_adapter()
    model.base_model.set_adapter(["default", "other"])
    both = results(model, "eager")
    folds.clear()
    assert_same(results(model, "anabranch"), both)
    assert folds  # PEFT's own way
    assert not torch.equal(first["logits"], both["logits"])


def test_gradient_checkpointing(folds):
    model = adapted("qwen3_moe")
    want = results(model, "eager")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    folds.clear()
    assert_same(results(model, "anabranch"), want)
    assert not folds


def test_hooks_of_a_wrapper_take_the_way_of_peft(folds):
    model = adapted("qwen3_moe")
    want = results(model, "eager")
    inner = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = [module for module in inner if not isinstance(module.base_layer, ParamWrapper)]
    calls = []
    handles = [module.register_forward_hook(lambda *_: calls.append(1)) for module in inner]
    assert_same(results(model, "anabranch"), want)
    assert len(calls) == len(inner)
    for handle in handles:
        handle.remove()
    folds.clear()
    assert_same(results(model, "anabranch"), want)
    assert not folds


def test_bfloat16_weights_with_float32_adapters(folds):
    """Gradients of float32 factors are not rounded."""
    model = adapted("qwen3_moe")
    model.base_model.model.set_experts_implementation("anabranch")
    experts = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 32, generator=generator)
    index, weights = torch.arange(24).reshape(12, 2) % 8, torch.rand(12, 2, generator=generator)
    factors = [value for name, value in experts.named_parameters() if "lora_" in name]

    def both_passes(x):
        y = experts(x, index, weights)
        return [y, *torch.autograd.grad(y.float().square().sum(), factors)]

    want = both_passes(x)
    for name, value in experts.named_parameters():
        if "lora_" not in name:
            value.data = value.data.to(torch.bfloat16)
    got = both_passes(x.to(torch.bfloat16))
    assert not folds and got[0].dtype == torch.bfloat16
    for value, expected in zip(got, want, strict=True):
        assert (value - expected).norm() / expected.norm() < 0.03
    for gradient in got[1:]:
        assert gradient.dtype == torch.float32 and (gradient != gradient.bfloat16().float()).any()


def test_saved_adapters_are_those_of_peft(tmp_path):
    model = adapted("qwen3_moe")
    want = logits_of(model, "anabranch")
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = copy.deepcopy(small_models.small_model("qwen3_moe", "cpu")).eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert_same(logits_of(loaded, "eager"), want)


def test_without_the_hook(folds):
    model = adapted("qwen3_moe")
    want = results(model, "anabranch")
    assert not folds
    adapter.register(peft=False)
    assert_same(results(model, "anabranch"), want)
    assert folds
    with pytest.raises(TypeError, match="peft: got int 1, expected True or False"):
        adapter.register(peft=1)


def test_peft_is_wrapped_when_it_is_imported():
    program = (
        "import sys, anabranch.torch.transformers as adapter\n"
        "adapter.register()\n"
        "assert 'peft' not in sys.modules\n"
        "from peft.tuners.lora.layer import ParamWrapper\n"
        "assert hasattr(ParamWrapper.forward, '__wrapped__')\n"
        "adapter.register(peft=False)\n"
        "assert not hasattr(ParamWrapper.forward, '__wrapped__')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

"""PEFT's LoRA on experts by `target_parameters`, eager and compiled."""

import peft
import pytest
import torch
import transformers
from stored_experts import check_same, make_experts, operands
from torch import nn
from torch._dynamo.testing import CompileCounter

import anabranch.torch.transformers as adapter


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    transformers.logging.set_verbosity_error()
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, index, weights):
        return x + self.experts(x, index, weights)


class Model(nn.Module):
    """Two layers of experts of one class."""

    def __init__(self):
        super().__init__()
        first, second = make_experts(bias=True), make_experts(bias=True)
        second.__class__ = type(first)
        self.layers = nn.ModuleList([Block(first), Block(second)])

    def forward(self, x, index, weights):
        for layer in self.layers:
            x = layer(x, index, weights)
        return x


def adapted():
    """A model with nonzero LoRA on both weights of its experts."""
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=[], target_parameters=targets))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.1)
    return model


def results(model, implementation, call=None):
    """Output and gradients of the model, or of the function `call`."""
    for part in model.modules():
        if hasattr(part, "is_transposed"):
            part.config._experts_implementation = implementation
    x, index, weights = operands()
    output = (model if call is None else call)(x, index, weights)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    inputs = [x, weights, *named.values()]
    found = torch.autograd.grad(output, inputs, cotangent, allow_unused=True)
    values = dict(zip(["output", "x", "weights", *named], [output, *found], strict=True))
    return {name: value for name, value in values.items() if value is not None}


def test_one_graph_for_all_passes():
    model = adapted()
    adapter.check(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    want = results(model, "eager")
    for _ in range(3):
        check_same(results(model, "anabranch", compiled), want)
    assert counter.frame_count == 1


def test_lora_of_the_experts_compiled_and_eager():
    """PEFT's own way, which parametrises the experts in each pass: adapters are enabled, disabled and merged."""
    adapter.register(peft=False)
    model = adapted()
    adapter.check(model)
    compiled = torch.compile(model, backend="eager")
    before = results(model, "eager")
    for _ in range(2):
        check_same(results(model, "anabranch", compiled), before)
    with model.disable_adapter():
        disabled = results(model, "eager")
        check_same(results(model, "anabranch", compiled), disabled)
    assert not torch.allclose(disabled["output"], before["output"])
    model.merge_adapter()
    check_same({"output": results(model, "anabranch", compiled)["output"]}, {"output": before["output"]})
    model.unmerge_adapter()
    check_same(results(model, "anabranch", compiled), before)

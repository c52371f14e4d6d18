"""PEFT's adapters reach every part of MoE, and accelerate offloads it like any other module."""

import copy
import warnings

import accelerate
import peft
import pytest
import torch
from torch import nn

from anabranch.torch import MoE

D, F, E, K = 12, 20, 4, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(D, D)
        self.moe = MoE(D, F, E, K, shared_features=8, shared_gate=True, use_gate_bias=True).eval()

    def forward(self, x):
        return self.moe(self.proj(x)).output


def tokens():
    return torch.randn(3, 5, D, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- PEFT


def adapted(**options):
    """A model with nonzero adapters."""
    model = peft.get_peft_model(Model(), peft.LoraConfig(r=2, lora_alpha=3, **options))
    with torch.no_grad():
        for parameter in adapters(model).values():
            parameter.normal_(std=0.3)
    return model


def adapters(model):
    return {name: value for name, value in model.named_parameters() if "lora_" in name}


def deltas(model):
    """The adapters' updates by parameter name."""
    found = {}
    for path, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            path = path.removeprefix("base_model.model.").replace(".base_layer", "")
            found[f"{path}.{getattr(module, 'parameter_name', 'weight')}"] = module.get_delta_weight("default")
    return found


EXPERTS, SHARED = (
    ["moe.gate_up_proj", "moe.down_proj"],
    ["moe.shared_expert.gate_up_proj", "moe.shared_expert.down_proj"],
)


@pytest.mark.parametrize(
    "options,names",
    [
        (dict(target_modules=["gate", "shared_expert_gate"]), {"moe.gate.weight", "moe.shared_expert_gate.weight"}),
        (dict(target_modules=["proj"], target_parameters=["moe.gate.weight"]), {"proj.weight", "moe.gate.weight"}),
        (
            dict(target_modules=["gate"], target_parameters=EXPERTS),
            {"moe.gate.weight", *EXPERTS},
        ),
        (dict(target_modules=["gate"], target_parameters=SHARED), {"moe.gate.weight", *SHARED}),
    ],
    ids=["gates", "gate by its parameter", "experts", "shared expert"],
)
def test_adapters(options, names):
    model, plain, x = adapted(**options), Model(), tokens()
    added = deltas(model)
    assert set(added) == names
    base = dict(plain.named_parameters())
    d_output = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    output = model(x)
    want = torch.func.functional_call(plain, base | {name: base[name] + added[name] for name in names}, x)
    torch.testing.assert_close(output, want)
    assert (output - plain(x)).abs().max() > 0.05
    named = adapters(model)
    got = torch.autograd.grad(output, list(named.values()), d_output)
    want_gradients = torch.autograd.grad(want, list(named.values()), d_output)
    for name, one, other in zip(named, got, want_gradients, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
        assert one.any(), name
    torch.testing.assert_close(copy.deepcopy(model)(x), output)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), output)
    if "moe.down_proj" in names:  # PEFT skips a module inside of one with adapted parameters
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(x), output)
    assert set(merged.state_dict()) == set(plain.state_dict())


def test_adapters_are_trained():
    """Three optimizer steps change the model's results, and no tensor but the adapters."""
    model, x = adapted(target_modules=["gate"], target_parameters=EXPERTS), tokens()
    before, frozen = model(x), {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > losses[1] > losses[2] and not torch.equal(model(x), before)
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value), name


def test_modules_to_save_and_all_linear_modules():
    options = dict(target_modules="all-linear", modules_to_save=["shared_expert"])
    model = adapted(**options)
    model(tokens()).square().sum().backward()
    with_gradient = {name for name, value in model.named_parameters() if value.grad is not None}
    for part in (
        "proj.lora_A",
        "gate.lora_A",
        "shared_expert_gate.lora_B",
        "shared_expert.modules_to_save.default.down",
    ):
        assert any(part in name for name in with_gradient), part


# ---------------------------------------------------------------- accelerate


def offloaded(how, folder):
    device, model = torch.device("cpu"), Model()
    options = dict(main_device="cpu", offload_dir=folder, force_hooks=True)
    if how == "cpu":
        return accelerate.cpu_offload(model, execution_device=device)
    if how == "disk":
        return accelerate.disk_offload(model, folder, execution_device=device)
    if how == "layer":
        return accelerate.dispatch_model(model, {"proj": "cpu", "moe": "disk"}, **options)
    if how == "submodules":
        with warnings.catch_warnings(action="ignore"):  # accelerate handles modules only, and warns about parameters
            devices = {"proj": "cpu", "moe": "cpu", "moe.gate": "disk", "moe.shared_expert": "disk"}
            return accelerate.dispatch_model(model, devices, **options)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with accelerate.init_empty_weights():
        model = Model()
    return accelerate.load_checkpoint_and_dispatch(
        model, str(folder / "pytorch_model.bin"), device_map={"proj": "cpu", "moe": "disk"}, offload_folder=folder
    )


@pytest.mark.parametrize("how", ["cpu", "disk", "layer", "submodules", "checkpoint"])
def test_offloading(how, tmp_path):
    model, x = offloaded(how, tmp_path), tokens()
    assert model.moe.gate.weight.is_meta
    assert how == "submodules" or model.moe.shared_expert_gate.weight.is_meta
    for _ in range(2):
        assert torch.equal(model(x), Model()(x))

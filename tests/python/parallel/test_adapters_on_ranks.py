"""Hooks, parametrizations, pruning and PEFT's adapters under DDP in two Gloo processes, with and without a group."""

import functools

import peft
import pytest
import torch
import torch.distributed as dist
from one_batch import Block, E, check_results, loss_of, one_process, rank_batches, run_in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

from anabranch.lora import NAMES
from anabranch.torch import add_lora, clip_grad_norm_, ddp_ignore_experts

RANKS, R = 2, 2
EXPERTS = ["moe.gate_up_proj", "moe.down_proj"]

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


def experts_of(layer):
    return slice(layer.rank * layer.local_experts, (layer.rank + 1) * layer.local_experts)


# ---------------------------------------------------------------- blocks with adapters and hooks


def with_lora_of_experts(**options):
    config = dict(target_modules=["before", "gate"], target_parameters=EXPERTS)
    return peft.get_peft_model(Block(**options), peft.LoraConfig(r=R, **config))


def with_lora_of_the_shared_expert(**options):
    config = dict(target_modules=["gate", "shared_expert_gate"], target_parameters=["moe.shared_expert.down_proj"])
    return peft.get_peft_model(Block(**options), peft.LoraConfig(r=R, **config))


def with_own_adapters(**options):
    block = Block(**options)
    add_lora(block.moe, R, shared=("a_in", "b_out"))
    return block


def with_parametrizations_and_hooks(**options):
    block = Block(**options)
    layer = block.moe
    for module, name in ((layer.shared_expert, "down_proj"), (layer, "gate_up_proj")):
        parametrizations.weight_norm(module, name)
    for gate in (layer.gate, layer.shared_expert_gate):
        parametrizations.weight_norm(gate, "weight")
    mask = torch.rand(E, *layer.down_proj.shape[1:], generator=torch.Generator().manual_seed(5)) < 0.5
    prune.custom_from_mask(layer, "down_proj", mask[experts_of(layer)])
    layer.gate.register_forward_hook(lambda *a: 1.5 * a[2])
    layer.shared_expert_gate.register_forward_pre_hook(lambda _, x: (1.5 * x[0],))
    layer.shared_expert.register_full_backward_pre_hook(lambda _, d: (0.5 * d[0],))
    return block


def lora_part(name, whole, mine):
    """PEFT stores the adapters of E matrices as [E, r, in] and [out, r, E], reshaped to two axes."""
    if "lora_A" in name:
        return whole.reshape(E, R, -1)[mine].reshape(-1, whole.shape[1])
    return whole.reshape(-1, R, E)[..., mine].reshape(len(whole), -1)


def part(name, whole, mine):
    """This rank's part of a parameter of the whole model."""
    if name.split(".")[-1] in NAMES:
        return whole if len(whole) == 1 else whole[mine]
    is_expert_parameter = "moe." in name and not any(f"{other}" in name for other in ("gate.", "shared_expert"))
    if not is_expert_parameter:
        return whole
    return lora_part(name, whole, mine) if "lora_" in name else whole[mine]


def filled(model, whole, mine):
    """The model with nonzero adapters: this rank's part of the whole model's."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(part(name, whole.get_parameter(name), mine))
    return model


def whole_model(build):
    whole = build()
    with torch.no_grad():
        for name, value in whole.named_parameters():
            if "lora_" in name:
                value.normal_(std=0.1)
    return whole


def moe_of(model):
    return next(module for module in model.modules() if hasattr(module, "local_experts"))


# ---------------------------------------------------------------- checks


def check_ddp(rank, build, shared):
    """Checks results and gradients, and with expert parallelism the clipped norm."""
    whole = whole_model(build)
    options = dict(group=dist.group.WORLD) if shared else dict(loss_group=dist.group.WORLD)
    model = build(**options)
    mine = experts_of(moe_of(model))
    wrapped = DistributedDataParallel(ddp_ignore_experts(filled(model, whole, mine)))
    _, want = one_process(RANKS, whole)
    results = []
    for x, real in rank_batches(rank, RANKS):
        results.append(wrapped(x, token_mask=real))
        loss_of(results[-1]).backward()
    check_results(results, rank, want)

    def check_gradients():
        for name, value in model.named_parameters():
            expected = whole.get_parameter(name).grad
            if expected is not None:
                expected = part(name, expected, mine)
                torch.testing.assert_close(value.grad, expected, msg=lambda text, name=name: f"{name}: {text}")

    check_gradients()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    assert norm > 0.2
    torch.testing.assert_close(clip_grad_norm_(model, 0.1), norm)
    check_gradients()


def check_adapters_that_come_later(rank):
    """DDP also ignores adapters that are added after the call of ddp_ignore_experts."""
    model = ddp_ignore_experts(with_lora_of_experts(group=dist.group.WORLD))
    model.add_adapter("other", peft.LoraConfig(r=R, target_modules=["before", "gate"], target_parameters=EXPERTS))
    model.set_adapter("other")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.fill_(rank + 1.0)
    wrapped = DistributedDataParallel(model)
    x, real = rank_batches(rank, RANKS)[0]
    loss_of(wrapped(x, token_mask=real)).backward()
    others = {name: value for name, value in model.named_parameters() if "moe." in name and "lora_A.other" in name}
    assert {name: float(value[0, 0]) for name, value in others.items()} == {
        name: 1.0 if "gate." in name else rank + 1.0 for name in others
    }


class Scaled(nn.Module):
    """Multiplies by a parameter of another module."""

    def __init__(self, scale):
        super().__init__()
        self.held = [scale]

    def forward(self, value):
        return value * self.held[0]


def check_undetectable_differences(rank):
    """Experts computed from another module's parameter: DDP would average it, and clipping counts it."""
    x, real = rank_batches(rank, RANKS)[0]
    block = Block(group=dist.group.WORLD)
    block.scale = nn.Parameter(torch.ones(E // RANKS, 1, 1))
    parametrize.register_parametrization(block.moe, "down_proj", Scaled(block.scale))
    with pytest.raises(ValueError, match=r"group: got experts that depend on a parameter float32\[4, 1, 1\] which"):
        DistributedDataParallel(ddp_ignore_experts(block))(x, token_mask=real)
    loss_of(block(x, token_mask=real)).backward()
    for value in (value for name, value in block.named_parameters() if name != "scale"):
        value.grad = None
    squares = block.scale.grad.square().sum()
    dist.all_reduce(squares)
    torch.testing.assert_close(clip_grad_norm_(block, 1e3), squares.sqrt())


def check_masks_that_ddp_would_broadcast(rank):
    """DDP would broadcast the first rank's pruning mask, if pruning follows DDP."""
    x, real = rank_batches(rank, RANKS)[0]
    block = Block(group=dist.group.WORLD)
    wrapped = DistributedDataParallel(ddp_ignore_experts(block))
    prune.random_unstructured(block.moe, "down_proj", 0.5)
    with pytest.raises(ValueError, match="group: got a layer inside DistributedDataParallel"):
        wrapped(x, token_mask=real)


CHECKS = (
    functools.partial(check_ddp, build=with_lora_of_experts, shared=True),
    functools.partial(check_ddp, build=with_own_adapters, shared=True),
    functools.partial(check_ddp, build=with_own_adapters, shared=False),
    functools.partial(check_ddp, build=with_lora_of_the_shared_expert, shared=False),
    functools.partial(check_ddp, build=with_parametrizations_and_hooks, shared=True),
    functools.partial(check_ddp, build=with_parametrizations_and_hooks, shared=False),
    check_adapters_that_come_later,
    check_undetectable_differences,
    check_masks_that_ddp_would_broadcast,
)


def test_two_processes_with_adapters_are_one(tmp_path):
    run_in_processes(RANKS, CHECKS, tmp_path)

"""examples/torchtitan_experts.py on torchtitan itself."""

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed: its adapters are not tested")

from torch.distributed.fsdp import fully_shard
from torchtitan.components.quantization.mx import _get_mxfp8_grouped_experts_cls
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

import torchtitan_experts

SIZES, R, D, F = (5, 0, 7, 1), 16, 16, 24  # of 16 rows three are padding
SHAPE = dict(dim=D, hidden_dim=F, num_experts=len(SIZES))
CASES = {
    "grouped_experts": GroupedExperts.Config(**SHAPE),
    "fused_grouped_experts": GroupedExperts.Config(**SHAPE),
    "gpt_oss_experts": GptOssGroupedExperts.Config(**SHAPE, swiglu_limit=0.8),
}


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(module):
    """With random parameters."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=10 + i) / p.shape[-1] ** 0.5)
    return module


def results(module):
    """The output, and the gradients of the rows and of the parameters, by the names in a checkpoint."""
    x = normal(R, D, seed=1).requires_grad_()
    output = module(x, torch.tensor(SIZES))[: sum(SIZES)]
    output.backward(normal(*output.shape, seed=2).to(output.dtype))
    for p in module.parameters():
        p.data, p.grad = p.grad, None  # a checkpoint of the gradients
    return {"output": output.detach(), "x": x.grad[: sum(SIZES)], **module.state_dict()}


def assert_close(got, want):
    """To eight roundings to bfloat16."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert (got[name] - tensor).abs().max() <= 8 * 2**-8 * tensor.abs().max(), name


@pytest.mark.parametrize("name", CASES)
def test_experts_compute_what_they_replace(name):
    theirs, ours = filled(CASES[name].build()), getattr(torchtitan_experts, name)(CASES[name]).build()
    ours.load_state_dict(theirs.state_dict())
    assert_close(results(ours), results(theirs))


def model_config():
    """DeepSeek-V3's model for debugging, six layers, with the attention that a CPU has."""
    config = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def test_a_quantised_subclass_stays_torchtitans():
    """An override after the quantisation leaves it alone, quantisation after an override is an error."""

    config = model_config()
    routed = [layer.moe.routed_experts for layer in config.layers if layer.moe is not None]
    quantised = _get_mxfp8_grouped_experts_cls(GroupedExperts).Config
    routed[0].inner_experts = quantised(**SHAPE)
    apply_overrides(OverrideConfig(imports=["torchtitan_experts.grouped_experts"]), config)
    assert type(routed[0].inner_experts) is quantised
    assert type(routed[1].inner_experts) is torchtitan_experts.AnabranchExperts.Config
    for kind in ("AnabranchExperts", "AnabranchFusedExperts", "AnabranchGptOssExperts"):
        with pytest.raises(TypeError, match=f"experts: got MXFP8{kind}, expected {kind} and no subclass"):
            _get_mxfp8_grouped_experts_cls(getattr(torchtitan_experts, kind)).Config(**SHAPE).build()


def test_fsdp_shards_the_experts(tmp_path):
    theirs = filled(CASES["grouped_experts"].build())
    ours = torchtitan_experts.grouped_experts(CASES["grouped_experts"]).build()
    ours.load_state_dict(theirs.state_dict())
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(ours, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        x = normal(R, D, seed=1)
        got = ours(x, torch.tensor(SIZES))[: sum(SIZES)]
        assert_close({"output": got.detach()}, {"output": theirs(x, torch.tensor(SIZES))[: sum(SIZES)].detach()})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["grouped_experts", "fused_grouped_experts"])
def test_the_model_is_torchtitans(name):
    """Logits and gradients."""
    found, state = [], None
    for imports in ([], [f"torchtitan_experts.{name}"]):
        config = model_config()
        assert bool(apply_overrides(OverrideConfig(imports=imports), config)) == bool(imports)
        model = config.build()
        if state is None:
            torch.manual_seed(0)
            model.init_states()
            state = model.state_dict()
        else:
            model.init_states()
            model.load_state_dict(state)
        tokens = torch.randint(0, 2048, (2, 16), generator=torch.Generator().manual_seed(1))
        logits = model(tokens)
        logits.backward(normal(*logits.shape, seed=2))
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and "inner_experts" not in n}
        found.append({"logits": logits.detach(), **gradients})
    assert_close(*reversed(found))

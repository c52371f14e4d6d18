"""examples/torchtitan_experts.py with torchtitan itself.

torchtitan rounds the operands of its grouped GEMMs to bfloat16 with `Tensor.bfloat16()`. If that is patched to the
identity, its code and ours run in float32 and must agree to 1e-6; otherwise they must agree to a few roundings.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed: its adapters are not tested")

from torch.distributed.fsdp import fully_shard
from torchtitan.components.quantization.mx import _get_mxfp8_grouped_experts_cls
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models import deepseek_v3, gpt_oss
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
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
    """Initialises the parameters randomly."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=10 + i) / p.shape[-1] ** 0.5)
    return module


def results(module):
    """The output, and the gradients of the rows and of the parameters by checkpoint name."""
    x = normal(R, D, seed=1).requires_grad_()
    output = module(x, torch.tensor(SIZES))[: sum(SIZES)]
    output.backward(normal(*output.shape, seed=2).to(output.dtype))
    for p in module.parameters():
        p.data, p.grad = p.grad, None  # the checkpoint then contains gradients
    return {"output": output.detach(), "x": x.grad[: sum(SIZES)], **module.state_dict()}


def computed_in(dtype):
    """A context that computes experts in bfloat16, torchtitan's default, or in float32."""
    exact = mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor)
    return exact if dtype == "float32" else contextlib.nullcontext()


def assert_close(got, want, dtype="bfloat16", bound=1e-6):
    """Compares to `bound` times each tensor's norm, or in bfloat16 to eight roundings of its largest value."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        difference = got[name] - tensor
        assert got[name].dtype == tensor.dtype
        if dtype == "float32":
            assert difference.norm() <= bound * tensor.norm(), name
        else:
            assert difference.abs().max() <= 8 * 2**-8 * tensor.abs().max(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_experts_compute_what_they_replace(name, dtype):
    theirs, ours = filled(CASES[name].build()), getattr(torchtitan_experts, name)(CASES[name]).build()
    ours.load_state_dict(theirs.state_dict())
    with computed_in(dtype):
        assert_close(results(ours), results(theirs), dtype)


def model_config(family=deepseek_v3):
    """A family's debug model, with the attention that runs on a CPU, which ignores gpt-oss's sinks."""
    config = family.model_registry("debugmodel").model
    if family is gpt_oss:  # smaller than its 4 layers of 2880
        config.layers = config.layers[:2]
        for layer in config.layers:
            layer.moe.routed_experts.inner_experts.hidden_dim = 256
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def test_a_quantised_subclass_is_not_replaced():
    """An override after quantisation skips it; quantisation after an override is an error."""

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


@functools.cache
def model_results(family, dtype, name=None):
    """The loss, the logits and the gradients of all parameters; `name`: the override to use."""
    config = model_config(family)
    imports = [] if name is None else [f"torchtitan_experts.{name}"]
    assert bool(apply_overrides(OverrideConfig(imports=imports), config)) == bool(imports)
    model = config.build()
    torch.manual_seed(0)
    model.init_states()
    if name is not None:
        model.load_state_dict(model_results(family, dtype)["state"])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tokens = torch.randint(0, 2048, (2, 17), generator=torch.Generator().manual_seed(1))
    with computed_in(dtype):
        logits = model(tokens[:, :-1])
        logits.backward(normal(*logits.shape, seed=2))
    loss = torch.nn.functional.cross_entropy(logits.detach().flatten(0, 1), tokens[:, 1:].flatten())
    for p in model.parameters():
        p.data, p.grad = torch.zeros(()) if p.grad is None else p.grad, None
    gradients = {f"d {key}": value for key, value in model.state_dict().items()}
    return {"state": state, "results": {"loss": loss, "logits": logits.detach(), **gradients}}


#: gpt-oss's model does not run with float32 beside bfloat16, because its experts return bfloat16. The gradients of its
#: key biases are sums that cancel, so their relative rounding errors are larger.
MODELS = [
    ("grouped_experts", deepseek_v3, "bfloat16", None),
    ("grouped_experts", deepseek_v3, "float32", 1e-6),
    ("fused_grouped_experts", deepseek_v3, "float32", 1e-6),
    ("gpt_oss_experts", gpt_oss, "float32", 3e-6),
]


@pytest.mark.parametrize(("name", "family", "dtype", "bound"), MODELS, ids=[f"{m[0]}-{m[2]}" for m in MODELS])
def test_the_model_is_torchtitans(name, family, dtype, bound):
    """The 6 layers of DeepSeek-V3's model and 2 of gpt-oss's: loss, logits and every gradient."""
    got, want = (model_results(family, dtype, of)["results"] for of in (name, None))
    assert sum("inner_experts" in key and bool(value.any()) for key, value in want.items()) >= 8
    assert_close(got, want, dtype, bound)

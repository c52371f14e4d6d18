"""precision="fp8" in torch: the module, a process group, torch.compile."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import anabranch.torch as ab
from fp8_layers import check_routed
from frameworks import only_torch
from routed_cases import routed_operands

T, E, K, D, F = 24, 3, 2, 128, 256
FP8 = dict(precision="fp8", fp8_scales="power_of_two")


def make_layer(**options):
    torch.manual_seed(0)
    return ab.MoE(D, F, num_experts=E, topk=K, **FP8, **options)


def test_the_module_and_its_shared_expert():
    for interleaved in (False, True):
        module, x = make_layer(shared_features=40, interleaved=interleaved), torch.randn(T, D)
        got = module(x).output
        halves = (E, F, 2, D) if interleaved else (E, 2, F, D)
        layouts = dict(w_in_layout="fpd" if interleaved else "pfd", w_out_layout="df")
        matrices = module.gate_up_proj.reshape(halves), module.down_proj
        want = ab.moe(x, module.gate.weight.T, *matrices, topk=K, **FP8, **layouts).output
        want = want + ab.shared_expert(x, *module.shared_expert.operands(), w_in_layout="pfd", w_out_layout="df")
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        for gradients in (True, False):
            again = module(x, quantized=module.quantized(gradients=gradients)).output
            torch.testing.assert_close(again, got, rtol=0, atol=0)


def test_module_errors():
    with pytest.raises(
        ValueError, match="hidden_features: got 100 beside in_features 128, expected hidden_features a m"
    ):
        ab.MoE(D, 100, num_experts=E, topk=K, **FP8)
    with pytest.raises(ValueError, match="quantized: got a layer with precision='highest', expected \"fp8\""):
        ab.MoE(D, F, num_experts=E, topk=K).quantized()
    with pytest.raises(ValueError, match="precision: got 'fp8', expected one of 'highest', 'tf32'"):
        ab.shared_expert(torch.ones(2, D), torch.ones(D, 2, F), torch.ones(F, D), precision="fp8")
    assert "precision='fp8', fp8_scales='power_of_two'" in repr(make_layer())


@only_torch
@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("transport", ["ring", "all_to_all"])
def test_a_group_of_ranks(platform, transport):
    """A group of one rank follows the rules of a process group."""
    arrays = routed_operands(40, 4, 2, D, F, dtype="bfloat16", bias=True)
    options = dict(activation="silu", fp8_scales="float32", weight_early=transport == "ring")
    if platform == "gpu":
        pytest.skip("Gloo does not support GPU tensors")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        given = (
            torch.from_numpy(arrays["w_in"].astype(np.float32)),
            torch.from_numpy(arrays["w_out"].astype(np.float32)),
        )
        arrays |= {name: w.numpy() for name, w in zip(("w_in", "w_out"), given, strict=True)}
        for quantized in (None, ab.quantize_experts(*given)):
            check_routed(arrays, platform, quantized, group=dist.group.WORLD, transport=transport, **options)
    finally:
        dist.destroy_process_group()


def test_compiled_gradients_are_eager_ones():
    found = []
    for compiled in (False, True):
        module, x = make_layer(), torch.randn(T, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
        function = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        function(x, quantized=module.quantized()).output.sin().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)

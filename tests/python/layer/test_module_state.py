"""The layer's state keeps its dtypes and shapes however it is replaced, or the layer refuses it."""

import re

import pytest
import torch

from anabranch.torch import MoE, quantize_experts

pytestmark = pytest.mark.usefixtures("device")

D, F, E, K = 12, 20, 6, 2


def make_layer(**options):
    torch.manual_seed(0)
    return MoE(D, F, E, K, score_function="sigmoid", **options)


def rounded(layer):
    """The layer's state in bfloat16."""
    return {name: value.bfloat16() for name, value in layer.state_dict().items()}


def assign(layer):
    layer.load_state_dict(rounded(layer), assign=True)


def assign_to_a_parent(layer):
    torch.nn.ModuleList([layer]).load_state_dict({f"0.{k}": v for k, v in rounded(layer).items()}, assign=True)


def assign_float64(layer):
    layer.load_state_dict(layer.state_dict() | {"expert_bias": layer.expert_bias.double()}, assign=True)


def set_attribute(layer):
    layer.expert_bias = layer.expert_bias.half()


def set_data(layer):
    layer.expert_bias.data = layer.expert_bias.data.bfloat16()


def swap(layer):
    torch.utils.swap_tensors(layer.expert_bias, layer.expert_bias.bfloat16())


def swap_and_convert(layer):
    swap(layer)
    layer.bfloat16()


WAYS = (assign, assign_to_a_parent, assign_float64, set_attribute, set_data, swap, swap_and_convert)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_update_is_not_lost_in_16_bits(way):
    layer = make_layer(use_expert_bias=True, balance="quantile")
    x, counts = torch.randn(9, D), torch.arange(E)
    layer(x)
    way(layer)
    layer(x)
    layer.update_quantile_bias()
    assert layer.expert_bias.dtype == torch.float32
    assert (layer.expert_bias != layer.expert_bias.bfloat16()).any()
    layer.expert_bias.fill_(7.0)
    way(layer)
    layer(x)
    for _ in range(20):
        layer.tokens_per_expert.copy_(counts)
        layer.update_expert_bias(1e-3)
    torch.testing.assert_close(layer.expert_bias, 7 + 0.02 * torch.sign(counts.float().mean() - counts))
    assert layer.expert_bias.dtype == layer.state_dict()["expert_bias"].dtype == torch.float32


def test_loading_restores_float32_at_once():
    layer = make_layer(use_expert_bias=True)
    layer.expert_bias.normal_()
    want = layer.expert_bias.bfloat16().float()
    assign(layer)
    torch.testing.assert_close(layer.expert_bias, want, rtol=0, atol=0)


def test_restoring_keeps_the_tensor_object():
    """DistributedDataParallel broadcasts the buffers that existed at its construction."""
    layer = make_layer(use_expert_bias=True)
    buffer = layer.expert_bias
    set_data(layer)
    layer.update_expert_bias()
    assert layer.expert_bias is buffer and buffer.dtype == torch.float32


def test_a_forward_pass_leaves_a_replaced_bias_as_it_is():
    """With torch.func.functional_call the state belongs to the caller."""
    layer = make_layer(use_expert_bias=True)
    bias, x = torch.randn(E), torch.randn(9, D)
    given = bias.bfloat16()
    got = torch.func.functional_call(layer, {"expert_bias": given}, (x,))
    want = torch.func.functional_call(layer, {"expert_bias": given.float()}, (x,))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert given.dtype == torch.bfloat16


def test_restored_in_a_compiled_update():
    torch._dynamo.reset()
    layer, counts = make_layer(use_expert_bias=True), torch.arange(E)
    layer.expert_bias.fill_(7.0)
    set_data(layer)
    update = torch.compile(layer.update_expert_bias, fullgraph=True, backend="eager")
    for rate in (1e-3, torch.tensor(1e-3)):
        layer.tokens_per_expert.copy_(counts)
        update(rate)
    torch.testing.assert_close(layer.expert_bias, 7 + 2e-3 * torch.sign(counts.float().mean() - counts))


def narrow(layer):
    layer.tokens_per_expert = layer.tokens_per_expert.float()


def without_bias(layer):
    layer.expert_bias = None


def integer_bias(layer):
    layer.expert_bias = torch.zeros(E, dtype=torch.int64)


def resized_bias(layer):
    layer.expert_bias = torch.zeros(1)


def fewer_bins(layer):
    layer.qb_histogram = torch.zeros(E, 1, dtype=torch.int64)


def fewer_experts(layer):
    layer.num_experts = E - 2


def transposed(layer):
    layer.gate_up_proj.data = layer.gate_up_proj.data.mT.contiguous()


def bias_of_other_axes(layer):
    layer.gate_up_proj_bias.data = layer.gate_up_proj_bias.data.mT.contiguous()


def pruned(layer):
    layer.gate_up_proj = torch.nn.Parameter(layer.gate_up_proj[:-1])


BROKEN = {
    narrow: "tokens_per_expert: got float32[6], expected int64 [E=6]",
    fewer_bins: "qb_histogram: got int64[6, 1], expected int64 [E=6, bins=10]",
    without_bias: "expert_bias: got NoneType None, expected a tensor",
    integer_bias: "expert_bias: got int64[6], expected float32 or",
    resized_bias: "expert_bias: got float32[1], expected float32 or",
    fewer_experts: "expert_bias: got float32[6], expected float32 or bfloat16 or float16 or float64 [E=4]",
    transposed: "gate_up_proj: got float32[6, 12, 40], expected [6, 40, 12]",
    bias_of_other_axes: "gate_up_proj_bias: got float32[40, 6], expected [6, 40]",
    pruned: "gate_up_proj: got float32[5, 40, 12], expected [6, 40, 12]",
}


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_state_of_another_shape_or_kind_is_refused(change):
    layer = make_layer(use_expert_bias=True, balance="quantile", qb_bins=10, use_bias=True)
    change(layer)
    with pytest.raises((TypeError, ValueError), match=re.escape(BROKEN[change])):
        layer(torch.randn(9, D))
    if change not in (transposed, bias_of_other_axes, pruned, without_bias):
        with pytest.raises((TypeError, ValueError), match=re.escape(BROKEN[change])):
            (layer.update_quantile_bias if change is fewer_bins else layer.update_expert_bias)()


def test_an_update_of_a_bias_without_values_is_refused():
    """The state as offloading leaves it between forward passes."""
    layer = make_layer(use_expert_bias=True)
    layer(torch.randn(9, D))
    counts = layer.tokens_per_expert.clone()
    layer.expert_bias = layer.expert_bias.to("meta")
    with pytest.raises(ValueError, match="expert_bias: got a tensor on meta"):
        layer.update_expert_bias()
    torch.testing.assert_close(layer.tokens_per_expert, counts, rtol=0, atol=0)


# ---------------------------------------------------------------- quantised weights


def test_quantised_experts_older_than_their_weights_are_refused():
    torch.manual_seed(0)
    layer, x = MoE(128, 128, 2, 1, precision="fp8"), torch.randn(3, 128, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    quantized = layer.quantized()
    layer(x, quantized=quantized).output.square().sum().backward()
    layer(x, quantized=quantized)
    optimizer.step()
    with pytest.raises(ValueError, match="quantized: got experts that were quantised before w_in changed"):
        layer(x, quantized=quantized)
    layer(x, quantized=layer.quantized())
    quantized = layer.quantized()
    with torch.no_grad():
        layer.down_proj.mul_(2.0)
    with pytest.raises(ValueError, match="quantized: got experts that were quantised before w_out changed"):
        layer(x, quantized=quantized)
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    layer(x, quantized=quantized)  # tensors from elsewhere are not tied to the parameters


def test_quantised_experts_of_frozen_weights_stay():
    with torch.inference_mode():
        w_in, w_out = torch.randn(2, 128, 2, 128), torch.randn(2, 128, 128)
        quantized = quantize_experts(w_in, w_out)
        layer = MoE(128, 128, 2, 1, precision="fp8")
        given = layer.quantized(gradients=False)
        layer(torch.randn(3, 128, dtype=torch.bfloat16), quantized=given)
    assert quantized.w_in is not None

"""The shared expert in torch: layouts, float32 weights, masks, autocast. test_shared_expert.py compares values."""

import math

import numpy as np
import pytest
import torch

from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS, Layouts
from anabranch.torch import shared_expert

pytestmark = pytest.mark.usefixtures("device")

D, S = 8, 12
OURS = dict(w_in=(D, 2, S), w_out=(S, D), w_gate=(D,))


def normal(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def operands():
    weights = {name: 0.3 * normal(*shape, seed=i) for i, (name, shape) in enumerate(OURS.items())}
    return {"x": normal(3, 5, D)} | weights


def gradients(given, **options):
    """The output, and the gradients of the named operands."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
    output = shared_expert(**leaves, **options)
    found = torch.autograd.grad(torch.sin(output.float()).sum(), list(leaves.values()))
    return output, dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("layouts", [Layouts(a, b) for a in IN_LAYOUTS for b in OUT_LAYOUTS], ids=str)
def test_layouts_store_the_same_weights(layouts):
    want_output, want = gradients(operands())

    def laid_out(name, value):
        return value[None].permute(layouts.from_ours(name))[0] if name in ("w_in", "w_out") else value

    given = {name: laid_out(name, value) for name, value in operands().items()}
    output, found = gradients(given, w_in_layout=layouts.w_in, w_out_layout=layouts.w_out)
    torch.testing.assert_close(output, want_output)
    torch.testing.assert_close(found, {name: laid_out(name, value) for name, value in want.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_float32_weights_are_not_rounded(dtype):
    given = operands()
    given["x"] = given["x"].to(dtype)
    output, found = gradients(given)
    rounded_output, rounded = gradients(
        {name: value.to(dtype) for name, value in given.items() if name != "w_gate"} | {"w_gate": given["w_gate"]}
    )
    assert torch.equal(output, rounded_output) and output.dtype == dtype
    for name in ("w_in", "w_out"):
        assert found[name].dtype == torch.float32 and (found[name] != rounded[name].float()).any()
        assert torch.equal(found[name].to(dtype), rounded[name])


def test_autocast_is_the_expert_in_its_dtype(device):
    given = operands()
    with torch.autocast(device, torch.bfloat16):
        output, found = gradients(given)
    want_output, want = gradients(given | {"x": given["x"].to(torch.bfloat16)})
    assert torch.equal(output, want_output)
    assert all(torch.equal(found[name].to(want[name].dtype), want[name]) for name in want)


def test_a_masked_token_may_hold_nan():
    mask = torch.arange(15).reshape(3, 5) % 4 > 0
    nan, zero = operands(), operands()
    nan["x"][~mask], zero["x"][~mask] = math.nan, 0
    (output, found), (_, want) = gradients(nan, token_mask=mask), gradients(zero, token_mask=mask)
    assert not output[~mask].any() and not found["x"][~mask].any()
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_compiled_gradients_are_the_eager_ones():
    torch._dynamo.reset()
    compiled = torch.compile(shared_expert, fullgraph=True, backend="aot_eager")
    want_output, want = gradients(operands())
    leaves = {name: value.requires_grad_() for name, value in operands().items()}
    output = compiled(**leaves)
    torch.sin(output).sum().backward()
    torch.testing.assert_close(output, want_output)
    torch.testing.assert_close({name: leaf.grad for name, leaf in leaves.items()}, want)


def test_no_tokens():
    output, found = gradients(operands() | {"x": torch.zeros(0, D)})
    assert output.shape == (0, D) and not any(gradient.any() for gradient in found.values())

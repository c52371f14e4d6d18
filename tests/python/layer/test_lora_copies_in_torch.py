"""Float32 factors of a 16-bit layer in torch: the backward pass reads the copies that the forward pass made."""

import contextlib

import pytest
import torch
import torch.utils.flop_counter

from anabranch.lora import NAMES
from anabranch.torch import Lora, moe, routed_experts
from anabranch.torch.binding import calls, define
from torch_transforms import normal

pytestmark = pytest.mark.usefixtures("device")
T, E, K, D, F, RANK = 9, 5, 2, 16, 8, 8
LAYOUTS = [(w_in, w_out) for w_in in ("dpf", "pfd", "dfp", "fpd") for w_out in ("fd", "df")]


def weights(w_in_layout, w_out_layout):
    sizes = {"d": D, "p": 2, "f": F}
    return (
        normal(E, *(sizes[axis] for axis in w_in_layout), seed=1, scale=0.3).bfloat16(),
        normal(E, *(sizes[axis] for axis in w_out_layout), seed=2, scale=0.3).bfloat16(),
    )


def factors(dtype=torch.float32, shared=()):
    shapes = {"a_in": (D, RANK), "b_in": (RANK, 2, F), "a_out": (F, RANK), "b_out": (RANK, D)}
    return [
        normal(1 if name in shared else E, *shape, seed=3 + i, scale=0.3).to(dtype).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    ]


def of_moe(x, routing, w_in, w_out, lora, **options):
    gate, _, _ = routing
    return moe(x, gate, w_in, w_out, topk=K, lora=Lora(*lora), lora_scale=(0.5, 2.0), **options).output


def of_routed(x, routing, w_in, w_out, lora, **options):
    _, experts, combined = routing
    options |= dict(lora=Lora(*lora), lora_scale=(0.5, 2.0))
    return routed_experts(x, experts, combined, w_in, w_out, **options).output


def routing():
    """A gate, and given experts of which the last one has no rows, with their weights."""
    experts = torch.arange(T * K, dtype=torch.int32).view(T, K) % (E - 1)
    return normal(D, E, seed=8).bfloat16(), experts.to(normal(1).device), normal(T, K, seed=9)


def step(function, lora, layouts):
    """The output, and the gradients of x and the factors."""
    x = normal(T, D).bfloat16().requires_grad_()
    named = dict(zip(("w_in_layout", "w_out_layout"), layouts, strict=True))
    output = function(x, routing(), *weights(*layouts), lora, **named)
    return output, torch.autograd.grad(output, [x, *lora], normal(T, D, seed=10).bfloat16())


FUNCTIONS = pytest.mark.parametrize("function", [of_moe, of_routed])


@pytest.mark.parametrize("layouts", LAYOUTS, ids="+".join)
@FUNCTIONS
def test_bits_are_those_of_rounded_factors(function, layouts):
    """Rounding each factor once before the layer gives the same results; only the gradients' last rounding differs."""
    lora = factors(shared=("b_in",))
    output, (d_x, *gradients) = step(function, lora, layouts)
    rounded = [factor.detach().bfloat16().requires_grad_() for factor in lora]
    want, (want_d_x, *want_gradients) = step(function, rounded, layouts)
    assert torch.equal(output, want) and torch.equal(d_x, want_d_x)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 4
    assert all(torch.equal(got.bfloat16(), of) for got, of in zip(gradients, want_gradients, strict=True))
    if function is of_routed:
        assert not any(gradient[E - 1].any() for gradient in (gradients[0], *gradients[2:]))


@pytest.fixture
def recorded(monkeypatch):
    """The dtypes and orders of the factors in C calls, by (forward or backward, field)."""
    found, describe = {}, calls.Operation.__call__

    def call(operation, tensors, orders=None, **options):
        is_backward = operation.name == "expert_ffn_backward" or options.get("backward", 0) == 1
        for name in (*NAMES, "lora_b"):
            if tensors.get(name) is not None:
                found.setdefault((is_backward, name), set()).add(tensors[name].dtype)
        return describe(operation, tensors, orders, **options)

    monkeypatch.setattr(calls.Operation, "__call__", call)
    define.forget_prepared()
    return found


@pytest.mark.parametrize("observed", ["eager", "mode", "compiled"])
@FUNCTIONS
def test_the_backward_pass_reads_the_copies(recorded, function, observed):
    torch._dynamo.reset()
    lora = factors()
    run = torch.compile(function, backend="aot_eager") if observed == "compiled" else function
    mode = torch.utils.flop_counter.FlopCounterMode(display=False) if observed == "mode" else contextlib.nullcontext()
    with mode:
        _, (_, *gradients) = step(run, lora, ("pfd", "df"))
    backward = {name: dtypes for (is_backward, name), dtypes in recorded.items() if is_backward}
    assert backward == {key: {torch.bfloat16} for key in (*NAMES, "lora_b")}
    assert recorded[False, "lora_a_in"] == {torch.float32} and recorded[False, "lora_b"] == {torch.bfloat16}
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


def test_factors_of_the_dtype_of_x_are_not_copied():
    found = []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda saved: found.append(saved) or saved, lambda saved: saved)
    for dtype in (torch.bfloat16, torch.float32):
        found.clear()
        with pack:
            step(of_moe, factors(dtype), ("pfd", "df"))
        copies = [tensor for tensor in found if tensor.dim() == 1 and tensor.dtype == torch.bfloat16 and tensor.numel()]
        elements = sum(factor.numel() for factor in factors())
        assert [tensor.numel() for tensor in copies] == ([] if dtype == torch.bfloat16 else [elements])


@pytest.mark.parametrize("observed", ["eager", "mode"])
@pytest.mark.parametrize("changed", range(4))
@FUNCTIONS
def test_a_step_of_the_optimizer_before_the_backward_pass_raises(function, changed, observed):
    """As for every other saved tensor, although the backward pass reads the copy of the factor."""
    lora = factors()
    mode = torch.utils.flop_counter.FlopCounterMode(display=False) if observed == "mode" else contextlib.nullcontext()
    with mode:
        output = function(normal(T, D).bfloat16(), routing(), *weights("dpf", "fd"), lora)
        with torch.no_grad():
            lora[changed].mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_changed_factor_is_read_by_the_next_forward_pass():
    lora = factors()
    first, _ = step(of_moe, lora, ("dpf", "fd"))
    with torch.no_grad():
        lora[3].mul_(2.0)
    second, (_, *gradients) = step(of_moe, lora, ("dpf", "fd"))
    fresh, (_, *want) = step(of_moe, [factor.detach().clone().requires_grad_() for factor in lora], ("dpf", "fd"))
    assert torch.equal(second, fresh) and not torch.equal(first, second)
    assert all(map(torch.equal, gradients, want))

"""Experts of Transformers: recognised and refused gate functions, and behaviour under torch's transformations."""

import math

import pytest
import torch
import transformers
from stored_experts import E, check_same, gradients, make_experts, operands, parts
from torch import nn
from transformers.activations import ACT2FN

import anabranch.torch.transformers as adapter
from anabranch.torch import Activation


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    transformers.logging.set_verbosity_error()
    torch.compiler.reset()  # all classes here share the forward function that Transformers makes


# ---------------------------------------------------------------- recognition


def interleaved_parts(gate_up):
    return gate_up[..., ::2], gate_up[..., 1::2]


def clamped(split):
    def _apply_gate(self, gate_up):
        g, u = split(gate_up)
        return nn.functional.silu(g.clamp(max=self.limit)) * u.clamp(-self.limit, self.limit)

    return _apply_gate


def oai(split):
    def _apply_gate(self, gate_up):
        g, u = split(gate_up)
        g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        return (u + 1) * g * torch.sigmoid(self.alpha * g)

    return _apply_gate


def then_clamped(self, gate_up):
    g, u = parts(gate_up)
    return self.act_fn(g).clamp(max=self.limit) * u.clamp(-self.limit, self.limit)


def situ(self, gate_up):
    g, u = (part.float() for part in parts(gate_up))
    return (self.a * torch.tanh(g / self.a) * torch.sigmoid(g) * self.b * torch.tanh(u / self.b)).to(gate_up.dtype)


RECOGNISED = {
    "silu": (dict(), Activation.glu("silu"), "pfd"),
    "transposed": (dict(transposed=True, bias=True), Activation.glu("silu"), "dpf"),
    "gelu": (dict(act="gelu"), Activation.glu("gelu_erf"), "pfd"),
    "gelu_pytorch_tanh": (dict(act="gelu_pytorch_tanh"), Activation.glu("gelu"), "pfd"),
    "gelu_new": (dict(act="gelu_new"), Activation.glu("gelu"), "pfd"),
    "quick_gelu": (dict(act="quick_gelu"), Activation.glu("quick_gelu"), "pfd"),
    "relu": (dict(act="relu"), Activation.glu("relu"), "pfd"),
    "relu2": (dict(act="relu2"), Activation.glu("relu2"), "pfd"),
    "linear": (dict(act="linear"), Activation.glu("linear"), "pfd"),
    "clamped": (dict(gate=clamped(parts), limit=1.5), Activation.swiglu_clamped(1.5), "pfd"),
    "clamped far out": (dict(gate=clamped(parts), limit=50000), Activation.swiglu_clamped(50000), "pfd"),
    "interleaved": (dict(gate=clamped(interleaved_parts), limit=1.5, bias=True), Activation.swiglu_clamped(1.5), "fpd"),
    "oai": (dict(gate=oai(parts), alpha=1.3, limit=2.0), Activation.swiglu_oai(1.3, 2.0), "pfd"),
    "gpt-oss": (
        dict(gate=oai(interleaved_parts), alpha=1.702, limit=7.0, transposed=True, bias=True),
        Activation.swiglu_oai(1.702, 7.0),
        "dfp",
    ),
    "then clamped": (dict(gate=then_clamped, limit=0.75), Activation.swiglu_then_clamp(0.75), "pfd"),
    "situ": (dict(gate=situ, a=2.0, b=3.0), Activation.situ(2.0, 3.0), "pfd"),
}


@pytest.mark.parametrize("case", RECOGNISED)
def test_a_gate_function_is_recognised(case):
    options, activation, layout = RECOGNISED[case]
    experts = make_experts(**options)
    given = operands()
    found = gradients(experts, "anabranch", given)
    check_same(found, gradients(experts, "eager", given))
    described = adapter.check(experts)[""]
    assert described.activation == activation
    assert described.w_in_layout == layout


def literal_limit(self, gate_up):
    g, u = parts(gate_up)
    return nn.functional.silu(g.clamp(max=7.0)) * u  # no attribute of the module holds 7.0


def far_limit(self, gate_up):
    g, u = parts(gate_up)
    return nn.functional.silu(g) * u.clamp(-9000.0, 9000.0)


def scaled(self, gate_up):
    g, u = parts(gate_up)
    return 1.001 * nn.functional.silu(g) * u


def swapped(self, gate_up):
    u, g = parts(gate_up)
    return nn.functional.silu(g) * u


def depends_on_one_row(self, gate_up):
    return gate_up[0]


def failing(self, gate_up):
    raise KeyError("a gate of another shape")


@pytest.mark.parametrize(
    "options",
    [
        dict(gate=literal_limit),
        dict(gate=far_limit),
        dict(gate=scaled),
        dict(gate=swapped),
        dict(gate=depends_on_one_row),
        dict(gate=failing),
        dict(act="tanh"),
        dict(act="mish"),
        dict(act="gelu_10"),
        dict(act="relu6"),
    ],
    ids=lambda options: getattr(options.get("gate"), "__name__", options.get("act")),
)
def test_a_gate_that_is_no_activation_is_refused(options):
    experts = make_experts(**options)
    message = r'experts_implementation="anabranch": got TestExperts of a_test, whose _apply_gate .*, expected one'
    with pytest.raises(NotImplementedError, match=message):
        experts(*operands())
    with pytest.raises(NotImplementedError, match=message):
        adapter.check(nn.Sequential(experts))


def test_a_replaced_activation_is_recognised():
    experts, given = make_experts(), operands()
    experts(*given)
    experts.act_fn = ACT2FN["gelu"]
    check_same(gradients(experts, "anabranch", given), gradients(experts, "eager", given))
    limited = make_experts(gate=clamped(parts), limit=1.5)
    limited(*given)
    limited.limit = 0.5
    check_same(gradients(limited, "anabranch", given), gradients(limited, "eager", given))
    experts.act_fn = ACT2FN["tanh"]
    experts.config._experts_implementation = "anabranch"
    with pytest.raises(NotImplementedError, match="whose _apply_gate"):
        experts(*given)


def test_a_clamp_at_a_large_literal_is_refused():
    def _apply_gate(self, gate_up):
        g, u = parts(gate_up)
        return nn.functional.silu(g.clamp(max=20000.0)) * u

    with pytest.raises(NotImplementedError, match=r"whose _apply_gate .*expected one"):
        adapter.check(make_experts(_apply_gate))


def without_a_gradient(self, gate_up):
    g, u = parts(gate_up)
    return nn.functional.silu(g).detach() * u


def test_a_gate_with_other_gradients_is_refused():
    with pytest.raises(NotImplementedError, match=r"whose _apply_gate .* has the values of silu and other gradients"):
        adapter.check(make_experts(without_a_gradient))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_recognised_without_gradients(mode):
    experts, given = make_experts(), operands()
    with mode():
        output = experts(*given)
    torch.testing.assert_close(output, experts(*given), rtol=0, atol=0)


def test_recognised_inside_a_checkpoint():
    """A checkpoint counts saved tensors, and recomputation does not evaluate the gate function again."""
    experts, given = make_experts(), operands()
    output = torch.utils.checkpoint.checkpoint(experts, *given, use_reentrant=False)
    output.sum().backward()


# ---------------------------------------------------------------- dtypes and transformations


def test_index_past_the_experts_is_no_expert():
    """Expert parallelism marks experts of other ranks like this. Their weight need not be 0."""
    experts, (x, index, weights) = make_experts(bias=True), operands()
    index[::3, 0] = E
    given = x, index, weights
    found = gradients(experts, "anabranch", given)
    check_same(found, gradients(experts, "eager", given))
    assert not found["weights"][::3, 0].any() and found["weights"][1::3, 0].all()


@pytest.mark.parametrize("case,dynamic", [("silu", False), ("gpt-oss", True)])
def test_compiled(case, dynamic, device):
    experts, given = make_experts(**RECOGNISED[case][0]).to(device), operands(device=device)
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    check_same(gradients(experts, "anabranch", given, compiled), gradients(experts, "eager", given))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    """Non-strict export evaluates the gate function while it traces. The number of tokens is dynamic."""
    experts, given = make_experts(**RECOGNISED["gpt-oss"][0]), tuple(tensor.detach() for tensor in operands())
    if strict:  # Dynamo cannot evaluate the gate function
        adapter.check(experts)
    dynamic = tuple({0: torch.export.Dim("T", min=2, max=2**20)} for _ in given)
    exported = torch.export.export(experts, given, dynamic_shapes=dynamic, strict=strict).module()
    for arguments in (given, tuple(torch.cat([tensor, tensor]) for tensor in given)):
        torch.testing.assert_close(exported(*arguments), experts(*arguments), rtol=0, atol=0)


def test_compilation_requires_a_check():
    """Gate functions cannot be evaluated while torch.compile traces."""
    experts = make_experts()
    with pytest.raises(Exception, match="NotImplementedError"):
        torch.compile(experts, fullgraph=True, backend="aot_eager")(*operands())
    with pytest.raises(NotImplementedError, match="whose _apply_gate"):
        adapter.check(make_experts(act="tanh"))
    experts(*operands())
    torch.compile(experts, fullgraph=True, backend="aot_eager")(*operands())


def test_recompiled_for_another_limit():
    """Two modules of one class may share a program, unless their limits differ."""
    experts, others, given = (
        make_experts(gate=clamped(parts), limit=1.5),
        make_experts(gate=clamped(parts), limit=0.5),
        operands(),
    )
    others.__class__ = type(experts)
    for one in (experts, others):
        adapter.check(one)
        compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
        check_same(gradients(one, "anabranch", given, compiled), gradients(one, "eager", given))
    experts.limit = 0.25
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    check_same(gradients(experts, "anabranch", given, compiled), gradients(experts, "eager", given))


def test_checkpointed():
    experts, given = make_experts(), operands()

    def forward(*arguments):
        return torch.utils.checkpoint.checkpoint(experts, *arguments, use_reentrant=False)

    expected = gradients(experts, "anabranch", given)
    check_same(gradients(experts, "anabranch", given, forward), expected, tolerance=0)


def test_bfloat16(device):
    experts, given = make_experts().to(device, torch.bfloat16), operands(torch.bfloat16, device)
    found = gradients(experts, "anabranch", given)
    check_same(
        {n: v.float() for n, v in found.items()},
        {n: v.float() for n, v in gradients(experts, "eager", given).items()},
        2e-2,
    )
    assert (
        found["output"].dtype == found["down_proj"].dtype == torch.bfloat16 and found["weights"].dtype == torch.float32
    )


def test_float32_parameters_with_bfloat16_states():
    experts, given = make_experts(), operands(torch.bfloat16)
    found = gradients(experts, "anabranch", given)
    assert found["output"].dtype == torch.bfloat16 and found["down_proj"].dtype == torch.float32
    want = gradients(experts.double(), "eager", (given[0].detach().double().requires_grad_(), *given[1:]))
    check_same({n: v.double() for n, v in found.items()}, {n: v.double() for n, v in want.items()}, 2e-2)


def test_autocast():
    experts, given = make_experts(), operands()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(experts, "anabranch", given)
    assert found["output"].dtype == torch.float32
    check_same(found, gradients(experts, "eager", given), 2e-2)


class Wrapper(torch.Tensor):
    """A wrapper subclass, like quantised and sharded parameters."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")

    def __tensor_flatten__(self):
        return [], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        raise AssertionError("unflattened")


def test_a_parameter_that_is_not_dense_is_refused():
    experts = make_experts()
    wrapped = Wrapper(experts.down_proj.data)
    del experts.down_proj
    experts.down_proj = wrapped
    with pytest.raises(TypeError, match=r"down_proj: got a Wrapper, expected a dense tensor of TestExperts of a_test"):
        experts(*operands())
    del experts.gate_up_proj
    with pytest.raises(TypeError, match=r"gate_up_proj: got None, expected a tensor of TestExperts of a_test"):
        experts(*operands())


# ---------------------------------------------------------------- registration


def test_registering_twice_is_once():
    before = transformers.PreTrainedModel.get_correct_experts_implementation
    adapter.register()
    assert transformers.PreTrainedModel.get_correct_experts_implementation is before


def test_a_model_without_experts_accepts_it():
    config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    with torch.device("meta"):
        transformers.LlamaModel._from_config(config, experts_implementation="anabranch")


def test_check_of_no_module():
    with pytest.raises(TypeError, match="model: got str 'qwen3_moe', expected a torch"):
        adapter.check("qwen3_moe")


# ---------------------------------------------------------------- load-balancing loss


@pytest.mark.parametrize("padded", [False, True])
def test_loss_equals_that_of_transformers(padded):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    rng = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(14, 6, generator=rng).requires_grad_() for _ in range(3))
    mask = (torch.rand(2, 7, generator=rng) < 0.6).long() if padded else None
    found = adapter.load_balancing_loss_func(layers, 6, 2, mask)
    expected = load_balancing_loss_func(layers, 6, 2, mask)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, layers), torch.autograd.grad(expected, layers), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert math.isfinite(found) and float(found) > 0


def test_loss_without_a_token_is_zero():
    assert float(adapter.load_balancing_loss_func([torch.ones(3, 2)], 2, 1, torch.zeros(3))) == 0.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 2), TypeError, "gate_logits: got None"),
        (([], 2), TypeError, "gate_logits: got "),
        (([torch.ones(3, 4)], 2), ValueError, r"gate_logits\[0\]: got float32\[3, 4\], expected .*E=2"),
        (
            ([torch.ones(3, 2), torch.ones(4, 2)], 2),
            ValueError,
            r"gate_logits\[1\]: got float32\[4, 2\], expected .*T=3",
        ),
        (([torch.ones(3, 2)], 2, 3), ValueError, "top_k: got 3"),
        (([torch.ones(3, 2)], 0), ValueError, "num_experts: got 0"),
        (([torch.ones(3, 2)], 2, 1, torch.ones(4)), ValueError, r"attention_mask: got .*expected .* 3"),
        (([torch.ones(3, 2)], 2, 1, "all"), ValueError, "attention_mask: got str 'all'"),
    ],
)
def test_loss_of_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        adapter.load_balancing_loss_func(*arguments)

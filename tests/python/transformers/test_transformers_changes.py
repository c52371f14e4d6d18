"""A gate that depends on more than its argument is refused, and a change of a listed attribute is noticed."""

import types

import pytest
import torch
import transformers
from stored_experts import check_same, gradients, make_experts, operands, parts
from torch import nn

import anabranch.torch.transformers as adapter
from anabranch.torch.transformers import experts_module

silu, gelu = nn.functional.silu, nn.functional.gelu


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    transformers.logging.set_verbosity_error()
    torch.compiler.reset()  # all classes here share the forward function that Transformers makes


OUTSIDE = torch.ones(())


def scaled(self, gate_up):
    g, u = parts(gate_up)
    return silu(g) * u * self.scale


def scaled_by_an_item(self, gate_up):
    g, u = parts(gate_up)
    return silu(g) * u * self.scale.item()


def scaled_by_a_global(self, gate_up):
    g, u = parts(gate_up)
    return silu(g) * u * OUTSIDE


@pytest.mark.parametrize(("gate", "trainable"), [(scaled, True), (None, False)], ids=["used", "unused"])
def test_an_additional_parameter_is_refused(gate, trainable):
    """The parameter's initial value is neutral, so values alone don't reveal it."""
    experts = make_experts(gate)
    experts.scale = nn.Parameter(torch.ones(()), requires_grad=trainable)
    message = "got TestExperts of a_test, which has a parameter of its own, scale, expected no other than gate_up_proj"
    with pytest.raises(NotImplementedError, match=message):
        experts(*operands())


@pytest.mark.parametrize("gate", [scaled, scaled_by_an_item, scaled_by_a_global])
def test_a_gate_that_reads_a_tensor_is_refused(gate):
    """The gate is refused also if it replaces another gate after the first call."""
    experts = make_experts()
    experts(*operands())
    type(experts)._apply_gate = gate
    experts.register_buffer("scale", torch.ones(()))
    message = r"whose _apply_gate .* computes with a tensor beside its argument, float32\[\].*, expected one"
    with pytest.raises(NotImplementedError, match=message):
        experts(*operands())


def test_an_unused_buffer_is_ignored():
    experts, given = make_experts(), operands()
    experts.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    check_same(gradients(experts, "anabranch", given), gradients(experts, "eager", given))


def gelu_in_bfloat16(self, gate_up):
    g, u = parts(gate_up)
    return (gelu(g) if gate_up.dtype == torch.bfloat16 else silu(g)) * u


def gelu_of_few_rows(self, gate_up):
    g, u = parts(gate_up)
    return (gelu(g) if len(gate_up) < 64 else silu(g)) * u


class SiluOfManyRows(nn.Module):
    def forward(self, h):
        return silu(h) if len(h) > 1 else gelu(h)


class SiluInFloat(nn.Module):
    def forward(self, h):
        return gelu(h) if h.dtype == torch.bfloat16 else silu(h)


@pytest.mark.parametrize(
    ("gate", "act_fn", "which"),
    [
        (gelu_in_bfloat16, SiluInFloat(), "in float64 and other values in bfloat16"),
        (gelu_of_few_rows, SiluOfManyRows(), "for many rows and other values for one row"),
    ],
    ids=["dtype", "rows"],
)
def test_a_function_that_depends_on_the_dtype_or_the_number_of_rows_is_refused(gate, act_fn, which):
    """Checked for gated experts, and for ungated ones, which only call act_fn."""
    ungated = make_experts()
    ungated.has_gate, ungated.act_fn = False, act_fn
    for experts, name in ((make_experts(gate), "_apply_gate"), (ungated, "act_fn")):
        with pytest.raises(NotImplementedError, match=f"(?s)whose {name} .* has the values of silu {which}"):
            adapter.check(experts)


def with_dropout(self, gate_up):
    g, u = parts(gate_up)
    return nn.functional.dropout(self.act_fn(g) * u, 0.1, self.training)


def relu_in_evaluation(self, gate_up):
    g, u = parts(gate_up)
    return (silu(g) if self.training else nn.functional.relu(g)) * u


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("gate", "which"),
    [(with_dropout, "draws random numbers .*bernoulli"), (relu_in_evaluation, "differs between training and evalu")],
)
def test_a_gate_that_depends_on_the_mode_is_refused_in_both(gate, which, training):
    experts = make_experts(gate).train(training)
    with pytest.raises(NotImplementedError, match=f"(?s)whose _apply_gate .* {which}"):
        experts(*operands())
    assert experts.training == experts.act_fn.training == training


def test_a_parametrised_weight_is_supported():
    """Adapters compute the weight anew in every forward pass."""
    experts, given = make_experts(), operands()
    expected = gradients(experts, "eager", given)
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    found = gradients(experts, "anabranch", given)
    found["down_proj"] = found.pop("parametrizations.down_proj.original")
    check_same(found, expected)


def test_a_parametrised_weight_compiles_while_its_value_is_cached():
    """PEFT caches the weight so. A guard fails if the weight is evaluated outside the compiled program."""
    experts, given = make_experts(), operands()
    want = experts(*given)
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with nn.utils.parametrize.cached():
        got = compiled(*given)
    torch.testing.assert_close(got, want)


def switched(self, gate_up):
    g, u = parts(gate_up)
    return (gelu(g) if self.mode in (1, True, "gelu") else silu(g)) * u


def switched_in_a_list(self, gate_up):
    g, u = parts(gate_up)
    return (gelu(g) if "gelu" in self.modes else silu(g)) * u


def replace_gate(experts):
    type(experts)._apply_gate = switched


CHANGES = {
    "str": (switched, dict(mode="silu"), lambda experts: setattr(experts, "mode", "gelu")),
    "bool": (switched, dict(mode=False), lambda experts: setattr(experts, "mode", True)),
    "gate of the instance": (
        None,
        dict(mode=1),
        lambda experts: setattr(experts, "_apply_gate", types.MethodType(switched, experts)),
    ),
    "gate of the class": (None, dict(mode=1), replace_gate),
    "act_fn": (None, dict(), lambda experts: setattr(experts, "act_fn", nn.GELU())),
    "act_fn's forward": (None, dict(), lambda experts: setattr(experts.act_fn, "forward", gelu)),
    "has_bias": (None, dict(bias=True), lambda experts: setattr(experts, "has_bias", False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_attribute_is_noticed(name):
    gate, options, change = CHANGES[name]
    experts, given = make_experts(gate, **options), operands()
    before = gradients(experts, "anabranch", given)
    change(experts)
    after, expected = gradients(experts, "anabranch", given), gradients(experts, "eager", given)
    assert [key for key, value in after.items() if value is None] == [k for k, v in expected.items() if v is None]
    used = [key for key, value in expected.items() if value is not None]  # without has_bias, biases have no gradient
    check_same({key: after[key] for key in used}, {key: expected[key] for key in used})
    assert not torch.equal(before["output"], after["output"])


@pytest.mark.parametrize("name", ["str", "gate of the class", "act_fn", "has_bias"])
@torch.no_grad()
def test_a_program_is_guarded_by_the_attributes(name):
    """After a change, the compiled program does not run; `check` has to evaluate the module first."""
    gate, options, change = CHANGES[name]
    experts, given = make_experts(gate, **options), operands()
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), experts(*given))
    change(experts)
    with pytest.raises(Exception, match="NotImplementedError"):
        compiled(*given)
    adapter.check(experts)
    torch.testing.assert_close(compiled(*given), experts(*given))


def test_check_evaluates_again():
    """The contents of a list are not watched."""
    experts, given = make_experts(switched_in_a_list, modes=["silu"]), operands()
    experts(*given)
    experts.modes.append("gelu")
    adapter.check(experts)
    check_same(gradients(experts, "anabranch", given), gradients(experts, "eager", given))


@torch.no_grad()
def test_other_attributes_cause_no_evaluation_and_no_compilation(monkeypatch):
    experts, given = make_experts(), operands()
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    compiled(*given)
    experts.eval()
    experts._is_hf_initialized, experts.config.use_cache = True, False
    monkeypatch.setattr(experts_module, "_describe", None)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*given)
    experts(*given)

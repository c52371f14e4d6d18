"""What else a gate depends on, beside its argument, is refused or noticed; nothing is computed with what was true once."""

import types

import pytest
import torch
import transformers
from stored_experts import check_same, gradients, made, operands, parts
from torch import nn
from transformers.activations import ACT2FN

import anabranch.torch.transformers as adapter
from anabranch.torch.transformers import experts_module


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    transformers.logging.set_verbosity_error()
    torch.compiler.reset()  # all classes here share the forward function that the library makes


OUTSIDE = torch.ones(())


def scaled_by(name):
    def _apply_gate(self, gate_up):
        g, u = parts(gate_up)
        return nn.functional.silu(g) * u * getattr(self, name)

    return _apply_gate


def with_item(self, gate_up):
    g, u = parts(gate_up)
    return nn.functional.silu(g) * u * self.scale.item()


def of_a_global(self, gate_up):
    g, u = parts(gate_up)
    return nn.functional.silu(g) * u * OUTSIDE


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_of_its_own_is_refused(used, trainable):
    """Neutral at first: no value tells it from silu."""
    experts = made(scaled_by("scale") if used else None)
    experts.scale = nn.Parameter(torch.ones(()), requires_grad=trainable)
    message = "got TestExperts of a_test, which has a parameter of its own, scale, expected no other than gate_up_proj"
    with pytest.raises(NotImplementedError, match=message):
        experts(*operands())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("gate", [scaled_by("scale"), with_item, of_a_global], ids=["multiplied", "item", "global"])
def test_a_tensor_that_the_gate_computes_with_is_refused(gate, late):
    """Also one that is registered after the first call."""
    experts = made(None if late else gate)
    if late:
        experts(*operands())
        type(experts)._apply_gate = gate
    experts.register_buffer("scale", torch.ones(()))
    message = r"whose _apply_gate .* computes with a tensor beside its argument, float32\[\].*, expected one"
    with pytest.raises(NotImplementedError, match=message):
        experts(*operands())


def test_a_buffer_that_nothing_uses_is_none_of_our_business():
    experts, given = made(), operands()
    experts.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    check_same(gradients(experts, "anabranch", given), gradients(experts, "eager", given))


def test_a_parametrized_weight_is_taken():
    """As adapters that train a change of the weight make it, at every forward pass anew."""
    experts, given = made(), operands()
    expected = gradients(experts, "eager", given)
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    found = gradients(experts, "anabranch", given)
    found["down_proj"] = found.pop("parametrizations.down_proj.original")
    check_same(found, expected)


def of_a_parameter(self, gate_up):
    g, u = parts(gate_up.to(self.down_proj.dtype))
    return self.act_fn(g) * u


@pytest.mark.parametrize("gate", [None, of_a_parameter], ids=["default", "reads a parameter"])
def test_a_parametrised_weight_compiles_while_its_value_is_cached(gate):
    """As PEFT runs the experts. Nothing may evaluate the weight outside of the program, or its guards fail."""
    experts, given = made(gate), operands()
    want = experts(*given)
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with nn.utils.parametrize.cached():
        got = compiled(*given)
    torch.testing.assert_close(got, want)


def switched(self, gate_up):
    g, u = parts(gate_up)
    return (nn.functional.gelu(g) if self.mode in (1, True, "gelu") else nn.functional.silu(g)) * u


def switched_by_default(self, gate_up):
    g, u = parts(gate_up)
    return (nn.functional.gelu(g) if getattr(self, "mode", None) else nn.functional.silu(g)) * u


def switched_in_a_list(self, gate_up):
    g, u = parts(gate_up)
    return (nn.functional.gelu(g) if "gelu" in self.modes else nn.functional.silu(g)) * u


def switched_by_the_configuration(self, gate_up):
    return self._of(gate_up, self.config.act)


def _of(gate_up, act):
    g, u = parts(gate_up)
    return ACT2FN[act](g) * u


CHANGES = {
    "str": (switched, dict(mode="silu"), lambda experts: setattr(experts, "mode", "gelu")),
    "bool": (switched, dict(mode=False), lambda experts: setattr(experts, "mode", True)),
    "None": (switched, dict(mode=None), lambda experts: setattr(experts, "mode", "gelu")),
    "int": (switched, dict(mode=0), lambda experts: setattr(experts, "mode", 1)),
    "of the class": (switched, dict(), lambda experts: setattr(type(experts), "mode", "gelu")),
    "added": (switched_by_default, dict(), lambda experts: setattr(experts, "mode", "gelu")),
    "in a list": (switched_in_a_list, dict(modes=["silu"]), lambda experts: experts.modes.append("gelu")),
    "in the configuration": (
        switched_by_the_configuration,
        dict(_of=_of),
        lambda experts: setattr(experts.config, "act", "gelu"),
    ),
    "gate of the instance": (
        None,
        dict(),
        lambda experts: setattr(experts, "_apply_gate", types.MethodType(switched, experts)),
    ),
    "gate of the class": (None, dict(), lambda experts: setattr(type(experts), "_apply_gate", switched)),
    "act_fn": (None, dict(), lambda experts: setattr(experts, "act_fn", nn.GELU())),
    "act_fn's attribute": (None, dict(), lambda experts: setattr(experts.act_fn, "forward", nn.functional.gelu)),
    "has_bias": (None, dict(bias=True), lambda experts: setattr(experts, "has_bias", False)),
}


def to_change(name):
    gate, options, change = CHANGES[name]
    experts = made(gate, **options)
    if name == "of the class":
        type(experts).mode = None
    if name.startswith("gate of"):
        experts.mode = "gelu"  # what the gate that comes reads
    return experts, change


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_gate_reads_may_change(name):
    experts, change = to_change(name)
    given = operands()
    before = gradients(experts, "anabranch", given)
    check_same(before, gradients(experts, "eager", given))
    change(experts)
    after, expected = gradients(experts, "anabranch", given), gradients(experts, "eager", given)
    with_one = [name for name, gradient in expected.items() if gradient is not None]  # all but a bias that is left out
    assert [name for name, gradient in after.items() if gradient is not None] == with_one
    check_same({name: after[name] for name in with_one}, {name: expected[name] for name in with_one})
    assert not torch.equal(before["output"], after["output"])


#: An attribute that was not there has no guard; constants have the same one, whatever they are.
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in ("added", "bool", "None", "int")])
@torch.no_grad()
def test_what_a_gate_reads_is_guarded_by_a_program(name):
    """It is not run any more where that changed; what the module computes now has to be found outside."""
    experts, change = to_change(name)
    given = operands()
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), experts(*given))
    change(experts)
    with pytest.raises(Exception, match="NotImplementedError"):
        compiled(*given)
    adapter.check(experts)
    torch.testing.assert_close(compiled(*given), experts(*given))


@torch.no_grad()
def test_what_no_gate_reads_changes_nothing(monkeypatch):
    """Neither is it found anew, nor compiled: flags of training, numbers of layers."""
    experts, given = made(layer=0), operands()
    adapter.check(experts)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    compiled(*given)
    experts.eval()
    experts.layer, experts._is_hf_initialized, experts.config.use_cache = 1, True, False
    monkeypatch.setattr(experts_module, "_describe", None)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*given)
    experts(*given)


def with_dropout(self, gate_up):
    g, u = parts(gate_up)
    return nn.functional.dropout(self.act_fn(g) * u, 0.1, self.training)


@pytest.mark.parametrize("where", ["gate", "act_fn"])
def test_dropout_is_refused_where_it_drops(where):
    experts = made(with_dropout if where == "gate" else None)
    if where == "act_fn":
        experts.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    given = operands()
    experts.eval()
    check_same(gradients(experts, "anabranch", given), gradients(experts, "eager", given))
    experts.config._experts_implementation = "anabranch"
    experts.train()
    with pytest.raises(NotImplementedError, match=r"(?s)whose _apply_gate .* draws random numbers .*bernoulli"):
        experts(*given)
    experts.eval()
    experts(*given)

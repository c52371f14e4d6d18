"""The submodules of MoE can be called, hooked, parametrised, pruned, replaced, copied and loaded."""

import copy
import io
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from anabranch.torch import MoE

pytestmark = pytest.mark.usefixtures("device")

D, F, E, K, S = 12, 20, 6, 2, 8
SUBMODULES = ("gate", "shared_expert", "shared_expert_gate")
OPTIONS = dict(shared_features=S, shared_gate=True, use_gate_bias=True, aux_loss_coeff=0.1, z_loss_coeff=0.1)


def make_layer(**options):
    torch.manual_seed(0)
    layer = MoE(D, F, E, K, **OPTIONS | options).eval()
    with torch.no_grad():
        layer.gate.bias.normal_()
    return layer


def tokens(dtype=torch.float32, width=D):
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(1), device="cpu")
    return x.to(torch.get_default_device(), dtype)


def some_mask():
    return torch.arange(15).reshape(3, 5) % 4 > 0


def cotangent(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(tensor)


def loss_of(result):
    losses = 1.3 * result.aux_loss + 0.7 * result.z_loss
    return (
        sum((t.float() * cotangent(t, i).float()).sum() for i, t in enumerate((result.output, result.weights))) + losses
    )


def run(call, layer, x=None, **given):
    """The result of a call, and all gradients by name; None: no gradient."""
    x = tokens() if x is None else x
    leaf = x.detach().clone().requires_grad_()
    result = call(leaf, **given)
    named = {"x": leaf} | {name: p for name, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss_of(result), list(named.values()), allow_unused=True)
    return result._asdict(), dict(zip(named, found, strict=True))


class Watched:
    """Forward hooks that count the submodules' calls; a hooked gate is called instead of computed inside the layer."""

    def __init__(self, layer, names=SUBMODULES):
        self.calls = []
        self.handles = [getattr(layer, name).register_forward_hook(self.hook(name)) for name in names]

    def hook(self, name):
        def called(module, arguments, output):
            self.calls.append(name)

        return called

    def __enter__(self):
        return self.calls

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---------------------------------------------------------------- a gate that is called, and one that is not


@pytest.mark.parametrize(
    "x_dtype,param_dtype",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_both_ways_give_the_same_bits(x_dtype, param_dtype):
    layer = make_layer(param_dtype=param_dtype, use_bias=True)
    plain = make_layer(param_dtype=param_dtype, score_function="sigmoid", shared_features=0, shared_gate=False)
    x, mask = tokens(x_dtype), some_mask()
    masked = torch.where(mask[..., None], x, math.nan)
    for one, given_x, given in ((layer, x, {}), (layer, masked, dict(token_mask=mask)), (plain, x, {})):
        want = run(one, one, given_x, **given)
        with Watched(one, ["gate"]) as calls:
            got = run(one, one, given_x, **given)
        assert calls == ["gate"]
        assert_same(got, want)


def test_both_paths_have_the_same_bits_for_all_requested_outputs():
    layer, x = make_layer(), tokens()
    chosen = dict(generator=torch.Generator().manual_seed(3), dtype=torch.int32, device="cpu")
    forced = torch.randint(E, (3, 5, K), **chosen).to(x.device)
    want, replayed = run(layer, layer), run(layer, layer, forced_experts=forced)
    with torch.autocast(x.device.type, torch.bfloat16):
        rounded = run(layer, layer)
    with Watched(layer, ["gate"]) as calls:
        assert_same(run(layer, layer, forced_experts=forced), replayed)
        for reentrant in (False, True):

            def again(x, reentrant=reentrant):
                return type(layer(x))(*checkpoint(layer, x, use_reentrant=reentrant))

            leaf = tokens().requires_grad_()
            loss_of(again(leaf)).backward()
            assert_same(leaf.grad, want[1]["x"])
        with torch.autocast(x.device.type, torch.bfloat16):
            assert_same(run(layer, layer), rounded)
        with torch.no_grad():
            assert_same(layer(x)._asdict(), want[0])
        found = torch.func.grad(lambda x: loss_of(layer(x)))(x)
        assert_same(found, want[1]["x"])
        output = layer(x).output  # x without a gradient
        (found,) = torch.autograd.grad(output.sum(), [layer.gate.weight])
        assert found.any()
        layer.requires_grad_(False)
        assert_same(run(layer, layer)[1]["x"], want[1]["x"])
    assert len(calls) > 8


def test_transforms_and_export_of_a_called_gate():
    layer, x = make_layer(), tokens()

    def gradient(x):
        return torch.func.grad(lambda x: torch.sin(layer(x).output).sum())(x)

    want = layer(x).output, torch.func.vmap(gradient)(x)
    with Watched(layer, ["gate"]) as calls:
        assert_same(torch.func.vmap(gradient)(x), want[1])
        assert calls == ["gate"]
        assert_same(torch.export.export(layer, (x,), strict=False).module()(x).output, want[0])
        with pytest.raises(RuntimeError, match="got a derivative of its gradient"):
            torch.func.grad(lambda x: gradient(x).sum())(x)


def test_both_ways_give_the_same_bits_with_fp8():
    layer = MoE(128, 128, 4, 2, precision="fp8").eval()
    for dtype in (torch.float16, torch.bfloat16):
        x = tokens(dtype, 128)
        want = run(layer, layer, x)
        with Watched(layer, ["gate"]) as calls:
            assert_same(run(layer, layer, x), want)
        assert calls == ["gate"]


# ---------------------------------------------------------------- hooks


def scaled(value):
    return tuple(map(scaled, value)) if isinstance(value, tuple) else None if value is None else 1.5 * value


HOOKS = {
    "forward": lambda m, seen: m.register_forward_hook(lambda *a: seen.append(1) or scaled(a[2])),
    "forward with kwargs": lambda m, seen: m.register_forward_hook(
        lambda *a: seen.append(1) or scaled(a[3]), with_kwargs=True
    ),
    "forward_pre": lambda m, seen: m.register_forward_pre_hook(lambda _, a: seen.append(1) or scaled(a)),
    "forward_pre with kwargs": lambda m, seen: m.register_forward_pre_hook(
        lambda _, a, kwargs: seen.append(1) or (scaled(a), kwargs), with_kwargs=True
    ),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda *a: seen.append(1) or scaled(a[1])),
    "backward_pre": lambda m, seen: m.register_full_backward_pre_hook(lambda *a: seen.append(1) or scaled(a[1])),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_fire_and_their_results_are_used(kind):
    for name in SUBMODULES:
        layer = make_layer()
        want = run(layer, layer)
        seen = []
        handle = HOOKS[kind](getattr(layer, name), seen)
        got = run(layer, layer)
        assert seen == [1], name
        differs = got[1]["x"] if "backward" in kind else got[0]["output"]
        assert not torch.equal(differs, want[1]["x"] if "backward" in kind else want[0]["output"]), name
        handle.remove()
        assert_same(run(layer, layer), want)


def test_hooks_of_all_modules_fire():
    layer = make_layer()
    module = nn.modules.module
    for register in (
        module.register_module_forward_hook,
        module.register_module_forward_pre_hook,
        module.register_module_full_backward_hook,
        module.register_module_full_backward_pre_hook,
    ):
        seen = []
        handle = register(lambda m, *_, seen=seen: seen.append(type(m).__name__))
        try:
            run(layer, layer)
        finally:
            handle.remove()
        assert sorted(seen) == ["Gate", "Gate", "MoE", "SharedExpert"], register.__name__


def test_compiled_hooks():
    torch._dynamo.reset()
    layer, seen = make_layer(dtype=torch.bfloat16), []
    for name, kind in itertools.product(SUBMODULES, ("forward", "forward_pre")):
        HOOKS[kind](getattr(layer, name), seen)
    given = dict(token_mask=some_mask())
    want = run(layer, layer, **given)
    assert_same(run(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, **given), want)
    assert seen == [1] * 12


def test_the_logits_can_be_captured():
    layer, x, tapped = make_layer(dtype=torch.bfloat16), tokens(), []
    handle = layer.gate.register_forward_hook(lambda gate, arguments, logits: tapped.append(logits))
    result = layer(x)
    (logits,) = tapped
    want = torch.nn.functional.linear(x.bfloat16().float(), layer.gate.weight, layer.gate.bias)
    assert logits.dtype == torch.float32 and logits.shape == (3, 5, E)
    torch.testing.assert_close(logits, want)
    d_logits = cotangent(logits, 5)  # a loss of the logits adds to their gradient
    (own,) = torch.autograd.grad(loss_of(result), [layer.gate.bias], retain_graph=True)
    (both,) = torch.autograd.grad(loss_of(result) + (logits * d_logits).sum(), [layer.gate.bias])
    torch.testing.assert_close(both, own + d_logits.sum((0, 1)))
    handle.remove()
    layer.gate.forward = lambda x: tapped.append(x) or type(layer.gate).forward(layer.gate, x)
    assert_same(layer(x).output, result.output)
    assert tapped[1].shape == x.shape


# ---------------------------------------------------------------- parameters that are computed


@pytest.mark.parametrize("name,parameter", [("gate", "weight"), ("shared_expert", "down_proj"), ("", "gate_up_proj")])
def test_parametrizations(name, parameter):
    layer, plain = make_layer(), make_layer()
    module = layer.get_submodule(name)
    parametrizations.weight_norm(module, parameter)
    with torch.no_grad():
        for original in module.parametrizations[parameter].parameters():
            original.mul_(1.5)
    plain.get_submodule(name).get_parameter(parameter).data = getattr(module, parameter).detach()
    want_result, want = run(plain, plain)
    result, found = run(layer, layer)
    assert_same(result, want_result)
    path = f"{name}." if name else ""
    originals = [n for n in found if "parametrizations" in n]
    (d_weight,) = [want[n] for n in want if n == path + parameter]
    original_gradients = torch.autograd.grad(
        getattr(module, parameter), [layer.get_parameter(n) for n in originals], d_weight
    )
    assert len(originals) == 2
    assert_same([found[n] for n in originals], list(original_gradients))
    assert_same(copy.deepcopy(layer)(tokens())._asdict(), result)
    if name == "gate":
        torch._dynamo.reset()
        assert_same(run(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer)[1], found)


@pytest.mark.parametrize("name,parameter", [("gate", "weight"), ("shared_expert", "gate_up_proj"), ("", "down_proj")])
def test_pruning_over_steps(name, parameter):
    layer, plain = make_layer(), make_layer()
    module, plain_module = layer.get_submodule(name), plain.get_submodule(name)
    prune.l1_unstructured(module, parameter, amount=0.5)
    mask = getattr(module, f"{parameter}_mask")
    with torch.no_grad():
        plain_module.get_parameter(parameter).mul_(mask)
    for one in (layer, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            loss_of(one(tokens())).backward()
            if one is plain:
                plain_module.get_parameter(parameter).grad.mul_(mask)
            optimizer.step()
            optimizer.zero_grad()
    want = plain(tokens())._asdict()
    assert_same(layer(tokens())._asdict(), want)
    prune.remove(module, parameter)
    assert (getattr(module, parameter) == 0).float().mean() == 0.5
    assert_same(layer(tokens())._asdict(), want)


def check_nothing_is_reset(layer, name):
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with pytest.raises(
        ValueError, match=f"^{name}: got a tensor that a parametrization, pruning or a wrapper computes"
    ):
        layer.reset_parameters()
    assert_same(layer.state_dict(), before)


@pytest.mark.parametrize("name,parameter", [("gate", "weight"), ("shared_expert", "down_proj"), ("", "down_proj_bias")])
def test_computed_parameters_are_not_reset(name, parameter):
    layer = make_layer(use_bias=True)
    module = layer.get_submodule(name)
    parametrizations.weight_norm(module, parameter)
    check_nothing_is_reset(layer, parameter)
    layer = make_layer(use_bias=True)
    module = layer.get_submodule(name)
    prune.random_unstructured(module, parameter, 0.5)
    check_nothing_is_reset(layer, parameter)
    prune.remove(module, parameter)
    layer.reset_parameters()
    assert (getattr(module, parameter) == 0).all() == (parameter == "down_proj_bias")


def test_a_pruned_module_is_copied_like_torchs_own_modules():
    """After a forward pass the pruned tensor has a graph and cannot be copied; state_dict works."""
    for module, x in ((nn.Linear(D, E), tokens()), (make_layer(), tokens())):
        prune.l1_unstructured(module if isinstance(module, nn.Linear) else module.gate, "weight", 0.5)
        module(x)
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy(module)


# ---------------------------------------------------------------- other modules in their place


def test_other_modules_in_their_place():
    layer, x = make_layer(), tokens()
    want = layer(x)
    gate = nn.Linear(D, E)
    gate.load_state_dict(layer.gate.state_dict())
    layer.gate = gate
    torch.testing.assert_close(layer(x).output, want.output)
    layer.gate = gate.bfloat16()
    layer.dtype = torch.bfloat16
    torch.testing.assert_close(layer(x).weights, want.weights, rtol=0.05, atol=0.05)
    assert "Linear" in repr(layer)
    plain = make_layer(shared_gate=False)
    plain.shared_expert = nn.Linear(D, D)
    got, shared_output, plain.shared_expert = plain(x).output, plain.shared_expert(x), None
    assert_same(got, plain(x).output + shared_output)


class Wide(nn.Module):
    """Returns float64."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x, weights=None):
        return x[..., :1].double().expand(*x.shape[:-1], self.width)


@pytest.mark.parametrize(
    "name,other,message",
    [
        ("gate", nn.Linear(D, E + 1), r"gate\(x\): got float32\[3, 5, 7\]"),
        ("gate", nn.LSTM(D, E), r"gate\(x\): got tuple"),
        ("shared_expert_gate", nn.Linear(D, 2), r"shared_expert_gate\(x\): got float32\[3, 5, 2\]"),
        (
            "shared_expert",
            nn.Linear(D, D),
            r"shared_expert: got Linear which, called with \(x=float32\[3, 5, 12\], weights=float32\[3, 5, 1\]\), "
            r"raised TypeError: .*; expected a module that takes x and weights=",
        ),
        ("shared_expert", nn.Identity(), None),
        ("shared_expert", Wide(D), r"shared_expert\(x\): got float64\[3, 5, 12\], expected float32 or"),
        ("gate", Wide(E), r"gate\(x\): got float64\[3, 5, 6\], expected float32 or"),
        ("shared_expert_gate", Wide(1), r"shared_expert_gate\(x\): got float64\[3, 5, 1\]"),
        ("shared_expert_gate", nn.LSTM(D, 1), r"shared_expert_gate\(x\): got tuple"),
        (
            "shared_expert_gate",
            nn.Bilinear(D, D, 1),
            r"shared_expert_gate: got Bilinear which, called with \(x=float32",
        ),
        ("gate", None, r"gate: got NoneType which, called with"),
    ],
)
def test_a_module_that_does_not_fit_is_an_error(name, other, message):
    layer = make_layer()
    setattr(layer, name, other if other is None else other.to(layer.down_proj.device))
    if message is None:
        layer.shared_expert_gate, layer.shared_expert = None, nn.Linear(D, D + 1)
        message = r"shared_expert\(x\): got float32\[3, 5, 13\]"
    with pytest.raises((TypeError, ValueError), match=message):
        layer(tokens())


# ---------------------------------------------------------------- state dicts


def old(state):
    """A state dict as version 0.1.0 has it."""
    return {f"{name}.weight" if "shared_expert." in name else name: value for name, value in state.items()}


def test_old_state_dicts_load():
    for gated, assign in itertools.product((True, False), repeat=2):
        stored, model = make_layer(gated=gated), nn.Sequential(make_layer(gated=gated))
        with torch.no_grad():
            for value in stored.parameters():
                value.normal_()
        state = old({f"0.{name}": value for name, value in stored.state_dict().items()})
        up = "gate_up_proj" if gated else "up_proj"
        assert f"0.shared_expert.{up}.weight" in state
        before = list(state)
        model.load_state_dict(state, assign=assign)
        assert list(state) == before
        assert_same(model[0].state_dict(), stored.state_dict())
        del state[f"0.shared_expert.{up}.weight"]
        with pytest.raises(RuntimeError, match=rf'Missing key.*"0.shared_expert.{up}"'):
            model.load_state_dict(state)


def test_copies_and_pickles_keep_hooks():
    layer = make_layer()
    layer.gate.register_forward_hook(_doubled)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    want = run(layer, layer)
    assert not torch.equal(want[0]["output"], make_layer()(tokens()).output)
    for other in (copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert_same(run(other, other), want)


def _doubled(gate, arguments, logits):
    return 2 * logits

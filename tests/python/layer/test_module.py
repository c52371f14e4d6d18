"""The layer as an nn.Module: moe() on its parameters, a state that is no parameter, and torch's module features."""

import copy
import io
import math
import re

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from anabranch.torch import Activation, MoE, MoEOutput, moe, quantile_bias, shared_expert
from anabranch.torch.layer.counts import add_counts

pytestmark = pytest.mark.usefixtures("device")

D, F, E, K = 12, 20, 6, 2
QUANTILE = dict(score_function="sigmoid", balance="quantile", qb_bins=400)
BIASED = dict(score_function="sigmoid", use_expert_bias=True)


def normal(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def make_layer(**options):
    """A layer with random parameters, biases included."""
    torch.manual_seed(0)
    layer = MoE(D, F, E, K, **options)
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if name.endswith("bias"):
                value.normal_()
        if layer.expert_bias is not None:
            layer.expert_bias.normal_(std=0.1)
    return layer


def loss_of(result):
    return torch.sin(result.output.float()).sum() + result.aux_loss + result.z_loss + torch.cos(result.weights).sum()


def gradients(layer, x, **given):
    """The result of a call, and the gradients of x and of the parameters by name."""
    x = x.detach().clone().requires_grad_()
    result = layer(x, **given)
    named = dict(layer.named_parameters())
    found = torch.autograd.grad(loss_of(result), [x, *named.values()])
    return result, dict(zip(["x", *named], found, strict=True))


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---------------------------------------------------------------- results


def test_vmap_counts_every_slice_once():
    x = normal(3, 5, D)
    layer, again = make_layer(**BIASED), make_layer(**BIASED)
    torch.func.vmap(lambda x: layer(x).output)(x)
    for slice_ in x:
        again(slice_)
    assert_same(dict(layer.named_buffers()), dict(again.named_buffers()))
    assert layer.tokens_per_expert.sum() == 3 * 5 * K


def test_a_parametrised_weight_is_an_expert_parameter():
    layer = make_layer()
    torch.nn.utils.parametrizations.weight_norm(layer, "down_proj")
    assert set(layer.expert_parameters()) == {
        "gate_up_proj", "parametrizations.down_proj.original0", "parametrizations.down_proj.original1",
    }  # fmt: skip


def functional(layer, x, options, **given):
    """moe() and shared_expert() on the parameters of a layer."""
    own = {
        name: value
        for name, value in options.items()
        if not name.startswith(("use_", "shared_", "qb_")) and name not in ("gated", "interleaved", "balance")
    }
    parts = 2 if options.get("gated", True) else 1
    up = layer.gate_up_proj if parts == 2 else layer.up_proj
    up_bias = layer.gate_up_proj_bias if parts == 2 else layer.up_proj_bias
    turns = options.get("interleaved", False)
    w_in = up.view(E, F, 2, D) if turns else up.view(E, parts, F, D)
    b_in = None if up_bias is None else up_bias.view(E, F, 2) if turns else up_bias.view(E, parts, F)
    if options.get("balance") == "quantile":
        own |= dict(qb_bin_bounds=(-1.0, 1.0), qb_bins=options["qb_bins"])
    result = moe(
        x,
        layer.gate.weight.T,
        w_in,
        layer.down_proj,
        topk=K,
        gate_bias=layer.gate.bias,
        b_in=b_in,
        b_out=layer.down_proj_bias,
        expert_bias=layer.expert_bias,
        w_in_layout="fpd" if turns else "pfd",
        w_out_layout="df",
        **own,
        **given,
    )
    if "shared_features" not in options:
        return result
    dense = layer.shared_expert
    up = (dense.gate_up_proj if parts == 2 else dense.up_proj).view(parts, -1, D)
    gate = layer.shared_expert_gate.weight[0] if options.get("shared_gate") else None
    shared = shared_expert(
        x,
        up.permute(2, 0, 1),
        dense.down_proj.T,
        w_gate=gate,
        activation=options.get("activation", "silu"),
        token_mask=given.get("token_mask"),
    )
    return result._replace(output=result.output + shared)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(gated=False, activation="relu2", use_bias=True, weight_early=True, shared_features=8),
        dict(**BIASED, num_groups=3, group_topk=2, group_score_topk=1, scaling_factor=2.0),
        dict(normalize=False, aux_loss_coeff=0.1, z_loss_coeff=0.1, align_size=8, shared_features=16, shared_gate=True),
        dict(interleaved=True, activation="swiglu_oai", use_bias=True, use_gate_bias=True),
        dict(**QUANTILE, shared_features=8, activation=Activation.situ()),
    ],
    ids=str,
)
def test_the_layer_is_moe_on_its_parameters(options):
    layer, x = make_layer(**options), normal(3, 7, D)
    mask = torch.arange(21).reshape(3, 7) % 5 > 0
    got, got_gradients = gradients(layer, x, token_mask=mask)
    leaf = x.clone().requires_grad_()
    want = functional(layer, leaf, options, token_mask=mask)
    named = dict(layer.named_parameters())
    found = torch.autograd.grad(loss_of(want), [leaf, *named.values()])
    want_gradients = dict(zip(["x", *named], found, strict=True))
    # The module stores the shared expert's weights in another layout than the function.
    apart = ("output",) if "shared_features" in options else ()
    for name in set(want._fields) - set(apart):
        assert_same(getattr(got, name), getattr(want, name))
    torch.testing.assert_close(got.output, want.output)
    for name, gradient in want_gradients.items():
        if apart:
            torch.testing.assert_close(got_gradients[name], gradient)
        else:
            assert_same(got_gradients[name], gradient)


def test_a_masked_token_may_hold_nan():
    layer, mask = make_layer(shared_features=8, shared_gate=True, use_gate_bias=True), torch.arange(7) != 2
    nan, zero = normal(7, D), normal(7, D)
    nan[2], zero[2] = math.nan, 0
    assert_same(gradients(layer, nan, token_mask=mask), gradients(layer, zero, token_mask=mask))


def test_any_selection_is_replayed():
    for options in (BIASED, QUANTILE, dict(BIASED, num_groups=3, group_topk=2)):
        layer, x = make_layer(**options), normal(9, D)
        want, want_gradients = gradients(layer.eval(), x)
        got, got_gradients = gradients(layer, x, forced_experts=want.experts)
        assert got.qb_histogram is None
        assert_same(got._replace(qb_histogram=want.qb_histogram), want)
        assert_same(got_gradients, want_gradients)


def test_parameters_start_at_the_fan_in_of_one_expert():
    torch.manual_seed(0)
    layer = MoE(256, 512, 16, 2, shared_features=128, use_bias=True, param_dtype=torch.bfloat16)
    for weight, fan in (
        (layer.gate_up_proj, 256),
        (layer.down_proj, 512),
        (layer.gate.weight, 256),
        (layer.shared_expert.down_proj, 128),
    ):
        assert weight.dtype == torch.bfloat16
        values = weight.detach().float()
        assert abs(values.std() / fan**-0.5 - 1) < 0.05
        assert values.abs().max() <= 2.3 * fan**-0.5
    assert not layer.down_proj_bias.any()
    layer = MoE(D, F, E, K, kernel_init=torch.nn.init.ones_, shared_features=3)
    assert all((value == 1).all() for value in layer.parameters())


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_float32_parameters_are_not_rounded(dtype):
    layer = make_layer(dtype=dtype, use_bias=True, shared_features=8, shared_gate=True)
    result, found = gradients(layer, normal(40, D))
    assert result.output.dtype == dtype
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    for name in ("gate_up_proj", "down_proj", "shared_expert.gate_up_proj", "shared_expert.down_proj"):
        assert (found[name] != found[name].to(dtype).float()).any(), name


def test_autocast_is_the_layer_in_its_dtype(device):
    layer, x = (
        make_layer(use_bias=True, use_gate_bias=True, shared_features=8, shared_gate=True, z_loss_coeff=0.1),
        normal(9, D),
    )
    with torch.autocast(device, torch.bfloat16):
        got = gradients(layer, x)
    layer.dtype = torch.bfloat16
    want = gradients(layer, x)
    assert_same(got, want)
    layer.dtype = torch.float32  # a requested dtype is not rounded
    with torch.autocast(device, torch.bfloat16):
        assert layer(x).output.dtype == torch.float32


def test_parameters_of_another_dtype_than_the_tokens(device):
    layer, x = make_layer(use_bias=True, shared_features=8), normal(9, D)
    layer.to(torch.bfloat16)
    got = layer(x)
    want = copy.deepcopy(layer).float()(x)
    assert got.output.dtype == torch.float32
    if device == "cpu":
        assert_same(got, want)
    else:  # The logits have the 16 bits of x; weights are then bfloat16 in both layers.
        torch.testing.assert_close(got.output, want.output, rtol=2.0**-12, atol=2.0**-12)


# ---------------------------------------------------------------- the router's state


def test_the_expert_bias_is_state_and_no_parameter():
    layer = make_layer(**BIASED)
    assert "expert_bias" in layer.state_dict() and "expert_bias" not in dict(layer.named_parameters())
    assert not [name for name in layer.state_dict() if "tokens" in name]
    assert "expert_bias" not in make_layer().state_dict()
    value = layer.expert_bias.clone()
    for moved in (layer.to(torch.bfloat16), layer.half(), layer.double()):
        assert_same(moved.expert_bias, value)


def test_the_expert_bias_moves_by_what_was_counted_in_training():
    layer, x = make_layer(**BIASED), [normal(30, D, seed=seed) for seed in (1, 2)]
    layer.eval()(x[0])
    assert not layer.tokens_per_expert.any()
    layer.train()
    layer(x[0], forced_experts=torch.zeros(30, K, dtype=torch.int32))
    assert not layer.tokens_per_expert.any()
    counts = sum(layer(part).tokens_per_expert for part in x)
    assert_same(layer.tokens_per_expert, counts.long())
    before = layer.expert_bias.clone()
    layer.update_expert_bias(0.5)
    assert_same(layer.expert_bias, before + 0.5 * torch.sign(counts.float().mean() - counts))
    assert not layer.tokens_per_expert.any()
    layer(x[0])
    layer.update_expert_bias(torch.tensor(0.25))
    assert layer.expert_bias.requires_grad is False
    with torch.no_grad():
        layer.tokens_per_expert.copy_(torch.tensor([2**40, 2**40 + 1, 2**40, 2**40, 2**40, 2**40 - 1]))
        layer.expert_bias.zero_()
    layer.update_expert_bias(1.0)  # float32 would lose small differences
    assert layer.expert_bias.tolist() == [0, -1, 0, 0, 0, 1]


def test_updates_balance_the_load():
    layer, x = make_layer(**BIASED), normal(64, D)
    layer.expert_bias.copy_(torch.tensor([1.0, 0, 0, 0, 0, 0]))

    def spread():
        return float(layer(x).tokens_per_expert.float().std())

    before = spread()
    for _ in range(100):
        layer(x)
        layer.update_expert_bias(0.02)
    assert spread() < before / 2


def test_quantile_balancing_sets_the_bias():
    layer, x = make_layer(**QUANTILE), [normal(40, D, seed=seed) for seed in (1, 2)]
    before = layer.expert_bias.clone()
    layer.update_quantile_bias()
    assert_same(layer.expert_bias, before)  # nothing was counted
    histogram = sum(layer(part).qb_histogram for part in x)
    layer.update_quantile_bias()
    assert_same(layer.expert_bias, quantile_bias(histogram.int(), -1.0, 1.0, K))
    assert not layer.qb_histogram.any()


def test_updates_refuse_wrong_arguments():
    with pytest.raises(ValueError, match="update_expert_bias: got a layer without"):
        make_layer(**QUANTILE).update_expert_bias()
    with pytest.raises(ValueError, match="update_quantile_bias: got a layer without quantile balancing"):
        make_layer(**BIASED).update_quantile_bias()
    layer = make_layer(**BIASED)
    before = layer.expert_bias.clone()
    wrong = (torch.tensor(1), torch.ones(2), torch.ones((), device="meta"))
    wrong += tuple(torch.tensor(value, dtype=torch.bfloat16, device="cpu") for value in (math.nan, math.inf, -1.0))
    for rate in (math.nan, math.inf, -1.0, True, None, 10**400, *wrong):
        with pytest.raises((ValueError, TypeError), match="rate: got"):
            layer.update_expert_bias(rate)
    for group in (0, "world"):
        with pytest.raises(TypeError, match=re.escape("group: got ")):
            layer.update_expert_bias(group=group)
        with pytest.raises(TypeError, match=re.escape("group: got ")):
            make_layer(**QUANTILE).update_quantile_bias(group)
    assert_same(layer.expert_bias, before)


def test_counting_passes_opcheck():
    torch.library.opcheck(add_counts, (torch.arange(4), torch.arange(4, dtype=torch.int32)))


# ---------------------------------------------------------------- transforms

BOTH_COUNTS = dict(QUANTILE, use_expert_bias=True, aux_loss_coeff=0.1, shared_features=8, shared_gate=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_count_tokens_once(reentrant):
    x, layer = normal(9, D), make_layer(**BOTH_COUNTS)
    want, want_gradients = gradients(layer, x)
    again = make_layer(**BOTH_COUNTS)
    leaf = x.clone().requires_grad_()
    result = MoEOutput(*checkpoint(again, leaf, use_reentrant=reentrant))  # the reentrant kind returns a plain tuple
    loss_of(result).backward()
    assert_same(again.tokens_per_expert, want.tokens_per_expert.long())
    assert_same(again.qb_histogram, want.qb_histogram.long())
    for name, parameter in again.named_parameters():
        assert_same(parameter.grad, want_gradients[name])


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_compiled_checkpoints_count_tokens_once(where):
    torch._dynamo.reset()
    x, layer = normal(9, D).requires_grad_(), make_layer(**BOTH_COUNTS)

    def saved(x, layer=layer):
        return checkpoint(layer, x, use_reentrant=False)

    def called(x):
        return checkpoint(torch.compile(layer, fullgraph=True, backend="aot_eager"), x, use_reentrant=False)

    run = called if where == "outside" else torch.compile(saved, fullgraph=True, backend="aot_eager")
    result = run(x)
    loss_of(result).backward()
    assert_same(layer.tokens_per_expert, result.tokens_per_expert.long())


def test_compiled_in_training():
    torch._dynamo.reset()
    x, layer = normal(9, D), make_layer(**BOTH_COUNTS)
    want, want_gradients = gradients(layer, x)
    again = make_layer(**BOTH_COUNTS)
    compiled = torch.compile(again, fullgraph=True)
    got, got_gradients = gradients(compiled, x)
    assert_same(again.tokens_per_expert, layer.tokens_per_expert)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        {name.removeprefix("_orig_mod."): gradient for name, gradient in got_gradients.items()}, want_gradients
    )
    for one in (layer, again):
        one.update_quantile_bias()
    torch.testing.assert_close(compiled(x), layer(x))  # with the current bias
    assert_same(again.tokens_per_expert, layer.tokens_per_expert)


def test_compiled_for_any_number_of_tokens():
    torch._dynamo.reset()
    layer, again = make_layer(**BOTH_COUNTS), make_layer(**BOTH_COUNTS)
    compiled = torch.compile(again, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (9, 5, 16):
        want, want_gradients = gradients(layer, normal(tokens, D))
        got, got_gradients = gradients(compiled, normal(tokens, D))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            {name.removeprefix("_orig_mod."): gradient for name, gradient in got_gradients.items()}, want_gradients
        )
    assert_same(again.tokens_per_expert, layer.tokens_per_expert)


def test_functional_call_of_torch_func():
    layer, x = make_layer(aux_loss_coeff=0.1), normal(9, D)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    got = torch.func.grad(lambda p: loss_of(torch.func.functional_call(layer, p, (x,))))(parameters)
    _, want = gradients(layer, x)
    assert_same(got, {name: gradient for name, gradient in want.items() if name != "x"})


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.9 exports few dynamic shapes non-strictly")
def test_exported_for_any_number_of_tokens():
    """A program exported in training mode updates the counts as the layer does."""
    layer, again = make_layer(**BIASED), make_layer(**BIASED)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(again, (normal(9, D),), dynamic_shapes={"x": {0: tokens}}, strict=False).module()
    for T in (9, 5):
        assert_same(program(normal(T, D)), layer(normal(T, D)))
    assert_same(again.tokens_per_expert, layer.tokens_per_expert)


# ---------------------------------------------------------------- as a module


def whole(**options):
    return dict(QUANTILE, use_bias=True, use_gate_bias=True, shared_features=8, shared_gate=True) | options


def test_the_state_dict_contains_the_whole_state():
    layer, other, x = make_layer(**whole()), MoE(D, F, E, K, **whole()), normal(9, D)
    assert set(layer.state_dict()) == {
        *("gate.weight", "gate.bias", "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
        *("shared_expert.gate_up_proj", "shared_expert.down_proj", "shared_expert_gate.weight"),
        "expert_bias",
    }
    assert set(make_layer(gated=False, use_bias=True).state_dict()) == {
        *("gate.weight", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
    }
    other.load_state_dict(layer.state_dict())
    assert_same(other(x), layer(x))


def test_copies_count_for_themselves():
    layer, x = make_layer(**whole(use_expert_bias=True)), normal(9, D)
    want = layer(x)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for other in (copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert_same(other(x), want)
        assert_same(other.tokens_per_expert, 2 * want.tokens_per_expert.long())
    assert_same(layer.tokens_per_expert, want.tokens_per_expert.long())


def test_created_on_meta_and_filled_afterwards(device):
    options = whole(use_expert_bias=True)
    layer = MoE(D, F, E, K, **options, device="meta")
    assert all(value.is_meta for value in (*layer.parameters(), *layer.buffers(), layer.tokens_per_expert))
    assert layer(normal(9, D).to("meta")).output.shape == (9, D)
    layer.to_empty(device=device)
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    want = MoE(D, F, E, K, **options)
    assert_same(layer.state_dict(), want.state_dict())
    assert_same(layer.tokens_per_expert, torch.zeros(E, dtype=torch.int64))
    assert_same(layer(normal(9, D)), want(normal(9, D)))


def test_repr_shows_options_that_are_not_the_default():
    text = repr(make_layer(**BIASED, interleaved=True, activation="swiglu_oai"))
    assert text.startswith("MoE(\n  12, 20, num_experts=6, topk=2, ")
    for part in ("score_function='sigmoid'", "use_expert_bias=True", "interleaved=True", "activation='swiglu_oai'"):
        assert part in text
    assert "layout" not in text and "gated" not in text


@pytest.mark.parametrize(
    "options,match",
    [
        (dict(topk=7), "topk: got 7"),
        (dict(in_features=0), "in_features: got 0"),
        (dict(activation="tanh"), "activation: got 'tanh'"),
        (dict(gated=1), "gated: got"),
        (dict(interleaved=None), "interleaved: got"),
        (dict(interleaved=True, gated=False), "interleaved: got True for experts that are not gated"),
        (dict(shared_features=-1), "shared_features: got -1"),
        (dict(score_function="nope"), "score_function: got 'nope'"),
        (dict(normalize=1), "normalize: got int 1"),
        (dict(scaling_factor=float("nan")), "scaling_factor: got nan"),
        (dict(num_groups=4), "num_groups: got 4"),
        (dict(align_size=-1), "align_size: got -1"),
        (dict(aux_loss_coeff=1e300), r"aux_loss_coeff: got 1e\+300"),
        (dict(z_loss_coeff=1e-320), "z_loss_coeff: got 1e-320"),
        (dict(loss_group="x", z_loss_coeff=1.0), "loss_group: got str 'x'"),
        (dict(use_bias="yes"), "use_bias: got str 'yes'"),
        (dict(use_expert_bias=1), "use_expert_bias: got int 1"),
        (dict(use_gate_bias=None), "use_gate_bias: got NoneType None"),
        (dict(dtype=torch.float64), "dtype: got float64, expected float32 or bfloat16 or float16"),
        (dict(dtype="nope"), "dtype: got 'nope'"),
        (dict(param_dtype=torch.int32), "param_dtype: got int32"),
        (dict(shared_gate=True), "shared_gate: got True without a shared expert"),
        (dict(balance="loss"), "balance: got 'loss', expected one of 'quantile'"),
        (dict(balance="quantile", qb_bin_bounds=(1.0, 1.0)), "qb_bin_bounds: got 1.0, 1.0"),
        (dict(balance="quantile", qb_bin_bounds=3), "qb_bin_bounds: got int 3"),
        (dict(balance="quantile", qb_bins=0), "qb_bins: got 0"),
        (dict(kernel_init=3), "kernel_init: got int 3"),
        (dict(kernel_init=torch.zeros_like), "kernel_init: got another tensor"),
    ],
)
def test_bad_options_are_named(options, match):
    sizes = dict(in_features=D, hidden_features=F, num_experts=E, topk=K)
    with pytest.raises((ValueError, TypeError), match=match):
        MoE(**sizes | options)


def test_bad_arguments_are_named():
    layer = make_layer()
    with pytest.raises(ValueError, match=re.escape("x: got float32[3, 11], expected float32 or bfloat16 or float16 [")):
        layer(normal(3, 11))
    with pytest.raises(TypeError, match="x: got int 3"):
        layer(3)
    with pytest.raises(ValueError, match="token_mask: got"):
        layer(normal(3, D), token_mask=torch.ones(4, dtype=torch.bool))

"""The oracle's grouped GEMM, activations, experts and whole layer against loops over rows and tokens."""

import functools
import itertools
import math

import numpy as np
import pytest

from anabranch.activation import PLAIN, Activation
from anabranch.reference.balance import load_balance_loss, z_loss
from anabranch.reference.dispatch import plan
from anabranch.reference.experts import (
    activation,
    activation_gradient,
    expert_ffn,
    expert_ffn_backward,
    gated_activation,
    gated_activation_gradients,
    grouped_matmul,
    grouped_matmul_backward,
)
from anabranch.reference.moe import moe, moe_backward, routed_experts, shared_expert
from anabranch.reference.router import route

T, E, D, F = 6, 4, 3, 5
SIZES, R = np.array([2, 0, 3, 1]), 8  # an expert without rows; two rows past the groups
MASK = np.array([True, True, False, True, True, False])
#: Selections with repeats, -1, indices out of range on either side, and a token without experts.
GIVEN = np.array([[0, 0, 1], [-1, 2, 1], [-1, -1, -1], [9, 0, 1], [1, 3, 0], [0, 2, -4]])
TWO_INPUTS = [
    Activation.swiglu_clamped(limit=0.9),
    Activation.swiglu_oai(alpha=1.702, limit=0.8),
    Activation.swiglu_then_clamp(limit=0.7),
    Activation.situ(a=0.6, b=1.3),
]
close = functools.partial(np.testing.assert_allclose, atol=1e-12)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def matrices(gated, biased):
    parts = 2 if gated else 1
    arrays = {"w_in": normal(E, D, parts, F), "w_out": normal(E, F, D)}
    return arrays | ({"b_in": normal(E, parts, F), "b_out": normal(E, D)} if biased else {})


def one_row(x, e, act, gated, w_in, w_out, b_in=None, b_out=None):
    h = np.einsum("d,dpf->pf", x, w_in[e]) + (0 if b_in is None else b_in[e])
    a = gated_activation(h[0], h[1], act) if gated else activation(h[0], act)
    return a @ w_out[e] + (0 if b_out is None else b_out[e])


# ---------------------------------------------------------------- grouped GEMM


def test_grouped_matmul_agrees_with_loops_and_ignores_rows_past_the_sizes():
    x, w, g = normal(R, D), normal(E, D, F), normal(R, F)
    x[6:], g[6:] = np.nan, np.nan
    y, (d_x, d_w) = grouped_matmul(x, w, SIZES), grouped_matmul_backward(g, x, w, SIZES)
    want_d_w = np.zeros_like(w)
    for r in range(6):
        e = np.searchsorted(np.cumsum(SIZES), r, side="right")
        close(y[r], x[r] @ w[e])
        close(d_x[r], w[e] @ g[r])
        want_d_w[e] += np.outer(x[r], g[r])
    close(d_w, want_d_w)
    assert not d_w[1].any() and not y[6:].any() and not d_x[6:].any()


def test_sizes_past_the_rows_are_clipped_and_no_rows_are_no_error():
    x, w = np.ones((3, 1)), np.array([[[2.0]], [[5.0]]])
    np.testing.assert_array_equal(grouped_matmul(x, w, np.array([2, 9])), [[2], [2], [5]])
    nothing = np.zeros(2, int)
    d_x, d_w = grouped_matmul_backward(np.ones((0, 1)), np.ones((0, 1)), w, nothing)
    assert d_x.shape == grouped_matmul(np.ones((0, 1)), w, nothing).shape == (0, 1) and not d_w.any()


# ---------------------------------------------------------------- activations


def test_activations_are_the_formulas():
    for h in (-30.0, -2.0, -0.1, 0.3, 4.0, 30.0):
        tanh = math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))
        want = {
            "silu": h / (1 + math.exp(-h)),
            "gelu": 0.5 * h * (1 + tanh),
            "relu": max(h, 0),
            "relu2": max(h, 0) ** 2,
            "gelu_erf": h / 2 * math.erfc(-h / math.sqrt(2)),
            "quick_gelu": h / (1 + math.exp(-1.702 * h)),
            "linear": h,
        }
        assert want.keys() == set(PLAIN)
        for name, value in want.items():
            assert math.isclose(activation(np.array([h]), name)[0], value, rel_tol=1e-12), name


def test_activations_of_two_inputs_are_the_formulas():
    def silu(x, alpha=1.0):
        return x / (1 + math.exp(-alpha * x))

    for g, u in itertools.product([-30.0, -1.5, -0.2, 0.3, 1.0, 1.5, 30.0], [-30.0, -1.0, 0.0, 0.4, 1.0, 30.0]):
        clamped = min(max(u, -1), 1)
        for act, want in [
            ("silu", silu(g) * u),
            (Activation.swiglu_clamped(1), silu(min(g, 1)) * clamped),
            (Activation.swiglu_oai(1.7, 1), silu(min(g, 1), 1.7) * (clamped + 1)),
            (Activation.swiglu_then_clamp(1), min(silu(g), 1) * clamped),
            (Activation.situ(4, 25), 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)),
        ]:
            value = gated_activation(np.array([g]), np.array([u]), act)[0]
            assert math.isclose(value, want, rel_tol=1e-13, abs_tol=1e-300), act


def test_a_gradient_passes_at_a_limit_and_not_past_it():
    at, past = np.array([2.0]), np.nextafter(np.array([2.0]), 3)
    for act in (Activation.swiglu_clamped(2), Activation.swiglu_oai(limit=2)):
        assert all(gradient[0] > 0.5 for gradient in gated_activation_gradients(at, at, act))
        for g, u, which in ((past, at, 0), (at, past, 1), (at, -past, 1)):
            assert gated_activation_gradients(g, u, act)[which][0] == 0
    act = Activation.swiglu_then_clamp(activation(at, "silu")[0])
    assert gated_activation_gradients(at, at / 8, act)[0][0] > 0.1
    assert gated_activation_gradients(past, at / 8, act)[0][0] == 0


def test_activations_at_zero_and_nan_and_of_another_name():
    for name in ("relu", "relu2"):
        assert not activation_gradient(np.array([0.0, -0.0]), name).any()
    for function in (activation, activation_gradient):
        assert all(np.isnan(function(np.array([np.nan]), name)[0]) for name in PLAIN if name != "linear")
        with pytest.raises(ValueError, match="activation: got 'tanh'"):
            function(np.zeros(1), "tanh")


# ---------------------------------------------------------------- experts

NETWORKS = [*((name, gated) for name in PLAIN for gated in (True, False)), *((act, True) for act in TWO_INPUTS)]


@pytest.mark.parametrize("act, gated", NETWORKS, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("biased", [True, False])
def test_experts_agree_with_a_loop_over_rows(act, gated, biased):
    rows, given, weights = normal(R, D), matrices(gated, biased), normal(R)
    for row_weights, early in itertools.product((None, weights), (False, True)):
        options = {"group_sizes": SIZES, "activation": act, "weight_early": early, "row_weights": row_weights}
        y = expert_ffn(rows, **given, **options)
        for r in range(6):
            e = np.searchsorted(np.cumsum(SIZES), r, side="right")
            close(y[r], one_row(rows[r], e, act, gated, **given) * (1 if row_weights is None else weights[r]))
        assert not y[6:].any()


@pytest.mark.parametrize("early", [False, True])
def test_padding_rows_are_zero_and_their_cotangents_ignored(early):
    p = plan(np.array([[0], [2], [2]]), E, 2)
    padding, n = p.slot_of_row < 0, p.slot_of_row.size
    arrays = {"rows": normal(n, D), "row_weights": normal(n), "d_y": normal(n, D)}
    options = matrices(True, True) | {"group_sizes": p.group_sizes, "activation": "gelu", "slot_of_row": p.slot_of_row}

    def padded_with(value):
        given = {name: np.where(padding.reshape(-1, *[1] * (a.ndim - 1)), value, a) for name, a in arrays.items()}
        d_y = given.pop("d_y")
        return expert_ffn(**given, **options, weight_early=early), *expert_ffn_backward(d_y, **given, **options)

    y, *gradients = padded_with(np.nan)
    assert np.isfinite(y).all() and (y[~padding] != 0).all() and not y[padding].any()
    for got, want in zip(gradients, padded_with(0.0)[1:], strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.shape[0] != n or not got[padding].any()


# ---------------------------------------------------------------- the layer

LOSSES = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
ROUTINGS = [
    {"topk": 2},
    {"topk": 2, "normalize": False},
    {"topk": 4, "score_function": "sqrtsoftplus", "scaling_factor": 2.5},
    {"topk": 2, "score_function": "sigmoid", "expert_bias": normal(E), "num_groups": 2, "group_topk": 1},
    {"topk": 2, "token_mask": MASK},
    {"topk": 3, "score_function": "sigmoid", "forced_experts": GIVEN},
]


def of_tokens(x, experts, weights, holds, act, gated, given):
    """The layer after the router, a token at a time."""
    out = np.zeros((T, D))
    for t, k in zip(*np.nonzero(holds), strict=True):
        out[t] += weights[t, k] * one_row(x[t], experts[t, k], act, gated, **given)
    return out


@pytest.mark.parametrize("options", ROUTINGS)
@pytest.mark.parametrize("act, gated, biased", [("silu", True, True), ("gelu", False, False)])
def test_layer_agrees_with_a_loop_over_tokens(options, act, gated, biased):
    x, gate, given = normal(T, D), normal(D, E), matrices(gated, biased)
    r = route(x @ gate, **options)
    want = of_tokens(x, r.experts, r.weights, r.experts >= 0, act, gated, given)
    n = options.get("token_mask", np.ones(T)).sum()
    for early, align_size in itertools.product((False, True), (0, 4)):
        how = {"activation": act, "weight_early": early, "align_size": align_size}
        got = moe(x, gate, **given, **options, **LOSSES, **how)
        close(got.output, want)
        np.testing.assert_array_equal(got.tokens_per_expert, r.tokens_per_expert)
        close(got.aux_loss, load_balance_loss(r.score_sum, r.tokens_per_expert, options["topk"], 0.3, n))
        close(got.z_loss, z_loss(r.lse, 0.2, n))
        assert got.dropped == 0


@pytest.mark.parametrize("bounded", [False, True])
def test_layer_after_the_router_agrees_with_a_loop_over_tokens(bounded):
    x, weights, given = normal(T, D), normal(*GIVEN.shape), matrices(True, True)
    kept = normal(T, 3, seed=1) < 0.8 if bounded else None
    out = routed_experts(x, GIVEN, weights, **given, kept=kept)
    valid = (GIVEN >= 0) & (GIVEN < E)
    holds = valid & kept if bounded else valid
    close(out.output, of_tokens(x, GIVEN, weights, holds, "silu", True, given))
    np.testing.assert_array_equal(out.tokens_per_expert, np.bincount(GIVEN[valid], minlength=E))
    assert out.dropped == ((GIVEN >= E) | (GIVEN < -1) | (valid & ~holds)).sum()


@pytest.mark.parametrize("gate_shape", [None, (D,), (D, 1)])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_shared_expert_is_the_formula(parts, gate_shape):
    x, w_in, w_out = normal(T, D), normal(D, parts, F), normal(F, D)
    w_gate = normal(*gate_shape) if gate_shape else None
    h = np.einsum("td,dpf->ptf", x, w_in)
    want = (activation(h[0], "silu") * (h[1] if parts == 2 else 1)) @ w_out
    if gate_shape:
        want = want / (1 + np.exp(-x @ w_gate.reshape(D, 1)))
    close(shared_expert(x, w_in, w_out, w_gate=w_gate), want)


def test_masked_tokens_do_not_contribute():
    x, operands, biases = normal(T, D), (normal(D, E),), matrices(True, True)
    operands += biases.pop("w_in"), biases.pop("w_out")
    d_output, options = normal(T, D, seed=1), biases | {"topk": 2} | LOSSES
    want = moe(x[MASK], *operands, **options)
    want_gradients = moe_backward(x[MASK], *operands, d_output[MASK], 0.7, -0.3, **options)
    x[~MASK], d_output[~MASK] = np.nan, np.nan
    out = moe(x, *operands, token_mask=MASK, **options)
    assert not out.output[~MASK].any()
    close(out.output[MASK], want.output)
    close((out.aux_loss, out.z_loss), (want.aux_loss, want.z_loss))
    gradients = moe_backward(x, *operands, d_output, 0.7, -0.3, token_mask=MASK, **options)
    assert not gradients["x"][~MASK].any()
    for key in gradients.keys() - {"gate_bias"}:
        close(gradients[key][MASK] if key in ("x", "weights") else gradients[key], want_gradients[key])


def test_leading_dimensions_no_tokens_and_experts_without_tokens():
    x, operands, biases = normal(T, D), (normal(D, E),), matrices(True, True)
    operands += biases.pop("w_in"), biases.pop("w_out")
    d_output, folded = normal(T, D, seed=1), (2, 3, D)
    got = moe(x.reshape(folded), *operands, topk=2, **biases).output
    np.testing.assert_array_equal(got, moe(x, *operands, topk=2, **biases).output.reshape(folded))
    options = biases | {"topk": 2}
    masked = options | {"token_mask": MASK.reshape(2, 3)}
    got = moe_backward(x.reshape(folded), *operands, d_output.reshape(folded), **masked)
    want = moe_backward(x, *operands, d_output, **options, token_mask=MASK)
    np.testing.assert_array_equal(got["x"], want["x"].reshape(folded))

    nothing = np.zeros((0, D))
    out = moe(nothing, *operands, **options, **LOSSES, align_size=4)
    assert out.output.shape == (0, D) and out.aux_loss == out.z_loss == 0
    gradients = moe_backward(nothing, *operands, nothing, 1.0, 1.0, **options, **LOSSES)
    assert all(not gradient.any() for key, gradient in gradients.items() if key != "gate_bias")

    gradients = moe_backward(x, *operands, d_output, topk=1, forced_experts=np.zeros((T, 1), int), **biases)
    for key in ("w_in", "w_out", "b_in", "b_out"):
        assert (gradients[key][0] != 0).all() and not gradients[key][1:].any(), key
    with pytest.raises(TypeError, match="temperature"):
        moe(x, *operands, topk=1, temperature=2.0)

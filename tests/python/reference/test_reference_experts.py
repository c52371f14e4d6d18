"""Grouped matmul, activations and the feed-forward network: section 6 against loops and differences."""

import functools
import math

import numpy as np
import pytest
from differences import check_gradient

from anabranch.activation import PLAIN, Activation
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

E, D, F = 4, 3, 5
SIZES = np.array([2, 0, 3, 1])  # an expert without rows
R = 8  # two rows past the groups
TWO_INPUTS = [
    Activation.swiglu_clamped(limit=0.9),
    Activation.swiglu_oai(alpha=1.702, limit=0.8),
    Activation.swiglu_then_clamp(limit=0.7),
    Activation.situ(a=0.6, b=1.3),
]


def expert_of_row(row):
    return int(np.searchsorted(np.cumsum(SIZES), row, side="right"))


# ---------------------------------------------------------------- grouped matmul


def test_grouped_matmul_agrees_with_loops_and_ignores_rows_past_the_sizes():
    rng = np.random.default_rng(0)
    x, w, g = rng.normal(size=(R, D)), rng.normal(size=(E, D, F)), rng.normal(size=(R, F))
    x[6:], g[6:] = np.nan, np.nan
    y = grouped_matmul(x, w, SIZES)
    d_x, d_w = grouped_matmul_backward(g, x, w, SIZES)
    want_d_w = np.zeros_like(w)
    for r in range(6):
        e = expert_of_row(r)
        np.testing.assert_allclose(y[r], x[r] @ w[e])
        np.testing.assert_allclose(d_x[r], w[e] @ g[r])
        want_d_w[e] += np.outer(x[r], g[r])
    np.testing.assert_allclose(d_w, want_d_w)
    np.testing.assert_array_equal(d_w[1], 0)
    np.testing.assert_array_equal(y[6:], 0)
    np.testing.assert_array_equal(d_x[6:], 0)


def test_sizes_past_the_rows_are_clipped():
    x, w = np.ones((3, 1)), np.array([[[2.0]], [[5.0]]])
    np.testing.assert_array_equal(grouped_matmul(x, w, np.array([2, 9])), [[2], [2], [5]])


def test_grouped_matmul_gradients():
    rng = np.random.default_rng(1)
    x, w, g = rng.normal(size=(R, D)), rng.normal(size=(E, D, F)), rng.normal(size=(R, F))
    d_x, d_w = grouped_matmul_backward(g, x, w, SIZES)
    check_gradient(lambda v: (g * grouped_matmul(v, w, SIZES)).sum(), x, d_x, "d_x")
    check_gradient(lambda v: (g * grouped_matmul(x, v, SIZES)).sum(), w, d_w, "d_w")


def test_nothing_to_do():
    w = np.ones((E, D, F))
    d_x, d_w = grouped_matmul_backward(np.ones((0, F)), np.ones((0, D)), w, np.zeros(E, int))
    assert d_x.shape == (0, D) and grouped_matmul(np.ones((0, D)), w, np.zeros(E, int)).shape == (0, F)
    np.testing.assert_array_equal(d_w, np.zeros_like(w))


# ---------------------------------------------------------------- activations


@pytest.mark.parametrize("h", [-30.0, -2.0, -0.1, 0.3, 4.0, 30.0])
def test_activation_values(h):
    at = np.array([h])
    assert math.isclose(activation(at, "silu")[0], h / (1 + math.exp(-h)), rel_tol=1e-13)
    tanh = math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))
    assert math.isclose(activation(at, "gelu")[0], 0.5 * h * (1 + tanh), rel_tol=1e-12)
    assert activation(at, "relu")[0] == max(h, 0)
    assert activation(at, "relu2")[0] == max(h, 0) ** 2
    assert math.isclose(activation(at, "gelu_erf")[0], h / 2 * math.erfc(-h / math.sqrt(2)), rel_tol=1e-13)
    assert math.isclose(activation(at, "quick_gelu")[0], h / (1 + math.exp(-1.702 * h)), rel_tol=1e-13)
    assert activation(at, "linear")[0] == h


@pytest.mark.parametrize("g", [-30.0, -1.5, -0.2, 0.3, 1.0, 1.5, 30.0])
@pytest.mark.parametrize("u", [-30.0, -1.0, 0.0, 0.4, 1.0, 30.0])
def test_values_of_two_inputs(g, u):
    def silu(x, alpha=1.0):
        return x / (1 + math.exp(-alpha * x))

    def value(act):
        return gated_activation(np.array([g]), np.array([u]), act)[0]

    clamped = min(max(u, -1), 1)
    close = functools.partial(math.isclose, rel_tol=1e-13, abs_tol=1e-300)
    assert close(value("silu"), silu(g) * u)
    assert close(value(Activation.swiglu_clamped(1)), silu(min(g, 1)) * clamped)
    assert close(value(Activation.swiglu_oai(1.7, 1)), silu(min(g, 1), 1.7) * (clamped + 1))
    assert close(value(Activation.swiglu_then_clamp(1)), min(silu(g), 1) * clamped)
    assert close(value(Activation.situ(4, 25)), 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25))


@pytest.mark.parametrize("act", [*map(Activation.glu, PLAIN), *TWO_INPUTS], ids=lambda a: a.name)
def test_gradients_of_two_inputs(act):
    rng = np.random.default_rng(7)
    g, u, weights = rng.normal(size=(3, 60)) * np.array([[1.5], [1.5], [1.0]])
    by_gate, by_up = gated_activation_gradients(g, u, act)
    check_gradient(lambda v: (weights * gated_activation(v, u, act)).sum(), g, weights * by_gate, "g", 1e-7)
    check_gradient(lambda v: (weights * gated_activation(g, v, act)).sum(), u, weights * by_up, "u", 1e-7)


def test_a_gradient_passes_at_a_limit_and_not_past_it():
    at, past = np.array([2.0]), np.nextafter(np.array([2.0]), 3)
    for act in (Activation.swiglu_clamped(2), Activation.swiglu_oai(limit=2)):
        by_gate, by_up = gated_activation_gradients(at, at, act)
        assert by_gate[0] > 0.5 and by_up[0] > 0.5
        for g, u, which in ((past, at, 0), (at, past, 1), (at, -past, 1)):
            assert gated_activation_gradients(g, u, act)[which][0] == 0
    limit = activation(at, "silu")[0]
    act = Activation.swiglu_then_clamp(limit)
    assert gated_activation_gradients(at, at / 8, act)[0][0] > 0.1
    assert gated_activation_gradients(past, at / 8, act)[0][0] == 0


@pytest.mark.parametrize("name", PLAIN)
def test_activation_gradient(name):
    h = np.array([-3.0, -1.0, -0.2, 0.4, 1.5, 5.0])
    check_gradient(lambda v: activation(v, name).sum(), h, activation_gradient(h, name), name)


def test_gradient_of_relu_at_zero_is_zero():
    zero = np.array([0.0, -0.0])
    np.testing.assert_array_equal(activation_gradient(zero, "relu"), [0, 0])
    np.testing.assert_array_equal(activation_gradient(zero, "relu2"), [0, 0])


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "linear"])
def test_nan_stays(name):
    assert np.isnan(activation(np.array([np.nan]), name)).all()
    assert np.isnan(activation_gradient(np.array([np.nan]), name)).all()


def test_unknown_activation():
    for function in (activation, activation_gradient):
        with pytest.raises(ValueError, match="activation: got 'tanh'"):
            function(np.zeros(1), "tanh")


# ---------------------------------------------------------------- feed-forward network


def random_experts(seed, gated, biased, weighted):
    rng = np.random.default_rng(seed)
    parts = 2 if gated else 1
    operands = {
        "rows": rng.normal(size=(R, D)),
        "w_in": rng.normal(size=(E, D, parts, F)),
        "w_out": rng.normal(size=(E, F, D)),
        "b_in": rng.normal(size=(E, parts, F)) if biased else None,
        "b_out": rng.normal(size=(E, D)) if biased else None,
        "row_weights": rng.normal(size=R) if weighted else None,
    }
    if weighted:
        operands["row_weights"][0] = 0.0  # a weight of exactly 0 still gets its gradient
    return operands, rng.normal(size=(R, D))


def run(operands, **options):
    return expert_ffn(**operands, group_sizes=SIZES, **options)


#: Activations with gated experts and without.
NETWORKS = [*((name, gated) for name in PLAIN for gated in (True, False)), *((act, True) for act in TWO_INPUTS)]


@pytest.mark.parametrize("name, gated", NETWORKS, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_forward_agrees_with_a_loop_over_rows(name, gated, biased, weighted):
    o, _ = random_experts(2, gated, biased, weighted)
    for early in (False, True):
        y = run(o, activation=name, weight_early=early)
        for r in range(6):
            e = expert_of_row(r)
            h = np.einsum("d,dpf->pf", o["rows"][r], o["w_in"][e]) + (o["b_in"][e] if biased else 0)
            a = gated_activation(h[0], h[1], name) if gated else activation(h[0], name)
            want = a @ o["w_out"][e] + (o["b_out"][e] if biased else 0)
            np.testing.assert_allclose(y[r], want * (o["row_weights"][r] if weighted else 1), atol=1e-13)
        np.testing.assert_array_equal(y[6:], 0)


@pytest.mark.parametrize(
    "name, gated, biased, weighted",
    [
        *((*network, True, True) for network in NETWORKS),
        *(
            (*network, *without)
            for network in NETWORKS[:2]
            for without in ((True, False), (False, True), (False, False))
        ),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_gradients(name, gated, biased, weighted):
    o, g = random_experts(3, gated, biased, weighted)
    grads = expert_ffn_backward(g, **o, group_sizes=SIZES, activation=name)
    for key, operand in o.items():
        gradient = getattr(grads, f"d_{key}")
        if operand is None:
            assert gradient is None
            continue
        for early in (False, True):

            def loss(v, key=key, early=early):
                return (g * run(o | {key: v}, activation=name, weight_early=early)).sum()

            check_gradient(loss, operand, gradient, f"d_{key}", 1e-7)
    if weighted:
        assert grads.d_row_weights[0] != 0
    for gradient in (grads.d_w_in, grads.d_w_out, grads.d_b_in, grads.d_b_out):
        assert gradient is None or (gradient[1] == 0).all()


@pytest.mark.parametrize("early", [False, True])
def test_padding_rows_are_zero_and_their_cotangents_ignored(early):
    o, g = random_experts(4, True, True, True)
    p = plan(np.array([[0], [2], [2]]), E, 2)
    sizes, slots = p.group_sizes, p.slot_of_row
    padding = slots < 0
    n = slots.size
    rng = np.random.default_rng(5)
    o["rows"], o["row_weights"], g = rng.normal(size=(n, D)), rng.normal(size=n), rng.normal(size=(n, D))
    clean = [v.copy() for v in (o["rows"], o["row_weights"], g)]
    for v in clean:
        v[padding] = 0
    for v in (o["rows"], o["row_weights"], g):
        v[padding] = np.nan
    options = {"activation": "gelu", "slot_of_row": slots}
    y = expert_ffn(**o, group_sizes=sizes, weight_early=early, **options)
    np.testing.assert_array_equal(y[padding], 0)
    assert np.isfinite(y).all() and (y[~padding] != 0).all()
    grads = expert_ffn_backward(g, **o, group_sizes=sizes, **options)
    want = expert_ffn_backward(
        clean[2], **o | {"rows": clean[0], "row_weights": clean[1]}, group_sizes=sizes, **options
    )
    for got, expected in zip(grads, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(grads.d_rows[padding], 0)
    np.testing.assert_array_equal(grads.d_row_weights[padding], 0)

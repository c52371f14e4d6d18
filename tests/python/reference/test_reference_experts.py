"""The oracle's grouped GEMM, activations, experts and whole layer against loops and central differences."""

import itertools
import math

import numpy as np
import pytest
from cases import Case, check, normal

from anabranch.activation import PLAIN, Activation
from anabranch.reference import experts as ex
from anabranch.reference.balance import load_balance_loss, z_loss
from anabranch.reference.moe import (
    moe,
    moe_backward,
    routed_experts,
    routed_experts_backward,
    shared_expert,
    shared_expert_backward,
)
from anabranch.reference.router import route

T, E, D, F = 6, 4, 3, 5
SIZES, R = np.array([2, 0, 3, 1]), 8  # an expert without rows; two rows past the groups
EXPERT_OF_ROW = np.repeat(np.arange(E), SIZES)
MASK = np.array([True, True, False, True, True, False])
#: Selections with repeats, -1, indices out of range on either side, and a token without experts.
GIVEN = np.array([[0, 0, 1], [-1, 2, 1], [-1, -1, -1], [9, 0, 1], [1, 3, 0], [0, 2, -4]])
TWO_INPUTS = [
    Activation.swiglu_clamped(limit=0.9),
    Activation.swiglu_oai(alpha=1.702, limit=0.8),
    Activation.swiglu_then_clamp(limit=0.7),
    Activation.situ(a=0.6, b=1.3),
]
equal, close = np.testing.assert_array_equal, np.testing.assert_allclose


def matrices(gated=True, biased=True):
    parts = 2 if gated else 1
    arrays = {"w_in": normal(E, D, parts, F), "w_out": normal(E, F, D)}
    return arrays | ({"b_in": normal(E, parts, F), "b_out": normal(E, D)} if biased else {})


def one_row(x, e, act, w_in, w_out, b_in=None, b_out=None):
    h = np.einsum("d,dpf->pf", x, w_in[e]) + (0 if b_in is None else b_in[e])
    a = ex.gated_activation(h[0], h[1], act) if len(h) == 2 else ex.activation(h[0], act)
    return a @ w_out[e] + (0 if b_out is None else b_out[e])


# ---------------------------------------------------------------- grouped GEMM


def test_grouped_matmul_agrees_with_loops_and_ignores_rows_past_the_sizes():
    operands = {"x": normal(R, D), "w": normal(E, D, F)}
    operands["x"][6:] = np.nan

    def loops(x, w):
        return [np.stack([*(x[r] @ w[e] for r, e in enumerate(EXPERT_OF_ROW)), *np.zeros((2, F))])]

    def backward(g):
        g[6:] = np.nan
        return dict(zip("xw", ex.grouped_matmul_backward(g, *operands.values(), SIZES), strict=True))

    def forward(x, w):
        return [ex.grouped_matmul(x, w, SIZES)[:6]]

    check(
        Case(forward, lambda g: backward(np.append(g, np.zeros((2, F)), 0)), operands, lambda **a: [loops(**a)[0][:6]])
    )
    assert not ex.grouped_matmul(*operands.values(), SIZES)[6:].any()
    x, w = np.ones((3, 1)), np.array([[[2.0]], [[5.0]]])
    equal(ex.grouped_matmul(x, w, np.array([2, 9])), [[2], [2], [5]])  # clipped
    nothing = np.zeros(2, int)
    d_x, d_w = ex.grouped_matmul_backward(np.ones((0, 1)), np.ones((0, 1)), w, nothing)
    assert d_x.shape == ex.grouped_matmul(np.ones((0, 1)), w, nothing).shape == (0, 1) and not d_w.any()


# ---------------------------------------------------------------- activations


def silu(x, alpha=1.0):
    return x / (1 + math.exp(-alpha * x))


FORMULAS = {
    "silu": silu,
    "gelu": lambda h: 0.5 * h * (1 + math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
    "relu": lambda h: max(h, 0),
    "relu2": lambda h: max(h, 0) ** 2,
    "gelu_erf": lambda h: h / 2 * math.erfc(-h / math.sqrt(2)),
    "quick_gelu": lambda h: silu(h, 1.702),
    "linear": lambda h: h,
}
FORMULAS_OF_TWO = [
    lambda g, u: silu(min(g, 0.9)) * min(max(u, -0.9), 0.9),
    lambda g, u: silu(min(g, 0.8), 1.702) * (min(max(u, -0.8), 0.8) + 1),
    lambda g, u: min(silu(g), 0.7) * min(max(u, -0.7), 0.7),
    lambda g, u: 0.6 * math.tanh(g / 0.6) / (1 + math.exp(-g)) * 1.3 * math.tanh(u / 1.3),
]


@pytest.mark.parametrize("name", PLAIN)
def test_activations_are_the_formulas(name):
    assert FORMULAS.keys() == set(PLAIN)
    h = np.array([-30.0, -3.0, -1.0, -0.2, 0.4, 1.5, 5.0, 30.0])

    def loops(h):
        return [[FORMULAS[name](value) for value in h]]

    check(
        Case(lambda h: [ex.activation(h, name)], lambda g: {"h": g * ex.activation_gradient(h, name)}, {"h": h}, loops)
    )
    if "relu" in name:
        assert not ex.activation_gradient(np.array([0.0, -0.0]), name).any()
    for function in (ex.activation, ex.activation_gradient):
        assert np.isnan(function(np.array([np.nan]), name)[0]) or name == "linear"
        with pytest.raises(ValueError, match="activation: got 'tanh'"):
            function(np.zeros(1), "tanh")


@pytest.mark.parametrize("act", [*map(Activation.glu, PLAIN), *TWO_INPUTS], ids=str)
def test_activations_of_two_inputs_are_the_formulas(act):
    operands = {"g": 1.5 * normal(60), "u": 1.5 * normal(60, seed=1)}
    operands["g"][:2], operands["u"][1:3] = 30, -30
    formulas = dict(zip(TWO_INPUTS, FORMULAS_OF_TWO, strict=True))

    def loops(g, u):
        formula = formulas.get(act) or (lambda g, u: FORMULAS[act.name](g) * u)
        return [[formula(*pair) for pair in zip(g, u, strict=True)]]

    def backward(cotangent):
        return dict(
            zip("gu", (cotangent * d for d in ex.gated_activation_gradients(*operands.values(), act)), strict=True)
        )

    check(Case(lambda g, u: [ex.gated_activation(g, u, act)], backward, operands, loops, 1e-7))


def test_a_gradient_passes_at_a_limit_and_not_past_it():
    at, past = np.array([2.0]), np.nextafter(np.array([2.0]), 3)
    for act in (Activation.swiglu_clamped(2), Activation.swiglu_oai(limit=2)):
        assert all(gradient[0] > 0.5 for gradient in ex.gated_activation_gradients(at, at, act))
        for g, u, which in ((past, at, 0), (at, past, 1), (at, -past, 1)):
            assert ex.gated_activation_gradients(g, u, act)[which][0] == 0
    act = Activation.swiglu_then_clamp(ex.activation(at, "silu")[0])
    assert ex.gated_activation_gradients(at, at / 8, act)[0][0] > 0.1
    assert ex.gated_activation_gradients(past, at / 8, act)[0][0] == 0


# ---------------------------------------------------------------- experts

NETWORKS = [
    *(("silu", gated, biased, weighted) for gated, biased, weighted in itertools.product((True, False), repeat=3)),
    *((name, False, True, True) for name in ("gelu", "relu2")),
    *((act, True, True, True) for act in TWO_INPUTS),
]


@pytest.mark.parametrize("act, gated, biased, weighted", NETWORKS)
@pytest.mark.parametrize("early", [False, True])
def test_experts_agree_with_a_loop_over_rows(act, gated, biased, weighted, early):
    """Rows past the groups may be NaN. A weight of exactly 0 gets its gradient."""
    operands = {"rows": normal(R, D)} | matrices(gated, biased)
    if weighted:
        operands["row_weights"] = normal(R)
        operands["row_weights"][0] = 0.0
    operands["rows"][6:] = np.nan
    options = {"group_sizes": SIZES, "activation": act}

    def loops(rows, row_weights=None, **arrays):
        y = np.zeros((R, D))
        for r, e in enumerate(EXPERT_OF_ROW):
            y[r] = one_row(rows[r], e, act, **arrays) * (1 if row_weights is None else row_weights[r])
        return [y]

    def backward(g):
        found = ex.expert_ffn_backward(g, **operands, **options)._asdict()
        given = {name.removeprefix("d_"): gradient for name, gradient in found.items() if gradient is not None}
        assert not weighted or given["row_weights"][0] != 0
        assert all((given[name][1] == 0).all() for name in given.keys() & {"w_in", "w_out", "b_in", "b_out"})
        return given

    check(
        Case(lambda **arrays: [ex.expert_ffn(**arrays, **options, weight_early=early)], backward, operands, loops, 1e-7)
    )


# ---------------------------------------------------------------- the layer

LAYERS = {
    "softmax": {"topk": 2},
    "raw softmax": {"topk": 2, "normalize": False},
    "every expert": {"topk": 4, "score_function": "sqrtsoftplus"},
    "bias and groups": {
        "topk": 2,
        "score_function": "sigmoid",
        "expert_bias": np.array([1.0, -1.0, 0.5, 0.0]),
        "num_groups": 2,
        "group_topk": 1,
        "scaling_factor": 2.5,
    },
    "mask": {"topk": 2, "token_mask": MASK},
    "replay": {"topk": 3, "score_function": "sigmoid", "forced_experts": GIVEN},
}
KINDS = [("silu", True, True), ("gelu", False, True), ("relu2", True, False)]


def of_tokens(x, experts, weights, holds, act, arrays):
    """The layer after the router, a token at a time."""
    out = np.zeros((T, D))
    for t, k in zip(*np.nonzero(holds), strict=True):
        out[t] += weights[t, k] * one_row(x[t], experts[t, k], act, **arrays)
    return out


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_agrees_with_a_loop_over_tokens(name, early):
    """With both losses and the weights as results, and the selection held. Masked tokens may be NaN."""
    act, gated, biased = KINDS[(list(LAYERS).index(name) + early) % 3]
    operands = {"x": normal(T, D), "gate": normal(D, E)} | matrices(gated, biased)
    if early:
        operands["gate_bias"] = normal(E)
    mask = LAYERS[name].get("token_mask", np.ones(T, bool))
    operands["x"][~mask] = np.nan
    how = {"activation": act, "weight_early": early, "align_size": 4 * early}
    options = LAYERS[name] | how | {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
    steering = ("expert_bias", "num_groups", "group_topk", "forced_experts")
    held = {k: v for k, v in options.items() if k not in steering}
    whole = moe(**operands, **options)
    held["experts"] = whole.experts
    assert whole.dropped == 0

    def loops(x, gate, gate_bias=0, **arrays):
        given = {k: v for k, v in LAYERS[name].items() if k not in steering}
        logits = np.where(mask[:, None], np.nan_to_num(x) @ gate + gate_bias, 0)
        r = route(logits, given.pop("topk"), experts=whole.experts, **given)
        equal(whole.tokens_per_expert, r.tokens_per_expert)
        aux = load_balance_loss(r.score_sum, r.tokens_per_expert, options["topk"], 0.3, mask.sum())
        output = of_tokens(x, r.experts, r.weights, r.experts >= 0, act, arrays)
        return [output, aux, z_loss(r.lse, 0.2, mask.sum()), r.weights]

    def forward(**arrays):
        out = moe(**arrays, **held)
        return [out.output, out.aux_loss, out.z_loss, out.weights]

    def backward(*cotangents):
        given = [operands[key] for key in ("x", "gate", "w_in", "w_out")]
        biases = {key: operands.get(key) for key in ("gate_bias", "b_in", "b_out")}
        cotangents[0][~mask] = np.nan
        found = moe_backward(*given, *cotangents, **biases, **options)
        assert biased or (found["b_in"] is None and found["b_out"] is None)
        return {key: found[key] for key in operands}

    check(Case(forward, lambda *g: backward(g[0].copy(), *g[1:]), operands, loops, 1e-7))


@pytest.mark.parametrize("gated, early, bounded", [(True, False, False), (False, True, True), (True, True, True)])
def test_the_layer_after_the_router_agrees_with_a_loop_over_tokens(gated, early, bounded):
    operands = {"x": normal(T, D), "weights": normal(T, 3)} | matrices(gated, gated)
    operands["weights"][0, 1] = 0.0
    kept = normal(T, 3, seed=1) < 0.8 if bounded else None
    options = {"experts": GIVEN, "weight_early": early, "align_size": 4 * early, "kept": kept}
    valid = (GIVEN >= 0) & (GIVEN < E)
    holds = valid & kept if bounded else valid

    def backward(g):
        found = routed_experts_backward(**operands, **options, d_output=g)
        return {name: found[name] for name in operands}

    def loops(x, weights, **arrays):
        return [of_tokens(x, GIVEN, weights, holds, "silu", arrays)]

    check(Case(lambda **arrays: [routed_experts(**arrays, **options).output], backward, operands, loops, 1e-7))
    out = routed_experts(**operands, **options)
    equal(out.tokens_per_expert, np.bincount(GIVEN[valid], minlength=E))
    assert out.dropped == ((GIVEN >= E) | (GIVEN < -1) | (valid & ~holds)).sum()


@pytest.mark.parametrize("parts, gate_shape", list(itertools.product((1, 2), (None, (D,), (D, 1)))))
def test_the_shared_expert_is_the_formula(parts, gate_shape):
    operands = {"x": normal(T, D), "w_in": normal(D, parts, F), "w_out": normal(F, D)}
    if gate_shape:
        operands["w_gate"] = normal(*gate_shape)

    def loops(x, w_in, w_out, w_gate=None):
        h = np.einsum("td,dpf->ptf", x, w_in)
        out = (ex.activation(h[0], "silu") * (h[1] if parts == 2 else 1)) @ w_out
        return [out if w_gate is None else out / (1 + np.exp(-x @ w_gate.reshape(D, 1)))]

    def backward(g):
        found = shared_expert_backward(**operands, d_output=g)
        return {name: found[name] for name in operands}

    check(Case(lambda **arrays: [shared_expert(**arrays)], backward, operands, loops, 1e-7))


def test_leading_dimensions_no_tokens_and_experts_without_tokens():
    x, operands, biases = normal(T, D), (normal(D, E),), matrices()
    operands += biases.pop("w_in"), biases.pop("w_out")
    d_output, folded, options = normal(T, D, seed=1), (2, 3, D), biases | {"topk": 2}
    got = moe(x.reshape(folded), *operands, **options).output
    equal(got, moe(x, *operands, **options).output.reshape(folded))
    masked = options | {"token_mask": MASK.reshape(2, 3)}
    got = moe_backward(x.reshape(folded), *operands, d_output.reshape(folded), **masked)
    equal(got["x"], moe_backward(x, *operands, d_output, **options, token_mask=MASK)["x"].reshape(folded))

    nothing, losses = np.zeros((0, D)), {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
    out = moe(nothing, *operands, **options, **losses, align_size=4)
    assert out.output.shape == (0, D) and out.aux_loss == out.z_loss == 0
    gradients = moe_backward(nothing, *operands, nothing, 1.0, 1.0, **options, **losses)
    assert all(not gradient.any() for key, gradient in gradients.items() if key not in ("gate_bias", "lora"))

    gradients = moe_backward(x, *operands, d_output, topk=1, forced_experts=np.zeros((T, 1), int), **biases)
    for key in ("w_in", "w_out", "b_in", "b_out"):
        assert (gradients[key][0] != 0).all() and not gradients[key][1:].any(), key
    with pytest.raises(TypeError, match="temperature"):
        moe(x, *operands, topk=1, temperature=2.0)

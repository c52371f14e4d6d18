"""The oracle's losses against loops and central differences, and quantile balancing."""

import numpy as np
import pytest
from cases import Case, check, normal

from anabranch.reference.balance import (
    fused_moe_aux_loss,
    fused_moe_aux_loss_backward,
    load_balance_loss,
    load_balance_loss_backward,
    z_loss,
    z_loss_backward,
)
from anabranch.reference.quantile import bin_positions, qb_histogram, quantile_bias, thresholds
from anabranch.reference.router import route, scores

inf, nan = np.inf, np.nan
E, K = 6, 2
close = np.testing.assert_allclose
every_function = pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])


@pytest.mark.parametrize("tokens", [4, 0, [4, 0, 7]])
def test_load_balance_loss_is_the_formula(tokens):
    """A batch or sequence without tokens adds nothing."""
    counts = np.rint(3 * np.abs(normal(*np.shape(tokens), E, seed=1)))

    def loops(score_sum):
        rows = zip(np.atleast_2d(score_sum), np.atleast_2d(counts), np.atleast_1d(tokens), strict=True)
        each = [sum(s * c for s, c in zip(*row, strict=True)) * 0.3 * E / (K * n**2) if n else 0 for *row, n in rows]
        return [np.mean(each)]

    def backward(g):
        return {"score_sum": load_balance_loss_backward(score_sum, counts, K, 0.3, tokens, g)}

    score_sum = np.abs(normal(*np.shape(tokens), E))
    check(Case(lambda score_sum: [load_balance_loss(score_sum, counts, K, 0.3, tokens)], backward, {"score_sum": score_sum}, loops))  # fmt: skip


def test_z_loss_is_the_formula_and_no_tokens_give_zero():
    lse = normal(2, 3)

    def loops(lse):
        return [0.2 / 5 * sum(value**2 for value in lse.ravel())]

    check(Case(lambda lse: [z_loss(lse, 0.2, 5)], lambda g: {"lse": z_loss_backward(lse, 0.2, 5, g)}, {"lse": lse}, loops))  # fmt: skip
    assert z_loss(np.zeros(3), 1.0, 0) == 0 and not z_loss_backward(np.zeros(3), 1.0, 0).any()
    assert fused_moe_aux_loss(np.ones((0, E)), np.zeros(E), K, 1.0) == 0
    assert fused_moe_aux_loss_backward(np.ones((0, E)), np.zeros(E), K, 1.0).shape == (0, E)


@pytest.mark.parametrize("options", [{}, {"total_num_tokens": 7}, {"num_experts": E}])
def test_the_fused_form_is_the_load_balance_loss_of_sums(options):
    """Also of two sequences side by side."""
    probs, counts = normal(4, 2 * E), np.arange(2 * E)

    def loops(probs):
        parts = 2 if options.get("num_experts") else 1
        sums = probs.sum(0).reshape(parts, -1)
        n = options.get("total_num_tokens", 4)
        of_parts = [load_balance_loss(s, c, K, 0.3, n) for s, c in zip(sums, counts.reshape(parts, -1), strict=True)]
        return [sum(of_parts)]

    def backward(g):
        return {"probs": fused_moe_aux_loss_backward(probs, counts, K, 0.3, d_loss=g, **options)}

    for dtype in (np.int32, np.uint8, np.float32):
        given = counts.astype(dtype)
        check(Case(lambda probs, given=given: [fused_moe_aux_loss(probs, given, K, 0.3, **options)], backward, {"probs": probs}, loops))  # fmt: skip
    with pytest.raises(ValueError, match="num_experts: got 5"):
        fused_moe_aux_loss(probs, counts, K, 0.3, num_experts=5)


# ---------------------------------------------------------------- quantile balancing


@every_function
def test_the_histogram_agrees_with_loops(function):
    rng = np.random.default_rng(0)
    z, bias, mask = rng.normal(size=(40, 6)), 0.2 * rng.normal(size=6), rng.random(40) < 0.7
    got = qb_histogram(z, 2, -0.25, 0.5, 9, score_function=function, expert_bias=bias, token_mask=mask)
    want = np.zeros((6, 9), int)
    for row, real in zip(z, mask, strict=True):
        s = scores(row, function)
        threshold = sorted(s + bias)[-3]
        for e in range(6):
            position = int(np.floor((threshold - s[e] + 0.25) * 9 / 0.75))
            want[e, min(max(position, 0), 8)] += real
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int32 and (got.sum(axis=1) == mask.sum()).all()


def test_equal_keys_infinities_and_nan():
    options = {"score_function": "sigmoid", "expert_bias": np.zeros(4)}
    z = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, nan, 0.0, -1.0], [nan, nan, nan, 0.0], [0.0, -inf, -inf, -inf]])
    half, low = 0.5, 1 / (1 + np.exp(1.0))
    close(thresholds(z, 2, **options), [half, half, nan, -inf])
    close(thresholds(z[1], 3, **options), low)  # All experts but one may be selected.
    # The NaN expert of the second token and the whole third token are not counted; -inf is below all bins.
    np.testing.assert_array_equal(qb_histogram(z, 2, -1.0, 1.0, 2, **options), [[2, 1], [1, 1], [1, 2], [1, 2]])
    positions = bin_positions(z, 2, -1.0, 1.0, 2, **options)
    np.testing.assert_array_equal(np.isnan(positions).sum(axis=1), [0, 1, 4, 0])
    with pytest.raises(ValueError, match="topk: got 4, expected 1 to 3"):
        thresholds(z, 4, **options)
    with pytest.raises(ValueError, match="expected lower < upper"):
        qb_histogram(z, 1, 1.0, 1.0, 4, **options)


def test_the_quantile_is_linear_inside_its_bin():
    # E = 4, K = 1: a quarter of the counts. Bins of width 1 start at -2.
    histogram = np.array([[0, 4, 4, 0], [1, 0, 3, 0], [2, 0, 6, 0], [0, 0, 0, 0]])
    want = np.array([-1 + 2 / 4, -1.0, -1.0, -2.0])
    close(quantile_bias(histogram, -2.0, 2.0, 1), want - want.mean())
    # E = 2, K = 1: half of the counts, which an empty bin cannot hold. Bins of width 1 start at 0.
    assert quantile_bias([[3, 0, 9], [12, 0, 0]], 0.0, 3.0, 1)[0] * 2 == (2 + 3 / 9) - 0.5


def test_biases_of_quantiles_balance():
    rng = np.random.default_rng(1)
    tokens, E, options = 4000, 16, {"score_function": "sigmoid"}
    z, bias, worst = rng.normal(size=(tokens, E)) + 1.5 * rng.normal(size=E), np.zeros(E), []
    for _ in range(9):
        loads = route(z, K, expert_bias=bias, **options).tokens_per_expert
        worst.append(loads.max() * E / (tokens * K))
        bias = quantile_bias(qb_histogram(z, K, -2.0, 2.0, 40000, expert_bias=bias, **options), -2.0, 2.0, K)
    assert worst[0] > 3 and worst[-1] < 1.1

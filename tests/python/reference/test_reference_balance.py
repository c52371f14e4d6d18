"""The oracle's losses against loops, and quantile balancing: histograms, quantiles, and that the bias balances."""

import numpy as np
import pytest

from anabranch.reference.balance import (
    fused_moe_aux_loss,
    fused_moe_aux_loss_backward,
    load_balance_loss,
    load_balance_loss_backward,
    z_loss,
    z_loss_backward,
)
from anabranch.reference.quantile import bin_positions, qb_histogram, quantile_bias, thresholds
from anabranch.reference.router import aux_scores, route, scores

inf, nan = np.inf, np.nan
E, K, N = 6, 2, 9
close = np.testing.assert_allclose
every_function = pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])


def test_load_balance_loss_is_the_formula():
    close(load_balance_loss(np.full(E, N / E), np.full(E, N * K / E), K, 0.01, N), 0.01)  # balanced
    rng = np.random.default_rng(1)
    each, counts, tokens = rng.random((3, E)), rng.integers(0, 5, (3, E)), np.array([4, 0, 7])
    each[1], counts[1] = 0, 0  # A masked sequence adds nothing.
    want = [0.3 * E / (K * n**2) * (s * c).sum() if n else 0 for s, c, n in zip(each, counts, tokens, strict=True)]
    close([load_balance_loss(each[b], counts[b], K, 0.3, tokens[b]) for b in range(3)], want)
    close(load_balance_loss(each, counts, K, 0.3, tokens), sum(want) / 3)


def test_z_loss_is_the_formula_over_unmasked_tokens():
    z, mask = np.random.default_rng(3).normal(size=(4, E)), np.array([True, True, False, True])
    want = 0.1 / 3 * sum(np.log(np.exp(row).sum()) ** 2 for row in z[mask])
    close(z_loss(route(z, K, token_mask=mask).lse, 0.1, 3), want)


def test_no_tokens_give_zero_and_zero_gradients():
    zero = np.zeros(E)
    assert load_balance_loss(zero, zero, K, 1.0, 0) == 0 and z_loss(np.zeros(3), 1.0, 0) == 0
    assert (
        not load_balance_loss_backward(zero, zero, K, 1.0, 0).any() and not z_loss_backward(np.zeros(3), 1.0, 0).any()
    )
    assert fused_moe_aux_loss(np.ones((0, E)), zero, K, 1.0) == 0
    assert fused_moe_aux_loss_backward(np.ones((0, E)), zero, K, 1.0).shape == (0, E)


def test_fused_form_is_the_load_balance_loss():
    z = np.random.default_rng(4).normal(size=(N, E))
    routing, a = route(z, K), aux_scores(z, "softmax")
    want = load_balance_loss(routing.score_sum, routing.tokens_per_expert, K, 0.3, N)
    for dtype in (np.int32, np.int64, np.uint8, np.float32):
        counts = routing.tokens_per_expert.astype(dtype)
        close(fused_moe_aux_loss(a, counts, K, 0.3), want)
        close(fused_moe_aux_loss(a, counts, K, 0.3, total_num_tokens=2 * N), want / 4)
    rng = np.random.default_rng(5)
    a, counts = rng.random((4, 2, E)), rng.integers(0, 5, (2, E))  # two sequences
    want = sum(load_balance_loss(a[:, b].sum(0), counts[b], K, 0.3, 4) for b in range(2))
    close(fused_moe_aux_loss(a.reshape(4, 2 * E), counts.ravel(), K, 0.3, num_experts=E), want)
    with pytest.raises(ValueError, match="num_experts: got 5"):
        fused_moe_aux_loss(a.reshape(4, 2 * E), counts.ravel(), K, 0.3, num_experts=5)


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


@every_function
def test_biases_of_quantiles_balance(function):
    rng = np.random.default_rng(1)
    tokens, E, K = 4000, 16, 2
    z, bias, worst = rng.normal(size=(tokens, E)) + 1.5 * rng.normal(size=E), np.zeros(E), []
    for _ in range(9):
        loads = route(z, K, score_function=function, expert_bias=bias).tokens_per_expert
        worst.append(loads.max() * E / (tokens * K))
        histogram = qb_histogram(z, K, -2.0, 2.0, 40000, score_function=function, expert_bias=bias)
        bias = quantile_bias(histogram, -2.0, 2.0, K)
    assert worst[0] > 3 and worst[-1] < 1.1

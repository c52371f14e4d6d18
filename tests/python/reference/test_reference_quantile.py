"""The oracle of quantile balancing: thresholds, histograms and quantiles against direct formulas, and balance."""

import numpy as np
import pytest

from anabranch.reference.quantile import bin_positions, qb_histogram, quantile_bias, thresholds
from anabranch.reference.router import route, scores

inf, nan = np.inf, np.nan
FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_histogram_agrees_with_loops(function):
    rng = np.random.default_rng(0)
    z, bias, mask = rng.normal(size=(40, 6)), 0.2 * rng.normal(size=6), rng.random(40) < 0.7
    got = qb_histogram(z, 2, -0.25, 0.5, 9, score_function=function, expert_bias=bias, token_mask=mask)
    want = np.zeros((6, 9), int)
    for row, real in zip(z, mask, strict=True):
        s = scores(row, function)
        threshold = sorted(s + bias)[-3]
        for e in range(6):
            place = int(np.floor((threshold - s[e] + 0.25) * 9 / 0.75))
            want[e, min(max(place, 0), 8)] += real
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int32 and (got.sum(axis=1) == mask.sum()).all()


def test_equal_keys_infinities_and_nan():
    options = {"score_function": "sigmoid", "expert_bias": np.zeros(4)}
    z = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, nan, 0.0, -1.0], [nan, nan, nan, 0.0], [0.0, -inf, -inf, -inf]])
    half, low = 0.5, 1 / (1 + np.exp(1.0))
    np.testing.assert_allclose(thresholds(z, 2, **options), [half, half, nan, -inf])
    np.testing.assert_allclose(thresholds(z[1], 3, **options), low)
    # of the second token the expert that is NaN isn't counted, of the third none is; -inf is below all bins
    got = qb_histogram(z, 2, -1.0, 1.0, 2, **options)
    np.testing.assert_array_equal(got, [[2, 1], [1, 1], [1, 2], [1, 2]])
    positions = bin_positions(z, 2, -1.0, 1.0, 2, **options)
    np.testing.assert_array_equal(np.isnan(positions).sum(axis=1), [0, 1, 4, 0])


def test_all_but_one_expert_may_be_selected():
    z = np.array([[3.0, 1.0, 2.0]])
    np.testing.assert_allclose(
        thresholds(z, 2, score_function="sigmoid", expert_bias=np.zeros(3)), scores(z, "sigmoid")[:, 1]
    )
    with pytest.raises(ValueError, match="topk: got 3, expected 1 to 2"):
        thresholds(z, 3, score_function="sigmoid", expert_bias=np.zeros(3))
    with pytest.raises(ValueError, match="expected lower < upper"):
        qb_histogram(z, 1, 1.0, 1.0, 4, score_function="sigmoid", expert_bias=np.zeros(3))


def test_the_quantile_is_linear_inside_its_bin():
    # E 4, K 1: a quarter of the counts. Bins of width 1 from -2 on.
    histogram = np.array([[0, 4, 4, 0], [1, 0, 3, 0], [2, 0, 6, 0], [0, 0, 0, 0]])
    want = np.array([-1 + 2 / 4, -1.0, -1.0, -2.0])
    np.testing.assert_allclose(quantile_bias(histogram, -2.0, 2.0, 1), want - want.mean())
    # E 2, K 1, bins of width 1 from 0 on: half of the counts, which is in no bin that is empty
    assert quantile_bias([[3, 0, 9], [12, 0, 0]], 0.0, 3.0, 1)[0] * 2 == (2 + 3 / 9) - 0.5


@pytest.mark.parametrize("function", FUNCTIONS)
def test_biases_of_quantiles_balance(function):
    rng = np.random.default_rng(1)
    T, E, K = 4000, 16, 2
    z = rng.normal(size=(T, E)) + 1.5 * rng.normal(size=E)
    bias = np.zeros(E)
    worst = []
    for _ in range(9):
        loads = route(z, K, score_function=function, expert_bias=bias).tokens_per_expert
        worst.append(loads.max() * E / (T * K))
        histogram = qb_histogram(z, K, -2.0, 2.0, 40000, score_function=function, expert_bias=bias)
        bias = quantile_bias(histogram, -2.0, 2.0, K)
    assert worst[0] > 3 and worst[-1] < 1.1

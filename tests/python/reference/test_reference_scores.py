"""Scores: values, extremes, derivatives, input dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
from differences import check_gradient

from anabranch.reference.router import logsumexp, score_gradient, scores

inf, nan = np.inf, np.nan


def test_softmax_is_over_all_experts():
    z = np.array([[0.0, math.log(2), math.log(5)]])
    np.testing.assert_allclose(scores(z, "softmax"), [[1 / 8, 2 / 8, 5 / 8]], rtol=1e-15)
    np.testing.assert_allclose(logsumexp(z), [math.log(8)], rtol=1e-15)


def test_sigmoid_and_sqrtsoftplus_values():
    for z in (-15.0, -1.0, 0.0, 0.5, 3.0, 15.0):
        s = scores(np.array([z]), "sigmoid")[0]
        assert math.isclose(s, 1 / (1 + math.exp(-z)), rel_tol=1e-14)
        s = scores(np.array([z]), "sqrtsoftplus")[0]
        assert math.isclose(s, math.sqrt(math.log1p(math.exp(z))), rel_tol=1e-12)


def test_sqrtsoftplus_is_half_exponential_below_minus_twenty():
    z = np.array([-20.5, -80.0, -300.0])
    np.testing.assert_array_equal(scores(z, "sqrtsoftplus"), np.exp(z / 2))
    np.testing.assert_array_equal(score_gradient(z, "sqrtsoftplus"), np.exp(z / 2) / 2)


def test_scores_of_infinite_logits():
    z = np.array([-inf, inf])
    np.testing.assert_array_equal(scores(z, "sigmoid"), [0, 1])
    np.testing.assert_array_equal(scores(z, "sqrtsoftplus"), [0, inf])
    np.testing.assert_array_equal(score_gradient(z, "sigmoid"), [0, 0])
    np.testing.assert_array_equal(score_gradient(z, "sqrtsoftplus"), [0, 0])
    np.testing.assert_array_equal(scores(np.array([-inf, 0.0]), "softmax"), [0, 1])


@pytest.mark.parametrize("broken", [nan, inf])
def test_softmax_row_with_nan_or_plus_infinity_is_nan(broken):
    z = np.array([[0.0, broken, -inf], [0.0, 1.0, -inf]])
    s, lse = scores(z, "softmax"), logsumexp(z)
    assert np.isnan(s[0]).all() and np.isnan(lse[0])
    assert np.isfinite(s[1]).all() and s[1, 2] == 0 and np.isfinite(lse[1])


def test_sigmoid_does_not_overflow_where_it_saturates():
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_allclose(scores(np.array([-1000.0, 1000.0]), "sigmoid"), [0, 1])
        np.testing.assert_allclose(scores(np.array([-1000.0, 1000.0]), "softmax"), [0, 1])


@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("z", [-60.0, -21.0, -19.0, -3.0, 0.0, 2.0, 30.0])
def test_score_gradient_is_the_derivative(function, z):
    at = np.array([z])
    scale = 1 / scores(at, function)[0]  # so that tiny scores are compared too
    gradient = scale * score_gradient(at, function)
    if gradient[0] < 1e-10:
        assert function == "sigmoid" and z == 30.0
    else:
        check_gradient(lambda x: scale * scores(x, function)[0], at, gradient, f"{function}'({z})", 1e-7)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_every_floating_dtype_is_taken_as_its_exact_value(dtype):
    z = np.array([0.1, -2.3, 7.7]).astype(dtype)
    np.testing.assert_array_equal(scores(z, "softmax"), scores(z.astype(np.float64), "softmax"))


def test_other_dtypes_and_names_are_refused():
    with pytest.raises(TypeError, match="logits: got dtype int64"):
        scores(np.arange(3), "softmax")
    with pytest.raises(ValueError, match="score_function: got 'tanh'"):
        scores(np.zeros(3), "tanh")

"""The comparison helpers fail where they have to."""

import ml_dtypes
import numpy as np
import pytest

from oracle import assert_close, assert_close_per_expert, relative_error

inf, nan = np.inf, np.nan


def test_relative_error_is_of_frobenius_norms_over_finite_values():
    assert relative_error(np.float32([3.0, 4.1]), np.array([3.0, 4.0])) == pytest.approx(0.02, rel=1e-5)
    assert relative_error(np.zeros(3), np.zeros(3)) == relative_error(np.zeros(0), np.zeros(0)) == 0
    assert relative_error(np.array([0, 1e-300]), np.zeros(2)) == inf
    want = np.array([nan, inf, 1.0])
    assert relative_error(want.copy(), want) == 0 and relative_error(np.array([nan, inf, 1.5]), want) == 0.5


@pytest.mark.parametrize(
    "got, message",
    [
        *(([value, 1.0], "w: relative error") for value in (nan, 2.0, -inf)),
        ([inf, nan], "w: relative error"),
        ([[inf, 1.0]], r"w: got shape \(1, 2\), expected \(2,\)"),
        (np.zeros(2, np.int32), "w: got dtype int32, expected floating"),
    ],
)
def test_values_that_are_not_finite_and_shapes_and_kinds_of_dtype_have_to_match(got, message):
    assert_close(np.array([inf, 1.0], ml_dtypes.bfloat16), np.array([inf, 1.0]), 0, "w")
    with pytest.raises(AssertionError, match=message):
        assert_close(np.array(got), np.array([inf, 1.0]), 0.5, "w")


def test_every_expert_is_compared_by_itself():
    want = np.ones((3, 4))
    want[1] *= 1e-6
    got = want.copy()
    got[1] *= 2
    assert_close(got, want, 1e-3, "d_w")
    with pytest.raises(AssertionError, match=r"d_w: .* bound 1.000e-03: expert 1: 1.000e\+00"):
        assert_close_per_expert(got, want, 1e-3, "d_w")
    with pytest.raises(AssertionError, match="expert 1"):
        assert_close_per_expert(got.T, want.T, 1e-3, "d_w", axis=1)
    with pytest.raises(AssertionError, match="counts: got dtype float32, expected integer"):
        assert_close_per_expert(np.zeros(2, np.float32), np.zeros(2, np.int32), 1, "counts")
    want[0], got = 0, want.copy()
    got[0, 2] = 1e-30  # An expert without tokens has to be exactly zero.
    with pytest.raises(AssertionError, match="expert 0: inf"):
        assert_close_per_expert(got, want * [[0], [1], [1]], 1e-6, "d_w")


def test_sums_whose_terms_cancel_are_compared_with_their_terms():
    want, terms = np.array([1e-3, 1.0]), np.array([1.0, 1.0])
    got = want + np.array([1e-5, 0.0])
    assert_close_per_expert(got, want, 2e-5, "y", terms=terms)
    with pytest.raises(AssertionError, match=r"y: relative error .* bound 2.000e-05: expert 0: 1.000e-02"):
        assert_close_per_expert(got, want, 2e-5, "y")
    with pytest.raises(AssertionError, match=r"y: relative error 1\.000e-05, bound 9\.000e-06"):
        assert_close(got[:1], want[:1], 9e-6, "y", terms[:1])
    with pytest.raises(AssertionError, match="y: relative error inf"):
        assert_close(np.array([1e-30]), np.zeros(1), 1.0, "y", terms[:1])  # Zero has to be exact all the same.

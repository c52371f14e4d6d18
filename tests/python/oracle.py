"""Compares a result with the float64 oracle by relative errors per tensor and per expert.

A wrong shape or kind of dtype is reported as such. NaN and infinities must be equal and in the same places. Where
exactly zero is expected, the result must be exactly zero.
"""

import numpy as np

KINDS = {"f": "floating", "i": "integer", "u": "integer", "b": "bool"}


def _kind(array):
    # the numpy kind of ml_dtypes' bfloat16 is V
    return "floating" if array.dtype.name == "bfloat16" else KINDS.get(array.dtype.kind, array.dtype.name)


def _check_like(got, want, name):
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: got shape {got.shape}, expected {want.shape}")
    if _kind(got) != _kind(want):
        raise AssertionError(f"{name}: got dtype {got.dtype}, expected {_kind(want)}")
    return got, want


def _same_where_not_finite(got, want):
    """Whether the NaN and infinities of both arrays are equal and in the same places."""
    broken = ~(np.isfinite(got) & np.isfinite(want))
    return np.array_equal(got[broken], want[broken], equal_nan=True)


def relative_error(got, want):
    """|got - want| / |want| (Frobenius norms, float64) over the finite values.

    0 for two zeros; infinite if `want` is zero and `got` is not, or if NaN and infinities differ.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if not _same_where_not_finite(got, want):
        return np.inf
    finite = np.isfinite(want)
    got, want = got[finite], want[finite]
    largest = np.abs(want).max(initial=0.0)
    if largest == 0:
        return np.inf if got.any() else 0.0
    # in units of the largest value, so that squares of small values do not underflow
    return float(np.linalg.norm((got - want) / largest) / np.linalg.norm(want / largest))


def _error(got, want, terms):
    """The error relative to `want`, or to `terms` if they are given and have the larger norm."""
    error = relative_error(got, want)
    if terms is None or not np.isfinite(error):
        return error
    return error * min(np.linalg.norm(want) / max(np.linalg.norm(terms), 1e-300), 1.0)


def assert_close(got, want, bound, name, terms=None):
    """Asserts that `got` has `want`'s shape and kind of dtype and a relative error of at most `bound`.

    terms: the norm of the summands of each value, for sums that may cancel; the error is then relative to it.
    """
    got, want = _check_like(got, want, name)
    error = _error(got, want, terms)
    if not error <= bound:
        raise AssertionError(f"{name}: relative error {error:.3e}, bound {bound:.3e}")


def assert_close_per_expert(got, want, bound, name, axis=0, terms=None):
    """Applies `assert_close` to the slice of each expert (along `axis`).

    So a wrong small expert cannot hide behind the others, and a slice that is expected to be zero must be exactly zero.
    """
    got, want = _check_like(got, want, name)
    errors = [
        _error(got.take(e, axis), want.take(e, axis), None if terms is None else terms.take(e, axis))
        for e in range(want.shape[axis])
    ]
    wrong = [f"expert {e}: {error:.3e}" for e, error in enumerate(errors) if not error <= bound]
    if wrong:
        raise AssertionError(f"{name}: relative error above the bound {bound:.3e}: {', '.join(wrong[:16])}")

"""Compares a result with the float64 oracle by relative errors per tensor and per expert; remembers oracles.

A wrong shape or kind of dtype is reported as such. NaN and infinities must be equal and in the same places. Where
exactly zero is expected, the result must be exactly zero.
"""

import collections
import functools
import hashlib
import math
import pickle

import jax
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


def _errors(got, want, group, count, terms=None):
    """The relative error of each of `count` groups of rows; group: that of each row of [n, ...].

    The error of a group is |got - want| / |want| (Frobenius norms, float64) over its finite values: 0 for two zeros;
    infinite if `want` is zero and `got` is not, or if NaN and infinities differ. It is relative to `terms` if they are
    given and have the larger norm.
    """
    shape = len(group), math.prod(np.shape(want)[1:])
    got, want = (np.asarray(array).astype(np.float64).reshape(shape) for array in (got, want))
    finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(invalid="ignore", over="ignore"):
        is_same = finite | (got == want) | (np.isnan(got) & np.isnan(want))
        difference, values = np.where(finite, got - want, 0.0), np.where(finite, want, 0.0)

        def norm(rows):
            return np.sqrt(np.bincount(group, np.square(rows).sum(1), count))

        largest = np.zeros(count)
        np.maximum.at(largest, group, np.abs(values).max(1, initial=0.0))
        # in units of the largest value, so that squares of small values do not underflow
        units = np.where(largest > 0, largest, 1.0)
        errors = norm(difference / units[group, None]) / np.where(largest > 0, norm(values / units[group, None]), 1.0)
        is_wrong = ~is_same.all(1) | ((largest[group] == 0) & difference.any(1))
        errors[np.bincount(group, is_wrong, count) > 0] = np.inf
        if terms is not None:
            size = norm(np.asarray(terms, np.float64).reshape(shape))
            errors *= np.where(np.isfinite(errors), np.minimum(norm(want) / np.maximum(size, 1e-300), 1.0), 1.0)
    return errors


def _error(got, want, terms=None):
    """The relative error of whole arrays; see `_errors`."""
    one_row = (array if array is None else np.reshape(array, (1, np.size(array))) for array in (got, want, terms))
    got, want, terms = one_row
    return float(_errors(got, want, np.zeros(1, int), 1, terms)[0])


def relative_error(got, want):
    """|got - want| / |want|; see `_errors`."""
    return _error(got, want)


def assert_close(got, want, bound, name, terms=None):
    """Asserts that `got` has `want`'s shape and kind of dtype and a relative error of at most `bound`.

    terms: the norm of the summands of each value, for sums that may cancel; the error is then relative to it.
    """
    got, want = _check_like(got, want, name)
    error = _error(got, want, terms)
    if not error <= bound:
        raise AssertionError(f"{name}: relative error {error:.3e}, bound {bound:.3e}")


def _assert_errors(errors, bound, name):
    wrong = [f"expert {e}: {error:.3e}" for e, error in enumerate(errors) if not error <= bound]
    if wrong:
        raise AssertionError(f"{name}: relative error above the bound {bound:.3e}: {', '.join(wrong[:16])}")


def assert_close_per_expert(got, want, bound, name, axis=0, terms=None):
    """Applies `assert_close` to the slice of each expert (along `axis`).

    So a wrong small expert cannot hide behind the others, and a slice that is expected to be zero must be exactly zero.
    """
    got, want = _check_like(got, want, name)
    slices = [array if array is None else np.moveaxis(array, axis, 0) for array in (got, want, terms)]
    experts = want.shape[axis]
    _assert_errors(_errors(*slices[:2], np.arange(experts), experts, slices[2]), bound, name)


def assert_rows_close(got, want, group_sizes, bound, name, terms=None):
    """Applies `assert_close` to the rows of each expert; rows past the groups must be exactly zero."""
    got, want = _check_like(got, want, name)
    expert = np.repeat(np.arange(len(group_sizes)), group_sizes)
    used = len(expert)
    terms = None if terms is None else terms[:used]
    _assert_errors(_errors(got[:used], want[:used], expert, len(group_sizes), terms), bound, name)
    assert not got[used:].astype(np.float64).any(), f"{name}: rows past the groups are not zero"


def remembered(oracle):
    """An oracle that remembers its last results, which become read-only.

    Tests of both frameworks, and of options that leave the result as it is, call it with equal arguments in succession.
    """
    results = collections.OrderedDict()

    @functools.wraps(oracle)
    def call(*arguments, **options):
        key = hashlib.sha256(pickle.dumps((arguments, options))).digest()
        if key not in results:
            result = oracle(*arguments, **options)
            for array in jax.tree.leaves(result):
                if isinstance(array, np.ndarray):
                    array.setflags(write=False)
            results[key] = result
            if len(results) > 8:
                results.popitem(last=False)
        return results[key]

    return call

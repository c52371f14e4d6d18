"""Checks of the oracle: its forward passes against loops, its hand-derived gradients against central differences."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

STEP = 1e-4  # The fourth-order stencil truncates at about STEP**4 and rounds at about 1e-16 / STEP.


class Case(NamedTuple):
    """A function of the oracle.

    forward: takes the operands by name and returns a list of results.
    backward: takes the cotangents of the results and returns the gradients of the operands by name.
    operands: arrays by name.
    loops: None, or another definition of `forward`.
    bound: relative error of the gradients.
    """

    forward: Callable[..., list]
    backward: Callable[..., dict]
    operands: dict[str, Any]
    loops: Callable[..., list] | None = None
    bound: float = 1e-8


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def check(case):
    results = case.forward(**case.operands)
    if case.loops is not None:
        for i, (got, want) in enumerate(zip(results, case.loops(**case.operands), strict=True)):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12, err_msg=f"result {i}")
    cotangents = [normal(*np.shape(result), seed=9) for result in results]
    gradients = case.backward(*cotangents)
    assert gradients.keys() == case.operands.keys()
    for key, gradient in gradients.items():

        def loss(value, key=key):
            results = case.forward(**case.operands | {key: value})
            return sum((g * result).sum() for g, result in zip(cotangents, results, strict=True))

        _check_gradient(loss, case.operands[key], gradient, f"d_{key}", case.bound)


def _check_gradient(function, at, gradient, name, bound):
    """Asserts that `gradient` is the derivative of the scalar `function` at `at`, along three random directions.

    Entries that are not finite stay fixed; their gradient has to be 0.
    """
    at, gradient = np.asarray(at, np.float64), np.asarray(gradient)
    assert gradient.shape == at.shape, f"{name}: got shape {gradient.shape}, expected {at.shape}"
    assert not gradient[~np.isfinite(at)].any(), f"{name}: nonzero where the operand is not finite"
    rng = np.random.default_rng(at.size)
    for _ in range(3):
        direction = np.where(np.isfinite(at), rng.normal(size=at.shape), 0.0)
        one, other, two, opposite = (function(at + steps * STEP * direction) for steps in (1, -1, 2, -2))
        want = (8 * (one - other) - (two - opposite)) / (12 * STEP)
        error = abs((gradient * direction).sum() - want)
        # The differences themselves round by up to 1e-9, which is all that is left of a gradient of 0.
        assert error <= bound * np.linalg.norm(gradient) + 1e-9, f"{name}: got an error of {error}"

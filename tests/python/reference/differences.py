"""Central differences in float64, which every hand-derived gradient of the oracle is checked against."""

import numpy as np

STEP = 1e-4  # The fourth-order stencil truncates at about STEP**4 and rounds at about 1e-16 / STEP.


def check_gradient(function, at, gradient, name, bound=1e-8):
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

"""Central differences in float64, against which every hand-derived gradient is checked."""

import numpy as np

from oracle import assert_close

STEP = 1e-4  # fourth order: truncation about STEP^4, rounding about 1e-16 / STEP
BOUND = 1e-8


def derivative(function, at):
    """d function / d at, entry by entry, to fourth order; `function` maps an array to a number.

    Entries that aren't finite are left out: their derivative is returned as 0.
    """
    at = np.asarray(at, np.float64)
    out = np.zeros(at.shape)
    for i in np.ndindex(at.shape):
        if not np.isfinite(at[i]):
            continue

        def moved(steps, i=i):
            x = at.copy()
            x[i] += steps * STEP
            return function(x)

        out[i] = (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * STEP)
    return out


def check_gradient(function, at, gradient, name, bound=BOUND):
    """Assert that `gradient` is the derivative of the scalar `function` at `at`."""
    want = derivative(function, at)
    # where the true gradient is 0, as at K = 1, differences leave their own rounding
    if np.linalg.norm(want) < 1e-9:
        assert np.linalg.norm(gradient) < 1e-9, f"{name}: got norm {np.linalg.norm(gradient)}, expected 0"
    else:
        assert_close(gradient, want, bound, name)

"""Recorded routings for tests, and the replays that are tested against the oracle."""

import numpy as np

from anabranch.replay import Replay


def record(T, E, K, *, weights=True, mask=True, dtype=np.int32, wrong=False):
    """A Replay with repeated and missing experts and weights that no router computes.

    wrong: some indices are out of range. dtype: of the experts.
    """
    rng = np.random.default_rng([T, E, K])
    experts = rng.integers(-1, E, (T, K))
    experts[0], experts[1] = 2, -1
    if wrong:
        experts[2, 0], experts[3, -1] = E + 1, -5
    return Replay(
        experts.astype(dtype),
        (2 * rng.standard_normal((T, K))).astype(np.float32) if weights else None,
        np.arange(T) % 4 < 2 if mask else None,
    )


def replayed(replay):
    """bool [T, 1], True for replayed tokens."""
    return np.ones((len(replay.experts), 1), bool) if replay.mask is None else np.asarray(replay.mask)[:, None]


#: (arguments of `record`, further options of the layer)
CASES = {
    "experts": (dict(weights=False, mask=False), {}),
    "weights": (dict(mask=False, wrong=True), dict(score_function="sigmoid", scaling_factor=2.5)),
    "mask": (dict(weights=False, wrong=True), dict(normalize=False, scaling_factor=2.5)),
    "weights, mask": (dict(wrong=True), dict(align_size=4)),
    "weights early": (dict(), dict(weight_early=True, normalize=False, scaling_factor=0.5)),
    "int16": (dict(dtype=np.int16), dict(score_function="sqrtsoftplus")),
}

"""A recorded routing for the oracle: `docs/semantics.md`, section 14."""

from typing import NamedTuple

import numpy as np


class Replay(NamedTuple):
    """experts int[..., K], weights [..., K] or None, mask bool[...] or None (all tokens are replayed)."""

    experts: np.ndarray
    weights: np.ndarray | None = None
    mask: np.ndarray | None = None

    def replayed(self):
        """bool[..., 1], True for a replayed token."""
        mask = np.ones(np.shape(self.experts)[:-1], bool) if self.mask is None else np.asarray(self.mask)
        return mask[..., None]

    def flat(self):
        """The record with one dimension of tokens."""
        K = np.shape(self.experts)[-1]
        weights = None if self.weights is None else np.reshape(self.weights, (-1, K))
        mask = None if self.mask is None else np.reshape(self.mask, -1)
        return Replay(np.reshape(self.experts, (-1, K)), weights, mask)

"""Quantile balancing in numpy float64: a batch's histogram, and the bias computed from it. Semantics, section 10.

With a bias b, expert e gets a token if s + b reaches the token's threshold, its best key that is not selected. This
holds for K/E of the tokens if b is the K/E quantile of threshold - s.
"""

import numpy as np

from .scores import as_float64, scores
from .selection import best_first, selection_keys


def thresholds(logits, topk, *, score_function, expert_bias):
    """The (K+1)-th largest selection key of each token, float64[...]."""
    keys = selection_keys(logits, score_function, expert_bias)
    if not 1 <= topk < keys.shape[-1]:
        raise ValueError(f"topk: got {topk}, expected 1 to {keys.shape[-1] - 1}")
    return np.take_along_axis(keys, best_first(keys)[..., topk : topk + 1], axis=-1)[..., 0]


def bin_positions(logits, topk, lower, upper, bins, *, score_function, expert_bias):
    """(threshold - s - lower) bins / (upper - lower) of each token and expert, float64[..., E]."""
    z = as_float64(logits, "logits")
    if not lower < upper:
        raise ValueError(f"qb_bin_bounds: got {lower}, {upper}, expected lower < upper")
    threshold = thresholds(z, topk, score_function=score_function, expert_bias=expert_bias)
    with np.errstate(invalid="ignore"):
        return (threshold[..., None] - scores(z, score_function) - lower) * (bins / (upper - lower))


def qb_histogram(logits, topk, lower, upper, bins, *, score_function, expert_bias, token_mask=None):
    """int32[E, bins]: the number of unmasked tokens per distance between threshold and the expert's score.

    Distances outside the bounds are counted in the first or last bin; NaN is counted in no bin.
    """
    options = {"score_function": score_function, "expert_bias": expert_bias}
    positions = bin_positions(logits, topk, lower, upper, bins, **options)
    if token_mask is not None:
        positions = np.where(np.asarray(token_mask)[..., None], positions, np.nan)
    rows = positions.reshape(-1, positions.shape[-1])
    counted = ~np.isnan(rows)
    bins_of_rows = np.clip(np.floor(np.where(counted, rows, 0.0)), 0, bins - 1).astype(np.int64)
    histogram = np.zeros((rows.shape[1], bins), np.int32)
    np.add.at(histogram, (np.nonzero(counted)[1], bins_of_rows[counted]), 1)
    return histogram


def quantile_bias(histogram, lower, upper, topk):
    """float64[E]: the K/E quantile of each expert's distribution, minus the mean over experts.

    The quantile is interpolated linearly inside its bin; it is `lower` for an expert without counts.
    """
    counts = np.asarray(histogram, np.int64)
    num_experts, bins = counts.shape
    cumulative = counts.cumsum(axis=1)
    width = (upper - lower) / bins
    quantiles = np.full(num_experts, float(lower))
    for e in range(num_experts):
        target = cumulative[e, -1] * topk / num_experts
        if target > 0:
            bin_index = int(np.argmax(cumulative[e] * num_experts >= cumulative[e, -1] * topk))  # exact
            before = cumulative[e, bin_index] - counts[e, bin_index]
            quantiles[e] = lower + (bin_index + (target - before) / counts[e, bin_index]) * width
    return quantiles - quantiles.mean()

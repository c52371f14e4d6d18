"""Quantile balancing: computes the bias that gives every expert an equal share of the tokens.

An expert's bias does not move by a fixed step. It is set to the value that would have given the expert K/E of the
tokens of a batch: the K/E quantile of the distance of its score below a token's threshold, from `route`'s histogram.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.jax.binding import check
from anabranch.jax.binding.eager import compiled

#: The square of the number of experts must fit int32.
_MOST_EXPERTS = 46340


def bin_bounds(value: Any, names: tuple[str, str] = ("qb_bin_bounds", "qb_bin_bounds")) -> jax.Array:
    """Checks `qb_bin_bounds`: float32 [2] or a pair, lower < upper if both are on the host; names: for errors."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"qb_bin_bounds: got {check.shown(value)}, expected (lower, upper)")
        named = list(zip(names, value, strict=True))
        ends = [v if isinstance(v, jax.Array) else np.float32(check.number(name, v)) for name, v in named]
        if any(isinstance(end, jax.Array) for end in ends):
            pair = zip(names, map(jnp.asarray, ends), strict=True)
            return jnp.stack([check.array(name, end, ("float32",), ()) for name, end in pair])
        value = np.array(ends, np.float32)
    bounds = check.array("qb_bin_bounds", value, ("float32",), (2,))
    if not isinstance(value, jax.Array) and not (value[0] < value[1] and np.isfinite(value).all()):
        raise ValueError(f"{names[0]}: got {value[0]}, {value[1]}, expected lower < upper, both finite")
    return bounds


def host_bounds(value: Any) -> tuple[float, float]:
    """Checks a static `qb_bin_bounds`: a pair of numbers, lower < upper."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"qb_bin_bounds: got {check.describe(value)}, expected (lower, upper)")
    lower, upper = (check.number("qb_bin_bounds", end) for end in value)
    if not np.float32(lower) < np.float32(upper):
        raise ValueError(f"qb_bin_bounds: got {lower}, {upper}, expected lower < upper")
    return lower, upper


def quantile_bias(histogram: jax.Array, lower: float | jax.Array, upper: float | jax.Array, topk: int) -> jax.Array:
    """The expert bias with which each expert would have received an equal share of the counted tokens.

    Args:
      histogram: int32 [E, bins], `route(..., qb_bin_bounds=(lower, upper), qb_bins=bins).qb_histogram`, or a sum of
        these over batches. The result is NaN if the counts of an expert add up to 2^31 or more.
      lower, upper: the bounds of the bins, numbers or float32 scalars.
      topk: K, 1 <= K < E.

    Returns:
      float32 [E]: the K/E quantile of every expert's distribution minus their mean. The quantile is interpolated
      linearly inside its bin; it is `lower` for an expert without counts.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: none.
    Source: semantics, section 10; quantile balancing as in Kimi-K3.

    >>> quantile_bias(jnp.array([[0, 2, 0, 0], [0, 0, 0, 2]]), 0.0, 4.0, 1).tolist()
    [-1.0, 1.0]
    """
    counts = check.array("histogram", histogram, ("int32",), ("E", "bins"))
    E, bins = counts.shape
    if not 1 <= bins:
        raise ValueError(f"histogram: got {check.describe(counts)}, expected int32 [E, bins] with at least one bin")
    if E > _MOST_EXPERTS:
        raise ValueError(f"histogram: got {E} experts, expected at most {_MOST_EXPERTS}")
    topk = check.integer("topk", topk, 1, E - 1)
    return _bias(topk, counts, bin_bounds((lower, upper), ("lower", "upper")))


@compiled(static_argnums=(0,))
def _bias(topk: int, counts: jax.Array, bounds: jax.Array) -> jax.Array:
    """`quantile_bias` of checked arguments; bounds: (lower, upper)."""
    (E, bins), (lower, upper) = counts.shape, bounds
    cumulative = jnp.cumsum(counts, axis=1)
    # The quantile is at count K n / E of n. Integer part and remainder are exact, so it never moves to another bin.
    n_quotient, n_remainder = cumulative[:, -1] // E, cumulative[:, -1] % E
    whole, remainder = topk * n_quotient + topk * n_remainder // E, (topk * n_remainder) % E
    bin_index = jnp.sum(cumulative < (whole + (remainder > 0))[:, None], axis=1)[:, None]
    in_bin = jnp.take_along_axis(counts, jnp.minimum(bin_index, bins - 1), axis=1)[:, 0]
    before = jnp.take_along_axis(cumulative, jnp.minimum(bin_index, bins - 1), axis=1)[:, 0] - in_bin
    fraction = ((whole - before).astype(jnp.float32) + remainder.astype(jnp.float32) / E) / jnp.maximum(in_bin, 1)
    width = (upper - lower) / bins
    has_counts = cumulative[:, -1] > 0
    quantiles = jnp.where(has_counts, lower + (bin_index[:, 0].astype(jnp.float32) + fraction) * width, lower)
    overflowed = jnp.any(cumulative < 0, axis=1)  # the first sum that overflows int32 is negative
    quantiles = jnp.where(overflowed, jnp.nan, quantiles)
    return jax.lax.stop_gradient(quantiles - jnp.mean(quantiles))

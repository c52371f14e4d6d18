"""Quantile balancing: computes the expert bias from the histogram of `route`.

The bias is not moved by a fixed step. It is set to the value that would have given the expert K/E of the tokens of a
batch: the K/E quantile of the distance from the expert's score up to the token's threshold.
"""

import math
from typing import Any

import torch
from torch import Tensor

from anabranch._text import shown
from anabranch.torch.binding import check


def _float32(value: float) -> float:
    """Rounds to float32 in plain Python, which torch.compile can trace."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 2.0**24), exponent - 24)


def _ascending(names: tuple[str, str], ends: Any) -> tuple[float, float]:
    """Checks two numbers, lower < upper in float32. names: of the arguments, for messages."""
    lower, upper = (check.number(name, end) for name, end in zip(names, ends, strict=True))
    if not _float32(lower) < _float32(upper):
        raise ValueError(f"{names[0]}: got {lower}, {upper}, expected lower < upper")
    return lower, upper


def bin_bounds(value: Any, like: Tensor, names: tuple[str, str] = ("qb_bin_bounds", "qb_bin_bounds")) -> Tensor:
    """Checks `qb_bin_bounds`, float32 [2] or a pair, and returns it as a tensor. names: of both bounds, for messages.

    lower < upper is checked for numbers, and in eager mode for CPU tensors. Numbers are moved to the device of `like`
    without waiting for it.
    """
    if not isinstance(value, (tuple, list)):
        return _known_ascending(names, check.tensor("qb_bin_bounds", value, (torch.float32,), (2,)))
    if len(value) != 2:
        raise ValueError(f"qb_bin_bounds: got {shown(value)}, expected (lower, upper)")
    if not any(isinstance(end, Tensor) for end in value):
        numbers = _ascending(names, value)
        # Two fills, since a copy from pageable memory would wait for the device.
        return torch.stack([torch.full((), float(end), dtype=torch.float32, device=like.device) for end in numbers])
    ends = [
        check.tensor(name, end, (torch.float32,), ()) if isinstance(end, Tensor) else
        torch.full((), check.number(name, end), dtype=torch.float32, device=like.device)
        for name, end in zip(names, value, strict=True)
    ]  # fmt: skip
    return _known_ascending(names, torch.stack(ends))


def _known_ascending(names: tuple[str, str], bounds: Tensor) -> Tensor:
    """Returns bounds [2], checked if the host can read them without waiting for a device."""
    known = check.host_values(bounds)
    if known is not None and not (math.isfinite(known[0]) and math.isfinite(known[1]) and known[0] < known[1]):
        raise ValueError(f"{names[0]}: got {known[0]}, {known[1]}, expected lower < upper, both finite")
    return bounds


def host_bounds(value: Any) -> tuple[float, float]:
    """Checks `qb_bin_bounds` as an option: a pair of numbers, lower < upper."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"qb_bin_bounds: got {check.describe(value)}, expected (lower, upper)")
    return _ascending(("qb_bin_bounds", "qb_bin_bounds"), value)


def quantile_bias(histogram: Tensor, lower: float | Tensor, upper: float | Tensor, topk: int) -> Tensor:
    """The expert bias under which each expert would have received K/E of the counted tokens.

    Args:
      histogram: int32 or int64 [E, bins], `route(..., qb_bin_bounds=(lower, upper), qb_bins=bins).qb_histogram`, or
        the sum over several batches.
      lower, upper: bounds of the bins, numbers or float32 scalars.
      topk: K, 1 <= K < E.

    Returns:
      float32 [E]: the K/E quantile of every expert's distribution, minus their mean. Quantiles are interpolated
      linearly within a bin; `lower` where nothing was counted.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: none.
    Source: semantics, section 10; quantile balancing is Kimi-K3's.

    >>> quantile_bias(torch.tensor([[0, 2, 0, 0], [0, 0, 0, 2]], dtype=torch.int32), 0.0, 4.0, 1).tolist()
    [-1.0, 1.0]
    """
    counts = check.tensor("histogram", histogram, (torch.int32, torch.int64), ("E", "bins"))
    E, bins = counts.shape
    if not 1 <= bins:
        raise ValueError(f"histogram: got {check.describe(counts)}, expected int32 [E, bins] with at least one bin")
    topk = check.integer("topk", topk, 1, E - 1)
    low, high = bin_bounds((lower, upper), counts, ("lower", "upper")).unbind()
    through = counts.cumsum(1)
    # The quantile is at position K n / E of n counts. Quotient and remainder are exact, so the bin is, too.
    total = through[:, -1]
    quotient, remainder = topk * total // E, topk * total % E
    bin_index = (through < (quotient + (remainder > 0))[:, None]).sum(1)
    place = bin_index.clamp(max=bins - 1)[:, None]
    inside = counts.gather(1, place)[:, 0]
    before = through.gather(1, place)[:, 0] - inside
    part = ((quotient - before).float() + remainder.float() / E) / inside.clamp(min=1)
    quantiles = torch.where(total > 0, low + (bin_index.float() + part) * ((high - low) / bins), low)
    return (quantiles - quantiles.mean()).detach()

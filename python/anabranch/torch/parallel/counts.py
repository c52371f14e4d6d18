"""Counts of all ranks, which are added up while the experts compute."""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.torch.binding import private
from anabranch.torch.parallel.exchange import Ranks


class Counts(NamedTuple):
    """Counts of a rank, or of all ranks: int32."""

    tokens_per_expert: Tensor
    """[E], before dropping."""
    dropped: Tensor
    """[P], dropped assignments by source rank."""
    histogram: Tensor
    """[E, bins], of the router; no elements without one."""


class CountsOnTheWay:
    """Adds up the counts of all ranks with one all-reduce.

    Args:
      counts, histogram: of this rank, see `Counts`.
      dropped: int32 [], of this rank.
    """

    def __init__(self, ranks: Ranks, counts: Tensor, dropped: Tensor, histogram: Tensor):
        by_source = dropped.new_zeros(ranks.ranks)
        by_source[ranks.rank] = dropped
        self._own = Counts(counts, by_source, histogram)
        packed = torch.cat([values.reshape(-1) for values in self._own])
        self._arriving = private.collectives.all_reduce(packed, "sum", ranks.group)

    def wait(self) -> Counts:
        """The sums. What was enqueued before overlaps with the all-reduce."""
        parts = private.collectives.wait_tensor(self._arriving).split([values.numel() for values in self._own])
        return Counts(*(part.clone().view_as(own) for part, own in zip(parts, self._own, strict=True)))

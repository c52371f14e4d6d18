"""Sizes of the buffers of expert parallelism, from shapes and options alone, the same for every front end."""

import dataclasses
import math

from anabranch.precision import BLOCK
from anabranch.rows import num_rows_needed


@dataclasses.dataclass(frozen=True)
class ExchangeSizes:
    """What the sizes of a rank's buffers follow from.

    Attributes:
      ranks: P; experts: E; align_size: as for `plan`; tokens: T of a rank; topk: K.
      slots_per_token: the slots of one token that can go to one rank: min(K, E/P), K where experts may repeat.
      capacity: slots that a rank takes, None: all.
    """

    ranks: int
    experts: int
    align_size: int
    tokens: int
    topk: int
    slots_per_token: int
    capacity: int | None

    @property
    def local_experts(self) -> int:
        """E/P."""
        return self.experts // self.ranks

    @property
    def pair_slots(self) -> int:
        """Slots that one rank can send to one other."""
        slots = self.tokens * self.slots_per_token
        return slots if self.capacity is None else min(slots, self.capacity)

    @property
    def arriving_slots(self) -> int:
        """Slots that can arrive at a rank."""
        slots = self.ranks * self.tokens * self.slots_per_token
        return slots if self.capacity is None else min(slots, self.capacity)

    @property
    def region(self) -> int:
        """Rows of the region of a buffer that is for one rank: the most that one rank can have for another."""
        return num_rows_needed(self.pair_slots, self.local_experts, self.align_size)


def capacity_of(factor: float | None, tokens: int, topk: int) -> int | None:
    """Slots that a rank takes of all that go to it; None: all."""
    return None if factor is None else math.ceil(factor * tokens * topk)


def traffic(bounds: ExchangeSizes, itemsize: int, fp8_exchange: bool = False) -> dict[str, float]:
    """Bytes a rank sends for every column of D in a forward pass, there and back, by transport (docs/scaling.md).

    itemsize: of x. fp8_exchange: tokens travel as a byte an element, and 4 for every block of 128.
    """
    b, others = bounds, bounds.ranks - 1
    there = 1 + 4 / BLOCK if fp8_exchange else itemsize
    return {
        "ring": others * b.tokens * (there + itemsize),
        "all_to_all": others * b.region * (there + itemsize),
        "ragged": b.tokens * b.topk * others / b.ranks * (there + itemsize),
    }

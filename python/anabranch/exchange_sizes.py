"""Sizes of the buffers of expert parallelism, from shapes and options alone, the same for every front end."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from anabranch.checks import INDEX_LIMIT
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

    def rows(self, transport: str) -> int:
        """Rows of a rank's largest buffer."""
        if transport == "ring":
            return num_rows_needed(self.arriving_slots, self.local_experts, self.align_size)
        if transport == "all_to_all":
            return self.ranks * self.region
        return max(
            num_rows_needed(self.tokens * self.topk, self.experts, self.align_size),
            num_rows_needed(self.arriving_slots, self.experts, self.align_size),
        )

    def check(self, transport: str, too_many: Callable[[Any], bool] = lambda number: number >= INDEX_LIMIT) -> None:
        """Raises ValueError unless int32 holds the counts and row indices of all ranks.

        too_many: whether int32 can't hold a number, for numbers that a program may not know.
        """
        if too_many(self.ranks * self.tokens * self.topk):
            raise ValueError(
                f"x: got {self.tokens} tokens with topk {self.topk} on each of {self.ranks} ranks, expected fewer than "
                "2^31 slots of all ranks"
            )
        if too_many(rows := self.rows(transport)):
            raise ValueError(
                f"align_size: got {self.align_size}, with which transport {transport!r} needs {rows} rows, expected "
                "fewer than 2^31"
            )


def capacity_of(factor: float | None, tokens: int, topk: int, ranks: int, slots_per_token: int) -> int | None:
    """Slots that a rank takes of all that go to it; None: all, also where the factor allows for more."""
    if factor is None or factor * topk >= ranks * slots_per_token:
        return None
    return math.ceil(factor * tokens * topk)


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

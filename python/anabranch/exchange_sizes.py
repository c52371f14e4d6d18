"""Buffer sizes of expert parallelism, from shapes and options alone, shared by the front ends."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from anabranch.checks import INDEX_LIMIT
from anabranch.precision import BLOCK
from anabranch.rows import num_rows_needed

#: Bytes per second and rank of transports on GPUs over NVLink, measured on two and four H200s
#: (docs/notes/expert_parallel.md): of XLA's collectives, and of the all-gather of "p2p".
GPU_RATES = {"p2p": 308e9, "ring": 220e9, "all_to_all": 240e9}


@dataclasses.dataclass(frozen=True)
class ExchangeSizes:
    """The quantities that determine the sizes of a rank's buffers.

    Attributes:
      ranks: P; experts: E; align_size: as for `plan`; tokens: T per rank; topk: K.
      slots_per_token: the most assignments of one token to one rank: min(K, E/P), or K if experts may repeat.
      capacity: the number of assignments that a rank accepts; None: all.
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
        """The most assignments that one rank can send to another."""
        slots = self.tokens * self.slots_per_token
        return slots if self.capacity is None else min(slots, self.capacity)

    @property
    def arriving_slots(self) -> int:
        """The most assignments that can arrive at a rank."""
        slots = self.ranks * self.tokens * self.slots_per_token
        return slots if self.capacity is None else min(slots, self.capacity)

    @property
    def region(self) -> int:
        """Rows of the buffer region for one rank: the most rows that one rank can send to another."""
        return num_rows_needed(self.pair_slots, self.local_experts, self.align_size)

    def rows(self, transport: str) -> int:
        """Rows of a rank's largest buffer."""
        if transport in ("ring", "p2p"):
            return num_rows_needed(self.arriving_slots, self.local_experts, self.align_size)
        if transport == "all_to_all":
            return self.ranks * self.region
        if transport == "ragged":
            return max(
                num_rows_needed(self.tokens * self.topk, self.experts, self.align_size),
                num_rows_needed(self.arriving_slots, self.experts, self.align_size),
            )
        raise ValueError(f"transport: got {transport!r}, expected 'ring', 'p2p', 'all_to_all' or 'ragged'")

    def check(self, transport: str, too_many: Callable[[Any], bool] = lambda number: number >= INDEX_LIMIT) -> None:
        """Raises ValueError unless int32 can represent the counts and row indices of all ranks.

        too_many: returns whether int32 can't represent a number, which may be symbolic.
        """
        if too_many(self.ranks * self.tokens * self.topk):
            raise ValueError(
                f"x: got {self.tokens} tokens with topk {self.topk} on each of {self.ranks} ranks, expected fewer than "
                "2^31 slots over all ranks"
            )
        if too_many(rows := self.rows(transport)):
            raise ValueError(
                f"align_size: got {self.align_size}, with which transport {transport!r} needs {rows} rows, expected "
                "fewer than 2^31"
            )


def capacity_of(factor: float | None, tokens: int, topk: int, ranks: int, slots_per_token: int) -> int | None:
    """The number of assignments that a rank accepts; None if there is no factor or it allows for all assignments."""
    if factor is None or factor * topk >= ranks * slots_per_token:
        return None
    return math.ceil(factor * tokens * topk)


def traffic(bounds: ExchangeSizes, itemsize: int, fp8_exchange: bool = False) -> dict[str, float]:
    """The traffic of a forward pass, in both directions (docs/scaling.md).

    Args:
      bounds: the sizes of the exchange.
      itemsize: bytes per element of x.
      fp8_exchange: whether tokens are sent with 1 byte per element and 4 bytes per block of 128.

    Returns:
      The bytes that a rank sends per column of D, by transport.
    """
    b, others = bounds, bounds.ranks - 1
    token_bytes = 1 + 4 / BLOCK if fp8_exchange else itemsize
    ring = others * b.tokens * (token_bytes + itemsize)
    return {
        "ring": ring,
        "p2p": ring,
        "all_to_all": others * b.region * (token_bytes + itemsize),
        "ragged": b.tokens * b.topk * others / b.ranks * (token_bytes + itemsize),
    }


def fastest(rates: Mapping[str, float], bytes_sent: Mapping[str, float], p2p: bool) -> str:
    """The transport with the shortest estimated time, bytes / rate, among those of `rates`.

    p2p: whether "p2p" may be chosen.
    """
    names = [name for name in rates if p2p or name != "p2p"]
    return min(names, key=lambda name: bytes_sent[name] / rates[name])

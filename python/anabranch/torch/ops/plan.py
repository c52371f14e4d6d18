"""The plan: gather and scatter indices between tokens and rows grouped by expert.

Sizes: T tokens (product of all leading dimensions), K experts per token, E experts, R rows. Slot t*K + k is assignment
(t, k): token t, its k-th expert.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.rows import check_num_slots, check_rows_needed, num_rows_needed
from anabranch.torch.binding import check
from anabranch.torch.binding.native import call
from anabranch.torch.ops import torch_ops


class Plan(NamedTuple):
    """The row of every slot; the result of `plan` and an argument of `dispatch` and `combine`.

    Rows of one expert are contiguous, ordered by (token, k). Expert e owns group_sizes[e] rows, starting at offsets[e].

    Attributes:
      tokens_per_expert: int32[E]: slots of every expert before dropping.
      group_sizes: int32[E]: rows of every expert, tokens_per_expert rounded up to align_size and clipped to R.
      offsets: int32[E + 1]: the first row of every expert, and the end of the last.
      row_of_slot: int32[..., K]: -1 where a slot has no row.
      slot_of_row: int32[R]: -1 in padding rows and past the last group.
      dropped: int32[]: slots past R rows, and indices outside [-1, E).
    """

    tokens_per_expert: Tensor
    group_sizes: Tensor
    offsets: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor
    dropped: Tensor

    @property
    def expert_of_row(self) -> Tensor:
        """int32[R]: the expert of every row, -1 in padding rows and past the last group; computed on access."""
        rows = torch.arange(self.slot_of_row.shape[0], dtype=torch.int32, device=self.slot_of_row.device)
        # If several groups start at one row, all but the last are empty.
        experts = torch.searchsorted(self.offsets[:-1].contiguous(), rows, right=True, out_int32=True) - 1
        return torch.where(self.slot_of_row >= 0, experts, -1)


def plan(
    experts: Tensor, num_experts: int, *, align_size: int = 0, num_rows: int | None = None, num_destinations: int = 1
) -> Plan:
    """Assigns rows to slots: ordered by expert, within one expert by (token, k).

    Args:
      experts: int16, int32 or int64 [..., K], K >= 1. -1: no expert. An index outside [-1, E) is treated as -1 and
        counted in `dropped`. An index may repeat; every slot gets a row of its own.
      num_experts: E.
      align_size: a; the rows of every expert are padded to a multiple of a. 0 or 1: no padding.
      num_rows: R, a multiple of align_size. Slots past it are dropped and counted. Default: the bound over all
        routings of N slots, floor((N + min(E, N) (a - 1)) / a) a, so nothing is dropped.
      num_destinations: P, a divisor of E. Rows are divided into P regions of R/P, one per destination of an exchange,
        which owns E/P consecutive experts. The groups of a destination start at its region and are clipped to it. The
        default R lets every region hold all slots.

    Returns:
      A `Plan` of integer tensors, deterministic and without gradients.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument is out of range, or T*K or R reaches 2^31.

    Source: semantics, section 5.

    >>> p = plan(torch.tensor([[1], [0], [1]]), 2)
    >>> p.row_of_slot.ravel().tolist(), p.offsets.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    E = check.integer("num_experts", num_experts, 1, check.INDEX_LIMIT - 1)
    align_size = check.integer("align_size", align_size, 0, check.INDEX_LIMIT - 1)
    experts = check.tensor("experts", experts, check.INDICES, (..., "K"))
    *leading, K = experts.shape
    T = math.prod(leading)
    if K < 1:
        raise ValueError(f"experts: got {check.describe(experts)}, expected [..., K] with K >= 1")
    check_num_slots("experts", T, K)
    P = check.integer("num_destinations", num_destinations, 1, E)
    if E % P:
        raise ValueError(f"num_destinations: got {P}, expected a divisor of {E} experts")
    needed = P * num_rows_needed(T * K, E // P, align_size, check.smaller)
    if num_rows is None:
        check_rows_needed(needed, align_size, P)
    R = needed if num_rows is None else check.num_rows("num_rows", num_rows, align_size, P)
    return run_plan(experts, E, R, align_size, P)


def run_plan(experts: Tensor, num_experts: int, rows: int, align_size: int, num_destinations: int = 1) -> Plan:
    """`plan` on checked arguments."""
    flat = experts.reshape(math.prod(experts.shape[:-1]), experts.shape[-1])
    counts, sizes, offsets, row_of_slot, slot_of_row, dropped = call(
        torch_ops.plan, flat, num_experts, rows, align_size, num_destinations
    )
    return Plan(counts, sizes, offsets, row_of_slot.reshape(experts.shape), slot_of_row, dropped)


def check_plan(value: Any) -> Plan:
    """Returns the value if it is a Plan."""
    if not isinstance(value, Plan):
        raise TypeError(f"plan: got {check.describe(value)}, expected a Plan")
    row_of_slot = check.tensor("plan.row_of_slot", value.row_of_slot, (torch.int32,), (..., "K"))
    if row_of_slot.shape[-1] < 1:
        raise ValueError(f"plan.row_of_slot: got {check.describe(row_of_slot)}, expected [..., K] with K >= 1")
    slot_of_row = check.tensor("plan.slot_of_row", value.slot_of_row, (torch.int32,), ("R",))
    check_num_slots("plan.row_of_slot", math.prod(row_of_slot.shape[:-1]), row_of_slot.shape[-1])
    check.same_device("plan.row_of_slot", row_of_slot, **{"plan.slot_of_row": slot_of_row})
    return value

"""Counts that add up over forward passes, each token's once."""

from typing import Any

import torch
from torch import Tensor

_ops = torch.library.Library("anabranch", "FRAGMENT")


def _add_counts(total: Tensor, counts: Tensor) -> None:
    # What runs a forward pass inside of a backward pass is an activation checkpoint: its tokens have been counted.
    if torch._C._current_graph_task_id() == -1:
        total.add_(counts)


def _nothing(total: Tensor, counts: Tensor) -> None:
    """What there is to know without the numbers."""


_ops.define("add_counts(Tensor(a!) total, Tensor counts) -> ()")
for _key in ("CPU", "CUDA"):
    _ops.impl("add_counts", _add_counts, _key)


def _add_slices(info: Any, in_dims: Any, total: Tensor, counts: Tensor) -> tuple[None, None]:
    """Counts of all slices, to a total that they share or, slice by slice, to one of each."""
    of_total, of_counts = in_dims
    if of_counts is None:  # the same of each slice
        counts = counts.expand(info.batch_size, *counts.shape)
        of_counts = 0
    if of_total is None:
        add_counts(total, counts.sum(of_counts, dtype=total.dtype))
    else:
        add_counts(total.movedim(of_total, 0), counts.movedim(of_counts, 0))
    return None, None


torch.library.register_fake("anabranch::add_counts", _nothing, lib=_ops)

torch.library.register_vmap("anabranch::add_counts", _add_slices, lib=_ops)

#: total += counts, in place, unless it is run again for a backward pass. An operation: so a compiled graph asks, too.
add_counts = torch.ops.anabranch.add_counts.default

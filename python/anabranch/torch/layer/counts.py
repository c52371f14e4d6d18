"""Counts accumulated over forward passes, without recomputation under activation checkpointing."""

from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import private

_ops = torch.library.Library("anabranch", "FRAGMENT")


def _add_counts(total: Tensor, counts: Tensor) -> None:
    # A forward pass inside a backward pass recomputes a checkpoint, whose tokens have been counted.
    if private.graph_task() == -1:
        total.add_(counts)


def _nothing(total: Tensor, counts: Tensor) -> None:
    """The fake implementation."""


_ops.define("add_counts(Tensor(a!) total, Tensor counts) -> ()")
for _key in ("CPU", "CUDA"):
    _ops.impl("add_counts", _add_counts, _key)


def _add_slices(info: Any, in_dims: Any, total: Tensor, counts: Tensor) -> tuple[None, None]:
    """The vmap rule: adds all slices to a shared total, or each slice to its own."""
    total_dim, counts_dim = in_dims
    if counts_dim is None:  # shared by all slices
        counts = counts.expand(info.batch_size, *counts.shape)
        counts_dim = 0
    if total_dim is None:
        add_counts(total, counts.sum(counts_dim, dtype=total.dtype))
    else:
        add_counts(total.movedim(total_dim, 0), counts.movedim(counts_dim, 0))
    return None, None


torch.library.register_fake("anabranch::add_counts", _nothing, lib=_ops)

torch.library.register_vmap("anabranch::add_counts", _add_slices, lib=_ops)

#: total += counts in place, except during recomputation in a backward pass. As an operation it also works compiled.
add_counts = torch.ops.anabranch.add_counts.default

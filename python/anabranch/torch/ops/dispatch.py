"""Dispatch and combine: tokens to rows grouped by expert, and back.

Sizes: T tokens (product of all leading dimensions), K experts per token, E experts, D width, R rows. Slot t*K + k is
assignment (t, k): token t, its k-th expert.
"""

import math
from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import check
from anabranch.torch.binding.autograd import Function, needs_gradient
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.plan import Plan, check_plan

ANY_DTYPE = (*check.FLOATS, torch.bool, torch.uint8, *check.INDICES)


class _Dispatch(Function):
    @staticmethod
    def forward(x, row_of_slot, slot_of_row):
        return torch_ops.dispatch(x, row_of_slot, slot_of_row, None)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, row_of_slot, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(row_of_slot)
        if not x.dtype.is_floating_point:
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, d_rows):
        (row_of_slot,) = ctx.saved_tensors
        return torch_ops.combine(d_rows, row_of_slot, None, None, ctx.dtype), None, None


class _Combine(Function):
    @staticmethod
    def forward(rows, row_of_slot, slot_of_row, weights):
        return torch_ops.combine(rows, row_of_slot, weights, None, rows.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        rows, row_of_slot, slot_of_row, weights = inputs
        ctx.dtype = rows.dtype
        needs_rows = weights is not None and needs_gradient(ctx, 3)
        ctx.save_for_backward(rows if needs_rows else None, row_of_slot, slot_of_row, weights)

    @staticmethod
    def backward(ctx, d_out):
        rows, row_of_slot, slot_of_row, weights = ctx.saved_tensors
        needs_weights = rows is not None
        d_rows, d_weights = torch_ops.combine_backward(
            d_out, rows, row_of_slot, slot_of_row, weights, ctx.dtype, needs_weights
        )
        return d_rows, None, None, d_weights.to(weights.dtype) if needs_weights else None


def _flat(tensor: Tensor) -> Tensor:
    """Reshapes [..., N] to [T, N]."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def dispatch(x: Tensor, plan: Plan) -> Tensor:
    """Copies every token to the rows of its slots: rows[row_of_slot[t, k]] = x[t].

    Args:
      x: [..., D] with the leading dimensions of plan.row_of_slot; float32, bfloat16, float16, or (without a gradient)
        bool, uint8, int16, int32, int64.
      plan: from `plan`.

    Returns:
      rows [R, D], dtype of x. Padding rows are zero.

    Gradient: d_x[t] = sum over k of d_rows[row(t, k)], summed in float32 in the order of k. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: x does not have the plan's leading dimensions, or is on another device.

    Source: semantics, section 5.

    >>> from anabranch.torch import plan
    >>> p = plan(torch.tensor([[1], [0]]), 2)
    >>> dispatch(torch.tensor([[1.0], [2.0]]), p).ravel().tolist()
    [2.0, 1.0]
    """
    check_plan(plan)
    x = check.tensor("x", x, ANY_DTYPE, (*plan.row_of_slot.shape[:-1], "D"))
    check.same_device("x", x, plan=plan.row_of_slot)
    rows: Tensor = _Dispatch.call(_flat(x), _flat(plan.row_of_slot), plan.slot_of_row)
    return rows


def combine(rows: Tensor, plan: Plan, weights: Any = None) -> Tensor:
    """Sums the rows of every token: out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]].

    Args:
      rows: [R, D] float32, bfloat16 or float16.
      plan: from `plan`.
      weights: float32, bfloat16 or float16 [..., K], the shape of plan.row_of_slot; None: ones.

    Returns:
      out [..., D], dtype of rows, summed in float32 in the order of k. Slots without a row are skipped.

    Gradient: d_rows[row] = w[t, k] d_out[t], zero in padding rows; d_w[t, k] = <d_out[t], rows[row]>, also where w is
    0, and zero in slots without a row. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: rows or weights do not match the plan, or are on another device.

    Source: semantics, section 5.

    >>> from anabranch.torch import plan
    >>> p = plan(torch.tensor([[1, 0]]), 2)
    >>> combine(torch.tensor([[10.0], [20.0]]), p, torch.tensor([[0.5, 0.25]])).tolist()
    [[12.5]]
    """
    check_plan(plan)
    rows = check.tensor("rows", rows, check.FLOATS, (("R", plan.slot_of_row.shape[0]), "D"))
    weights = check.optional_tensor("weights", weights, check.FLOATS, plan.row_of_slot.shape)
    check.same_device("rows", rows, plan=plan.row_of_slot, weights=weights)
    flat_weights = None if weights is None else _flat(weights)
    out: Tensor = _Combine.call(rows, _flat(plan.row_of_slot), plan.slot_of_row, flat_weights)
    return out.reshape(*plan.row_of_slot.shape[:-1], out.shape[1])

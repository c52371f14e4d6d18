"""Calling the gate as a module with bitwise the same results as the fused layer.

The fused layer adds two gradients of x in float32, from the experts and from the logits, and rounds the sum once. If
the gate is a module, its input gradient has the dtype of x, so plain autograd would round three times. Instead, x is
forked:

    x ---> for_gate ---> gate ---> logits ---> layer
      \\--> port (float32) -------------------> layer

The layer takes x without a gradient and returns the experts' part as the float32 gradient of the port. The fork adds
both parts and rounds once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.torch.binding.autograd import Function


class Fork(NamedTuple):
    """The results of `fork`."""

    for_gate: Tensor
    """[..., D]: x, with masked tokens set to 0, since 0 * NaN in the gate's gradient would be NaN."""
    port: Tensor
    """float32 [..., D] without data (an expanded scalar)."""


class _Fork(Function):
    @staticmethod
    def forward(x, token_mask):
        for_gate = x.view_as(x) if token_mask is None else torch.where(token_mask[..., None], x, 0)
        return for_gate, x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.dtype = inputs[0].dtype
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, d_for_gate, d_port):
        (token_mask,) = ctx.saved_tensors
        if d_for_gate is None:
            return None if d_port is None else d_port.to(ctx.dtype), None
        if token_mask is not None:
            d_for_gate = torch.where(token_mask[..., None], d_for_gate, 0)
        return d_for_gate if d_port is None else (d_port + d_for_gate.float()).to(ctx.dtype), None


def fork(x: Tensor, token_mask: Tensor | None) -> Fork:
    """Forks x [..., D]; token_mask is a checked bool [...] or None."""
    return Fork(*_Fork.call(x, token_mask))

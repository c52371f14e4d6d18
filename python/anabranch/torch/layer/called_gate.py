"""The gate called as a module, with the same bits as the layer that computes the logits itself.

The layer adds two gradients of x in float32 and rounds the sum: what comes back from the experts, and what comes back
through the logits. A module's input gradient has the dtype of its input, so autograd alone would round three times.
Here x forks instead:

    x ---> for_gate ---> gate ---> logits ---> layer
      \\--> port (float32) -------------------> layer

The layer takes x without a gradient and gives the port the experts' part, in float32. The fork rounds the sum once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.torch.binding.autograd import Function


class Fork(NamedTuple):
    """What `fork` returns."""

    for_gate: Tensor
    """[..., D]: x; 0 where token_mask is False, since 0 * NaN in the gate's gradient would be NaN."""
    port: Tensor
    """Float32 [..., D], which holds no data."""


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
    """Forks x [..., D] with a checked mask bool [...]."""
    return Fork(*_Fork.call(x, token_mask))

"""The whole layer on a GPU in torch, eager operations."""

from collections.abc import Callable
from typing import Any

from anabranch.bench.cuda_layer_graphs import Operands
from anabranch.bench.layer_in_torch import grouped_mm_layer


def calls(given: Operands, topk: int) -> dict[str, Callable[[], Any]]:
    """The forward pass, and forward and backward: the output and the gradients of the leaves."""
    import torch

    def forward() -> Any:
        with torch.no_grad():
            return grouped_mm_layer(*given.leaves, given.experts, topk=topk)

    def both() -> Any:
        output = grouped_mm_layer(*given.leaves, given.experts, topk=topk)
        return output, *torch.autograd.grad(output, given.leaves, given.d_out)

    return {"forward": forward, "forward and backward": both}

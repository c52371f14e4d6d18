"""How the layer's parameters are drawn."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Initializer = Callable[[Tensor], Any]


def fan_in_normal_(parameter: Tensor) -> Tensor:
    """Fills a parameter whose last axis is the input's with a normal of variance 1 / fan-in, cut at two deviations."""
    cut = math.erf(math.sqrt(2.0))
    deviation = 0.87962566103423978  # of a unit normal that is cut there
    values = torch.empty_like(parameter, dtype=torch.float32).uniform_(-cut, cut).erfinv_()
    limit = 2 / deviation / math.sqrt(parameter.shape[-1])
    return parameter.copy_(values.mul_(limit / math.sqrt(2.0)).clamp_(-limit, limit))


def _fill(init: Initializer, matrix: Tensor) -> None:
    """Calls an initialiser; one that returns something else has left the matrix as it was."""
    returned = init(matrix)
    if returned is not None and returned is not matrix:
        raise TypeError("kernel_init: got another tensor back, expected the given one, filled in place")


def check_plain(module: nn.Module, *names: str) -> None:
    """Refuses to draw parameters that a module computes from others: what is drawn would be lost.

    Raises:
      ValueError: one is neither a parameter of its own nor None.
    """
    for name in names:
        if module._parameters.get(name) is None and getattr(module, name, None) is not None:
            raise ValueError(
                f"{name}: got a tensor that a parametrization, pruning or a wrapper computes, expected a parameter: "
                "call reset_parameters() before them"
            )


def _part(parameter: Any, first: int) -> tuple[Tensor, list[int]]:
    """What this process has of a parameter, and where that begins in the whole; first: the expert of a plain tensor."""
    if not hasattr(parameter, "__create_chunk_list__"):
        return parameter, [first, 0, 0][-parameter.dim() :]
    (chunk,) = parameter.__create_chunk_list__()  # a DTensor, as torch.distributed.checkpoint asks it
    return parameter.to_local(), list(chunk.offsets)


@torch.no_grad()
def draw(init: Initializer, parameter: Tensor, num_experts: int = 1, first: int = 0) -> None:
    """Fills what this process has of a weight [out, in], or of the experts' [E, out, in], a matrix after the other.

    Every matrix is drawn on every process, so that from one seed the whole is the same however it is divided.

    Args:
      init: fills a matrix.
      parameter: the weight: a DTensor, or a plain tensor that holds whole matrices.
      num_experts: E, of all ranks.
      first: the expert that a plain tensor begins with.
    """
    if parameter.is_meta:
        return
    part, offsets = _part(parameter, first)
    if part.dim() == 2:
        part, offsets = part[None], [0, *offsets]
    matrix = torch.empty(parameter.shape[-2:], dtype=part.dtype, device=part.device)
    before, row, column = offsets
    experts, rows, columns = part.shape
    for expert in range(num_experts):
        _fill(init, matrix)
        if before <= expert < before + experts:
            part[expert - before].copy_(matrix[row : row + rows, column : column + columns])

"""Initialisation of the layer's parameters."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Initializer = Callable[[Tensor], Any]


def fan_in_normal_(parameter: Tensor) -> Tensor:
    """Fills [..., in] with a normal distribution of variance 1 / in, truncated at two standard deviations."""
    cut = math.erf(math.sqrt(2.0))
    deviation = 0.87962566103423978  # standard deviation of a unit normal truncated at 2
    values = torch.empty_like(parameter, dtype=torch.float32).uniform_(-cut, cut).erfinv_()
    limit = 2 / deviation / math.sqrt(parameter.shape[-1])
    return parameter.copy_(values.mul_(limit / math.sqrt(2.0)).clamp_(-limit, limit))


def factor_uniform_(factor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fills a LoRA factor A [..., in, r] with a uniform distribution in +-1/sqrt(in)."""
    bound = 1 / math.sqrt(max(factor.shape[-2], 1))
    return factor.uniform_(-bound, bound, generator=generator)


def _fill(init: Initializer, matrix: Tensor) -> None:
    """Calls an initialiser. One that returns another tensor has not filled the matrix, so it is an error."""
    returned = init(matrix)
    if returned is not None and returned is not matrix:
        raise TypeError("kernel_init: got another tensor back, expected the given one, filled in place")


def check_plain(module: nn.Module, *names: str) -> None:
    """Checks that the named tensors are parameters. Values written to a computed tensor would be lost.

    Raises:
      ValueError: a tensor is neither a parameter nor None.
    """
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name in names:
        if name not in parameters and getattr(module, name, None) is not None:
            raise ValueError(
                f"{name}: got a tensor that a parametrization, pruning or a wrapper computes, expected a parameter: "
                "call reset_parameters() before them"
            )


def _part(parameter: Any, first: int) -> tuple[Tensor, list[int]]:
    """The local tensor and its offsets in the whole parameter. first: index of a plain tensor's first expert."""
    if not hasattr(parameter, "__create_chunk_list__"):
        return parameter, [first, 0, 0][-parameter.dim() :]
    (chunk,) = parameter.__create_chunk_list__()  # a DTensor; torch.distributed.checkpoint uses this method
    return parameter.to_local(), list(chunk.offsets)


@torch.no_grad()
def draw(init: Initializer, parameter: Tensor, num_experts: int = 1, first: int = 0) -> None:
    """Initialises the local part of a weight [out, in] or [E, out, in], one matrix after the other.

    Every process draws every matrix, so with one seed the whole weight does not depend on the sharding.

    Args:
      init: fills a matrix.
      parameter: a DTensor, or a plain tensor of whole matrices.
      num_experts: E of all ranks.
      first: index of a plain tensor's first expert.
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

"""The layer's parameters: how they are drawn, and those that are modules of their own."""

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


class Projection(nn.Module):
    """The parameters of a linear map: `weight` [out, in] and `bias` [out] or None. The layer multiplies them itself."""

    init: Initializer
    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool, init: Initializer, **factory: Any):
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **factory)) if bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weight and zeroes the bias."""
        draw(self.init, self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        """The sizes."""
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"


class SharedExpert(nn.Module):
    """The parameters of a shared expert of width S.

    `gate_up_proj.weight` [2 S, D], gate rows first, then up rows, or `up_proj.weight` [S, D] where not gated, and
    `down_proj.weight` [D, S].
    """

    def __init__(self, features: int, shared_features: int, gated: bool, init: Initializer, **factory: Any):
        super().__init__()
        self.parts, self.up_name = (2, "gate_up_proj") if gated else (1, "up_proj")
        up = Projection(features, self.parts * shared_features, False, init, **factory)
        self.add_module(self.up_name, up)
        self.down_proj = Projection(shared_features, features, False, init, **factory)

    def operands(self) -> tuple[Tensor, Tensor]:
        """w_in [2 or 1, S, D] and w_out [D, S] of `shared_expert`: views."""
        up: Tensor = getattr(self, self.up_name).weight
        return up.reshape(self.parts, -1, up.shape[-1]), self.down_proj.weight

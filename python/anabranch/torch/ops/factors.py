"""LoRA factors as arguments of torch's operations.

An operation reads contiguous tensors. A factor that is dense in another order of axes, such as a transposed view, is
passed as the permuted view that is contiguous, and a number tells the order. So it is not copied. Other factors are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from anabranch.lora import NAMES

#: The factors as arguments of an operation.
FACTORS = ", ".join(f"Tensor? {name}" for name in NAMES) + ", int lora_orders"
#: The arguments of `FACTORS` without adapters.
NO_FACTORS = (None, None, None, None, 0)

_BITS = 8  # of one order in a number: two bits per axis


def _by_stride(strides: Sequence[int]) -> list[int]:
    """The axes, that with the largest stride first. Dynamo does not trace `sorted` for symbolic strides."""
    axes: list[int] = []
    for axis, stride in enumerate(strides):
        place = len(axes)
        while place > 0 and strides[axes[place - 1]] < stride:
            place -= 1
        axes.insert(place, axis)
    return axes


def _stored(factor: Tensor | None) -> tuple[Tensor | None, int]:
    """The factor as it lies in memory, and the code of its order; 0: row-major."""
    if factor is None or factor.is_contiguous():
        return factor, 0
    axes = _by_stride(factor.stride())
    view = factor.permute(axes)
    if not view.is_contiguous():
        return factor, 0
    return view, sum(axes.index(axis) << 2 * axis for axis in range(len(axes)))


def factor_arguments(factors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Factors as arguments of an operation: contiguous views, and the number of their orders."""
    pairs = [_stored(factor) for factor in factors]
    return *(view for view, _ in pairs), sum(code << _BITS * i for i, (_, code) in enumerate(pairs))


class _Factor(NamedTuple):
    """A factor, or a description of it, as an operation gets it."""

    tensor: Any
    order: tuple[int, ...]
    """The tensor's axis for each axis of the factor."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the factor."""
        return tuple(self.tensor.shape[axis] for axis in self.order)


class Factors:
    """The factors of an operation.

    Args:
      arguments: those of `FACTORS`, or (A, B, orders) of one adapter.
      names: the fields of C calls.
    """

    def __init__(self, arguments: Sequence[Any], names: Sequence[str] = NAMES):
        *tensors, orders = arguments
        self.names, self._factors = names, {}
        for i, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            if tensor is None:
                continue
            code, rank = orders >> _BITS * i & (1 << _BITS) - 1, len(tensor.shape)
            order = tuple(code >> 2 * axis & 3 for axis in range(rank)) if code else tuple(range(rank))
            self._factors[name] = _Factor(tensor, order)

    def __getitem__(self, name: str) -> _Factor:
        return self._factors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._factors

    def rank(self, a_name: str) -> Any:
        """The rank of the adapter whose first factor has this name."""
        return self[a_name].shape[2]

    def tensors(self) -> dict[str, Any]:
        """The factors as fields of a C call."""
        return {name: factor.tensor for name, factor in self._factors.items()}

    def orders(self, others: Mapping[str, Sequence[int]] | None = None) -> dict[str, Sequence[int]]:
        """The orders of the factors' axes, for a C call, together with those of other fields."""
        return dict(others or {}) | {name: factor.order for name, factor in self._factors.items()}

"""LoRA factors as arguments of torch's operations.

An operation reads contiguous tensors. A factor that is dense in another order of axes, such as a transposed view, is
passed as the permuted view that is contiguous, and a number tells the order. So it is not copied. Other factors are.

The layer's forward pass copies factors of another dtype than x to one tensor, `lora_copies`, from which the backward
pass reads them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from anabranch.lora import NAMES
from anabranch.options import Network
from anabranch.precision import FP8
from anabranch.torch.binding.described import Described

#: The factors as arguments of an operation.
FACTORS = ", ".join(f"Tensor? {name}" for name in (*NAMES, "lora_copies")) + ", int lora_orders"
#: The arguments of `FACTORS` without adapters.
NO_FACTORS = (None, None, None, None, None, 0)

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


def stored_factors(factors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Factors (A, B, ...) as contiguous views, and the number of their orders."""
    pairs = [_stored(factor) for factor in factors]
    return *(view for view, _ in pairs), sum(code << _BITS * i for i, (_, code) in enumerate(pairs))


def factor_arguments(factors: Sequence[Tensor | None], copies: Tensor | None = None) -> tuple[Any, ...]:
    """The factors of both projections as arguments of `FACTORS`. copies: see `Factors.with_copies`."""
    if factors[0] is None and factors[2] is None:
        return NO_FACTORS
    *views, orders = stored_factors(factors)
    return *views, copies, orders


class _Factor(NamedTuple):
    """A factor, or a description of it, as an operation gets it."""

    tensor: Any
    order: tuple[int, ...]
    """The tensor's axis for each axis of the factor."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the factor."""
        return tuple(self.tensor.shape[axis] for axis in self.order)


#: The axes of the factors after E, and the axis of the weight whose place the rank r takes.
_AXES = {
    "lora_a_in": ("dr", "f"),
    "lora_b_in": ("rpf", "d"),
    "lora_a_out": ("fr", "d"),
    "lora_b_out": ("rd", "f"),
}
#: Copies begin at multiples of this number of elements.
_ALIGNMENT = 64


def _order_of_copy(name: str, network: Network) -> tuple[int, ...]:
    """The tensor's axis for each axis of a factor, in a copy that the GEMMs of both passes read as it is."""
    axes, replaced = _AXES[name]
    layout = network.w_in_layout if name.endswith("_in") else network.w_out_layout
    if network.precision == FP8:
        stored = axes if axes.endswith("r") else axes[1:] + "r"
    else:
        stored = "".join("r" if axis == replaced else axis for axis in layout if axis == replaced or axis in axes)
    return 0, *(1 + stored.index(axis) for axis in axes)


def _padded_size(factor: _Factor) -> Any:
    """The number of elements of a factor, rounded up to a multiple of `_ALIGNMENT`."""
    return -(-math.prod(factor.tensor.shape) // _ALIGNMENT) * _ALIGNMENT


class Factors:
    """The factors of an operation.

    Args:
      tensors: contiguous views; None: not given.
      orders: the number of their orders.
      names: the fields of C calls.
    """

    def __init__(self, tensors: Sequence[Any], orders: int, names: Sequence[str] = NAMES):
        self._factors: dict[str, _Factor] = {}
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

    def size_of_copies(self, dtype: Any) -> Any:
        """The number of elements of `lora_copies`. dtype: that of x; factors of other dtypes are copied."""
        return sum(_padded_size(factor) for factor in self._factors.values() if factor.tensor.dtype != dtype)

    def copied(self, copies: Described | None, network: Network) -> dict[str, _Factor]:
        """The copies in `lora_copies` by the names of their factors. None: there are none."""
        found: dict[str, _Factor] = {}
        start: Any = 0
        for name, factor in self._factors.items():
            if copies is None or factor.tensor.dtype == copies.dtype:
                continue
            order = _order_of_copy(name, network)
            shape = [factor.shape[order.index(axis)] for axis in range(len(order))]
            offset = copies.offset + start * copies.dtype.itemsize
            found[name] = _Factor(Described(shape, copies.dtype, copies.memory, offset), order)
            start = start + _padded_size(factor)
        return found

    def replaced(self, others: Mapping[str, _Factor]) -> "Factors":
        """These factors, with others of the same names in the place of some."""
        factors = Factors((), 0, ())
        factors._factors = {**self._factors, **others}
        return factors

    def tensors(self) -> dict[str, Any]:
        """The factors as fields of a C call."""
        return {name: factor.tensor for name, factor in self._factors.items()}

    def orders(self, others: Mapping[str, Sequence[int]] | None = None) -> dict[str, Sequence[int]]:
        """The orders of the factors' axes, for a C call, together with those of other fields."""
        return dict(others or {}) | {name: factor.order for name, factor in self._factors.items()}

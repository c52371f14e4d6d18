"""Descriptions of tensors by numbers that are recorded as expressions.

An operation's calls are prepared once for options, dtypes and ranks. The sizes of its arguments are inputs: everything
computed from them (the sizes of results and working memory, offsets, sizes in structs) is recorded in a `Sizes` and
evaluated again for other sizes.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anabranch.checks import INDEX_LIMIT

#: The operators of the nodes; native code knows them by their index.
OPERATORS: tuple[Callable[[int, int], int], ...] = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, min,
)  # fmt: skip
COMPARISONS: tuple[Callable[[int, int], bool], ...] = (operator.lt, operator.le, operator.eq)
_ADD, _SUB, _MUL, _FLOORDIV, _MOD, _MIN = range(len(OPERATORS))
_LT, _LE, _EQ = range(len(COMPARISONS))


class Sizes:
    """Numbers computed from the sizes of an operation's arguments.

    Numbers have indices: first the inputs, then the nodes in the order in which they were recorded.

    Args:
      inputs: the sizes at hand, which decide comparisons.

    Attributes:
      nodes: (operator, left, right): an index into OPERATORS and the indices of two numbers; or (-1, constant, 0).
      conditions: (comparison, left, right, outcome): an index into COMPARISONS, the indices of two numbers, and the
        outcome for the inputs at hand. The recorded numbers hold for other inputs with the same outcomes.
    """

    def __init__(self, inputs: Sequence[int]):
        self.num_inputs = len(inputs)
        self.nodes: list[tuple[int, int, int]] = []
        self.conditions: list[tuple[int, int, int, bool]] = []
        self._values = list(inputs)
        self._indices: dict[tuple[int, int, int], int] = {}

    def input(self, index: int) -> "Size":
        """One of the inputs."""
        return Size(self, index)

    def index(self, number: Any) -> int:
        """The index of a Size or of a constant."""
        return number.index if isinstance(number, Size) else self._record((-1, int(number), 0))

    def value(self, index: int) -> int:
        """A number for the inputs at hand."""
        return self._values[index]

    def _record(self, node: tuple[int, int, int]) -> int:
        index = self._indices.get(node)
        if index is None:
            index = self._indices[node] = len(self._values)
            self.nodes.append(node)
            self._values.append(_evaluate(node, self._values))
        return index

    def compute(self, code: int, left: Any, right: Any) -> "Size":
        """Records an operation on two numbers."""
        return Size(self, self._record((code, self.index(left), self.index(right))))

    def compare(self, code: int, left: Any, right: Any) -> bool:
        """Compares two numbers and records the outcome."""
        first, second = self.index(left), self.index(right)
        outcome = COMPARISONS[code](self._values[first], self._values[second])
        if (condition := (code, first, second, outcome)) not in self.conditions:
            self.conditions.append(condition)
        return outcome

    def evaluate(self, inputs: Sequence[int]) -> list[int] | None:
        """All numbers for other inputs; None if a comparison has another outcome."""
        values = list(inputs)
        for node in self.nodes:
            values.append(_evaluate(node, values))
        for code, left, right, outcome in self.conditions:
            if COMPARISONS[code](values[left], values[right]) != outcome:
                return None
        return values


def _evaluate(node: tuple[int, int, int], values: list[int]) -> int:
    code, left, right = node
    return left if code < 0 else OPERATORS[code](values[left], values[right])


class Size:
    """A number that depends on the sizes of an operation's arguments. Arithmetic and comparisons are recorded."""

    __slots__ = ("index", "sizes")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sizes: Sizes, index: int):
        self.sizes, self.index = sizes, index

    def __add__(self, other: Any) -> "Size":
        return self.sizes.compute(_ADD, self, other)

    def __sub__(self, other: Any) -> "Size":
        return self.sizes.compute(_SUB, self, other)

    def __rsub__(self, other: Any) -> "Size":
        return self.sizes.compute(_SUB, other, self)

    def __neg__(self) -> "Size":
        return self.sizes.compute(_SUB, 0, self)

    def __mul__(self, other: Any) -> "Size":
        return self.sizes.compute(_MUL, self, other)

    def __floordiv__(self, other: Any) -> "Size":
        return self.sizes.compute(_FLOORDIV, self, other)

    def __mod__(self, other: Any) -> "Size":
        return self.sizes.compute(_MOD, self, other)

    __radd__, __rmul__ = __add__, __mul__

    def smaller(self, other: Any) -> "Size":
        """The smaller of two numbers."""
        return self.sizes.compute(_MIN, self, other)

    def __lt__(self, other: Any) -> bool:
        return self.sizes.compare(_LT, self, other)

    def __le__(self, other: Any) -> bool:
        return self.sizes.compare(_LE, self, other)

    def __gt__(self, other: Any) -> bool:
        return self.sizes.compare(_LT, other, self)

    def __ge__(self, other: Any) -> bool:
        return self.sizes.compare(_LE, other, self)

    def __eq__(self, other: object) -> bool:
        return self.sizes.compare(_EQ, self, other)

    def __bool__(self) -> bool:
        return not self.sizes.compare(_EQ, self, 0)

    def __index__(self) -> int:
        raise TypeError("a size of an argument is no constant of a prepared call")

    def __repr__(self) -> str:
        return str(self.sizes.value(self.index))


class Described:
    """Stands for a contiguous tensor while calls are prepared: a shape of ints and Sizes, a dtype, and its memory.

    It has the methods of a tensor that the descriptions of operations use.

    Attributes:
      memory: an object that stands for the memory; views share it.
      offset: where the tensor begins in the memory, in bytes.
    """

    __slots__ = ("dtype", "memory", "offset", "shape")

    def __init__(self, shape: Sequence[Any], dtype: torch.dtype, memory: object = None, offset: Any = 0):
        self.shape, self.dtype, self.offset = tuple(shape), dtype, offset
        self.memory = object() if memory is None else memory

    def new_empty(self, shape: Sequence[Any], dtype: torch.dtype | None = None) -> "Described":
        """Another tensor."""
        return Described(shape, self.dtype if dtype is None else dtype)

    def view(self, *shape: Any) -> "Described":
        """This tensor's memory with other sizes; their product is not checked."""
        return Described(shape[0] if isinstance(shape[0], tuple) else shape, self.dtype, self.memory, self.offset)

    def num_bytes(self) -> Any:
        """The size in bytes."""
        number: Any = self.dtype.itemsize
        for size in self.shape:
            number = number * size
        return number


def check_int32(name: str, value: Any) -> None:
    """Raises ValueError unless int32 holds a number."""
    if not -INDEX_LIMIT <= value < INDEX_LIMIT:
        raise ValueError(f"{name}: got {value}, expected an integer that int32 holds")

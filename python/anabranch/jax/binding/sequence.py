"""Several C calls as one custom call (src/api/sequence_xla.cc).

A `Sequence` collects calls. Its arrays are `Buffer`s: `ffi.call` with a Buffer among its operands becomes a call of
that sequence, so the same rules compose a sequence or call the library directly. `ffi.call_sequence` runs it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """An array of a sequence.

    Attributes:
      sequence: the sequence.
      kind: "operand", "result", or "view" of a buffer of an exchange.
      index: its number among those of its kind.
    """

    sequence: "Sequence"
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def astype(self, dtype: Any) -> "Buffer":
        """Itself: a sequence converts nothing."""
        if np.dtype(dtype) != self.dtype:
            raise TypeError(f"sequence: got a conversion of {self.dtype} to {np.dtype(dtype)}, expected none")
        return self


@dataclasses.dataclass(frozen=True)
class View:
    """A buffer of an exchange, by the key of the exchange, as an array."""

    exchange: str
    buffer: int
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass
class Call:
    """A C call. Options that are exchanges are their keys."""

    function: str
    tensors: dict[str, Buffer]
    orders: str
    workspace: int
    """Bytes of its workspace on a GPU."""
    options: dict[str, int | float | str]
    fp4: str = ""


class Sequence:
    """C calls that run one after another.

    Args:
      exchanges: names of exchanges (parallel/peers.py) by keys.
    """

    def __init__(self, exchanges: Mapping[str, str] | None = None):
        self.exchanges = dict(exchanges or {})
        self.operands: list[jax.Array] = []
        self.results: list[jax.ShapeDtypeStruct] = []
        self.views: list[View] = []
        self.calls: list[Call] = []
        #: Numbers of operands and of the results that may reuse their buffers.
        self.aliases: list[tuple[int, int]] = []

    @property
    def workspace(self) -> int:
        """Bytes of the workspace on a GPU, which all calls share."""
        return max((call.workspace for call in self.calls), default=0)

    def operand(self, array: jax.Array) -> Buffer:
        """An operand."""
        index = next((i for i, known in enumerate(self.operands) if known is array), len(self.operands))
        if index == len(self.operands):
            self.operands.append(array)
        return Buffer(self, "operand", index, tuple(array.shape), np.dtype(array.dtype))

    def result(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """A result, or memory between the calls."""
        self.results.append(jax.ShapeDtypeStruct(shape, dtype))
        return Buffer(self, "result", len(self.results) - 1, tuple(shape), np.dtype(dtype))

    def view(self, exchange: str, buffer: int, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """A buffer of an exchange as an array."""
        self.views.append(View(exchange, buffer, tuple(shape), np.dtype(dtype)))
        return Buffer(self, "view", len(self.views) - 1, tuple(shape), np.dtype(dtype))

    def call(
        self,
        function: str,
        operands: Mapping[str, Any],
        results: Mapping[str, jax.ShapeDtypeStruct | None],
        *,
        aliases: Mapping[str, str] | None = None,
        workspace: int = 0,
        orders: Mapping[str, str] | None = None,
        fp4: Iterable[str] = (),
        **options: int | float | str,
    ) -> dict[str, Any]:
        """Appends a call. The arguments are those of `ffi.call`, with arrays or Buffers as operands.

        Returns:
          Buffers of the results by name, None if not requested.
        """
        tensors = {
            name: operand if isinstance(operand, Buffer) else self.operand(operand)
            for name, operand in operands.items()
            if operand is not None
        }
        made = {
            name: None if result is None else self.result(result.shape, result.dtype)
            for name, result in results.items()
        }
        for source, target in (aliases or {}).items():
            result = made[target]
            if tensors[source].kind == "operand" and result is not None:
                self.aliases.append((tensors[source].index, result.index))
        tensors |= {name: result for name, result in made.items() if result is not None}
        given_orders = ",".join(f"{name}:{order}" for name, order in (orders or {}).items() if name in tensors)
        self.calls.append(Call(function, tensors, given_orders, workspace, dict(options), ",".join(fp4)))
        return made

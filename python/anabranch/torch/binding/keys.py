"""Keys of native operations: the bytes by which native code finds prepared calls.

src/torch/operations.cc writes the same bytes. A key has all arguments but sizes, which are inputs of the calls.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anabranch.torch.binding.described import Described, Sizes

#: Letters of argument types in schemas; see src/torch/operations.h.
_LETTERS = {
    "Tensor": "T", "Tensor?": "t", "SymInt": "n", "int": "i", "bool": "b", "float": "f", "ScalarType": "d",
    "ScalarType?": "D", "int[]": "I", "float[]": "F", "str": "s",
}  # fmt: skip
_FORMATS = {"i": "q", "b": "b", "f": "d"}


def kinds_of(schema: str) -> str:
    """A letter for each argument of a schema.

    >>> kinds_of("name(Tensor x, int[] sizes) -> (Tensor, Tensor)")
    'TI'
    """
    arguments = schema.partition("(")[2].partition(")")[0].split(", ")
    return "".join(_LETTERS[argument.split()[0]] for argument in arguments)


def encode(kind: str, value: Any) -> bytes:
    """An option as part of a key."""
    if kind in "IF":
        return struct.pack("<I", len(value)) + struct.pack(f"<{len(value)}{'q' if kind == 'I' else 'd'}", *value)
    if kind == "s":
        return struct.pack("<I", len(value)) + value.encode()
    return struct.pack(f"<{_FORMATS[kind]}", value)


class Decoded(NamedTuple):
    """The contents of a key."""

    arguments: list[Any]
    """Descriptions in the place of tensors and sizes."""
    sizes: Sizes
    device_type: int
    """torch's number."""
    device_index: int
    threads: int


def decode(kinds: str, key: bytes, inputs: Sequence[int], dtypes: Mapping[int, torch.dtype]) -> Decoded:
    """Reads a key. inputs: the sizes of the tensors and the integers that are sizes; dtypes: by torch's numbers."""
    at = 0

    def read(code: str) -> Any:
        nonlocal at
        values = struct.unpack_from(f"<{code}", key, at)
        at += struct.calcsize(f"<{code}")
        return values

    sizes = Sizes(inputs)
    numbers = iter([sizes.input(i) for i in range(len(inputs))])
    arguments: list[Any] = []
    for kind in kinds:
        value: Any = None
        if kind in "TtDd":
            (number,) = read("b")
            value = None if number == -1 else dtypes[number]
            if kind in "Tt" and value is not None:
                value = Described([next(numbers) for _ in range(read("b")[0])], value)
        elif kind in "IF":
            (length,) = read("I")
            value = read(f"{length}{'q' if kind == 'I' else 'd'}")
        elif kind == "s":
            (length,) = read("I")
            value, at = key[at : at + length].decode(), at + length
        elif kind != "n":
            (value,) = read(_FORMATS[kind])
        arguments.append(bool(value) if kind == "b" else value)
    for i, kind in enumerate(kinds):
        if kind == "n":
            arguments[i] = next(numbers)
    return Decoded(arguments, sizes, *read("iii"))

"""Checks of options for every front end, with one error style: "argument: got X, expected Y".

A wrong type raises TypeError, a wrong value or combination ValueError. Options are static, so arrays are refused; the
message describes the array.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from anabranch._text import shown, typed

INDEX_LIMIT = 2**31
"""Upper bound (exclusive) on the number of assignments, rows and experts: indices are int32."""

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _is_array(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "dtype") and hasattr(value, "shape")


def describe(value: Any) -> str:
    """The X of "got X": dtype and shape of an array or tensor, parts of a NamedTuple or of a sequence with arrays, type
    and value of the rest.

    >>> describe((np.zeros([2, 3]), 1))
    'tuple (float64[2, 3], int 1)'
    """
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", ())):
        parts = (f"{name}={describe(part)}" for name, part in zip(fields, value, strict=True))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, np.ma.MaskedArray):
        return f"a masked array {value.dtype}{list(value.shape)}"
    if isinstance(value, (tuple, list)) and any(map(_is_array, value)):
        shortened = [*map(describe, value[:8]), *(["..."] if len(value) > 8 else [])]
        return f"{type(value).__name__} ({', '.join(shortened)})"
    if not _is_array(value):
        return typed(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Returns a Python int in [minimum, maximum]."""
    expected = f"an integer >= {minimum}" if maximum is None else f"an integer in [{minimum}, {maximum}]"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {describe(value)}, expected {expected}")
    if value < minimum or (maximum is not None and value > maximum):
        empty = ", which is empty" if maximum is not None and maximum < minimum else ""  # for example, without experts
        raise ValueError(f"{name}: got {shown(int(value))}, expected {expected}{empty}")
    return int(value)


def number(name: str, value: Any) -> float:
    """Returns a finite Python float that is 0 or a normal float32 number.

    Traced values are refused, since options are static.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {describe(value)}, expected a finite Python number")
    try:
        held = float(value)
    except OverflowError:
        held = math.inf
    if not abs(held) < math.inf:
        raise ValueError(f"{name}: got {shown(value)}, expected a finite number")
    if (value != 0 and abs(held) < _SMALLEST) or abs(held) > _LARGEST:
        raise ValueError(
            f"{name}: got {shown(value)}, expected 0 or a magnitude in [{_SMALLEST:.4g}, {_LARGEST:.4g}], "
            "which float32 holds"
        )
    return held


def boolean(name: str, value: Any) -> bool:
    """Returns a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {describe(value)}, expected True or False")
    return bool(value)


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Returns one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: got {shown(value)}, expected one of {', '.join(map(repr, choices))}")
    return str(value)

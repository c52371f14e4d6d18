"""Checks of arguments, all in one error style: "argument: got X, expected Y".

A wrong type or dtype is a TypeError, a wrong shape, value or combination a ValueError.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "bfloat16", "float16")
INDICES = ("int16", "int32", "int64")
BOOL = ("bool",)
INDEX_LIMIT = 2**31
"""Slots, rows and experts are fewer: their indices are int32."""

# An axis is a size, a name (any size), or (name, size); `...` first: any leading axes.
Axis = Any


def describe(value: Any) -> str:
    """Dtype and shape of an array, else type and value: the X of "got X"."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def _axis_text(axis: Axis) -> str:
    if axis is Ellipsis:
        return "..."
    return f"{axis[0]}={axis[1]}" if isinstance(axis, tuple) else str(axis)


def _axis_fits(axis: Axis, size: int) -> bool:
    wanted = axis[1] if isinstance(axis, tuple) else axis
    return isinstance(wanted, str) or wanted == size


def array(name: str, value: Any, dtypes: Sequence[str], shape: Sequence[Axis]) -> jax.Array:
    """Returns `value` as a JAX array of one of `dtypes` and of the given shape.

    Raises:
      TypeError: not an array, or another dtype.
      ValueError: another shape.
    """
    expected = f"{' or '.join(dtypes)} [{', '.join(map(_axis_text, shape))}]"
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{name}: got {describe(value)}, expected an array, {expected}")
    if str(value.dtype) not in dtypes:
        raise TypeError(f"{name}: got {describe(value)}, expected {expected}")
    leading = bool(shape) and shape[0] is Ellipsis
    axes = tuple(shape[1:]) if leading else tuple(shape)
    sizes = value.shape[value.ndim - len(axes) :] if leading else value.shape
    if len(sizes) != len(axes) or not all(map(_axis_fits, axes, sizes)):
        raise ValueError(f"{name}: got {describe(value)}, expected {expected}")
    return jnp.asarray(value)


def optional_array(name: str, value: Any, dtypes: Sequence[str], shape: Sequence[Axis]) -> jax.Array | None:
    """Like `array`; None stays None."""
    return None if value is None else array(name, value, dtypes, shape)


def integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Returns a Python int in [minimum, maximum]."""
    expected = f"an integer >= {minimum}" if maximum is None else f"an integer in [{minimum}, {maximum}]"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {describe(value)}, expected {expected}")
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name}: got {value}, expected {expected}")
    return int(value)


def number(name: str, value: Any) -> float:
    """Returns a finite Python float; traced values are refused, since options are part of the program."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {describe(value)}, expected a finite Python number")
    if not math.isfinite(value):
        raise ValueError(f"{name}: got {value}, expected a finite number")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """Returns a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {describe(value)}, expected True or False")
    return bool(value)


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Returns one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")
    return str(value)

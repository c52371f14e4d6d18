"""Checks of arguments, with one error style: "argument: got X, expected Y".

A wrong type or dtype raises TypeError, a wrong shape, value or combination ValueError. Values on the host (Python
numbers and numpy arrays) are checked too, and never wrapped or rounded. The values of traced arrays and of arrays on a
device are not read.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch._text import shown
from anabranch.checks import INDEX_LIMIT, boolean, choice, describe, integer, number

__all__ = (
    "BOOL",
    "FLOATS",
    "INDEX_LIMIT",
    "INDICES",
    "INTEGERS",
    "amounts",
    "array",
    "boolean",
    "choice",
    "describe",
    "dtype",
    "indices",
    "integer",
    "narrow",
    "number",
    "optional_array",
    "shown",
    "sizes",
)

FLOATS = ("float32", "bfloat16", "float16")
INDICES = ("int16", "int32", "int64")
INTEGERS = (*INDICES, "int8", "uint8", "uint16", "uint32", "uint64")
BOOL = ("bool",)
_INT32 = np.iinfo(np.int32)

# An axis is a size, a name (any size) or (name, size). A leading `...` means any leading axes.
Axis = Any


def _axis_text(axis: Axis) -> str:
    if axis is Ellipsis:
        return "..."
    return f"{axis[0]}={axis[1]}" if isinstance(axis, tuple) else str(axis)


def _axis_fits(axis: Axis, size: int) -> bool:
    expected = axis[1] if isinstance(axis, tuple) else axis
    return isinstance(expected, str) or expected == size


def _checked(name: str, value: Any, dtypes: Sequence[str], shape: Sequence[Axis]) -> Any:
    """Checks that `value` is a JAX or numpy array of one of `dtypes` with the given shape; see `array`."""
    expected = f"{' or '.join(dtypes)} [{', '.join(map(_axis_text, shape))}]"
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: got {describe(value)}, expected an array, {expected}")
    if str(value.dtype) not in dtypes:
        raise TypeError(f"{name}: got {describe(value)}, expected {expected}")
    if not all(isinstance(size, int) for size in value.shape):
        raise ValueError(
            f"{name}: got {describe(value)} with symbolic sizes, expected static ones: buffers are sized for one "
            "shape; export one program per shape"
        )
    leading = bool(shape) and shape[0] is Ellipsis
    axes = tuple(shape[1:]) if leading else tuple(shape)
    sizes = value.shape[value.ndim - len(axes) :] if leading else value.shape
    if len(sizes) != len(axes) or not all(map(_axis_fits, axes, sizes)):
        raise ValueError(f"{name}: got {describe(value)}, expected {expected}")
    return value


def array(name: str, value: Any, dtypes: Sequence[str], shape: Sequence[Axis]) -> jax.Array:
    """Returns `value` as a JAX array after checking its dtype and shape.

    Raises:
      TypeError: not an array, another dtype, or a dtype that JAX supports with jax_enable_x64 only.
      ValueError: another shape.
    """
    value = _checked(name, value, dtypes, shape)
    if not isinstance(value, jax.Array) and jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        raise TypeError(f"{name}: got {describe(value)}, expected another dtype, or jax_enable_x64 to be set")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def optional_array(name: str, value: Any, dtypes: Sequence[str], shape: Sequence[Axis]) -> jax.Array | None:
    """Like `array`, but accepts None."""
    return None if value is None else array(name, value, dtypes, shape)


def narrow(name: str, value: Any, dtypes: Sequence[str], shape: Sequence[Axis]) -> jax.Array:
    """Like `array`, for indices, sizes or a map; converts dtypes wider than int32 to int32.

    Values outside int32 are clipped. Zero stays zero, and an index or size that is out of range stays out of range,
    since all ranges end below 2^31.
    """
    value = _checked(name, value, dtypes, shape)
    if value.dtype in (np.int64, np.uint32, np.uint64):
        lowest = max(_INT32.min, np.iinfo(value.dtype).min)
        if not isinstance(value, jax.Array):
            value = np.clip(value, lowest, _INT32.max)
        elif value.dtype == np.uint32 or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            value = jnp.clip(value, lowest, _INT32.max)
        value = value.astype(np.int32)
    return jnp.asarray(value)


def indices(name: str, value: Any, shape: Sequence[Axis]) -> jax.Array:
    """Indices or sizes of a dtype in INDICES as int32; out-of-range values stay out of range (`narrow`)."""
    return narrow(name, value, INDICES, shape).astype(jnp.int32)


def sizes(name: str, value: Any, shape: Sequence[Axis]) -> jax.Array:
    """Sizes of groups or chunks, of any integer dtype, as int32; see `indices`."""
    return narrow(name, value, INTEGERS, shape).astype(jnp.int32)


def amounts(
    name: str,
    value: Any,
    dtypes: Sequence[str],
    shape: Sequence[Axis],
    minimum: int = -INDEX_LIMIT,
    maximum: int = INDEX_LIMIT - 1,
) -> jax.Array:
    """Like `array`, for counts and other numbers; checks values on the host and converts 64-bit integers to int32.

    Raises:
      ValueError: additionally, a host array contains NaN or a number outside [minimum, maximum].
    """
    value = _checked(name, value, dtypes, shape)
    if isinstance(value, jax.Array):
        return value
    valid = (value >= minimum) & (value < maximum + 1)  # False for NaN; float32 represents 2^31 but not 2^31 - 1
    if not np.all(valid):
        wrong = np.ravel(value)[np.argmin(np.ravel(valid))]
        raise ValueError(f"{name}: got {wrong} in {describe(value)}, expected numbers in [{minimum}, {maximum}]")
    return jnp.asarray(value.astype(np.int32) if value.dtype.itemsize == 8 else value)


def dtype(name: str, value: Any, choices: Sequence[str]) -> str:
    """Returns the name of a dtype, one of `choices`, given as a name, a type or a numpy.dtype."""
    try:
        # An array has a dtype but is not one.
        got = np.dtype(value).name if isinstance(value, (str, type, np.dtype)) else describe(value)
    except Exception:  # numpy raises many error types, also those of the value's own methods
        got = shown(value)
    if got not in choices:
        raise TypeError(f"{name}: got {got}, expected {' or '.join(choices)}")
    return got

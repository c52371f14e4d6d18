"""Bad values for an argument, and the check that an error names the argument. All front ends share them."""

import fractions
import re

import ml_dtypes
import numpy as np


class Rude:
    """An object whose comparison and repr raise."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


class Shaped:
    shape, dtype, ndim = (4, 4), "float32", 2


#: Values that belong to no framework.
VALUES = [
    None, "", "softmax", "ü\0", b"x", True, -1, 0, 1, 2**31 - 1, 2**31, 2**32 + 1, 10**400, 10**5000, -(2**63), 0.5, -1.5,
    float("nan"), float("inf"), 1e300, 1e-320, 3j, fractions.Fraction(10**400), [], (), ("a", "a"), {"a": 1}, ...,
    NotImplemented, object(), Rude(), Shaped(), len, int, Rude, np.str_("softmax"), np.float64(0.5), range(3), slice(1),
    np.ndarray, Shaped, np.dtype("float64"), np.float32("nan"), np.int64(2**32 + 1), np.uint64(2**63), np.bool_(True),
    np.array(["softmax"]), np.array(["a", "b"]), np.array(1), np.array([2**32 + 1]), np.array([1, 2], object),
    np.zeros((0, 0)), np.zeros((1,) * 9, np.float32), np.ma.masked_array([1.0, 2.0], [0, 1]),
    np.datetime64("2020-01-01"), np.zeros((4, 4), [("a", "f4")]), np.zeros((4, 4), ">f4"),
]  # fmt: skip
DTYPES = (
    "bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64",
    "complex64", "float8_e4m3fn", "int4",
)  # fmt: skip


def floats(*shape):
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def as_dtype(array, name):
    """An array in a dtype of DTYPES."""
    return array.astype(getattr(ml_dtypes, name, name))


def shown(value):
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}"
    try:
        return repr(value)[:80]
    except Exception:
        return f"a {type(value).__name__}"


def complaint(error, argument, names, value, arrays=()):
    """What is wrong with an error message, or None.

    An array or a size that is valid by itself may not fit the other arguments; the error may then name one of these.
    arrays: the array types of the framework.
    """
    may_be_good = isinstance(value, (int, np.ndarray, np.generic, *arrays))
    if not isinstance(error, (TypeError, ValueError)):
        return f"{type(error).__name__}: {error}"
    blamed = re.match(r"([a-z_]+)[^:]*: got .*expected ", str(error), re.DOTALL)
    if blamed is None:
        return f"no 'argument: got X, expected Y': {error}"
    if not re.search(rf"\b{argument}\b", str(error)) and not (may_be_good and blamed[1] in names):
        return f"another argument named: {error}"
    return None

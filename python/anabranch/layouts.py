"""How the weights of the experts lie in memory: which axes an array has, in which order.

Letters: D model width, F expert width, P parts of w_in, 2 (gate, up) or 1. Our own are "dpf" and "fd"; "pfd" and "df"
are those of PyTorch's Linear, which most checkpoints have; "dfp" and "fpd" have gate and up interleaved.
"""

from collections.abc import Sequence
from typing import Any

IN_LAYOUTS = ("dpf", "pfd", "dfp", "fpd")
OUT_LAYOUTS = ("fd", "df")


def axes(layout: str, **sizes: Any) -> tuple[Any, ...]:
    """What belongs to each letter of a layout, in its order.

    >>> axes("pfd", d=16, p=2, f=32)
    (2, 32, 16)
    """
    return tuple(sizes[letter] for letter in layout)


def order(layout: str, own: str, leading: int = 1) -> str:
    """Where the axes of our own layout stand in an array of `layout`, behind leading ones: the digits of `_ffi.call`.

    >>> order("pfd", "dpf")
    '0312'
    """
    return "".join(map(str, (*range(leading), *(leading + layout.index(letter) for letter in own))))


def hidden(in_layout: str) -> str:
    """The order of P and F in b_in and h: that in w_in.

    >>> hidden("dpf"), hidden("dfp")
    ('pf', 'fp')
    """
    return in_layout.replace("d", "")


def by_letter(layout: str, shape: Sequence[Any]) -> dict[str, Any]:
    """The last sizes of a shape by their letters."""
    return dict(zip(layout, shape[len(shape) - len(layout) :], strict=True))

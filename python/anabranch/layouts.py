"""Memory layouts of the experts' weights: which axes the arrays have, and in which order.

Letters: E experts, D model width, F expert width, P parts of w_in, 2 (gate, up) or 1; R rows. The default layouts are
"dpf" and "fd"; "pfd" and "df" are those of PyTorch's Linear and of most checkpoints; "dfp" and "fpd" interleave gate
and up.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

IN_LAYOUTS = ("dpf", "pfd", "dfp", "fpd")
OUT_LAYOUTS = ("fd", "df")


class Layouts(NamedTuple):
    """The order of the axes of w_in and of w_out after E."""

    w_in: str = "dpf"
    w_out: str = "fd"

    @property
    def intermediate(self) -> str:
        """The order of P and F in b_in and h, which is that in w_in.

        >>> Layouts("dfp").intermediate
        'fp'
        """
        return self.w_in.replace("d", "")

    def letters(self, name: str) -> str:
        """The axes of an array by its C name ("d_w_in" as "w_in"); "" for an array without layouts.

        >>> Layouts("pfd").letters("d_w_in"), Layouts("dfp").letters("h")
        ('epfd', 'rfp')
        """
        name = name.removeprefix("d_")
        if name in ("w_in", "w_out"):
            return "e" + getattr(self, name)
        return {"b_in": "e", "h": "r", "dh": "r"}[name] + self.intermediate if name in ("b_in", "h", "dh") else ""

    def shape(self, name: str, **sizes: Any) -> tuple[Any, ...]:
        """Maps the axes of an array to values, for example sizes.

        >>> Layouts("pfd").shape("w_in", e=4, d=16, p=2, f=32)
        (4, 2, 32, 16)
        """
        return tuple(sizes[letter] for letter in self.letters(name))

    def sizes(self, name: str, shape: Sequence[int]) -> dict[str, int]:
        """The sizes of an array by letter.

        >>> Layouts("pfd").sizes("w_in", (4, 2, 32, 16))["d"]
        16
        """
        return dict(zip(self.letters(name), shape, strict=True))

    def axis(self, name: str, letter: str) -> int:
        """The index of the axis with a letter.

        >>> Layouts(w_out="df").axis("w_out", "f")
        2
        """
        return self.letters(name).index(letter)

    def order(self, name: str) -> tuple[int, ...]:
        """For each axis of the default layout, its index in this layout's array.

        >>> Layouts("pfd").order("w_in")
        (0, 3, 1, 2)
        """
        return tuple(self.letters(name).index(letter) for letter in OURS.letters(name))

    def from_ours(self, name: str) -> tuple[int, ...]:
        """The permutation for a transpose from the default layout to this one."""
        return tuple(OURS.letters(name).index(letter) for letter in self.letters(name))


OURS = Layouts()

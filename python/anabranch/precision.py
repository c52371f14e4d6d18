"""How float32 operands of the experts' products are multiplied, for every front end."""

from typing import Any

from anabranch.checks import choice

HIGHEST = 0
TF32 = 1
#: The numbers of ab_precision by their names, the default first.
NUMBERS = {"highest": HIGHEST, "tf32": TF32}


def precision_number(value: Any) -> int:
    """The argument `precision`, one of `NUMBERS`."""
    return NUMBERS[choice("precision", value, tuple(NUMBERS))]

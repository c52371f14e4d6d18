"""Which gradients an operation of a backward pass computes. Others are neither computed nor allocated.

The argument `requested` is a number whose bit i stands for the gradient of OPERANDS[i].
"""

from collections.abc import Iterable, Mapping
from typing import Any

from anabranch.lora import NAMES

OPERANDS = ("x", "w_in", "b_in", "w_out", "b_out", "weights", *NAMES)
#: Gradients that later calls than that of the other gradients compute from dh.
FROM_DH = frozenset({"x", "w_in", "b_in"})


def request(needs: Mapping[str, bool]) -> int:
    """The argument of an operation. needs: by operand; a missing one needs no gradient."""
    return sum(1 << i for i, name in enumerate(OPERANDS) if needs.get(name, False))


def requested_names(requested: int) -> frozenset[str]:
    """The operands whose gradients are requested."""
    return frozenset(name for i, name in enumerate(OPERANDS) if requested >> i & 1)


def allocate(like: Any, is_requested: bool, shape: Any, dtype: Any = None) -> Any:
    """An empty gradient; without elements if it is not requested."""
    return like.new_empty(shape if is_requested else (0,), dtype=dtype)


def gradient_fields(names: frozenset[str], gradients: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Fields of a C call for (operand, gradient); None for those that are not requested."""
    return {f"d_{operand}": gradient if operand in names else None for operand, gradient in gradients}

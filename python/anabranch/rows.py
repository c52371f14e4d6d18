"""The number of rows of a plan, which depends on shapes and options alone; shared by the front ends."""

from collections.abc import Callable
from typing import Any

from anabranch import checks


def num_rows_needed(
    num_slots: int, num_experts: int, align_size: int = 0, smaller: Callable[[int, int], int] = min
) -> int:
    """The number of rows that suffices for every routing: floor((N + min(E, N) (a - 1)) / a) a.

    a = max(align_size, 1). smaller: min, or a replacement that accepts symbolic sizes.
    """
    if align_size <= 1:
        return num_slots  # may be symbolic
    a = align_size
    return (num_slots + smaller(num_experts, num_slots) * (a - 1)) // a * a


def check_num_slots(name: str, num_tokens: int, slots_per_token: int) -> None:
    """Raises ValueError unless there are fewer than 2^31 assignments."""
    if num_tokens * slots_per_token >= checks.INDEX_LIMIT:
        raise ValueError(f"{name}: got {num_tokens} x {slots_per_token} slots, expected fewer than 2^31")


def check_rows_needed(needed: int, align_size: int, num_destinations: int) -> None:
    """Raises ValueError unless the default number of rows of a plan is below 2^31."""
    if needed >= checks.INDEX_LIMIT:
        name, value = ("align_size", align_size) if align_size > 1 else ("num_destinations", num_destinations)
        raise ValueError(f"{name}: got {value}, which requires {needed} rows, expected fewer than 2^31")


def check_num_rows(
    name: str,
    num_rows: Any,
    align_size: int = 0,
    num_destinations: int = 1,
    integer: Callable[..., int] = checks.integer,
) -> int:
    """Returns a row count below 2^31 whose part for each destination is a multiple of align_size.

    `integer` checks its type.
    """
    num_rows = integer(name, num_rows, 0, checks.INDEX_LIMIT - 1)
    if num_rows % (max(align_size, 1) * num_destinations):
        factors = (("align_size", align_size), ("num_destinations", num_destinations))
        expected = " * ".join(f"{factor} {value}" for factor, value in factors if value > 1)
        raise ValueError(f"{name}: got {num_rows}, expected a multiple of {expected}")
    return num_rows

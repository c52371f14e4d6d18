"""Formats the rows of a benchmark as columns and Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.timing import Timing


def columns(times: Mapping[str, Timing]) -> dict[str, Any]:
    """Returns microseconds by name, "spread" (lowest and highest, see `Timing`) and "host bound" (names)."""
    return {
        **{name: 1e6 * timing.seconds for name, timing in times.items()},
        "spread": {name: [1e6 * timing.low, 1e6 * timing.high] for name, timing in times.items()},
        "host bound": [name for name, timing in times.items() if timing.host_bound],
    }


def shown(row: Mapping[str, Any], names: Sequence[str], ours: str, peers: tuple[str, str]) -> dict[str, Any]:
    """Returns a row with the columns `names`. "x torch" and "x xla" are the times of the two peers divided by ours.

    >>> row = {"a": 2.0, "b": 5.0, "host bound": ["b"]}
    >>> shown(row, ["a", "b", "x torch", "x xla"], "a", ("b", "c"))
    {'a': '2', 'b': '5*', 'x torch': '2.5', 'x xla': None}
    """

    def cell(value: float | None, star: bool = False) -> str | None:
        return None if value is None else (f"{value:.0f}" if value >= 100 else f"{value:.3g}") + "*" * star

    result = dict(row)
    for name in names:
        if isinstance(row.get(name), float):
            result[name] = cell(row[name], name in row["host bound"])
    for name, peer in zip(("x torch", "x xla"), peers, strict=True):
        known = row.get(ours) is not None and row.get(peer) is not None
        result[name] = cell(row[peer] / row[ours]) if known else None
    return {name: result.get(name) for name in names}


def format_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Formats rows as a Markdown table. Numbers have three significant digits."""
    rows = list(rows)
    if not rows:
        return "(no rows)"
    names = list(dict.fromkeys(name for row in rows for name in row))

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return "-" if value is None else str(value)

    cells = [names, *([text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)

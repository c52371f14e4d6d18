"""Timing on the CPU: warm-up, repeats, median and best, several implementations interleaved in one run."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the best of the repeats."""

    median: float
    best: float


def interleaved(functions: Mapping[Any, Callable[[], Any]], *, seconds: float, repeats: int = 7) -> dict[Any, Timing]:
    """Times each function `repeats` times, taking turns, so that a slow minute of the machine hits all alike.

    Args:
      functions: name to a call that returns when its work is done.
      seconds: time for all repeats of one function; a repeat is a batch of calls. One that needs longer than this for
        a single call is timed once, after its warm-up.
      repeats: batches of each function.
    """
    batches: dict[Any, int] = {}
    samples: dict[Any, list[float]] = {}

    def batch(name: Any, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            functions[name]()
        return (time.perf_counter() - start) / calls

    for name, function in functions.items():
        function()
        once = max(batch(name, 1), 1e-7)
        samples[name] = [once] if once > seconds else []
        batches[name] = max(1, min(1000, int(seconds / repeats / once)))
    for _ in range(repeats):
        for name in functions:
            if len(samples[name]) == 0 or batches[name] * samples[name][0] <= seconds:
                samples[name].append(batch(name, batches[name]))
    return {name: Timing(statistics.median(times), min(times)) for name, times in samples.items()}


def format_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; numbers with three significant digits."""
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

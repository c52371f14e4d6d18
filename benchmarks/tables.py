"""The rows of benchmarks: times, rates and the kernels that experts run on, and rows as Markdown tables."""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anabranch import _library
from anabranch.bench import BenchError
from benchmarks.shapes import LayerShape
from benchmarks.timing import Timing

UNITS = {"cpu": "GFLOP/s", "cuda": "TFLOP/s"}
SCALES = {"GFLOP/s": 1e9, "TFLOP/s": 1e12}


def columns(times: Mapping[str, Timing]) -> dict[str, Any]:
    """Returns microseconds by name, "spread" (lowest and highest, see `Timing`) and "host bound" (names)."""
    return {
        **{name: 1e6 * timing.seconds for name, timing in times.items()},
        "spread": {name: [1e6 * timing.low, 1e6 * timing.high] for name, timing in times.items()},
        "host bound": [name for name, timing in times.items() if timing.host_bound],
    }


def rates(shape: LayerShape, times: Mapping[str, Timing], device: str, ceiling: float | None = None) -> dict[str, Any]:
    """Returns milliseconds and FLOP/s of the passes, "spread" and "host bound"; None: not measured.

    Args:
      shape: sizes of the layer.
      times: of the passes "forward" and "both". The time of "backward" is the difference.
      device: "cpu" or "cuda".
      ceiling: FLOP/s of a large GEMM. The passes' shares of it are columns too.
    """
    flops, unit = shape.forward_flops(), UNITS[device]
    forward, both = (times[name].seconds if name in times else None for name in ("forward", "both"))
    backward = None if forward is None or both is None else both - forward
    seconds = {"forward": forward, "backward": backward, "both": both}
    rate = {
        name: None if time is None else factor * flops / time
        for (name, time), factor in zip(seconds.items(), (1, 2, 3), strict=True)
    }
    return {
        **{f"{name} ms": None if time is None else 1e3 * time for name, time in seconds.items()},
        **{f"{name} {unit}": None if of is None else of / SCALES[unit] for name, of in rate.items()},
        f"product {unit}": None if ceiling is None else ceiling / SCALES[unit],
        **{f"{name} share": of / ceiling if of and ceiling else None for name, of in rate.items()},
        "host bound": [name for name, timing in times.items() if timing.host_bound],
        "spread": {f"{name} ms": [1e3 * timing.low, 1e3 * timing.high] for name, timing in times.items()},
    }


def unit_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the unit of the rows' rates; rows with an error have none."""
    rows = list(rows)
    return next((unit for unit in UNITS.values() if any(f"both {unit}" in row for row in rows)), "TFLOP/s")


def selected(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns rows with the columns `names` and "error", if one has it. A time that is bound by the host has a *."""
    rows = list(rows)
    names = [*names, *(["error"] if any("error" in row for row in rows) else [])]

    def cell(row: Mapping[str, Any], name: str) -> Any:
        value, bound = row.get(name), row.get("host bound", ())
        parts = {"backward ms": ("forward", "both")}.get(name, (name.removesuffix(" ms"),))
        return _text(value) + "*" if value is not None and any(part in bound for part in parts) else value

    return [{name: cell(row, name) for name in names} for row in rows]


def shown(row: Mapping[str, Any], names: Sequence[str], ours: str, peers: tuple[str, str]) -> dict[str, Any]:
    """Returns a row with the columns `names`. "x torch" and "x xla" are the times of the two peers divided by ours.

    >>> row = {"a": 2.0, "b": 5.0, "host bound": ["b"]}
    >>> shown(row, ["a", "b", "x torch", "x xla"], "a", ("b", "c"))
    {'a': 2.0, 'b': '5*', 'x torch': 2.5, 'x xla': None}
    """
    ratios = {
        name: row[peer] / row[ours] if row.get(ours) is not None and row.get(peer) is not None else None
        for name, peer in zip(("x torch", "x xla"), peers, strict=True)
    }
    return selected([{**row, **ratios}], names)[0]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)


def format_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Formats rows as a Markdown table. Numbers have three significant digits."""
    rows = list(rows)
    if not rows:
        return "(no rows)"
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def experts_path(shape: LayerShape, dtype: str, w_in_layout: str = "dpf", w_out_layout: str = "fd") -> str:
    """Returns the kernels of a forward and backward pass on the current GPU (ab_cuda_experts_path).

    Args:
      shape: sizes of the layer.
      dtype: dtype of the operands.
      w_in_layout, w_out_layout: layouts of the weights, as in `moe`.

    Returns:
      One or more of "few_rows", "hopper" and "portable", joined by +.

    Raises:
      BenchError: no kernel supports the layer; the message gives the reason.
    """
    ask = _library.load_cuda().ab_cuda_experts_path
    ask.restype = _library.Status
    gated = 2
    sizes = map(ctypes.c_int64, (shape.T, shape.K, shape.E, shape.D, gated, shape.F))
    flags = map(ctypes.c_int32, (w_in_layout[-1] == "d", w_out_layout[-1] == "f", True))
    path = ctypes.c_char_p()
    status = ask(ctypes.c_int32(_library.DTYPES[dtype]), *sizes, *flags, ctypes.byref(path), None)
    if status.code != 0:
        raise BenchError(f"path: {status.message.decode()}")
    assert path.value is not None
    return path.value.decode()

"""`python -m anabranch bench`: our operations beside torch (if installed) and XLA, in one run."""

import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch import _packages
from anabranch.bench.errors import ArgumentError, BenchError
from anabranch.bench.measure import format_table
from anabranch.bench.processes import rows_of_a_process

__all__ = ["CUDA_OPERATIONS", "CUDA_TOGETHER", "DTYPES", "OPERATIONS", "TOGETHER", "ArgumentError", "BenchError", "run"]

#: The operations on the CPU, and what can be chosen of each.
OPERATIONS = {
    "router": (),
    "dispatch": (),
    "experts": (),
    "layer": (),
    "torch": ("shape", "tokens", "by"),
}
#: Those that run after each other, in processes of their own.
TOGETHER = ("router", "dispatch", "experts", "layer")

#: The operations on cuda, and what can be chosen of each.
CUDA_OPERATIONS = {
    "router": ("rows", "tokens", "by"),
    "plan": ("rows", "tokens", "by"),
    "dispatch": (),
    "layer": ("shape", "tokens", "routing", "by", "trace"),
    "decode": ("shape", "tokens"),
    "mesh": ("shape", "tokens", "by", "transport"),
    "torch": ("shape", "tokens", "by"),
}
#: Those that one process runs after each other; the layer needs the device's whole memory.
CUDA_TOGETHER = ("router", "plan", "dispatch")

DTYPES = ("float32", "bfloat16")


def run(
    operations: Sequence[str],
    *,
    device: str = "cpu",
    dtypes: Sequence[str] | None,
    quick: bool,
    json_file: str | None,
    selection: Mapping[str, Any] | None = None,
) -> int:
    """Runs the benchmarks of some operations and prints a table for each.

    Args:
      operations: names out of OPERATIONS, or CUDA_OPERATIONS.
      device: "cpu" or "cuda".
      dtypes: out of DTYPES; None: all that the operation is timed with.
      quick: one shape and few repeats.
      json_file: also write all rows there; "-" writes them to standard output instead of the tables.
      selection: more arguments for the benchmarks' rows().

    Returns:
      The exit status: 1 where a row has an `error`.

    Raises:
      BenchError: this machine lacks something.
      ArgumentError: the selection names something that does not exist, or json_file can't be written.
    """
    from anabranch import info

    if json_file not in (None, "-"):
        _check_file(json_file)
    modules = {name: _module(name, device) for name in operations}
    together = len(operations) == 1 or device == "cuda"
    # On the CPU each has a process of its own: what one does to the allocator must not reach the next.
    rows = {
        name: _rows(name, modules[name], dtypes, quick, selection or {})
        if together
        else rows_of_a_process(name, _flags(dtypes, quick))
        for name in operations
    }
    if json_file != "-":
        for name, module in modules.items():
            print(f"\n{name}: {module.CAPTION}")
            tables = module.tables(rows[name]) if hasattr(module, "tables") else {"": rows[name]}
            for title, table in tables.items():
                print((f"\n{title}\n" if title else "") + f"{format_table(table)}\n")
    report = {"machine": info.collect(), "arguments": sys.argv[1:], "rows": rows}
    if json_file == "-":
        json.dump(report, sys.stdout, indent=2)
        print()
    elif json_file:
        with open(json_file, "w") as file:
            json.dump(report, file, indent=2)
    return int(any("error" in row for of_operation in rows.values() for row in of_operation))


def _check_file(name: str) -> None:
    """Refuses a file that can't be written, before the benchmarks take their minutes."""
    path = pathlib.Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError(f"--json: got {name}, expected a file that can be written")


def _module(operation: str, device: str) -> Any:
    try:
        return importlib.import_module(f"anabranch.bench.{'cuda_' * (device == 'cuda')}{operation}")
    except ImportError as error:
        raise BenchError(_packages.explain(operation, error)) from error


def _rows(
    operation: str, module: Any, dtypes: Sequence[str] | None, quick: bool, selection: Mapping[str, Any]
) -> list[dict[str, Any]]:
    start, rows = time.perf_counter(), []
    dtypes = dtypes or getattr(module, "DTYPES", DTYPES)
    for row in module.rows(dtypes=dtypes, quick=quick, **selection):
        rows.append(row)
        shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "spread")
        print(f"{operation}: {', '.join(shown)}", file=sys.stderr)
    print(f"{operation}: {len(rows)} rows in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return rows


def _flags(dtypes: Sequence[str] | None, quick: bool) -> list[str]:
    return [argument for dtype in dtypes or () for argument in ("--dtype", dtype)] + ["--quick"] * quick

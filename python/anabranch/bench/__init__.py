"""`python -m anabranch bench`: our operations beside torch (if installed) and XLA, in one run."""

import importlib
import json
import subprocess
import sys
from typing import Any

from anabranch.bench.measure import format_table

OPERATIONS = ("router", "dispatch", "experts", "layer")
CUDA_OPERATIONS = ("router", "dispatch")  # cuda_router.py, cuda_dispatch.py


def run(operations: list[str], *, dtypes: list[str], quick: bool, json_file: str | None) -> int:
    """Runs the benchmarks of some operations and prints a table for each.

    Args:
      operations: names out of OPERATIONS, or "cuda_" and a name out of CUDA_OPERATIONS.
      dtypes: "float32" and/or "bfloat16".
      quick: one shape and few repeats.
      json_file: also write all rows there; "-" writes them to standard output instead of the tables.

    Returns:
      The exit status.
    """
    from anabranch import info

    if len(operations) == 1:
        table = {operations[0]: _rows(operations[0], dtypes, quick)}
    else:
        table = {operation: _rows_of_a_process(operation, dtypes, quick) for operation in operations}
    if json_file != "-":
        for operation, rows in table.items():
            caption = importlib.import_module(f"anabranch.bench.{operation}").CAPTION
            print(f"\n{operation}: {caption}\n{format_table(rows)}\n")
    report = {"machine": info.collect(), "rows": table}
    if json_file == "-":
        json.dump(report, sys.stdout, indent=2)
        print()
    elif json_file:
        with open(json_file, "w") as file:
            json.dump(report, file, indent=2)
    return 0


def _rows(operation: str, dtypes: list[str], quick: bool) -> list[dict[str, Any]]:
    rows = []
    for row in importlib.import_module(f"anabranch.bench.{operation}").rows(dtypes=dtypes, quick=quick):
        rows.append(row)
        print(f"{operation}: {row}", file=sys.stderr)
    return rows


def _rows_of_a_process(operation: str, dtypes: list[str], quick: bool) -> list[dict[str, Any]]:
    """The same in a process of its own: what one benchmark does to the allocator must not reach the next."""
    flags = [argument for dtype in dtypes for argument in ("--dtype", dtype)] + ["--quick"] * quick
    if operation.startswith("cuda_"):
        flags += ["--device", "cuda"]
    name = operation.removeprefix("cuda_")
    command = [sys.executable, "-m", "anabranch", "bench", name, "--json", "-", *flags]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout)["rows"][operation]

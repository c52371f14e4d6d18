"""`python -m anabranch bench`: our operations beside torch (if installed) and XLA, in one run."""

import importlib
import json
import sys
from typing import Any

from anabranch.bench.measure import format_table

OPERATIONS = ("router", "dispatch", "experts", "layer")


def run(operations: list[str], *, dtypes: list[str], quick: bool, json_file: str | None) -> int:
    """Runs the benchmarks of some operations and prints a table for each.

    Args:
      operations: names out of OPERATIONS.
      dtypes: "float32" and/or "bfloat16".
      quick: one shape and few repeats.
      json_file: also write all rows there; "-" writes them to standard output instead of the tables.

    Returns:
      The exit status.
    """
    from anabranch import info

    table: dict[str, list[dict[str, Any]]] = {}
    for operation in operations:
        module = importlib.import_module(f"anabranch.bench.{operation}")
        rows = []
        for row in module.rows(dtypes=dtypes, quick=quick):
            rows.append(row)
            print(f"{operation}: {row}", file=sys.stderr)
        table[operation] = rows
        if json_file != "-":
            print(f"\n{operation}: {module.CAPTION}\n{format_table(rows)}\n")
    report = {"machine": info.collect(), "rows": table}
    if json_file == "-":
        json.dump(report, sys.stdout, indent=2)
        print()
    elif json_file:
        with open(json_file, "w") as file:
            json.dump(report, file, indent=2)
    return 0

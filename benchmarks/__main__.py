"""`python -m benchmarks OPERATION`: times one of our operations and its peers on this machine."""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch import _packages
from anabranch.bench import ArgumentError, BenchError, check_json, write_json
from benchmarks import beside
from benchmarks.flags import positive
from benchmarks.processes import busy_processes, rows_of_a_process
from benchmarks.tables import format_table

#: The module of each operation. A module defines CAPTION, DTYPES per device (() if dtypes do not matter), OPTIONS (the
#: arguments of `add_argument` by name), `rows(options)`, unless one table shows all rows, `tables(rows)`, and for
#: --beside `cases(options)`.
OPERATIONS = {
    "router": "router",
    "plan": "plan",
    "dispatch": "dispatch",
    "experts": "experts",
    "layer": "layer",
    "torch": "torch_modes",
    "decode": "decode",
    "host": "host",
    "lora": "lora",
    "mesh": "mesh",
    "train": "train",
}
#: The operations that run if none is given, each in its own process.
TOGETHER = {"cpu": ("router", "plan", "dispatch", "experts", "layer"), "cuda": ("router", "plan", "dispatch")}
DTYPES = ("float32", "bfloat16", "float16")
BESIDE = "time only the C calls, interleaved with those of another build of the library for the device"


def _add_common(parser: argparse.ArgumentParser, devices: Sequence[str], dtypes: Sequence[str]) -> None:
    parser.add_argument("--device", choices=devices, default=devices[0], help=f"default: {devices[0]}")
    if dtypes:
        parser.add_argument("--dtype", choices=dtypes, action="append", help="default: all dtypes of the device")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, only the first shape")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the rows to FILE; '-' writes to standard output and prints no table"
    )
    parser.add_argument(
        "--busy", type=positive, metavar="N", default=0, help="run N other processes meanwhile, each busy on one thread"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times operations of anabranch and their peers. Without OPERATION, runs several, each in its own "
        f"process: on the CPU {', '.join(TOGETHER['cpu'])}; on a GPU {', '.join(TOGETHER['cuda'])}.",
    )
    _add_common(parser, ("cpu", "cuda"), DTYPES[:2])
    commands = parser.add_subparsers(dest="operation", metavar="OPERATION", help="see OPERATION --help for its options")
    for name in OPERATIONS:
        module = _module(name)
        headline, about = module.__doc__.strip().rstrip("."), f"{module.__doc__}\n{module.CAPTION}."
        command = commands.add_parser(
            name, help=headline, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        dtypes = [dtype for dtype in DTYPES if any(dtype in of for of in module.DTYPES.values())]
        _add_common(command, list(module.DTYPES), dtypes)
        for option, settings in module.OPTIONS.items():
            command.add_argument(option, **settings)
        if hasattr(module, "cases"):
            command.add_argument("--beside", metavar="LIBRARY", action="append", default=[], help=BESIDE)
    return parser


def _module(operation: str) -> Any:
    return importlib.import_module(f"benchmarks.{OPERATIONS[operation]}")


def _rows(operation: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows of one operation and prints each as soon as it is measured."""
    module, start, rows = _module(operation), time.perf_counter(), []
    known = module.DTYPES[options.device]
    options.dtype = getattr(options, "dtype", None) or known
    for dtype in options.dtype:
        if dtype not in known:
            where = f"{operation} on {options.device}"
            raise ArgumentError(f"--dtype: got {dtype} with {where}, expected {', '.join(known)}")
    try:
        if getattr(options, "beside", None):
            found = beside.rows(module.cases(options), options.beside, options.device, options.quick)
        else:
            found = module.rows(options)
        for row in found:
            rows.append(row)
            shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "spread")
            print(f"{operation}: {', '.join(shown)}", file=sys.stderr)
    except ImportError as error:
        raise BenchError(_packages.explain(operation, error)) from error
    print(f"{operation}: {len(rows)} rows in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return rows


def _run_all(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of every operation of TOGETHER, each measured in its own process."""
    found = {}
    for operation in TOGETHER[options.device]:
        flags = [operation, "--device", options.device] + ["--quick"] * options.quick
        if _module(operation).DTYPES[options.device]:
            flags += [argument for dtype in options.dtype or () for argument in ("--dtype", dtype)]
        found[operation] = rows_of_a_process(flags)
    return found


def run(options: argparse.Namespace) -> int:
    """Runs the requested benchmarks and prints their tables. Returns exit status 1 if a row has an `error`.

    Raises:
      BenchError: this machine lacks something, or an argument is invalid.
    """
    check_json(options.json)
    with busy_processes(options.busy):
        rows = (
            {options.operation: _rows(options.operation, options)}
            if options.operation is not None
            else _run_all(options)
        )
    if options.json != "-":
        for name, found in rows.items():
            module = _module(name)
            other = bool(getattr(options, "beside", None))
            print(f"\n{name}: {beside.CAPTION if other else module.CAPTION}")
            tables = module.tables(found) if hasattr(module, "tables") and not other else {"": map(_printable, found)}
            for title, table in tables.items():
                print((f"\n{title}\n" if title else "") + f"{format_table(table)}\n")
    write_json(options.json, rows)
    return int(any("error" in row for found in rows.values() for row in found))


def _printable(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("spread", "host bound")}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark. Returns the exit status: 2 for an invalid argument, 1 for any other failure."""
    arguments, parser = sys.argv[1:] if argv is None else argv, _parser()
    options = parser.parse_args(arguments)
    if options.operation not in (None, arguments[0]):
        parser.error(f"OPERATION: got {options.operation} after options, expected it before its options")
    if argv is None and options.device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for this process and its children
    try:
        return run(options)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

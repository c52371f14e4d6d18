"""Benchmarks in separate processes, so that allocator state is not carried over, and their errors."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import BenchError
from benchmarks.shapes import LayerShape

ROOT = pathlib.Path(__file__).parents[1]


class Case(NamedTuple):
    """One measurement of a layer by the benchmark `operation`. routing, transport: None if it has no such option."""

    operation: str
    device: str
    shape: LayerShape
    dtype: str
    by: str
    routing: str | None = None
    transport: str | None = None

    def _own(self) -> dict[str, str]:
        return {name: value for name in ("routing", "transport") if (value := getattr(self, name)) is not None}

    def head(self) -> dict[str, Any]:
        """Returns the first columns of its rows."""
        return {"T,D,F,E,K": str(self.shape), **self._own(), "dtype": self.dtype, "by": self.by}

    def arguments(self) -> list[str]:
        """Returns the command line of the measurement alone."""
        options = {"device": self.device, "shape": self.shape, "dtype": self.dtype, "by": self.by, **self._own()}
        return [self.operation, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def rows_of_cases(
    operation: str, cases: Sequence[Case], quick: bool, measure: Callable[[Case], Iterator[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all cases. A single case is measured here, each of several in its own process.

    Raises:
      BenchError: the only case failed. Of several cases, a failed one has a row with `error`.
    """
    for case in cases:
        if len(cases) == 1 and case.operation == operation:
            with as_bench_errors(case.by):
                yield from measure(case)
            continue
        try:
            yield from rows_of_a_process([*case.arguments(), *["--quick"] * quick], quiet=True)
        except BenchError as error:
            yield {**case.head(), "error": str(error)}


@contextlib.contextmanager
def as_bench_errors(by: str) -> Iterator[None]:
    """Prints the traceback of any failure in the block and raises a BenchError. by: name of the implementation."""
    try:
        yield
    except BenchError:
        raise
    except Exception as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # An error in a process that torch started has a message that begins with a traceback; use its last line.
        reason = (lines or [""])[-1 if "Traceback (most recent call last):" in lines else 0]
        raise BenchError(f"{by}: {type(error).__name__}: {reason}") from error


def rows_of_a_process(
    arguments: Sequence[str], *, quiet: bool = False, variables: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Runs `python -m benchmarks ARGUMENTS` and returns its rows.

    Args:
      arguments: the operation and its options.
      quiet: show the process's standard error only if it fails.
      variables: added to the environment of the process.

    Raises:
      BenchError: the process failed. If quiet, the error has its message.
    """
    command = [sys.executable, "-m", "benchmarks", *arguments, "--json", "-"]
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | dict(variables or {}),
    )
    if result.returncode != 0 and not result.stdout:  # rows with an `error` also give status 1
        sys.stderr.write(result.stderr or "")
        message = last_error(result.stderr or "") or f"{arguments[0]} failed"
        raise BenchError(f"{message} (exit status {result.returncode})")
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"][arguments[0]]
    return found


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs `count` busy single-threaded processes until the block ends."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def last_error(text: str) -> str:
    """Returns the error that a benchmark wrote to standard error, or else the last line.

    >>> last_error("Traceback\\nbench: no GPU\\nshutting down\\n"), last_error("Aborted\\n"), last_error("")
    ('no GPU', 'Aborted', '')
    """
    lines = text.strip().splitlines()
    errors = [line.removeprefix("bench: ") for line in lines if line.startswith("bench: ")]
    return (errors or lines or [""])[-1]

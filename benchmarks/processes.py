"""Errors of the benchmarks, and benchmarks in separate processes, so that allocator state is not carried over."""

import contextlib
import json
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from anabranch.bench import BenchError

ROOT = pathlib.Path(__file__).parents[1]


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


def rows_of_a_process(operation: str, flags: Sequence[str], *, quiet: bool = False) -> list[dict[str, Any]]:
    """Runs `python -m benchmarks OPERATION FLAGS` and returns its rows.

    Args:
      operation: the benchmark to run.
      flags: its options.
      quiet: show the process's standard error only if it fails.

    Raises:
      BenchError: the process failed. If quiet, the error has its message.
    """
    command = [sys.executable, "-m", "benchmarks", operation, "--json", "-", *flags]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None, text=True, check=False, cwd=ROOT
    )
    if result.returncode != 0 and not result.stdout:  # rows with an `error` also give status 1
        sys.stderr.write(result.stderr or "")
        raise BenchError(
            f"{last_error(result.stderr or '') or f'{operation} failed'} (exit status {result.returncode})"
        )
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"][operation]
    return found


def rows_or_error(operation: str, flags: Sequence[str], failed: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a quiet process and returns its rows. If it fails, returns `failed` with the message as `error`, `note`."""
    try:
        return rows_of_a_process(operation, flags, quiet=True)
    except BenchError as error:
        said = str(error)
        return [failed | {"error": said} | ({"note": said} if "note" in failed else {})]


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

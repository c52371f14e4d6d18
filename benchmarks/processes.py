"""Errors of the benchmarks, and benchmarks in processes of their own: no allocator's state reaches the next one."""

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
    """Turns any failure within into a BenchError, after its traceback; by: who failed."""
    try:
        yield
    except BenchError:
        raise
    except Exception as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The error of a process that torch started begins with a traceback; others begin with what happened.
        told = (lines or [""])[-1 if "Traceback (most recent call last):" in lines else 0]
        raise BenchError(f"{by}: {type(error).__name__}: {told}") from error


def rows_of_a_process(operation: str, flags: Sequence[str], *, quiet: bool = False) -> list[dict[str, Any]]:
    """The rows of `python -m benchmarks OPERATION FLAGS`.

    Args:
      operation: what to run.
      flags: its options.
      quiet: shows what the process writes to standard error only if it fails.

    Raises:
      BenchError: it failed; if quiet, with the message of the process.
    """
    command = [sys.executable, "-m", "benchmarks", operation, "--json", "-", *flags]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None, text=True, check=False, cwd=ROOT
    )
    if result.returncode != 0 and not result.stdout:  # rows with an `error` have status 1, too
        sys.stderr.write(result.stderr or "")
        raise BenchError(
            f"{last_words(result.stderr or '') or f'{operation} failed'} (exit status {result.returncode})"
        )
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"][operation]
    return found


def rows_or_error(operation: str, flags: Sequence[str], failed: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a quiet process; if that fails, the row `failed` with the message as `error` and in its `note`."""
    try:
        return rows_of_a_process(operation, flags, quiet=True)
    except BenchError as error:
        said = str(error)
        return [failed | {"error": said} | ({"note": said} if "note" in failed else {})]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs `count` processes that compute without a pause, each on one thread, until the block ends."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def last_words(text: str) -> str:
    """The error that a benchmark wrote to standard error, else the last line.

    >>> last_words("Traceback\\nbench: no GPU\\nshutting down\\n"), last_words("Aborted\\n"), last_words("")
    ('no GPU', 'Aborted', '')
    """
    lines = text.strip().splitlines()
    errors = [line.removeprefix("bench: ") for line in lines if line.startswith("bench: ")]
    return (errors or lines or [""])[-1]

"""Benchmarks in processes of their own: what one does to an allocator or a device must not reach the next."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from anabranch.bench.errors import BenchError


def rows_of_a_process(operation: str, flags: Sequence[str], *, quiet: bool = False) -> list[dict[str, Any]]:
    """The rows of `python -m anabranch bench OPERATION FLAGS`.

    Args:
      operation: what to run.
      flags: on which device, for instance.
      quiet: what it writes to standard error is shown only where it fails.

    Raises:
      BenchError: it failed. Where it is quiet, with its own message.
    """
    command = [sys.executable, "-m", "anabranch", "bench", operation, "--json", "-", *flags]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None, text=True, check=False
    )
    if result.returncode != 0:
        sys.stderr.write(result.stderr or "")
        raise BenchError(
            f"{last_words(result.stderr or '') or f'{operation} failed'} (exit status {result.returncode})"
        )
    return json.loads(result.stdout)["rows"][operation]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs `count` processes that compute without a pause, each on one thread, until the block ends."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        yield processes
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

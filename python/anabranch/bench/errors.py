"""The error of the benchmarks."""

import contextlib
import traceback
from collections.abc import Iterator


class BenchError(RuntimeError):
    """This machine lacks what was asked for; the message says what."""


class ArgumentError(BenchError):
    """An argument of the command line is wrong: "--name: got X, expected Y"."""


@contextlib.contextmanager
def as_bench_errors(by: str) -> Iterator[None]:
    """Any failure within as a BenchError, after its traceback; by: who failed."""
    try:
        yield
    except BenchError:
        raise
    except Exception as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # A process of torch's begins with a traceback, all others with what happened.
        told = (lines or [""])[-1 if "Traceback (most recent call last):" in lines else 0]
        raise BenchError(f"{by}: {type(error).__name__}: {told}") from error

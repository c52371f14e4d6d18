"""The error of the benchmarks."""

import contextlib
import traceback
from collections.abc import Iterator


class BenchError(RuntimeError):
    """This machine lacks what was asked for, or there is no such benchmark; the message says what."""


@contextlib.contextmanager
def as_bench_errors(by: str) -> Iterator[None]:
    """Any failure within as a BenchError, after its traceback; by: who failed."""
    try:
        yield
    except BenchError:
        raise
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        raise BenchError(f"{by}: {type(error).__name__}: {first}") from error

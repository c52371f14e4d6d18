"""How the examples end: what a user can fix is one line and an exit status, never a traceback."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

#: Characters of a cause that are told, at most.
TOLD = 240


class RunError(ValueError):
    """Options, files and folders do not go together, or can't be read or written; no traceback is needed."""


def cause(error: BaseException) -> str:
    """Type and first line of an error, shortened in its middle."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = ": ".join([type(error).__name__, *lines[:1]])
    # What failed stands at the beginning, why at the end.
    return told if len(told) <= TOLD else f"{told[: TOLD // 2]} ... {told[-TOLD // 2 :]}"


@contextlib.contextmanager
def as_run_error(
    what: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError, after: str = ""
) -> Iterator[None]:
    """Any failure of `kinds` within as a RunError.

    Args:
      what: what was tried, and on which argument or file.
      after: what the user can do now.
    """
    try:
        yield
    except RunError:
        raise
    except kinds as error:
        raise RunError(f"{what}: {cause(error)}{after}") from error


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports, which take seconds: where one fails, the program ends with the command that installs it."""
    try:
        yield
    except ImportError as error:
        program = Path(sys.argv[0])
        name = program.parent.name if program.stem == "__main__" else program.stem
        sys.exit(f"{name}: {str(error).rstrip('.')}. In the folder of the repository: pip install '.[{extra}]'")
    except KeyboardInterrupt:
        sys.exit(130)


def run_main(name: str, main: Callable[[], int | None]) -> int:
    """Runs an example.

    Returns:
      The exit status: 2 after a RunError, 130 after Ctrl-C, 141 where the reader of standard output is gone.
    """
    try:
        try:
            return main() or 0
        finally:
            sys.stdout.flush()
    except RunError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it exits
        return 141

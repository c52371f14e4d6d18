"""Errors of the examples: a user's mistakes end in one line and an exit status, without a traceback."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

#: Maximum length of a printed cause.
MAX_LENGTH = 240


class RunError(ValueError):
    """Options, files and folders are inconsistent, or cannot be read or written; needs no traceback."""


def cause(error: BaseException) -> str:
    """Type and first line of an error, shortened in its middle."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = ": ".join([type(error).__name__, *lines[:1]])
    # The start says what failed, the end says why.
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH // 2]} ... {text[-MAX_LENGTH // 2 :]}"


@contextlib.contextmanager
def as_run_error(
    what: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError, after: str = ""
) -> Iterator[None]:
    """Converts errors of `kinds` inside the context to RunError.

    Args:
      what: the failed action, with its argument or file.
      after: advice for the user.
    """
    try:
        yield
    except RunError:
        raise
    except kinds as error:
        raise RunError(f"{what}: {cause(error)}{after}") from error


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Context for imports, which take seconds; if one fails, the program ends with the command that installs it."""
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
      The exit status: 2 after a RunError, 130 after Ctrl-C, 141 if the reader of standard output has closed it.
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        return 141

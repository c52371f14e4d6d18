"""The error of the examples: what a user can mend, told in one line."""

import contextlib
from collections.abc import Iterator

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

"""Training progress: a bar on a terminal, a line every few seconds in a log."""

from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

#: Seconds between updates of the bar, and between lines of a log.
ON_TERMINAL, IN_LOG = 0.2, 10.0


class Progress(tqdm):
    """tqdm rewrites its line on a terminal; elsewhere this class prints every update as a new line without a bar."""

    def __init__(self, *arguments: Any, file: TextIO, **options: Any):
        if file.isatty():
            options |= dict(dynamic_ncols=True, mininterval=ON_TERMINAL)
        else:
            text = "{desc}: {n_fmt}/{total_fmt} {unit}s, {elapsed} elapsed, {remaining} left, {rate_fmt}{postfix}"
            options |= dict(bar_format=text, mininterval=IN_LOG)
        super().__init__(*arguments, file=file, unit="step", **options)

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """The function that writes an update to the file."""
        if file.isatty():
            printer: Callable[[str], None] = tqdm.status_printer(file)
            return printer
        return lambda text: print(text, file=file, flush=True)

"""`python -m byte_lm.compare NAME=FOLDER ...`, from the folder `examples`: curves of several runs in one picture."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from byte_lm import pictures
from byte_lm.checkpoint import SUMMARY
from run_error import RunError, as_run_error


def _run(text: str) -> tuple[str, Path]:
    """A name and a folder from "NAME=FOLDER"."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=FOLDER")
    return name, Path(folder)


def read(folder: Path) -> dict[str, Any]:
    """The curves that the run in `folder` has left in its summary.json.

    Raises:
      RunError: there is none, or it is another file.
    """
    path = folder / SUMMARY
    with as_run_error(str(path), (OSError, ValueError)):
        summary = json.loads(path.read_text())
    if not isinstance(summary, dict) or not isinstance(summary.get("curves"), dict):
        raise RunError(f"{path}: got no curves, expected the summary of a run of byte_lm")
    curves: dict[str, Any] = summary["curves"]
    return curves


def main(argv: list[str] | None = None) -> int:
    """Draws the picture; returns the exit status."""
    parser = argparse.ArgumentParser(prog="byte_lm.compare", description="The curves of several runs in one picture.")
    parser.add_argument("runs", nargs="+", type=_run, metavar="NAME=FOLDER", help="what to call a run, and its --out")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="the picture (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        curves = {name: read(folder) for name, folder in options.runs}
        with as_run_error(f"--out: {options.out}"):
            pictures.draw_comparison(options.out, curves)
    except RunError as error:
        print(f"byte_lm.compare: {error}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

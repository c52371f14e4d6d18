"""`python -m byte_lm.compare NAME=FOLDER ...`, from the folder `examples`: plots several runs in one figure."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from run_error import RunError, as_run_error, needs, run_main


def _run(text: str) -> tuple[str, Path]:
    """A name and a folder from "NAME=FOLDER"."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=FOLDER")
    return name, Path(folder)


def read(folder: Path) -> dict[str, Any]:
    """The curves in the summary.json of the run in `folder`.

    Raises:
      RunError: the file is missing or is no summary of a run.
    """
    from byte_lm.checkpoint import SUMMARY

    path = folder / SUMMARY
    with as_run_error(str(path), (OSError, ValueError)):
        summary = json.loads(path.read_text())
    if not isinstance(summary, dict) or not isinstance(summary.get("curves"), dict):
        raise RunError(f"{path}: got no curves, expected the summary of a run of byte_lm")
    curves: dict[str, Any] = summary["curves"]
    return curves


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="byte_lm.compare", description="Plots the curves of several runs in one figure."
    )
    parser.add_argument("runs", nargs="+", type=_run, metavar="NAME=FOLDER", help="name of a run, and its --out folder")
    parser.add_argument(
        "--out", type=Path, default=Path("compare.png"), help="file of the figure (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def draw(options: argparse.Namespace) -> None:
    """Draws the figure.

    Raises:
      RunError: a summary cannot be read, or the figure cannot be written.
    """
    with needs("demo"):
        from byte_lm import pictures
    curves = {name: read(folder) for name, folder in options.runs}
    with as_run_error(f"--out: {options.out}", (OSError, ValueError)):
        pictures.draw_comparison(options.out, curves)
    print(options.out)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and draws; returns the exit status."""
    return run_main("byte_lm.compare", lambda: draw(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())

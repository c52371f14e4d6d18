"""Options shared by several benchmarks."""

import argparse
from collections.abc import Sequence

from anabranch.bench import ArgumentError
from benchmarks.shapes import INDEX_LIMIT, NAMED, LayerShape, parse_shape


def positive(text: str) -> int:
    """Parses an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected E,K such as 128,8")
    return int(parts[0]), int(parts[1])


def _shape(text: str) -> LayerShape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_rows(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --rows E,K."""
    parser.add_argument("--rows", type=_pair, metavar="E,K", action="append", help=what)


def add_tokens(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --tokens T."""
    parser.add_argument(
        "--tokens", type=positive, metavar="T", action="append", help=f"numbers of tokens; default: {default}"
    )


def add_shapes(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --shape T,D,F,E,K and --tokens T."""
    parser.add_argument(
        "--shape",
        type=_shape,
        metavar="T,D,F,E,K",
        action="append",
        help=f"sizes, or {', '.join(NAMED)} with T = 32768; default: {default}",
    )
    add_tokens(parser, "T of the shape")


def add_by(parser: argparse.ArgumentParser, known: Sequence[str], what: str) -> None:
    """Adds --by NAME."""
    parser.add_argument("--by", choices=known, action="append", help=f"implementations to time; default: {what}")


def sized(shapes: Sequence[LayerShape], tokens: Sequence[int] | None, quick: bool) -> list[LayerShape]:
    """Returns the shapes with each T of --tokens, or with their own T, without repeats; only the first if quick.

    Raises:
      ArgumentError: T * K is 2^31 or more.
    """
    chosen = [shape._replace(T=T) for shape in shapes for T in tokens or (shape.T,)]
    chosen = list(dict.fromkeys(chosen[:1] if quick else chosen))
    for shape in chosen:
        if shape.T * shape.K >= INDEX_LIMIT:
            raise ArgumentError(f"--tokens: got {shape.T} with K = {shape.K}, expected T * K < 2^31")
    return chosen

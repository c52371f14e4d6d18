"""Options that several benchmarks have: the arguments of `add_argument` by name."""

import argparse
from collections.abc import Sequence
from typing import Any

from anabranch.bench import ArgumentError
from anabranch.checks import INDEX_LIMIT
from benchmarks.shapes import NAMED, ROUTINGS, LayerShape

Flags = dict[str, dict[str, Any]]


def positive(text: str) -> int:
    """Parses an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def _sizes(text: str, count: int, expected: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != count or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return tuple(map(int, parts))


def parse_shape(text: str) -> LayerShape:
    """Parses a shape from its name or from "T,D,F,E,K".

    >>> parse_shape("qwen3-30b").E, parse_shape("256,128,64,8,2").K
    (128, 2)
    """
    if text in NAMED:
        return NAMED[text]
    known = ", ".join(NAMED)
    shape = LayerShape(*_sizes(text, 5, f"T,D,F,E,K such as 32768,2048,768,128,8, or {known}"))
    if shape.K > shape.E or shape.T * shape.K >= INDEX_LIMIT:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected T,D,F,E,K with K <= E and T * K < 2^31")
    return shape


def rows(what: str) -> Flags:
    """Returns --rows E,K."""

    def pair(text: str) -> tuple[int, ...]:
        return _sizes(text, 2, "E,K such as 128,8")

    return {"--rows": {"type": pair, "metavar": "E,K", "action": "append", "help": what}}


def tokens(default: str) -> Flags:
    """Returns --tokens T."""
    text = f"numbers of tokens; default: {default}"
    return {"--tokens": {"type": positive, "metavar": "T", "action": "append", "help": text}}


def shapes(default: str) -> Flags:
    """Returns --shape T,D,F,E,K and --tokens T."""
    text = f"sizes, or {', '.join(NAMED)} with T = 32768; default: {default}"
    shape = {"type": parse_shape, "metavar": "T,D,F,E,K", "action": "append", "help": text}
    return {"--shape": shape, **tokens("T of the shape")}


def choices(name: str, known: Sequence[str], what: str) -> Flags:
    """Returns an option that can be repeated."""
    return {name: {"choices": known, "action": "append", "help": what}}


def routing() -> Flags:
    """Returns --routing."""
    what = "nearly equal loads, or loads proportional to 1 / (1 + e); default: uniform"
    return choices("--routing", ROUTINGS, what)


def by(known: Sequence[str], default: str = "all installed ones") -> Flags:
    """Returns --by NAME."""
    return choices("--by", known, f"implementations to time; default: {default}")


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

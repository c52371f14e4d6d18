"""What of a layer's benchmark is timed: the options that several of them share, checked alike."""

import importlib.util
import sys
from collections.abc import Sequence

from anabranch.bench.errors import ArgumentError
from anabranch.bench.layer_shape import LayerShape


def check_dtypes(operation: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raises ArgumentError for a --dtype that is not known."""
    for dtype in given:
        if dtype not in known:
            raise ArgumentError(f"--dtype: got {dtype} with {operation}, expected {', '.join(known)}")


def implementations(operation: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """What --by names, each once; None: all that is known, without what needs torch where it is missing, which is said.

    Calls through C need it too, for memory, streams and graphs.

    Raises:
      ArgumentError: a name is not known.
    """
    for by in given or ():
        if by not in known:
            raise ArgumentError(f"--by: got {by} with {operation}, expected {', '.join(known)}")
    if given is not None:
        return list(dict.fromkeys(given))
    found = [by for by in known if by not in ("c", "torch", "moe") or importlib.util.find_spec("torch")]
    if len(found) < len(known):
        left_out = " and ".join(by for by in known if by not in found)
        print(f"{operation}: without {left_out}: torch is not installed", file=sys.stderr)
    return found


def sized(shapes: Sequence[LayerShape], tokens: Sequence[int] | None, quick: bool) -> list[LayerShape]:
    """The shapes with the numbers of tokens of --tokens, or their own; each once, the first alone if quick.

    Raises:
      ArgumentError: T * K is 2^31 or more.
    """
    chosen = [shape._replace(T=T) for shape in shapes for T in tokens or (shape.T,)]
    chosen = list(dict.fromkeys(chosen[:1] if quick else chosen))
    for shape in chosen:
        if shape.T * shape.K >= 2**31:
            raise ArgumentError(f"--tokens: got {shape.T} with K = {shape.K}, expected T * K < 2^31")
    return chosen

"""Times the C functions of the current build beside those of other builds, for example an older one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks import timing
from benchmarks.c_call import Calls, through

CAPTION = """with --beside: microseconds of the calls through C, of this build and of the other libraries. Batches, on a
GPU replays of CUDA graphs, are interleaved. x: time divided by that of this build; bits differ: the libraries whose
results differ from those of this build"""

#: The first columns of a row, sets of operands, and a function that returns the C calls on one set.
Case = tuple[dict[str, Any], Sequence[Any], Callable[[Any], Calls]]


def rows(cases: Iterable[Case], libraries: Sequence[str], device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields one row per case and call.

    Args:
      cases: the cases.
      libraries: paths of other builds of the library for the device.
      device: "cpu" or "cuda".
      quick: shorter and fewer repeats.
    """
    builds = {"this": None} | {path: path for path in libraries}
    for library in libraries:
        with through(library):  # An invalid path is an error of the arguments.
            pass
    for head, operands, make in cases:
        calls: dict[str, list[Calls]] = {}
        try:
            for name, path in builds.items():
                with through(path):
                    calls[name] = [make(one) for one in operands]
        except RuntimeError as error:  # for example an older build that does not support the case
            yield {**head, "error": f"{name}: {error}"}
            continue
        for call in calls["this"][0]:
            of_build = {name: [one[call] for one in sets] for name, sets in calls.items()}
            results = {name: sets[0]() for name, sets in of_build.items()}
            differ = [path for path in libraries if not _same_bits(results[path], results["this"])]
            if device == "cpu":
                times = timing.times_of("cpu", of_build, quick=quick)
            else:
                graphs = [timing.captured(sets, least_calls=24) for sets in of_build.values()]
                times = dict(zip(builds, timing.replays(graphs, 5 if quick else 30), strict=True))
            ours = times["this"].seconds
            yield {
                **head,
                "call": call,
                "this": 1e6 * ours,
                **{path: 1e6 * times[path].seconds for path in libraries},
                **{f"x {path}": times[path].seconds / ours for path in libraries},
                "bits differ": ", ".join(differ),
                "spread": {name: [1e6 * of.low, 1e6 * of.high] for name, of in times.items()},
            }


def _tensors(result: Any) -> list[Any]:
    """Returns the tensors of a call's result."""
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else None
    return [result] if parts is None else [tensor for part in parts for tensor in _tensors(part)]


def _same_bits(one: Any, other: Any) -> bool:
    import torch

    bits = ([tensor.reshape(-1).view(torch.uint8) for tensor in _tensors(result)] for result in (one, other))
    return all(map(torch.equal, *bits))

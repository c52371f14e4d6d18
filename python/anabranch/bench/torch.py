"""The layer in torch on the CPU: ours eager and compiled, beside torch's grouped products and transformers' experts."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anabranch._packages import explain
from anabranch.bench import torch_rows
from anabranch.bench.cuda_layer_graphs import operands
from anabranch.bench.errors import ArgumentError, BenchError
from anabranch.bench.layer_shape import LayerShape
from anabranch.bench.measure import interleaved
from anabranch.bench.selection import sized
from anabranch.bench.torch_layers import BY, COMPILED, EAGER, MODES, batched_bytes, installed, make

CAPTION = """from x [T, D] to the output; forward, and both: forward and backward, of x and of all weights. moe, MoE:
ours, the function and the module; grouped_mm: topk, sort, torch's grouped products, index_add; hf-...: Qwen3-MoE's
layer of transformers with that implementation of its experts; compiled: torch.compile with fullgraph. x: the time over
that of moe called alike. host: time of a call on a layer with next to nothing to compute, (8,16,16,8,2), by one thread.
Best of the repeats, by turns"""

SHAPES = (LayerShape(256, 256, 128, 16, 4), LayerShape(1024, 512, 256, 64, 8))
_TINY = LayerShape(8, 16, 16, 8, 2)
_MOST_BATCHED_BYTES = 2 << 30

tables = torch_rows.tables


def rows(
    *,
    dtypes: Sequence[str],
    quick: bool,
    shape: Sequence[LayerShape] | None = None,
    tokens: Sequence[int] | None = None,
    by: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for every shape, dtype, implementation and mode.

    Args:
      dtypes: of everything.
      quick: the first shape, a short time each, and nothing is compiled.
      shape: None: SHAPES.
      tokens: T, in the place of the shapes' own.
      by: out of BY; None: all that are installed.

    Raises:
      ArgumentError: an argument is wrong.
      BenchError: torch is not installed.
    """
    chosen = implementations(by, BY)
    modes = (EAGER,) if quick else (EAGER, COMPILED)
    found = _rows(sized(shape or SHAPES, tokens, quick), dtypes, chosen, modes, 0.2 if quick else 1.0)
    yield from torch_rows.with_ratios(found)


def implementations(given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """What --by names, each once; None: all that are installed, and what is not is said.

    Raises:
      ArgumentError: a name is not known.
      BenchError: torch or transformers is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise BenchError(explain("the layer in torch", error)) from error
    for by in given or ():
        if by not in known:
            raise ArgumentError(f"--by: got {by} with torch, expected {', '.join(known)}")
    wanted = list(dict.fromkeys(given or known))
    found = installed(wanted)
    if len(found) < len(wanted):
        lacking = ", ".join(by for by in wanted if by not in found)
        if given is not None:
            raise BenchError(f"--by: got {lacking}, expected transformers to be installed")
        print(f"torch: without {lacking}: transformers is not installed", file=sys.stderr)
    return found


def _rows(
    shapes: Sequence[LayerShape], dtypes: Sequence[str], chosen: Sequence[str], modes: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    cases = [(by, mode) for by in chosen for mode in modes if mode in MODES[by]]
    for dtype in dtypes:
        host = {case: _host(*case, dtype) for case in cases}
        for shape in shapes:
            copied = batched_bytes(shape, 4 if dtype == "float32" else 2)
            fitting = [case for case in cases if case[0] != "hf-batched_mm" or copied <= _MOST_BATCHED_BYTES]
            layers = {case: _calls(*case, shape, dtype) for case in fitting}
            times: dict[str, Any] = {}
            for name in torch_rows.PASSES:
                times[name] = interleaved({case: layers[case][name] for case in fitting}, seconds=seconds)
            for case in cases:
                left_out = f"not run: it would copy {copied / 2**30:.1f} GiB of weights"
                yield torch_rows.row(
                    shape,
                    dtype,
                    *case,
                    seconds={name: of[case].best for name, of in times.items() if case in of},
                    spread={name: (of[case].best, of[case].median) for name, of in times.items() if case in of},
                    host_seconds=host[case],
                    rate="GFLOP/s",
                    note="" if case in fitting else left_out,
                )


def _calls(by: str, mode: str, shape: LayerShape, dtype: str) -> dict[str, Callable[[], Any]]:
    import torch

    layer = make(by, shape, operands(shape, dtype, "uniform", device="cpu"))
    if mode == COMPILED:
        layer = layer._replace(function=torch.compile(layer.function, fullgraph=True))
    return {"forward": layer.forward, "both": layer.both}


def _host(by: str, mode: str, dtype: str) -> dict[str, float]:
    """Seconds of a call on the tiny layer by one thread."""
    import torch

    threads = torch.get_num_threads()
    with contextlib.ExitStack() as after:
        after.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        times = interleaved(_calls(by, mode, _TINY, dtype), seconds=0.3, repeats=15)
    return {name: timing.best for name, timing in times.items()}

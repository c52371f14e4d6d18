"""The layer in torch on a GPU, eager, compiled and in graphs: ours against grouped_mm and transformers' experts."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import BenchError
from benchmarks import flags, layer, timing
from benchmarks.layer_torch import COMPILED, EAGER, FP8, GRAPH, PASSES, REDUCE, measure
from benchmarks.peers import transformers
from benchmarks.processes import Case, rows_of_cases
from benchmarks.shapes import NAMED
from benchmarks.tables import experts_path, selected

CAPTION = """from x [T, D] to the output. both: forward and backward, with gradients of x and all weights. moe, MoE:
ours, the function and the module; grouped_mm: topk, sort, torch's grouped_mm, index_add; hf-...: the Qwen3-MoE layer of
transformers with that implementation of its experts; fp8: moe with precision="fp8", which quantises the experts in each
pass; fp8-kept: with experts that are quantised once; jax: ours through JAX under jit, as in the benchmark `layer`. x:
the time divided by that of moe in the same mode.

eager, compiled (torch.compile with fullgraph) and reduce-overhead: many calls with the queue full, by the host's clock.
graph: captured explicitly, timed by events. For jit and reduce-overhead, x compares with moe's graph. host: time until
a call returns while the device is busy with other work; -: the call waits for the device, or is a graph. path: our
kernels that the experts ran on. Medians; each implementation runs in its own process; *: bound by the host"""

#: The modes of each layer. "reduce-overhead" copies the weights that are passed to a function at every call, but not
#: the parameters of a module, so only the module has that mode.
MODES = {
    "moe": (EAGER, COMPILED, GRAPH),
    "MoE": (EAGER, COMPILED, GRAPH, REDUCE),
    "grouped_mm": (EAGER, COMPILED, GRAPH),
    "hf-grouped_mm": (EAGER, COMPILED, GRAPH),
    "fp8": (EAGER, GRAPH),
    "fp8-kept": (EAGER, GRAPH),
    "jax": ("jit",),
}
DTYPES = {"cuda": ("bfloat16",)}
OPTIONS = {
    **flags.shapes("qwen3-30b with T = 8192 and 32768"),
    **flags.by(list(MODES)),
}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, implementation and mode.

    A single case is measured in this process, several cases in one process each.

    Raises:
      BenchError: an argument is invalid, or this machine lacks something. Of several cases, a failed one has a row
        with `error`.
    """
    timing.torch_on(options.device)
    by = list(dict.fromkeys(options.by or MODES))
    lacking = [] if transformers.installed() else [who for who in by if who.startswith("hf-")]
    if lacking and options.by:
        raise BenchError(f"--by: got {', '.join(lacking)}, expected transformers to be installed")
    if lacking:
        print(f"torch: without {', '.join(lacking)}: transformers is not installed", file=sys.stderr)
    default = [NAMED["qwen3-30b"]._replace(T=T) for T in (8192, 32768)]
    cases = [
        Case("layer" if who == "jax" else "torch", options.device, shape, "bfloat16", who)
        for shape in flags.sized(options.shape or default, options.tokens, options.quick)
        for who in by
        if who not in lacking
    ]
    repeats = 5 if options.quick else timing.REPEATS
    yield from with_ratios(rows_of_cases("torch", cases, options.quick, lambda case: _measure(case, repeats)))


def _measure(case: Case, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of one implementation, one per mode."""
    layouts = ("pfd", "df") if case.by == "MoE" else ()
    path = experts_path(case.shape, case.dtype, *layouts) if case.by in ("moe", "MoE", *FP8) else None
    for mode in MODES[case.by]:
        found = measure(case.by, case.shape, case.dtype, "uniform", mode, repeats)
        yield layer.row(case, **found, mode=mode, path=path)


def with_ratios(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds "x forward" and "x both": the row's times divided by those of the earlier row of moe in the same mode.

    MoE in "reduce-overhead" and JAX programs are compared with moe in a graph.

    >>> def of(by, mode, ms):
    ...     return {"T,D,F,E,K": "8,8,8,4,2", "by": by, "mode": mode, "both ms": ms}
    >>> rows = [of("moe", "graph", 2.0), of("MoE", "graph", 3.0), of("jax", "jit", 1.0), of("MoE", "eager", 1.0)]
    >>> [found["x both"] for found in with_ratios(rows)]
    [1.0, 1.5, 0.5, None]
    """
    base: dict[Any, dict[str, Any]] = {}
    for found in rows:
        shape, mode = found["T,D,F,E,K"], found.get("mode")
        if found["by"] == "moe":
            base[shape, mode] = found
        ours = base.get((shape, GRAPH if mode in ("jit", REDUCE) else mode), {})
        times = {name: (found.get(f"{name} ms"), ours.get(f"{name} ms")) for name in PASSES}
        yield found | {f"x {name}": time / base if time and base else None for name, (time, base) in times.items()}


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table."""
    names = ["T,D,F,E,K", "by", "mode", "path", *(f"{name} ms" for name in PASSES), *(f"x {name}" for name in PASSES)]
    names += [f"{name} TFLOP/s" for name in PASSES] + [f"host {name} us" for name in PASSES]
    return {"": selected(rows, [*names, "note"])}

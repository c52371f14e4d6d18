"""The layer in torch on a GPU: ours eager, compiled and in CUDA graphs, beside torch's grouped products, transformers'
experts, and ours through JAX.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anabranch.bench import gpu, torch_rows
from anabranch.bench.auto_choice import auto_choice
from anabranch.bench.cuda_layer_graphs import operands
from anabranch.bench.errors import BenchError, as_bench_errors
from anabranch.bench.experts_path import experts_path
from anabranch.bench.layer_shape import NAMED, LayerShape
from anabranch.bench.processes import rows_of_a_process
from anabranch.bench.selection import check_dtypes, sized
from anabranch.bench.torch import implementations
from anabranch.bench.torch_layers import BY as IN_TORCH
from anabranch.bench.torch_layers import EAGER, FP8_BY, GRAPH, MODES, OURS, REDUCE, make

CAPTION = """from x [T, D] to the output; forward, and both: forward and backward, of x and of all weights. moe, MoE:
ours, the function and the module; grouped_mm: topk, sort, torch's grouped products, index_add; hf-...: Qwen3-MoE's
layer of transformers with that implementation of its experts; fp8: moe with precision="fp8", which quantises the
experts in each pass; fp8-kept: with experts that were quantised before; jax: ours through JAX, under jit, as `bench
layer` has it. eager, compiled (torch.compile with fullgraph) and reduce-overhead: many calls with the queue full, by
the host's clock. graph: captured by hand, by events. x: the time over that of moe called alike, of jit and
reduce-overhead over that of its graph. host: until a call returns while the device is busy with something else; -: it
waits for the device, or is a graph. path: which of our kernels the experts ran on; auto: what
precision="auto" chooses for these sizes, forward and for both passes, each of which quantises. Medians; each
implementation in a process of its own"""

BY = (*IN_TORCH, *FP8_BY, "jax")
DTYPES = ("bfloat16",)
SHAPES = tuple(NAMED["qwen3-30b"]._replace(T=T) for T in (8192, 32768))
_HOST_CALLS = 10

tables = torch_rows.tables


def rows(
    *,
    dtypes: Sequence[str],
    quick: bool,
    shape: Sequence[LayerShape] | None = None,
    tokens: Sequence[int] | None = None,
    by: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for every shape, implementation and mode; a single implementation of a single shape in this process.

    Args:
      dtypes: "bfloat16" alone.
      quick: the first shape only, and 5 repeats.
      shape: None: SHAPES.
      tokens: T, in the place of the shapes' own.
      by: out of BY; None: all that are installed.

    Raises:
      BenchError: an argument is wrong, or this machine has no GPU. What fails by itself has a row with `error`.
    """
    check_dtypes("torch on cuda", dtypes, DTYPES)
    chosen = implementations(by, BY)
    cases = [(size, who) for size in sized(shape or SHAPES, tokens, quick) for who in chosen]
    gpu.torch_with_gpu()
    yield from torch_rows.with_ratios(_rows(cases, 5 if quick else gpu.REPEATS, quick))


def _rows(cases: Sequence[tuple[LayerShape, str]], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    for shape, by in cases:
        if by == "jax":
            yield _through_jax(shape, quick)
        elif len(cases) == 1:
            with as_bench_errors(by):
                yield from _measure(shape, by, repeats)
        else:
            flags = ["--device", "cuda", "--shape", str(shape), "--by", by, *["--quick"] * quick]
            try:
                yield from rows_of_a_process("torch", flags, quiet=True)
            except BenchError as error:
                yield torch_rows.row(shape, DTYPES[0], by, EAGER, note=str(error)) | {"error": str(error)}


def _through_jax(shape: LayerShape, quick: bool) -> dict[str, Any]:
    flags = ["--device", "cuda", "--shape", str(shape), "--by", "jax", *["--quick"] * quick]
    try:
        (found,) = rows_of_a_process("layer", flags, quiet=True)
    except BenchError as error:
        return torch_rows.row(shape, DTYPES[0], "jax", torch_rows.JIT, note=str(error)) | {"error": str(error)}
    seconds = {name: 1e-3 * time for name in torch_rows.PASSES if (time := found[f"{name} ms"]) is not None}
    spread = {name: [1e-3 * t for t in found["spread"][f"{name} ms"]] for name in seconds}
    also = {name: found[name] for name in ("path", "auto", "note")}
    return torch_rows.row(shape, DTYPES[0], "jax", torch_rows.JIT, seconds=seconds, spread=spread, **also)


def _measure(shape: LayerShape, by: str, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one implementation, one a mode. The process should have done nothing on the device before."""
    path, auto = (of(shape, DTYPES[0]) if by in OURS else None for of in (experts_path, auto_choice))
    for mode in MODES[by]:
        seconds, host, notes = {}, {}, []
        spread = {}
        for name in torch_rows.PASSES:
            try:
                timing, of_host = _times(shape, by, mode, name, repeats)
            except gpu.torch_with_gpu().cuda.OutOfMemoryError:
                notes.append(f"{name}: out of memory")
                continue
            seconds[name], spread[name] = timing.median, (timing.low, timing.high)
            if of_host is not None:
                host[name] = of_host
            if timing.host_bound:
                notes.append(f"{name}: the host is the limit")
        yield torch_rows.row(
            shape,
            DTYPES[0],
            by,
            mode,
            seconds=seconds,
            host_seconds=host,
            spread=spread,
            path=path,
            auto=auto,
            note="; ".join(notes),
        )


def _times(shape: LayerShape, by: str, mode: str, name: str, repeats: int) -> tuple[gpu.Timing, float | None]:
    """Of a call in a mode, and of the host until it returns; a graph's replay has no such calls."""
    torch = gpu.torch_with_gpu()
    count = gpu.copies_past_cache(shape.operand_bytes(2), least=1)
    layers = [make(by, shape, operands(shape, DTYPES[0], "uniform", seed)) for seed in range(count)]
    if mode not in (EAGER, GRAPH):
        options: dict[str, Any] = {"mode": REDUCE} if mode == REDUCE else {}
        layers = [of._replace(function=torch.compile(of.function, fullgraph=True, **options)) for of in layers]
    calls: list[Callable[[], Any]] = [getattr(layer, name) for layer in layers]
    if mode == GRAPH:
        return gpu.seconds_of_each(calls, repeats=repeats, seconds=40e-3), None
    if mode == REDUCE:
        calls = [_as_a_step(call) for call in calls]
    timing = gpu.seconds_of_calls(calls, repeats=repeats)
    return timing, gpu.host_seconds(calls[0], calls=_HOST_CALLS, repeats=repeats)


def _as_a_step(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a step by itself, whose results the next one may write over."""

    def step() -> Any:
        gpu.torch_with_gpu().compiler.cudagraph_mark_step_begin()
        return call()

    return step

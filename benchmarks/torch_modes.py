"""The layer in torch: eager, compiled and in CUDA graphs; ours against grouped_mm and transformers' experts."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import ArgumentError, BenchError
from benchmarks import figures, timing
from benchmarks.layer_torch import Operands, operands
from benchmarks.options import add_by, add_shapes, sized
from benchmarks.peers import transformers
from benchmarks.processes import as_bench_errors, rows_or_error
from benchmarks.shapes import NAMED, LayerShape

CAPTION = """from x [T, D] to the output. both: forward and backward, with gradients of x and all weights. moe, MoE:
ours, the function and the module; grouped_mm: topk, sort, torch's grouped_mm, index_add; hf-...: the Qwen3-MoE layer of
transformers with that implementation of its experts. compiled: torch.compile with fullgraph. x: the time divided by
that of moe in the same mode.

On a GPU also fp8: moe with precision="fp8", which quantises the experts in each pass; fp8-kept: with experts that are
quantised once; jax: ours through JAX under jit, as in the benchmark `layer`. eager, compiled and reduce-overhead: many
calls with the queue full, by the host's clock. graph: captured explicitly, timed by events. For jit and
reduce-overhead, x compares with moe's graph. host: time until a call returns while the device is busy with other work;
-: the call waits for the device, or is a graph. path: our kernels that the experts ran on. Medians; each implementation
runs in its own process.

On the CPU: best of interleaved repeats; host: time of a call on a tiny layer (8,16,16,8,2) with one thread"""

EAGER, COMPILED, GRAPH, REDUCE, JIT = "eager", "compiled", "graph", "reduce-overhead", "jit"
PASSES = ("forward", "both")
#: The modes of each layer on a GPU; on the CPU only eager and compiled. "reduce-overhead" copies the weights that are
#: passed to a function at every call, but not the parameters of a module, so only the module has that mode.
MODES = {
    "moe": (EAGER, COMPILED, GRAPH),
    "MoE": (EAGER, COMPILED, GRAPH, REDUCE),
    "grouped_mm": (EAGER, COMPILED, GRAPH),
    "hf-grouped_mm": (EAGER, COMPILED, GRAPH),
    "hf-batched_mm": (EAGER,),
    "hf-eager": (EAGER,),
    "fp8": (EAGER, GRAPH),
    "fp8-kept": (EAGER, GRAPH),
    "jax": (JIT,),
}
FP8 = ("fp8", "fp8-kept")
#: Implementations whose experts are ours.
OURS = ("moe", "MoE", *FP8)

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
BY = {"cpu": tuple(by for by in MODES if by not in (*FP8, "jax")), "cuda": tuple(MODES)}
SHAPES = {
    "cpu": (LayerShape(256, 256, 128, 16, 4), LayerShape(1024, 512, 256, 64, 8)),
    "cuda": tuple(NAMED["qwen3-30b"]._replace(T=T) for T in (8192, 32768)),
}
_TINY = LayerShape(8, 16, 16, 8, 2)
_MOST_BATCHED_BYTES = 2 << 30
_HOST_CALLS = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_shapes(parser, "two small ones on the CPU, qwen3-30b with T = 8192 and 32768 on a GPU")
    add_by(parser, BY["cuda"], "all installed ones")


class Layer(NamedTuple):
    """A layer and its operands.

    function: computes the output from the tokens.
    leaves: the tensors to differentiate: the tokens first.
    d_out: the cotangent of the output.
    """

    function: Callable[[Any], Any]
    leaves: tuple[Any, ...]
    d_out: Any

    def forward(self) -> Any:
        """Returns the output, without an autograd graph."""
        import torch

        with torch.no_grad():
            return self.function(self.leaves[0])

    def both(self) -> tuple[Any, ...]:
        """Returns the output and the gradients of the leaves."""
        import torch

        output = self.function(self.leaves[0])
        return output, *torch.autograd.grad(output, self.leaves, self.d_out)


def make(by: str, shape: LayerShape, given: Operands) -> Layer:
    """Returns the layer `by`, a name in MODES, on the values of operands without given experts."""
    from anabranch.torch import MoE, moe, quantize_experts
    from benchmarks.peers import torch as eager

    x, gate, w_in, w_out = (leaf.detach() for leaf in given.leaves)
    if by in ("moe", "grouped_mm", *FP8):
        options: dict[str, Any] = {"precision": "fp8"} if by in FP8 else {}
        if by == "fp8-kept":
            options["quantized"] = quantize_experts(w_in, w_out)

        def ours(*given: Any) -> Any:
            return moe(*given, topk=shape.K, **options).output

        weights = tuple(w.requires_grad_() for w in (gate, w_in, w_out))
        function = functools.partial(eager.layer, topk=shape.K) if by == "grouped_mm" else ours
        return Layer(lambda tokens: function(tokens, *weights), (x.requires_grad_(), *weights), given.d_out)
    _, D, F, E, _ = shape
    state = {  # names and layouts of checkpoints
        "gate.weight": gate.T.contiguous(),
        "gate_up_proj": w_in.permute(0, 2, 3, 1).reshape(E, 2 * F, D).contiguous(),
        "down_proj": w_out.transpose(1, 2).contiguous(),
    }
    if by == "MoE":
        module = MoE(D, F, E, shape.K, device="meta")
    else:
        module = transformers.block(by.removeprefix("hf-"), shape)
        state = {name if name.startswith("gate.") else f"experts.{name}": value for name, value in state.items()}
    module.load_state_dict(state, assign=True)
    leaves = (x.requires_grad_(), *(module.get_parameter(name).requires_grad_() for name in state))
    if by == "MoE":
        return Layer(lambda tokens: module(tokens).output, leaves, given.d_out)
    return Layer(lambda tokens: module(tokens[None])[0], leaves, given.d_out)


def implementations(requested: Sequence[str] | None, device: str) -> list[str]:
    """Returns the names of --by without repeats. For None, returns all installed ones and prints the missing ones.

    Raises:
      ArgumentError: an implementation does not support this device.
      BenchError: torch or transformers is not installed.
    """
    timing.torch_on(device)
    names = list(dict.fromkeys(requested or BY[device]))
    for by in names:
        if by not in BY[device]:
            raise ArgumentError(f"--by: got {by} with torch on {device}, expected {', '.join(BY[device])}")
    lacking = [] if transformers.installed() else [by for by in names if by.startswith("hf-")]
    if lacking and requested is not None:
        raise BenchError(f"--by: got {', '.join(lacking)}, expected transformers to be installed")
    if lacking:
        print(f"torch: without {', '.join(lacking)}: transformers is not installed", file=sys.stderr)
    return [by for by in names if by not in lacking]


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, dtype, implementation and mode.

    On a GPU a single case is measured in this process, several cases in one process each.

    Raises:
      BenchError: an argument is invalid, or this machine lacks something. Of several GPU cases, a failed one has a row
        with `error`.
    """
    device = options.device
    chosen = implementations(options.by, device)
    shapes = sized(options.shape or SHAPES[device], options.tokens, options.quick)
    if device == "cpu":
        modes = (EAGER,) if options.quick else (EAGER, COMPILED)
        yield from with_ratios(_rows_on_cpu(shapes, options.dtype, chosen, modes, 0.2 if options.quick else 1.0))
    else:
        yield from with_ratios(_rows_on_gpu([(shape, by) for shape in shapes for by in chosen], options.quick))


def _rows_on_cpu(
    shapes: Sequence[LayerShape], dtypes: Sequence[str], chosen: Sequence[str], modes: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    cases = [(by, mode) for by in chosen for mode in modes if mode in MODES[by]]
    for dtype in dtypes:
        host = {case: _host_on_cpu(*case, dtype) for case in cases}
        for shape in shapes:
            copied = transformers.batched_bytes(shape, 4 if dtype == "float32" else 2)
            fitting = [case for case in cases if case[0] != "hf-batched_mm" or copied <= _MOST_BATCHED_BYTES]
            layers = {case: _calls_on_cpu(*case, shape, dtype) for case in fitting}
            times = {
                name: timing.interleaved({case: layers[case][name] for case in fitting}, seconds=seconds)
                for name in PASSES
            }
            for case in cases:
                left_out = f"not run: it would copy {copied / 2**30:.1f} GiB of weights"
                timed = {name: of[case] for name, of in times.items() if case in of}
                note = "" if case in fitting else left_out
                yield row(shape, dtype, *case, "cpu", timed, host_seconds=host[case], note=note)


def _calls_on_cpu(by: str, mode: str, shape: LayerShape, dtype: str) -> dict[str, Callable[[], Any]]:
    import torch

    layer = make(by, shape, operands(shape, dtype, "uniform", "cpu"))
    if mode == COMPILED:
        layer = layer._replace(function=torch.compile(layer.function, fullgraph=True))
    return {"forward": layer.forward, "both": layer.both}


def _host_on_cpu(by: str, mode: str, dtype: str) -> dict[str, float]:
    """Returns seconds per call on the tiny layer with one thread."""
    import torch

    threads = torch.get_num_threads()
    with contextlib.ExitStack() as after:
        after.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        times = timing.interleaved(_calls_on_cpu(by, mode, _TINY, dtype), seconds=0.3, repeats=15)
    return {name: timed.seconds for name, timed in times.items()}


def _rows_on_gpu(cases: Sequence[tuple[LayerShape, str]], quick: bool) -> Iterator[dict[str, Any]]:
    for shape, by in cases:
        flags = ["--device", "cuda", "--shape", str(shape), "--by", by, *["--quick"] * quick]
        if len(cases) == 1 and by != "jax":
            with as_bench_errors(by):
                yield from _measure(shape, by, 5 if quick else timing.REPEATS)
            continue
        failed = row(shape, "bfloat16", by, JIT if by == "jax" else EAGER, "cuda")
        for found in rows_or_error("layer" if by == "jax" else "torch", flags, failed):
            yield _from_layer_row(found) if by == "jax" and "error" not in found else found


def _from_layer_row(found: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row of the benchmark `layer` to a row of this benchmark."""
    shape = LayerShape(*map(int, found["T,D,F,E,K"].split(",")))
    times = {}
    for name in PASSES:
        if found[f"{name} ms"] is not None:
            low, high = found["spread"][f"{name} ms"]
            times[name] = timing.Timing(1e-3 * found[f"{name} ms"], 1e-3 * low, 1e-3 * high)
    return row(shape, found["dtype"], "jax", JIT, "cuda", times, path=found["path"], note=found["note"])


def _measure(shape: LayerShape, by: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of one implementation, one per mode. The process should not have used the device before."""
    torch = timing.torch_on("cuda")
    layouts = ("pfd", "df") if by == "MoE" else ()
    path = figures.experts_path(shape, "bfloat16", *layouts) if by in OURS else None
    for mode in MODES[by]:
        times, host, notes = {}, {}, []
        for name in PASSES:
            try:
                times[name], host_time = _times(shape, by, mode, name, repeats)
            except torch.cuda.OutOfMemoryError:
                notes.append(f"{name}: out of memory")
                continue
            if host_time is not None:
                host[name] = host_time
            if times[name].host_bound:
                notes.append(f"{name}: bound by the host")
        yield row(shape, "bfloat16", by, mode, "cuda", times, host_seconds=host, path=path, note="; ".join(notes))


def _times(shape: LayerShape, by: str, mode: str, name: str, repeats: int) -> tuple[timing.Timing, float | None]:
    """Returns the time of a call in a mode, and the host's time until it returns; None for a graph."""
    torch = timing.torch_on("cuda")
    count = timing.sets_past_cache("cuda", shape.operand_bytes(2), least=1)
    layers = [make(by, shape, operands(shape, "bfloat16", "uniform", "cuda", seed)) for seed in range(count)]
    if mode not in (EAGER, GRAPH):
        options: dict[str, Any] = {"mode": REDUCE} if mode == REDUCE else {}
        layers = [of._replace(function=torch.compile(of.function, fullgraph=True, **options)) for of in layers]
    calls: list[Callable[[], Any]] = [getattr(layer, name) for layer in layers]
    if mode == GRAPH:
        return timing.seconds_of_each(calls, repeats=repeats, seconds=40e-3), None
    if mode == REDUCE:
        calls = [_mark_step(call) for call in calls]
    timed = timing.seconds_of_calls(calls, repeats=repeats)
    return timed, timing.host_seconds(calls[0], calls=_HOST_CALLS, repeats=repeats)


def _mark_step(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the call as a separate CUDA graph step, whose results the next step may overwrite."""

    def step() -> Any:
        timing.torch_on("cuda").compiler.cudagraph_mark_step_begin()
        return call()

    return step


def row(
    shape: LayerShape,
    dtype: str,
    by: str,
    mode: str,
    device: str,
    times: Mapping[str, timing.Timing] | None = None,
    *,
    host_seconds: Mapping[str, float] | None = None,
    path: str | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Returns a row for the JSON file: milliseconds and rates of PASSES, host microseconds; None: not measured."""
    times, host_seconds = times or {}, host_seconds or {}
    seconds = {name: times[name].seconds if name in times else None for name in PASSES}
    return {
        "T,D,F,E,K": str(shape),
        "dtype": dtype,
        "by": by,
        "mode": mode,
        "path": path,
        **figures.rates(shape, seconds, device),
        **{f"host {name} us": 1e6 * host_seconds[name] if name in host_seconds else None for name in PASSES},
        "note": note,
        "spread": figures.spread(times),
    }


def with_ratios(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds "x forward" and "x both": the row's times divided by those of the earlier row of moe in the same mode.

    MoE in "reduce-overhead" and JAX programs are compared with moe in a graph.

    >>> def of(by, mode, seconds):
    ...     return row(_TINY, "float32", by, mode, "cpu", {"both": timing.Timing(seconds, seconds, seconds)})
    >>> rows = [of("moe", "graph", 2.0), of("MoE", "graph", 3.0), of("jax", "jit", 1.0), of("MoE", "eager", 1.0)]
    >>> [found["x both"] for found in with_ratios(rows)]
    [1.0, 1.5, 0.5, None]
    """
    base: dict[Any, dict[str, Any]] = {}
    for found in rows:
        case = found["T,D,F,E,K"], found["dtype"]
        if found["by"] == "moe":
            base[*case, found["mode"]] = found
        like = GRAPH if found["mode"] in (JIT, REDUCE) else found["mode"]
        ours = base.get((*case, like), {})
        ratios = {}
        for name in PASSES:
            time, base_time = found[f"{name} ms"], ours.get(f"{name} ms")
            ratios[f"x {name}"] = time / base_time if time is not None and base_time is not None else None
        yield found | ratios


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table, with paths if there are any."""
    excluded = ("spread", "note", *(["path"] if not any(found["path"] for found in rows) else []))
    names = [name for name in (rows[0] if rows else ()) if name not in excluded]
    return {"": [{name: found[name] for name in (*names, "note")} for found in rows]}

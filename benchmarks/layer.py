"""The whole layer, forward and backward: ours through JAX and C, against plain JAX, torch and a large GEMM."""

import argparse
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch import _library
from anabranch.bench import ArgumentError, BenchError
from benchmarks import figures, timing
from benchmarks.figures import UNITS, Measured
from benchmarks.options import add_by, add_shapes, sized
from benchmarks.processes import as_bench_errors, rows_or_error
from benchmarks.product import product_rate
from benchmarks.shapes import CPU_SHAPES, SHAPES, LayerShape

CAPTION = """from x [T, D] to the output: router, top K of E, SwiGLU experts [D, 2, F] and [F, D], combine; random
operands. backward: gradients of x, gate, w_in and w_out; its time is that of both passes minus forward. FLOP/s count 6
T K D F for forward and 12 T K D F for backward. jax: ours, moe() under jit; c: the same C functions, with the gate's
GEMMs by torch; xla: lax.top_k, argsort, ragged_dot, segment_sum under jit; ragged-dot: xla with our ragged_dot; torch:
topk, sort, grouped_mm, index_add, eager; torch-loop: a loop over experts. Only on request by --by: jax-transposed,
jax-interleaved (weights in other layouts), jax-biases, jax-swiglu-oai (biases and gpt-oss's activation), and sonicmoe,
the layer of SonicMoE.

On a GPU each implementation runs in its own process. product: an 8192^3 GEMM by cuBLAS, timed right before and after in
that process; share: divided by the mean of the two. Times are medians of 20 batches of calls with the queue full, for c
and torch in CUDA graphs; *: bound by the host's launches. routing: uniform (random gate) or zipf (K distinct experts
per token, given, with shares 1 / (1 + e)). path: our kernels that the experts ran on; largest load: divided by the
mean. needed: weights, x, their gradients, the output, its cotangent and h; total: arguments + outputs - aliased +
temporaries, from XLA's analysis; peak: from the device. On the CPU: best of interleaved repeats; product: a 2048^3 GEMM
by oneDNN; "-": skipped because it is too slow"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
BY = ("jax", "c", "ragged-dot", "xla", "torch", "torch-loop")
_DEFAULT = {"cpu": ("jax", "c", "xla", "torch-loop"), "cuda": BY[:-1]}
#: Timed only if requested by name; see layer_jax.LAYERS.
VARIANTS = ("jax-transposed", "jax-interleaved", "jax-biases", "jax-swiglu-oai")
#: Timed only if requested by name, because it is not a dependency.
SONICMOE = "sonicmoe"
#: Implementations that use torch, for computation or for memory.
IN_TORCH = ("c", "torch", "torch-loop", SONICMOE)
#: Implementations whose experts are ours.
OURS = ("jax", "c", "ragged-dot", *VARIANTS)
ROUTINGS = ("uniform", "zipf")

#: If a forward pass on the CPU takes longer than this many seconds, both passes together are skipped.
_TOO_SLOW = 2.0

Case = tuple[LayerShape, str, str, str]  # shape, routing, dtype, implementation


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_shapes(parser, "three on the CPU, twelve on a GPU")
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        action="append",
        help="nearly equal loads, or loads proportional to 1 / (1 + e); default: uniform",
    )
    default = "; ".join(f"{device}: {', '.join(by)}" for device, by in _DEFAULT.items())
    add_by(parser, (*BY, *VARIANTS, SONICMOE), default)
    parser.add_argument(
        "--trace", metavar="DIR", help="GPU, jax only: also write profiler traces to DIR/T,D,F,E,K-ROUTING (once)"
    )


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, routing, dtype and implementation.

    On a GPU a single case is measured in this process, several cases in one process each.

    Raises:
      ArgumentError: an argument is invalid.
      BenchError: this machine has no GPU, or the only case failed. Of several cases, a failed one has a row with
        `error`.
    """
    device, by = options.device, list(dict.fromkeys(options.by or _DEFAULT[options.device]))
    if options.trace is not None and (device == "cpu" or "jax" not in by):
        raise ArgumentError(
            f"--trace: got it with --by {' '.join(by)} on {device}, expected jax on cuda: only our layer is traced"
        )
    if device == "cpu" and SONICMOE in by:
        raise ArgumentError("--by: got sonicmoe on cpu, expected it on cuda")
    shapes = sized(options.shape or (CPU_SHAPES if device == "cpu" else SHAPES), options.tokens, options.quick)
    routings = list(dict.fromkeys(options.routing or ROUTINGS[:1]))
    if device == "cpu":
        by = timing.available("layer", by, options.by is not None, device)
        for shape in shapes:
            for routing in routings:
                for dtype in options.dtype:
                    yield from _rows_on_cpu(shape, routing, dtype, by, options.quick)
        return
    cases = [
        (shape, kind, dtype, who) for shape in shapes for kind in routings for dtype in options.dtype for who in by
    ]
    _require_gpu()
    for case in cases:
        traced = options.trace if case[-1] == "jax" else None
        if len(cases) == 1:
            with as_bench_errors(case[-1]):
                yield _row(case, _measure(case, options.quick, traced))
        else:
            yield from _rows_of_a_process(case, options.quick, traced)


def _rows_on_cpu(
    shape: LayerShape, routing: str, dtype: str, by: Sequence[str], quick: bool
) -> Iterator[dict[str, Any]]:
    calls: dict[str, dict[str, Any]] = {}
    programs: dict[str, dict[str, timing.Program]] = {}
    for who in by:
        if who in IN_TORCH:
            from benchmarks import layer_torch

            given = layer_torch.operands(shape, dtype, routing, "cpu")
            calls[who] = layer_torch.calls_of(who, given, shape.K)
        else:
            from benchmarks import layer_jax

            programs[who] = layer_jax.cpu_programs(who, shape, dtype, routing)

    def timed(name: str, names: Sequence[str]) -> dict[str, timing.Timing]:
        selected_calls = {who: [passes[name]] for who, passes in calls.items() if who in names}
        selected_programs = {who: passes[name] for who, passes in programs.items() if who in names}
        return timing.times_of("cpu", selected_calls, selected_programs, quick=quick)

    before = product_rate("cpu", dtype)
    forward = timed("forward", by)
    both = timed("both", [who for who in by if forward[who].seconds < _TOO_SLOW])
    after = product_rate("cpu", dtype)
    product = None if before is None or after is None else (max(before, after),) * 2
    for who in by:
        measured = Measured(forward=forward[who], both=both.get(who), product=product, product_by="oneDNN")
        yield figures.row(shape, routing, dtype, who, "cpu", measured)


def _require_gpu() -> None:
    """Raises BenchError if there is no GPU. Does not initialise CUDA."""
    try:
        facts = _library.describe_cuda()
    except _library.LibraryError as error:
        raise BenchError(f"benchmarks of CUDA kernels need libanabranch_cuda.so: {error}") from error
    if "error" in facts:
        raise BenchError(f"benchmarks of CUDA kernels need a GPU: {facts['error']}")


def _measure(case: Case, quick: bool, trace: str | None) -> Measured:
    shape, routing, dtype, by = case
    repeats = 5 if quick else timing.REPEATS
    if by in IN_TORCH:
        # The report names JAX's devices, which starts JAX in this process. It must leave the memory to torch.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        measured = _in_torch(case, repeats)
    else:
        from benchmarks import layer_jax

        layer_jax.claim_memory()
        timing.jax_on("cuda")
        folder = None if trace is None else os.path.join(trace, f"{shape}-{routing}")
        measured = layer_jax.measure(by, shape, dtype, routing, repeats=repeats, trace=folder)
    if by not in OURS or measured.forward is measured.both is None:
        return measured
    return measured._replace(path=figures.experts_path(shape, dtype))


def _in_torch(case: Case, repeats: int) -> Measured:
    torch = timing.torch_on("cuda")
    try:
        return _graphs(case, repeats)
    except torch.cuda.OutOfMemoryError:
        return Measured(note="out of memory")


def _graphs(case: Case, repeats: int) -> Measured:
    """Returns times from CUDA graphs."""
    import torch

    from benchmarks.layer_torch import calls_of, largest_load, operands

    shape, routing, dtype, by = case
    timed = functools.partial(timing.seconds_of_each, repeats=repeats, seconds=40e-3)
    given = operands(shape, dtype, routing, "cuda")
    count = timing.sets_past_cache("cuda", shape.operand_bytes(given.d_out.element_size()), least=1)
    sets = [given, *(operands(shape, dtype, routing, "cuda", seed) for seed in range(1, count))]
    by_name = [calls_of(by, one, shape.K) for one in sets]
    times, missing, before = {}, [], product_rate("cuda", dtype, repeats=repeats)
    for name in by_name[0]:
        try:
            times[name] = timed([one[name] for one in by_name])
        except torch.cuda.OutOfMemoryError:
            missing.append(name)
        torch.cuda.empty_cache()
    after = product_rate("cuda", dtype, repeats=repeats)
    return Measured(
        forward=times.get("forward"),
        both=times.get("both"),
        product=None if before is None or after is None else (before, after),
        product_by="cuBLAS",
        largest_load=largest_load(given, shape.K),
        note="; ".join(f"{name}: out of memory" for name in missing),
    )


def _row(case: Case, measured: Measured) -> dict[str, Any]:
    shape, routing, dtype, by = case
    return figures.row(shape, routing, dtype, by, "cuda", measured)


def _rows_of_a_process(case: Case, quick: bool, trace: str | None) -> Iterator[dict[str, Any]]:
    shape, routing, dtype, by = case
    flags = ["--device", "cuda", "--shape", str(shape), "--routing", routing, "--dtype", dtype, "--by", by]
    flags += ["--quick"] * quick + (["--trace", trace] if trace else [])
    yield from rows_or_error("layer", flags, _row(case, Measured()))


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns a table of rates and a table of memory."""
    what = ("T,D,F,E,K", "routing", "dtype", "by")
    passes = ("forward", "backward", "both")
    unit = next(unit for unit in UNITS.values() if not rows or f"both {unit}" in rows[0])
    rates = (
        *(f"{name} ms" for name in ("forward", "backward")),
        *(f"{name} {unit}" for name in (*passes, "product")),
        *(f"{name} share" for name in passes),
        "largest load",
    )
    memory = ("arguments", "outputs", "aliased", "temporaries", "total", "needed", "peak")

    def with_star(row: Mapping[str, Any], name: str) -> Any:
        bound = {"forward ms": ["forward"], "backward ms": ["forward", "both"]}.get(name, [])
        star = row[name] is not None and any(part in row["host bound"] for part in bound)
        return f"{row[name]:.3g}*" if star else row[name]

    tables = {"rates": [{name: with_star(row, name) for name in (*what, "path", *rates, "note")} for row in rows]}
    memory_rows = [
        {
            **{name: row[name] for name in what},
            **{name: row[f"{name} GiB"] for name in memory},
            "total / needed": row["total / needed"],
        }
        for row in rows
        if row["total GiB"] is not None or row["peak GiB"] is not None
    ]
    return tables | ({"memory of forward and backward, GiB": memory_rows} if memory_rows else {})

"""The whole layer, forward and backward: ours through JAX and C, beside plain JAX, torch and a large matrix product."""

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
operands; backward: of x, gate, w_in and w_out, the difference between both passes and forward. FLOP/s: of 6 T K D F
forward, 12 T K D F backward. jax: ours, moe() under jit; c: the same C functions, with the gate's products by torch;
xla: lax.top_k, argsort, ragged_dot, segment_sum under jit; ragged-dot: xla with our ragged_dot; torch: topk, sort,
grouped_mm, index_add, eager; torch-loop: a loop over experts. By name alone: jax-transposed, jax-interleaved (weights
in other layouts), jax-biases, jax-swiglu-oai (biases and gpt-oss's activation), and sonicmoe, SonicMoE's layer.

On a GPU each in a process of its own, in which product, 8192^3 by cuBLAS, is timed right before and after; share: of
their mean. Medians of 20 batches of calls with the queue full, those of c and torch in CUDA graphs; *: the host's
launches are the limit. routing: uniform, by the random gate; zipf, K distinct experts with shares 1 / (1 + e) given;
path: which of our kernels the experts ran on; largest load: over the mean. needed: weights, x, their gradients, the
output, its cotangent and h; total: arguments + outputs - aliased + temporaries, as XLA plans; peak: by the device. On
the CPU the best of the repeats, which take turns; product: oneDNN's, 2048^3; "-": not waited for"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
BY = ("jax", "c", "ragged-dot", "xla", "torch", "torch-loop")
_DEFAULT = {"cpu": ("jax", "c", "xla", "torch-loop"), "cuda": BY[:-1]}
#: Timed where they are named: see layer_jax.LAYERS.
VARIANTS = ("jax-transposed", "jax-interleaved", "jax-biases", "jax-swiglu-oai")
#: Timed where it is named: it is no dependency of ours.
SONICMOE = "sonicmoe"
#: Those that call torch, for what they compute or for their memory.
IN_TORCH = ("c", "torch", "torch-loop", SONICMOE)
#: Those whose experts are ours.
OURS = ("jax", "c", "ragged-dot", *VARIANTS)
ROUTINGS = ("uniform", "zipf")

#: Seconds of a forward pass on the CPU beyond which forward and backward together are not waited for.
_TOO_SLOW = 2.0

Case = tuple[LayerShape, str, str, str]  # and the routing, the dtype, and who


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark alone."""
    add_shapes(parser, "three on the CPU, twelve on a GPU")
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        action="append",
        help="nearly equal loads, or loads that fall like 1 / (1 + e); default: uniform",
    )
    default = "; ".join(f"{device}: {', '.join(by)}" for device, by in _DEFAULT.items())
    add_by(parser, (*BY, *VARIANTS, SONICMOE), default)
    parser.add_argument(
        "--trace", metavar="DIR", help="GPU, jax: also write profiler traces to DIR/T,D,F,E,K-ROUTING (once)"
    )


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per shape, routing, dtype and implementation; on a GPU a single one is measured in this process.

    Raises:
      ArgumentError: an argument is wrong.
      BenchError: this machine has no GPU. What fails by itself has a row with `error`.
    """
    device, by = options.device, list(dict.fromkeys(options.by or _DEFAULT[options.device]))
    if options.trace is not None and (device == "cpu" or "jax" not in by):
        raise ArgumentError(
            f"--trace: got it with --by {' '.join(by)} on {device}, expected jax on cuda: it traces ours"
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
        of_torch = {who: [of[name]] for who, of in calls.items() if who in names}
        of_jax = {who: of[name] for who, of in programs.items() if who in names}
        return timing.times_of("cpu", of_torch, of_jax, quick=quick)

    before = product_rate("cpu", dtype)
    forward = timed("forward", by)
    both = timed("both", [who for who in by if forward[who].seconds < _TOO_SLOW])
    after = product_rate("cpu", dtype)
    product = None if before is None or after is None else (max(before, after),) * 2
    for who in by:
        measured = Measured(forward=forward[who], both=both.get(who), product=product, product_by="oneDNN")
        yield figures.row(shape, routing, dtype, who, "cpu", measured)


def _require_gpu() -> None:
    """Raises BenchError where there is no GPU; starts nothing on one."""
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
        # The report names JAX's devices, which starts JAX beside torch.
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
    """Times from CUDA graphs."""
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
    """The rows as a table of rates and one of memory."""
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

    def starred(row: Mapping[str, Any], name: str) -> Any:
        bound = {"forward ms": ["forward"], "backward ms": ["forward", "both"]}.get(name, [])
        star = row[name] is not None and any(part in row["host bound"] for part in bound)
        return f"{row[name]:.3g}*" if star else row[name]

    tables = {"rates": [{name: starred(row, name) for name in (*what, "path", *rates, "note")} for row in rows]}
    of_memory = [
        {
            **{name: row[name] for name in what},
            **{name: row[f"{name} GiB"] for name in memory},
            "total / needed": row["total / needed"],
        }
        for row in rows
        if row["total GiB"] is not None or row["peak GiB"] is not None
    ]
    return tables | ({"memory of forward and backward, GiB": of_memory} if of_memory else {})

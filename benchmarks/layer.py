"""The whole layer, forward and backward: ours through JAX and C, against plain JAX, torch and a large GEMM."""

import argparse
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch import _library
from anabranch.bench import ArgumentError, BenchError
from benchmarks import beside, ceilings, flags, timing
from benchmarks.processes import Case, rows_of_cases
from benchmarks.shapes import CPU_SHAPES, ITEMSIZES, ROUTINGS, SHAPES
from benchmarks.tables import SCALES, UNITS, experts_path, rates, selected, unit_of
from benchmarks.timing import Timing

CAPTION = """from x [T, D] to the output: router, top K of E, SwiGLU experts [D, 2, F] and [F, D], combine; random
operands. backward: gradients of x, gate, w_in and w_out; its time is that of both passes minus forward. FLOP/s count 6
T K D F for forward and 12 T K D F for backward. jax: ours, moe() under jit; c: the same C functions, with the gate's
GEMMs by torch; xla: lax.top_k, argsort, ragged_dot, segment_sum under jit; ragged-dot: xla with our ragged_dot; torch:
topk, sort, grouped_mm, index_add, eager; torch-loop: a loop over experts. Only on request by --by: jax-transposed
(weights in the layouts of checkpoints), jax-biases, and sonicmoe, the layer of SonicMoE.

On a GPU each implementation runs in its own process. product: an 8192^3 GEMM by cuBLAS, timed right before and after in
that process; share: divided by the mean of the two. Times are medians of 20 batches of calls with the queue full, for c
and torch in CUDA graphs; *: bound by the host's launches. routing: uniform (random gate) or zipf (K distinct experts
per token, given, with shares 1 / (1 + e)). path: our kernels that the experts ran on. needed: weights, x, their
gradients, the output, its cotangent and h; planned: by XLA for both passes, from its analysis; peak: from the device.
On the CPU: best of interleaved repeats; product: a 2048^3 GEMM by oneDNN; "-": skipped because it is too slow"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
BY = ("jax", "c", "ragged-dot", "xla", "torch", "torch-loop")
_DEFAULT = {"cpu": ("jax", "c", "xla", "torch-loop"), "cuda": BY[:-1]}
#: Timed only if requested by name. SonicMoE is not a dependency.
VARIANTS, SONICMOE = ("jax-transposed", "jax-biases"), "sonicmoe"
#: Implementations that use torch, for computation or for memory.
IN_TORCH = ("c", "torch", "torch-loop", SONICMOE)
#: Implementations whose experts are ours.
OURS = ("jax", "c", "ragged-dot", *VARIANTS)
OPTIONS = {
    **flags.shapes("three on the CPU, twelve on a GPU"),
    **flags.routing(),
    **flags.by((*BY, *VARIANTS, SONICMOE), "; ".join(f"{device}: {', '.join(by)}" for device, by in _DEFAULT.items())),
}
#: If a forward pass on the CPU takes longer than this many seconds, both passes together are skipped.
_TOO_SLOW = 2.0
_GIB = 2**30


def _cases(options: argparse.Namespace, by: Sequence[str]) -> list[Case]:
    default = CPU_SHAPES if options.device == "cpu" else SHAPES
    return [
        Case("layer", options.device, shape, dtype, who, routing=routing)
        for shape in flags.sized(options.shape or default, options.tokens, options.quick)
        for routing in dict.fromkeys(options.routing or ROUTINGS[:1])
        for dtype in options.dtype
        for who in by
    ]


def cases(options: argparse.Namespace) -> Iterator[beside.Case]:
    """Yields what --beside times."""
    from benchmarks.layer_torch import c_calls, operands

    for case in _cases(options, ["c"]):
        count = timing.sets_past_cache(case.device, case.shape.operand_bytes(ITEMSIZES[case.dtype]), least=1)
        draw = functools.partial(operands, case.shape, case.dtype, case.routing, case.device)
        yield case.head(), [draw(seed) for seed in range(count)], functools.partial(c_calls, topk=case.shape.K)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, routing, dtype and implementation.

    On a GPU a single case is measured in this process, several cases in one process each.

    Raises:
      ArgumentError: an argument is invalid.
      BenchError: this machine has no GPU, or the only case failed. Of several cases, a failed one has a row with
        `error`.
    """
    device, by = options.device, list(dict.fromkeys(options.by or _DEFAULT[options.device]))
    if device == "cuda":
        _require_gpu()
        yield from rows_of_cases(
            "layer", _cases(options, by), options.quick, lambda case: _measure(case, options.quick)
        )
        return
    if SONICMOE in by:
        raise ArgumentError("--by: got sonicmoe on cpu, expected it on cuda")
    by = timing.available("layer", options.by, by, device)
    cases = _cases(options, by)
    for i in range(0, len(cases), len(by)):
        yield from _rows_on_cpu(cases[i : i + len(by)], options.quick)


def _rows_on_cpu(cases: Sequence[Case], quick: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of cases that differ only in the implementation."""
    calls: dict[str, dict[str, Any]] = {}
    programs: dict[str, dict[str, timing.Program]] = {}
    for _, device, shape, dtype, who, routing, _ in cases:
        if who in IN_TORCH:
            from benchmarks import layer_torch

            calls[who] = layer_torch.calls_of(who, layer_torch.operands(shape, dtype, routing, device), shape.K)
        else:
            from benchmarks import layer_jax

            programs[who] = layer_jax.cpu_programs(who, shape, dtype, routing)

    def timed(name: str, names: Sequence[str]) -> dict[str, Timing]:
        selected_calls = {who: [passes[name]] for who, passes in calls.items() if who in names}
        selected_programs = {who: passes[name] for who, passes in programs.items() if who in names}
        return timing.times_of("cpu", selected_calls, selected_programs, quick=quick)

    before = ceilings.product_rate("cpu", cases[0].dtype)
    forward = timed("forward", [case.by for case in cases])
    both = timed("both", [case.by for case in cases if forward[case.by].seconds < _TOO_SLOW])
    after = ceilings.product_rate("cpu", cases[0].dtype)
    product = () if before is None or after is None else (max(before, after),)
    for case in cases:
        times = {name: of[case.by] for name, of in (("forward", forward), ("both", both)) if case.by in of}
        yield row(case, times, product=product)


def _require_gpu() -> None:
    """Raises BenchError if there is no GPU. Does not initialise CUDA."""
    try:
        facts = _library.describe_cuda()
    except _library.LibraryError as error:
        raise BenchError(f"benchmarks of CUDA kernels need libanabranch_cuda.so: {error}") from error
    if "error" in facts:
        raise BenchError(f"benchmarks of CUDA kernels need a GPU: {facts['error']}")


def _measure(case: Case, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields the row of a case on a GPU."""
    _, _, shape, dtype, by, routing, _ = case
    repeats = 5 if quick else timing.REPEATS
    if by in IN_TORCH:
        from benchmarks import layer_torch

        # The report names JAX's devices, which starts JAX in this process. It must leave the memory to torch.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        before = ceilings.product_rate("cuda", dtype, repeats=repeats)
        found = layer_torch.measure(by, shape, dtype, routing, layer_torch.GRAPH, repeats)
        after = ceilings.product_rate("cuda", dtype, repeats=repeats)
        found["product"] = (before, after)
        mode = layer_torch.GRAPH
    else:
        from benchmarks import layer_jax

        layer_jax.claim_memory()
        timing.jax_on("cuda")
        found = layer_jax.measure(by, shape, dtype, routing, repeats=repeats)
        mode = "jit"
    path = experts_path(shape, dtype) if by in OURS and found["times"] else None
    yield row(case, **found, mode=mode, path=path)


def row(
    case: Case,
    times: Mapping[str, Timing],
    *,
    mode: str | None = None,
    product: Sequence[float] = (),
    planned: int | None = None,
    peak: int | None = None,
    host: Mapping[str, float] | None = None,
    path: str | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Returns the row for the JSON file: milliseconds, FLOP/s, shares of the large GEMM's rate, GiB, host microseconds.

    Args:
      case: what was measured.
      times: of the passes "forward" and "both".
      mode: how the layer was called: "jit", "graph" and so on; see the benchmark `torch`.
      product: FLOP/s of the large GEMM before and after.
      planned, peak: bytes in use by XLA's plan and on the device.
      host: seconds until a call of a pass returns.
      path: our kernels that the experts ran on.
      note: what is missing and why.
    """
    ceiling = sum(product) / len(product) if product else None
    figures = rates(case.shape, times, case.device, ceiling)
    unit = UNITS[case.device]
    figures["spread"] |= {f"product {unit}": [rate / SCALES[unit] for rate in product]}
    return {
        **case.head(),
        "mode": mode,
        "path": path,
        **figures,
        "needed GiB": case.shape.step_bytes(ITEMSIZES[case.dtype]) / _GIB,
        "planned GiB": None if planned is None else planned / _GIB,
        "peak GiB": None if peak is None else peak / _GIB,
        **{f"host {name} us": 1e6 * time if (time := (host or {}).get(name)) else None for name in ("forward", "both")},
        "note": note,
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table, with memory if some was measured."""
    unit = unit_of(rows)
    passes = ("forward", "backward", "both")
    names = ["T,D,F,E,K", "routing", "dtype", "by", "path", "forward ms", "backward ms"]
    names += [f"{name} {unit}" for name in (*passes, "product")] + [f"{name} share" for name in passes]
    if any(row.get("peak GiB") or row.get("planned GiB") for row in rows):
        names += ["needed GiB", "planned GiB", "peak GiB"]
    return {"": selected(rows, [*names, "note"])}

"""The layer on all GPUs of this machine as ranks of expert parallelism, and the collectives that carry it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import gpu
from anabranch.bench.errors import ArgumentError, BenchError, as_bench_errors
from anabranch.bench.experts_path import experts_path
from anabranch.bench.gpu import Timing
from anabranch.bench.layer_result import LayerTimes
from anabranch.bench.layer_shape import NAMED, LayerShape
from anabranch.bench.processes import rows_of_a_process
from anabranch.bench.selection import check_dtypes, implementations, sized

CAPTION = """the layer on all GPUs as ranks along one expert axis, T tokens a rank, random gate; TFLOP/s a rank, of
6 T K D F forward and 12 T K D F backward (the difference between forward and backward, and forward). fp8: the layer
with precision="fp8"; fp8-exchange: and with tokens that travel so; moe: the layer through torch, a process a GPU,
called one by one (eager) or as a CUDA graph of many calls (graph). capacity: the capacity_factor, none: buffers for
the worst case; path: which of our kernels the experts ran on; dropped: slots, of all ranks. collectives: T K rows of D
a rank, exchanged in equal parts (all_to_all, ragged_all_to_all), and what the ring needs (all_gather: T rows there,
all_to_all_sums: as many back);
xla: jax.lax's under jit, torch: NCCL's all_to_all, a process a GPU. GB/s: of what a rank sends to others. Medians of
20 batches with the queue full"""

DTYPES = ("bfloat16",)
#: The layer, and collectives by themselves.
OURS = ("jax", "fp8", "fp8-exchange", "moe")
BY = (*OURS, "xla", "torch")
TRANSPORTS = ("ring", "all_to_all", "ragged")
CAPACITIES = (None, 1.25)

#: How JAX's programs are called, and which transports torch's ranks have.
JIT = "jit"
IN_TORCH = ("ring", "all_to_all")

#: Those that others have published figures of.
SHAPES = tuple(NAMED[name]._replace(T=8192) for name in ("qwen3-30b", "mixtral"))


def rows(
    *,
    dtypes: Sequence[str],
    quick: bool,
    shape: Sequence[LayerShape] | None = None,
    tokens: Sequence[int] | None = None,
    by: Sequence[str] | None = None,
    transport: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of every shape: ours for each transport, with and without a bound; collectives by XLA and by NCCL.

    Args:
      dtypes: "bfloat16" alone.
      quick: the first shape only, and 5 repeats.
      shape: None: SHAPES, whose T is that of a rank.
      tokens: T, in the place of the shapes' own.
      by: out of BY; None: all that are installed.
      transport: out of TRANSPORTS; None: all, of moe those that it has.

    Raises:
      ArgumentError: an argument is wrong.
      BenchError: the only case failed, for example with fewer than two GPUs. Of several cases those that fail have a
        row with `error`.
    """
    check_dtypes("mesh", dtypes, DTYPES)
    timed = implementations("mesh", by, BY)
    ways = list(dict.fromkeys(transport or TRANSPORTS))
    cases = [
        (sizes, who, way)
        for sizes in sized(shape or SHAPES, tokens, quick)
        for who in timed
        for way in (ways if who in OURS else ways[:1])
        if who != "moe" or way in IN_TORCH
    ]
    if not cases:
        raise ArgumentError(f"--transport: got {', '.join(ways)} with moe, expected {' or '.join(IN_TORCH)}")
    repeats = 5 if quick else gpu.REPEATS
    for case in cases:
        if len(cases) == 1:
            with as_bench_errors(case[1]):
                yield from _measure(*case, repeats)
        else:
            yield from _rows_of_a_process(*case, quick)


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows as a table of the layer and one of collectives."""
    hidden = ("spread", "dtype", "collective")
    layers = [row for row in rows if row.get("collective") is None]
    others = [row for row in rows if row.get("collective") is not None]
    return {
        "layer": [{name: value for name, value in row.items() if name not in hidden} for row in layers],
        "collectives": [{name: value for name, value in row.items() if name not in hidden[:2]} for row in others],
    }


def _measure(shape: LayerShape, by: str, transport: str, repeats: int) -> Iterator[dict[str, Any]]:
    if by == "torch":
        from anabranch.bench import mesh_in_torch

        timing, sent = mesh_in_torch.measure_all_to_all(shape.T * shape.K * shape.D, repeats=repeats)
        yield collective_row(shape, by, "all_to_all", timing, sent)
        return
    devices = gpu.torch_with_gpu().cuda.device_count() if by == "moe" else gpu.jax_with_gpu().device_count()
    if devices < 2:
        raise BenchError(f"mesh: got {devices} GPU, expected 2 or more")
    if by == "moe":
        yield from _in_torch(shape, devices, transport, repeats)
        return
    from anabranch.bench import mesh_in_jax

    if by == "xla":
        times = mesh_in_jax.measure_collectives(shape, DTYPES[0], repeats=repeats)
        for name, (timing, sent) in times.items():
            yield collective_row(shape, by, name, timing, sent)
        return
    for capacity in CAPACITIES:
        try:
            with as_bench_errors(by):
                measured = mesh_in_jax.measure_layer(shape, DTYPES[0], by, transport, capacity, repeats=repeats)
        except BenchError as error:  # such as memory that did not suffice, which it may with another bound
            yield {**_head(shape, by), "transport": transport, "capacity": capacity, "error": str(error)}
        else:
            yield layer_row(shape, by, JIT, devices, transport, capacity, measured, experts_path(shape, DTYPES[0]))


def _in_torch(shape: LayerShape, ranks: int, transport: str, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of the layer through torch."""
    from anabranch.bench import mesh_in_torch

    path = experts_path(shape, DTYPES[0])
    for capacity in CAPACITIES:
        try:
            with as_bench_errors("moe"):
                by_mode = mesh_in_torch.measure_layer(shape, DTYPES[0], transport, capacity, repeats=repeats)
        except BenchError as error:
            yield {**_head(shape, "moe"), "transport": transport, "capacity": capacity, "error": str(error)}
        else:
            for mode, measured in by_mode.items():
                yield layer_row(shape, "moe", mode, ranks, transport, capacity, measured, path)


def layer_row(
    shape: LayerShape,
    by: str,
    mode: str,
    ranks: int,
    transport: str,
    capacity: float | None,
    measured: LayerTimes,
    path: str,
) -> dict[str, Any]:
    """The row of what was measured; mode: how the layer was called, path: which of our kernels the experts ran on."""
    forward, both, dropped = measured
    backward = both.median - forward.median
    return {
        **_head(shape, by),
        "mode": mode,
        "ranks": ranks,
        "transport": transport,
        "capacity": capacity,
        "path": path,
        "forward ms": 1e3 * forward.median,
        "backward ms": 1e3 * backward,
        "forward TFLOP/s": shape.forward_flops() / forward.median / 1e12,
        "backward TFLOP/s": shape.backward_flops() / backward / 1e12,
        "dropped": dropped,
        "spread": {"forward ms": _spread(forward), "both ms": _spread(both)},
    }


def collective_row(shape: LayerShape, by: str, name: str, timing: Timing, sent: int) -> dict[str, Any]:
    """sent: bytes of a rank to others."""
    return {
        **_head(shape, by),
        "collective": name,
        "sent MiB": sent / 2**20,
        "ms": 1e3 * timing.median,
        "GB/s": sent / timing.median / 1e9,
        "spread": {"ms": _spread(timing)},
    }


def _head(shape: LayerShape, by: str) -> dict[str, Any]:
    return {"T,D,F,E,K": str(shape), "by": by, "dtype": DTYPES[0]}


def _spread(timing: Timing) -> list[float]:
    return [1e3 * timing.low, 1e3 * timing.high]


def _rows_of_a_process(shape: LayerShape, by: str, transport: str, quick: bool) -> Iterator[dict[str, Any]]:
    """The rows of a process of its own; where that fails, one with its last words as `error`."""
    flags = ["--device", "cuda", "--shape", str(shape), "--by", by, "--transport", transport] + ["--quick"] * quick
    try:
        yield from rows_of_a_process("mesh", flags, quiet=True)
    except BenchError as error:
        what = {"transport": transport} if by in OURS else {"collective": "all"}
        yield {**_head(shape, by), **what, "error": str(error)}

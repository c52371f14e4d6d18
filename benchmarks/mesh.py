"""The layer on all devices with expert parallelism, and the collectives of its transports."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import ArgumentError, BenchError
from benchmarks import figures, timing
from benchmarks.options import add_by, add_shapes, sized
from benchmarks.processes import as_bench_errors, rows_or_error
from benchmarks.shapes import NAMED, LayerShape

CAPTION = """the layer on all devices, which are the ranks of one expert axis; T tokens per rank, random gate. FLOP/s
per rank count 6 T K D F for forward and 12 T K D F for backward (time of both passes minus forward). jax: ours through
JAX; fp8: jax with precision="fp8"; fp8-exchange: fp8, and tokens are sent in FP8; moe: ours through torch, one process
per device, in eager mode (eager) or as a CUDA graph of many calls (graph). capacity: the capacity_factor, -: buffers
for the worst case; path: our kernels that the experts ran on; dropped: dropped assignments of all ranks. collectives: T
K rows of width D per rank, exchanged in equal parts (all_to_all, ragged_all_to_all), and those of the ring transport
(all_gather of T rows, all_to_all_sums of T rows of partial sums); xla: jax.lax under jit, torch: NCCL's all_to_all, one
process per GPU. GB/s: bytes that a rank sends to others. Medians of 20 batches with the queue full. On the CPU, JAX
needs XLA_FLAGS=--xla_force_host_platform_device_count=N, and torch uses 2 processes with Gloo"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
#: Implementations of the layer, and of the collectives alone.
OURS = ("jax", "fp8", "fp8-exchange", "moe")
BY = (*OURS, "xla", "torch")
TRANSPORTS = ("ring", "all_to_all", "ragged")
CAPACITIES = (None, 1.25)

#: The mode of JAX programs, and the transports that torch supports.
JIT = "jit"
TRANSPORTS_OF_TORCH = ("ring", "all_to_all")

#: Shapes with published figures of other projects; T is per rank.
SHAPES = {
    "cpu": (LayerShape(256, 128, 128, 16, 2),),
    "cuda": tuple(NAMED[name]._replace(T=8192) for name in ("qwen3-30b", "mixtral")),
}


class Case(NamedTuple):
    """One measurement, made in its own process."""

    shape: LayerShape
    by: str
    transport: str
    device: str

    @property
    def dtype(self) -> str:
        """The dtype of all arrays."""
        return DTYPES[self.device][0]

    def head(self) -> dict[str, Any]:
        """Returns the first columns of its rows."""
        return {"T,D,F,E,K": str(self.shape), "by": self.by, "dtype": self.dtype}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_shapes(parser, "qwen3-30b and mixtral with T = 8192 on a GPU, a small one on the CPU; T is per rank")
    add_by(parser, BY, "all installed ones")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, action="append", help="default: all that the implementation supports"
    )


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of every shape: ours per transport and capacity factor; collectives by XLA and by NCCL.

    Raises:
      ArgumentError: an argument is invalid.
      BenchError: the only case failed, for example with fewer than two devices. Of several cases, a failed one has a
        row with `error`.
    """
    transports = list(dict.fromkeys(options.transport or TRANSPORTS))
    cases = [
        Case(shape, by, transport, options.device)
        for shape in sized(options.shape or SHAPES[options.device], options.tokens, options.quick)
        for by in dict.fromkeys(options.by or BY)
        for transport in (transports if by in OURS else transports[:1])
        if by != "moe" or transport in TRANSPORTS_OF_TORCH
    ]
    if not cases:
        known = " or ".join(TRANSPORTS_OF_TORCH)
        raise ArgumentError(f"--transport: got {', '.join(transports)} with moe, expected {known}")
    for case in cases:
        if len(cases) == 1:
            with as_bench_errors(case.by):
                yield from _measure(case, 5 if options.quick else timing.REPEATS)
        else:
            yield from _rows_of_a_process(case, options.quick)


def _measure(case: Case, repeats: int) -> Iterator[dict[str, Any]]:
    shape, by, transport, device = case
    if by == "torch":
        from benchmarks import mesh_torch

        timed, sent = mesh_torch.measure_all_to_all(shape.T * shape.K * shape.D, case.dtype, device, repeats)
        yield collective_row(case, "all_to_all", timed, sent)
        return
    if by == "moe":
        from benchmarks import mesh_torch

        ranks = mesh_torch.ranks_on(device)
    else:
        ranks = timing.jax_on(device).device_count()
    if ranks < 2:
        raise BenchError(f"mesh: got {ranks} device, expected 2 or more")
    if by == "xla":
        from benchmarks import mesh_jax

        for name, (timed, sent) in mesh_jax.measure_collectives(shape, case.dtype, repeats).items():
            yield collective_row(case, name, timed, sent)
        return
    for capacity in CAPACITIES:
        try:
            with as_bench_errors(by):
                by_mode = _layer(case, capacity, repeats)
        except BenchError as error:  # for example out of memory, which another capacity may avoid
            yield {**case.head(), "transport": transport, "capacity": capacity, "error": str(error)}
            continue
        path = figures.experts_path(shape, case.dtype) if device == "cuda" else None
        for mode, (forward, both, dropped) in by_mode.items():
            yield layer_row(case, mode, ranks, capacity, path, forward, both, dropped)


def _layer(case: Case, capacity: float | None, repeats: int) -> Mapping[str, tuple[timing.Timing, timing.Timing, int]]:
    """Returns, per mode, the times of forward and of both, and the number of dropped assignments."""
    shape, by, transport, device = case
    if by == "moe":
        from benchmarks import mesh_torch

        return mesh_torch.measure_layer(shape, case.dtype, device, transport, capacity, repeats)
    from benchmarks import mesh_jax

    return {JIT: mesh_jax.measure_layer(shape, case.dtype, by, transport, capacity, repeats)}


def layer_row(
    case: Case,
    mode: str,
    ranks: int,
    capacity: float | None,
    path: str | None,
    forward: timing.Timing,
    both: timing.Timing,
    dropped: int,
) -> dict[str, Any]:
    """Returns the row of a layer. mode: how it was called; path: our kernels that the experts ran on."""
    seconds = {"forward": forward.seconds, "backward": both.seconds - forward.seconds}
    return {
        **case.head(),
        "mode": mode,
        "ranks": ranks,
        "transport": case.transport,
        "capacity": capacity,
        "path": path,
        **figures.rates(case.shape, seconds, case.device),
        "dropped": dropped,
        "spread": figures.spread({"forward": forward, "both": both}),
    }


def collective_row(case: Case, name: str, timed: timing.Timing, sent: int) -> dict[str, Any]:
    """Returns the row of a collective. sent: bytes that a rank sends to others."""
    return {
        **case.head(),
        "collective": name,
        "sent MiB": sent / 2**20,
        "ms": 1e3 * timed.seconds,
        "GB/s": sent / timed.seconds / 1e9,
        "spread": {"ms": [1e3 * timed.low, 1e3 * timed.high]},
    }


def _rows_of_a_process(case: Case, quick: bool) -> Iterator[dict[str, Any]]:
    flags = ["--device", case.device, "--shape", str(case.shape), "--by", case.by, "--transport", case.transport]
    what = {"transport": case.transport} if case.by in OURS else {"collective": "all"}
    yield from rows_or_error("mesh", flags + ["--quick"] * quick, {**case.head(), **what})


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns a table of the layer and a table of the collectives."""
    excluded = ("spread", "dtype", "collective")
    layers = [row for row in rows if row.get("collective") is None]
    others = [row for row in rows if row.get("collective") is not None]
    tables = {
        "layer": [{name: value for name, value in row.items() if name not in excluded} for row in layers],
        "collectives": [{name: value for name, value in row.items() if name not in excluded[:2]} for row in others],
    }
    return {title: table for title, table in tables.items() if table}

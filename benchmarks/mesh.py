"""The layer on all devices as ranks of expert parallelism, and the collectives that carry it."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import ArgumentError, BenchError
from benchmarks import figures, timing
from benchmarks.options import add_by, add_shapes, sized
from benchmarks.processes import as_bench_errors, rows_or_error
from benchmarks.shapes import NAMED, LayerShape

CAPTION = """the layer on all devices as ranks along one expert axis, T tokens per rank, random gate; FLOP/s per rank of
6 T K D F forward and 12 T K D F backward (the difference between both passes and forward). jax: ours through JAX; fp8:
jax with precision="fp8"; fp8-exchange: and with tokens that travel so; moe: ours through torch, a process per device,
called one by one (eager) or as a CUDA graph of many calls (graph). capacity: the capacity_factor, -: buffers for the
worst case; path: which of our kernels the experts ran on; dropped: assignments, of all ranks. collectives: T K rows of
D per rank, exchanged in equal parts (all_to_all, ragged_all_to_all), and what the ring needs (all_gather: T rows there,
all_to_all_sums: as many back); xla: jax.lax's under jit, torch: NCCL's all_to_all, a process per GPU. GB/s: of what a
rank sends to others. Medians of 20 batches with the queue full. On the CPU, JAX needs
XLA_FLAGS=--xla_force_host_platform_device_count=N, and torch takes 2 processes with Gloo"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
#: The layer, and collectives by themselves.
OURS = ("jax", "fp8", "fp8-exchange", "moe")
BY = (*OURS, "xla", "torch")
TRANSPORTS = ("ring", "all_to_all", "ragged")
CAPACITIES = (None, 1.25)

#: How JAX's programs are called, and which transports torch's ranks have.
JIT = "jit"
TRANSPORTS_OF_TORCH = ("ring", "all_to_all")

#: Those that others have published figures of; T is that of a rank.
SHAPES = {
    "cpu": (LayerShape(256, 128, 128, 16, 2),),
    "cuda": tuple(NAMED[name]._replace(T=8192) for name in ("qwen3-30b", "mixtral")),
}


class Case(NamedTuple):
    """What one process measures."""

    shape: LayerShape
    by: str
    transport: str
    device: str

    @property
    def dtype(self) -> str:
        """Of all arrays."""
        return DTYPES[self.device][0]

    def head(self) -> dict[str, Any]:
        """The first columns of its rows."""
        return {"T,D,F,E,K": str(self.shape), "by": self.by, "dtype": self.dtype}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark alone."""
    add_shapes(parser, "qwen3-30b and mixtral with T = 8192 on a GPU, a small one on the CPU; T is that of a rank")
    add_by(parser, BY, "all that are installed")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: all, of moe those it has")


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of every shape: ours for each transport, with and without a bound; collectives by XLA and by NCCL.

    Raises:
      ArgumentError: an argument is wrong.
      BenchError: the only case failed, for example with fewer than two devices. Of several cases those that fail have
        a row with `error`.
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
        except BenchError as error:  # such as memory that did not suffice, which it may with another bound
            yield {**case.head(), "transport": transport, "capacity": capacity, "error": str(error)}
            continue
        path = figures.experts_path(shape, case.dtype) if device == "cuda" else None
        for mode, (forward, both, dropped) in by_mode.items():
            yield layer_row(case, mode, ranks, capacity, path, forward, both, dropped)


def _layer(case: Case, capacity: float | None, repeats: int) -> Mapping[str, tuple[timing.Timing, timing.Timing, int]]:
    """By mode, the times of forward and of both, and how many assignments were dropped."""
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
    """The row of a layer; mode: how it was called, path: which of our kernels the experts ran on."""
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
    """sent: bytes of a rank to others."""
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
    """The rows as a table of the layer and one of collectives."""
    hidden = ("spread", "dtype", "collective")
    layers = [row for row in rows if row.get("collective") is None]
    others = [row for row in rows if row.get("collective") is not None]
    tables = {
        "layer": [{name: value for name, value in row.items() if name not in hidden} for row in layers],
        "collectives": [{name: value for name, value in row.items() if name not in hidden[:2]} for row in others],
    }
    return {title: table for title, table in tables.items() if table}

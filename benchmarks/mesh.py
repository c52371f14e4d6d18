"""The layer on all devices with expert parallelism, and the collectives of its transports."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import ArgumentError, BenchError
from benchmarks import flags, timing
from benchmarks.processes import Case, as_bench_errors, rows_of_cases
from benchmarks.shapes import NAMED, ROUTINGS, LayerShape
from benchmarks.tables import experts_path, rates, selected, unit_of

CAPTION = """the layer on all devices, which are the ranks of one expert axis; T tokens per rank. FLOP/s
per rank count 6 T K D F for forward and 12 T K D F for backward (time of both passes minus forward). routing: uniform
(random gate) or zipf (K distinct experts with shares 1 / (1 + e), so that rank 0 gets most assignments). jax: ours
through JAX; fp8: jax with precision="fp8"; fp8-exchange: fp8, and tokens are sent in FP8; moe: ours through torch, one
process per device, in eager mode (eager) or as a CUDA graph of many calls (graph). capacity: the capacity_factor, -:
buffers for the worst case; path: our kernels that the experts ran on; dropped: dropped assignments of all ranks; / one:
the rate, divided by that of one device with all experts and T tokens, in the same mode. collectives: T K rows of width
D per rank, exchanged in equal parts (all_to_all, ragged_all_to_all), and those of the ring transport (all_gather of T
rows, all_to_all_sums of T rows of partial sums); xla: jax.lax under jit, torch: NCCL's all_to_all, one process per GPU.
GB/s: bytes that a rank sends to others. Medians of 20 batches with the queue full. On the CPU, JAX needs
XLA_FLAGS=--xla_force_host_platform_device_count=N, and torch uses 2 processes with Gloo"""

DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
#: Implementations of the layer, and of the collectives alone.
OURS = ("jax", "fp8", "fp8-exchange", "moe")
BY = (*OURS, "xla", "torch")
TRANSPORTS = ("ring", "p2p", "all_to_all", "ragged")
CAPACITIES = (None, 1.25)

#: Those that torch supports.
TRANSPORTS_OF_TORCH = ("ring", "p2p", "all_to_all")

#: Shapes with published figures of other projects; T is per rank.
SHAPES = {
    "cpu": (LayerShape(256, 128, 128, 16, 2),),
    "cuda": tuple(NAMED[name]._replace(T=8192) for name in ("qwen3-30b", "mixtral")),
}


OPTIONS = {
    **flags.shapes("qwen3-30b and mixtral with T = 8192 on a GPU, a small one on the CPU; T is per rank"),
    **flags.by(BY),
    **flags.routing(),
    **flags.choices("--transport", TRANSPORTS, "default: all that the implementation supports"),
}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of every shape: ours per transport and capacity factor; collectives by XLA and by NCCL.

    Raises:
      ArgumentError: an argument is invalid.
      BenchError: the only case failed, for example with fewer than two devices. Of several cases, a failed one has a
        row with `error`.
    """
    device = options.device
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # the transport p2p of JAX with several GPUs in a process
    transports = list(dict.fromkeys(options.transport or TRANSPORTS))
    cases = [
        Case("mesh", device, shape, DTYPES[device][0], by, routing=routing, transport=transport)
        for shape in flags.sized(options.shape or SHAPES[device], options.tokens, options.quick)
        for by in dict.fromkeys(options.by or BY)
        for routing in dict.fromkeys((by in OURS and options.routing) or ROUTINGS[:1])
        for transport in (transports if by in OURS else transports[:1])
        if by not in OURS or transport in _supported(by, device)
    ]
    if not cases:
        by = next(by for by in options.by or BY if by in OURS)
        known = " or ".join(_supported(by, device))
        raise ArgumentError(f"--transport: got {', '.join(transports)} with {by}, expected {known}")
    repeats = 5 if options.quick else timing.REPEATS
    yield from rows_of_cases("mesh", cases, options.quick, lambda case: _measure(case, repeats))


def _supported(by: str, device: str) -> list[str]:
    """Returns the transports of an implementation of the layer on a device."""
    names = TRANSPORTS_OF_TORCH if by == "moe" else TRANSPORTS
    return [name for name in names if name != "p2p" or device == "cuda"]


def _measure(case: Case, repeats: int) -> Iterator[dict[str, Any]]:
    _, device, shape, dtype, by, _, _ = case
    ranks = _ranks(by, device)
    if ranks < 2:
        raise BenchError(f"mesh: got {ranks} device, expected 2 or more")
    if by in ("torch", "xla"):
        if by == "torch":
            from benchmarks import mesh_torch

            count = shape.T * shape.K * shape.D
            found = {"all_to_all": mesh_torch.measure_all_to_all(count, dtype, device, repeats)}
        else:
            from benchmarks import mesh_jax

            found = mesh_jax.measure_collectives(shape, dtype, repeats)
        for name, (timed, sent) in found.items():
            yield {
                **case._replace(routing=None, transport=None).head(),
                "collective": name,
                "sent MiB": sent / 2**20,
                "ms": 1e3 * timed.seconds,
                "GB/s": sent / timed.seconds / 1e9,
                "spread": {"ms": [1e3 * timed.low, 1e3 * timed.high]},
            }
        return
    try:
        with as_bench_errors(by):
            alone = _layer(case._replace(transport=None), None, repeats)
    except BenchError:  # for example, one device may not have the memory for all experts
        alone = {}
    for capacity in CAPACITIES:
        try:
            with as_bench_errors(by):
                by_mode = _layer(case, capacity, repeats)
        except BenchError as error:  # for example out of memory, which another capacity may avoid
            yield {**case.head(), "capacity": capacity, "error": str(error)}
            continue
        path = experts_path(shape, dtype) if device == "cuda" else None
        for mode, (forward, both, dropped) in by_mode.items():
            figures = rates(shape, {"forward": forward, "both": both}, device)
            what = {"mode": mode, "ranks": ranks, "capacity": capacity, "path": path}
            shares = _shares(alone[mode][:2], (forward, both)) if alone else {}
            yield {**case.head(), **what, **figures, **shares, "dropped": dropped}


def _shares(alone: Sequence[timing.Timing], found: Sequence[timing.Timing]) -> dict[str, float]:
    """The rates of the passes divided by those of one device. Each has the times of forward and of both passes."""
    one, many = ((forward.seconds, both.seconds - forward.seconds) for forward, both in (alone, found))
    return {f"{name} / one": a / b for name, a, b in zip(("forward", "backward"), one, many, strict=True)}


def _ranks(by: str, device: str) -> int:
    if by in ("moe", "torch"):
        from benchmarks import mesh_torch

        return mesh_torch.ranks_on(device)
    return int(timing.jax_on(device).device_count())


def _layer(case: Case, capacity: float | None, repeats: int) -> Mapping[str, tuple[timing.Timing, timing.Timing, int]]:
    """Returns, per mode, the times of forward and of both, and the number of dropped assignments."""
    _, device, shape, dtype, by, routing, transport = case
    if by == "moe":
        from benchmarks import mesh_torch

        return mesh_torch.measure_layer(shape, dtype, device, routing, transport, capacity, repeats)
    from benchmarks import mesh_jax

    return {"jit": mesh_jax.measure_layer(shape, dtype, by, routing, transport, capacity, repeats)}


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns a table of the layer and a table of the collectives."""
    layers = [row for row in rows if "collective" not in row and row["by"] in OURS]
    others = [row for row in rows if row not in layers]
    names = ["T,D,F,E,K", "routing", "by", "mode", "ranks", "transport", "capacity", "path"]
    names += ["forward ms", "backward ms"]
    names += [f"{name} {unit_of(layers)}" for name in ("forward", "backward")]
    names += [f"{name} / one" for name in ("forward", "backward")]
    of_others = ["T,D,F,E,K", "by", "dtype", "collective", "sent MiB", "ms", "GB/s"]
    tables = {"layer": selected(layers, [*names, "dropped"]), "collectives": selected(others, of_others)}
    return {title: table for title, table in tables.items() if table}

"""The layer through torch with its experts spread over ranks, and all_to_all alone; one process per rank."""

import json
import math
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import timing
from benchmarks.layer_torch import EAGER, GRAPH, Layer, operands
from benchmarks.shapes import ITEMSIZES, LayerShape
from benchmarks.timing import Timing

MODES = {"cpu": (EAGER,), "cuda": (EAGER, GRAPH)}
_BATCH_SECONDS = 40e-3
_MOST_CALLS = 8  # per batch; the same as in mesh_jax


def ranks_on(device: str) -> int:
    """Returns the number of processes: one per GPU, 2 on the CPU."""
    torch = timing.torch_on(device)
    return torch.cuda.device_count() if device == "cuda" else 2


def measure_layer(
    shape: LayerShape,
    dtype: str,
    device: str,
    routing: str | None,
    transport: str | None,
    capacity_factor: float | None,
    repeats: int,
) -> dict[str, tuple[Timing, Timing, int]]:
    """Returns, per mode, times of moe(group=) with shape.T tokens per rank (forward, both) and dropped assignments.

    transport None: the layer of each rank alone, without a group, with all experts. Eager calls keep the queue full if
    the host is faster than the device. A graph contains a batch of calls, with NCCL.
    """
    found = in_ranks(device, _layer, (shape, dtype, routing, transport, capacity_factor, repeats))
    times = {}
    for mode in MODES[device]:
        forward, both = (timing.summary(samples) for samples in found[mode])
        times[mode] = forward, both, found["dropped"]
    return times


def measure_all_to_all(count: int, dtype: str, device: str, repeats: int) -> tuple[Timing, int]:
    """Times one exchange between all ranks with `count` elements per rank; also returns the bytes that a rank sends."""
    ranks = ranks_on(device)
    samples = in_ranks(device, _all_to_all, (count, dtype, repeats))
    return timing.summary(samples), count // ranks * (ranks - 1) * ITEMSIZES[dtype]


def in_ranks(device: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Runs `function` in one process per rank and returns the result of rank 0, converted through JSON."""
    torch, ranks = timing.torch_on(device), ranks_on(device)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "result.json"
        torch.multiprocessing.spawn(_rank, (ranks, device, port, str(file), function, arguments), nprocs=ranks)
        return json.loads(file.read_text())


def _rank(
    rank: int, ranks: int, device: str, port: int, file: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options: dict[str, Any] = {"rank": rank, "world_size": ranks}
    if device == "cuda":
        torch.cuda.set_device(rank)
        distributed.init_process_group("nccl", device_id=torch.device("cuda", rank), **options)
    else:
        distributed.init_process_group("gloo", **options)
    try:
        found = function(device, *arguments)
        if rank == 0:
            pathlib.Path(file).write_text(json.dumps(found))
    finally:
        distributed.destroy_process_group()
    if device == "cpu":
        # A thread of Gloo that still releases a tensor aborts the process while the interpreter shuts down
        # (https://github.com/pytorch/pytorch/pull/179291).
        sys.stdout.flush()
        os._exit(0)


def _all_to_all(device: str, count: int, dtype: str, repeats: int) -> list[float]:
    import torch
    import torch.distributed as distributed

    ranks = distributed.get_world_size()
    sent = torch.ones(count // ranks * ranks, dtype=getattr(torch, dtype), device=device)
    received = torch.empty_like(sent)

    def batch() -> None:
        for _ in range(8):
            distributed.all_to_all_single(received, sent)

    if device == "cpu":
        return _seconds_of_batches(device, batch, 8, repeats)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for repeat in range(repeats + 3):
        start.record()
        batch()
        end.record()
        end.synchronize()
        if repeat >= 3:
            samples.append(start.elapsed_time(end) * 1e-3 / 8)
    return samples


def _layer(
    device: str,
    shape: LayerShape,
    dtype: str,
    routing: str | None,
    transport: str | None,
    capacity_factor: float | None,
    repeats: int,
) -> dict[str, Any]:
    """Returns, per mode, seconds per call of forward and both, and the number of dropped assignments."""
    import torch
    import torch.distributed as distributed

    from anabranch.torch import moe

    shape = LayerShape(*shape)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if transport is None:
        rank, ranks = 0, 1
    mine = slice(rank * shape.E // ranks, (rank + 1) * shape.E // ranks)
    # Every rank draws the same gate and weights. Tokens and their experts differ between ranks.
    whole = operands(shape._replace(T=1), dtype, "uniform", device)
    tokens = operands(shape._replace(F=1), dtype, routing, device, seed=1 + distributed.get_rank())
    gate, w_in, w_out = (leaf.detach() for leaf in whole.leaves[1:])
    x, d_out = tokens.leaves[0].detach().requires_grad_(), tokens.d_out
    weights = [w.requires_grad_() for w in (gate, w_in[mine].clone(), w_out[mine].clone())]
    experts = tokens.experts
    del whole, tokens, w_in, w_out

    def layer(x: Any) -> Any:
        options: dict[str, Any] = dict(transport=transport, capacity_factor=capacity_factor)
        options = {} if transport is None else options | {"group": distributed.group.WORLD}
        return moe(x, *weights, topk=shape.K, forced_experts=experts, **options)

    passes = Layer(lambda x: layer(x).output, (x, *weights), d_out)
    calls: list[Callable[[], Any]] = [passes.forward, passes.both]
    found: dict[str, Any] = {EAGER: [_seconds_eager(device, call, repeats) for call in calls]}
    if GRAPH in MODES[device]:
        found[GRAPH] = [_seconds_of_graph(call, repeats) for call in calls]
    with torch.no_grad():
        found["dropped"] = int(layer(x).dropped)
    return found


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _calls_of_a_batch(device: str, call: Callable[[], Any]) -> int:
    """Returns how many calls make a batch that takes long enough; the same number on all ranks."""
    import torch
    import torch.distributed as distributed

    for _ in range(3):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        once = time.perf_counter() - start
    slowest = torch.tensor([once], dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return min(max(2, math.ceil(_BATCH_SECONDS / float(slowest))), _MOST_CALLS)


def _seconds_of_batches(device: str, batch: Callable[[], None], calls: int, repeats: int) -> list[float]:
    """Returns seconds per call, from batches that all ranks start together."""
    import torch.distributed as distributed

    samples = []
    for repeat in range(repeats + 2):
        distributed.barrier()
        _synchronize(device)
        start = time.perf_counter()
        batch()
        _synchronize(device)
        if repeat >= 2:
            samples.append((time.perf_counter() - start) / calls)
    return samples


def _seconds_eager(device: str, call: Callable[[], Any], repeats: int) -> list[float]:
    calls = _calls_of_a_batch(device, call)

    def batch() -> None:
        for _ in range(calls):
            call()

    return _seconds_of_batches(device, batch, calls, repeats)


def _seconds_of_graph(call: Callable[[], Any], repeats: int) -> list[float]:
    """Returns seconds per call, from a CUDA graph of a batch of calls."""
    import torch

    with torch.cuda.stream(timing.capture_stream()):  # autograd must have run on the capture stream before
        calls = _calls_of_a_batch("cuda", call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's thread may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=timing.capture_stream(), capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    samples = _seconds_of_batches("cuda", graph.replay, calls, repeats)
    torch.cuda.synchronize()
    del graph  # the graph must be destroyed before its communicator
    return samples

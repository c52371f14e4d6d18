"""A process a GPU: the layer through torch with its experts shared by all ranks, and NCCL's all_to_all by itself."""

import json
import math
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

from anabranch.bench import cuda_layer_graphs, gpu
from anabranch.bench.errors import BenchError
from anabranch.bench.gpu import Timing
from anabranch.bench.layer_result import LayerTimes
from anabranch.bench.layer_shape import LayerShape

EAGER, GRAPH = "eager", "graph"
MODES = (EAGER, GRAPH)
_BATCH_SECONDS = 40e-3
_MOST_CALLS = 8  # of a batch: as many as mesh_in_jax has


def measure_layer(
    shape: LayerShape, dtype: str, transport: str, capacity_factor: float | None, *, repeats: int
) -> dict[str, LayerTimes]:
    """Times by mode of moe(group=) with shape.T tokens a rank, forward, and forward and backward.

    The eager calls' queue is full where the host is faster than the device; graphs hold a batch of calls, NCCL's too.

    Raises:
      BenchError: torch is missing, or sees fewer than two GPUs.
    """
    ranks = _ranks("moe")
    found = _in_ranks(ranks, _layer, (shape, dtype, transport, capacity_factor, repeats))
    times = {}
    for mode in MODES:
        forward, both = (gpu.summary(samples) for samples in found[mode])
        times[mode] = LayerTimes(forward, both, found["dropped"])
    return times


def measure_all_to_all(count: int, *, repeats: int) -> tuple[Timing, int]:
    """Times of one exchange between all GPUs in which a rank has `count` bfloat16 elements, and the bytes it sends.

    Raises:
      BenchError: torch is missing, or sees fewer than two GPUs.
    """
    ranks = _ranks("NCCL's all_to_all")
    samples = _in_ranks(ranks, _all_to_all, (count, repeats))
    return gpu.summary(samples), count // ranks * (ranks - 1) * 2


def _ranks(what: str) -> int:
    count: int = gpu.torch_with_gpu().cuda.device_count()
    if count < 2:
        raise BenchError(f"{what}: got {count} GPU, expected 2 or more")
    return count


def _in_ranks(ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What `function` returns, as JSON has it, on the first of `ranks` processes with a GPU and NCCL each."""
    torch = gpu.torch_with_gpu()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "found.json"
        torch.multiprocessing.spawn(_rank, (ranks, port, str(file), function, arguments), nprocs=ranks)
        return json.loads(file.read_text())


def _rank(
    rank: int, ranks: int, port: int, file: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    try:
        found = function(*arguments)
        if rank == 0:
            pathlib.Path(file).write_text(json.dumps(found))
    finally:
        distributed.destroy_process_group()


def _all_to_all(count: int, repeats: int) -> list[float]:
    import torch
    import torch.distributed as distributed

    ranks = distributed.get_world_size()
    sent = torch.ones(count // ranks * ranks, dtype=torch.bfloat16, device="cuda")
    received = torch.empty_like(sent)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for repeat in range(repeats + 3):
        start.record()
        for _ in range(8):
            distributed.all_to_all_single(received, sent)
        end.record()
        end.synchronize()
        if repeat >= 3:
            samples.append(start.elapsed_time(end) * 1e-3 / 8)
    return samples


def _layer(
    shape: LayerShape, dtype: str, transport: str, capacity_factor: float | None, repeats: int
) -> dict[str, Any]:
    """Seconds of a call by mode, of forward and of both, and how many slots were dropped."""
    import torch
    import torch.distributed as distributed

    from anabranch.torch import moe

    shape = LayerShape(*shape)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mine = slice(rank * shape.E // ranks, (rank + 1) * shape.E // ranks)
    # The gate and all experts are those of one seed on every rank, tokens are each rank's own.
    whole = cuda_layer_graphs.operands(shape._replace(T=1), dtype, "uniform")
    tokens = cuda_layer_graphs.operands(shape._replace(E=shape.K, F=1), dtype, "uniform", seed=1 + rank)
    gate, w_in, w_out = (leaf.detach() for leaf in whole.leaves[1:])
    x, d_out = tokens.leaves[0].detach().requires_grad_(), tokens.d_out
    weights = [w.requires_grad_() for w in (gate, w_in[mine].clone(), w_out[mine].clone())]
    del whole, tokens, w_in, w_out

    def layer() -> Any:
        options = dict(topk=shape.K, transport=transport, capacity_factor=capacity_factor)
        return moe(x, *weights, **options, group=distributed.group.WORLD)

    def forward() -> Any:
        with torch.no_grad():
            return layer().output

    def both() -> Any:
        output = layer().output
        return output, *torch.autograd.grad(output, [x, *weights], d_out)

    timed = (_seconds_eager, _seconds_of_graph)
    found: dict[str, Any] = {
        mode: [seconds(call, repeats) for call in (forward, both)] for mode, seconds in zip(MODES, timed, strict=True)
    }
    with torch.no_grad():
        found["dropped"] = int(layer().dropped)
    return found


def _calls_of_a_batch(call: Callable[[], Any]) -> int:
    """How many calls last as long as a batch is to, the same on all ranks."""
    import torch
    import torch.distributed as distributed

    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        once = time.perf_counter() - start
    slowest = torch.tensor([once], dtype=torch.float64, device="cuda")
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return min(max(2, math.ceil(_BATCH_SECONDS / float(slowest))), _MOST_CALLS)


def _seconds_of_batches(batch: Callable[[], None], calls: int, repeats: int) -> list[float]:
    """Seconds of a call, by batches that all ranks begin together."""
    import torch
    import torch.distributed as distributed

    samples = []
    for repeat in range(repeats + 2):
        distributed.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        batch()
        torch.cuda.synchronize()
        if repeat >= 2:
            samples.append((time.perf_counter() - start) / calls)
    return samples


def _seconds_eager(call: Callable[[], Any], repeats: int) -> list[float]:
    calls = _calls_of_a_batch(call)

    def batch() -> None:
        for _ in range(calls):
            call()

    return _seconds_of_batches(batch, calls, repeats)


def _seconds_of_graph(call: Callable[[], Any], repeats: int) -> list[float]:
    """Of a CUDA graph of a batch's calls."""
    import torch

    with torch.cuda.stream(gpu.capture_stream()):  # what autograd captures must have run on that stream before
        calls = _calls_of_a_batch(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread may call CUDA while we capture.
    with torch.cuda.graph(graph, stream=gpu.capture_stream(), capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    samples = _seconds_of_batches(graph.replay, calls, repeats)
    torch.cuda.synchronize()
    del graph  # before the communicator that it holds calls of
    return samples

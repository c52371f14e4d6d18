"""Timing on a GPU: graphs of many calls over rotated operands, medians of replays, and the rate of a copy."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

L2_BYTES = 60 << 20


def torch_with_gpu() -> Any:
    """torch, which gives the benchmarks their memory, streams and graphs.

    Raises:
      RuntimeError: torch is not installed, or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise RuntimeError("the benchmarks of CUDA kernels need torch for memory, streams and graphs") from error
    if not torch.cuda.is_available():
        raise RuntimeError("the benchmarks of CUDA kernels need a GPU, and torch finds none")
    return torch


def copies_past_cache(bytes_of_one: int) -> int:
    """How many sets of operands of a call it takes until the first has left the cache."""
    return min(max(2, -(-2 * L2_BYTES // max(bytes_of_one, 1))), 64)


def seconds_of_each(calls: Sequence[Callable[[], Any]], *, repeats: int = 20, least_calls: int = 20) -> float:
    """Median over replays of a graph that makes all `calls`, several times over; seconds of one call."""
    torch = torch_with_gpu()
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = -(-least_calls // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    samples = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3 / (rounds * len(calls)))
    return statistics.median(samples)


def copy_rate(size: int = 1 << 30) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    torch = torch_with_gpu()
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: a copy inside a graph may go through the copy engines, which are slower.
    return 2 * size / seconds_of_each([lambda: torch.neg(source, out=target)], least_calls=5)

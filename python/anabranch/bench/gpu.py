"""Timing on a GPU: graphs and jitted programs of many calls over rotated operands, and the rate of a copy."""

import concurrent.futures
import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch._packages import explain
from anabranch.bench.errors import ArgumentError, BenchError

L2_BYTES = 60 << 20
MOST_SETS = 64
REPEATS = 20
MOST_EXECUTIONS = 30  # XLA lets 32 be on their way

#: What is timed: ours through C, ours through JAX, torch eager, XLA's jit.
BY = ("c", "jax", "torch", "xla")


class Timing(NamedTuple):
    """Seconds of one call: the median, the 10th and the 90th percentile of the repeats.

    host_bound: the device waited for the host's launches, so that the operation itself takes less.
    """

    median: float
    low: float
    high: float
    host_bound: bool = False


def summary(samples: Sequence[float], host_bound: bool = False) -> Timing:
    """The Timing of at least two samples.

    >>> summary([1.0, 2.0, 3.0]).median
    2.0
    """
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), deciles[0], deciles[-1], host_bound)


@functools.cache
def torch_with_gpu() -> Any:
    """torch, which gives the benchmarks their memory, streams and graphs.

    Raises:
      BenchError: torch is not installed, or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise BenchError(explain("a benchmark of CUDA kernels", error)) from error
    if not torch.cuda.is_available():
        raise BenchError("benchmarks of CUDA kernels need a GPU, and torch finds none")
    return torch


@functools.cache
def jax_with_gpu() -> Any:
    """jax, which shares the device's memory with torch.

    Raises:
      BenchError: jax is not installed, or sees no GPU.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        jax.devices("cuda")  # starts it
    except ImportError as error:
        raise BenchError(explain("a benchmark through JAX", error)) from error
    except RuntimeError as error:
        raise BenchError(f"benchmarks through JAX need a GPU that JAX sees: {error}") from error
    return jax


@functools.cache
def capture_stream() -> Any:
    """The stream that everything is captured on. What autograd replays in a graph must have run on it before."""
    return torch_with_gpu().cuda.Stream()


def copies_past_cache(bytes_of_one: int, least: int = 2) -> int:
    """How many sets of operands of a call it takes until the first has left the cache; at most MOST_SETS.

    Args:
      bytes_of_one: that a call reads and writes.
      least: 1 where a call that reads and writes more than the cache holds is known to come back to nothing it left.

    >>> copies_past_cache(L2_BYTES), copies_past_cache(1 << 40), copies_past_cache(1 << 40, least=1)
    (2, 2, 1)
    """
    return min(max(least, -(-2 * L2_BYTES // max(bytes_of_one, 1))), MOST_SETS)


def seconds_of_each(
    calls: Sequence[Callable[[], Any]], *, repeats: int = REPEATS, least_calls: int = 20, seconds: float = 4e-3
) -> Timing:
    """Time of one call in a graph that makes all `calls`.

    Args:
      calls: enqueue work on torch's current stream; each on other operands.
      repeats: replays of the graph.
      least_calls: calls of a graph, where that many take no more than `seconds`.
      seconds: see there.
    """
    torch = torch_with_gpu()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(capture_stream()):
        for _ in range(2):
            start.record()
            for call in calls:
                call()
            end.record()
    end.synchronize()
    once = max(start.elapsed_time(end) * 1e-3, 1e-6)
    rounds = max(1, min(-(-least_calls // len(calls)), int(seconds / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):  # XLA has threads too
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    samples = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3 / (rounds * len(calls)))
    return summary(samples)


def seconds_of_calls(calls: Sequence[Callable[[], Any]], *, repeats: int = REPEATS, seconds: float = 40e-3) -> Timing:
    """Time of one call by itself, as eager code makes them, with the device's queue full.

    Args:
      calls: enqueue work on torch's current stream; each on other operands.
      repeats: batches of calls, timed by the host's clock from the first to the end of the last.
      seconds: a batch takes at least that long.
    """
    torch = torch_with_gpu()

    def batch(rounds: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        return time.perf_counter() - start, enqueued - start

    for _ in range(3):  # also what is compiled or captured on the way
        once = batch(1)[0]
    rounds = max(2, math.ceil(seconds / once))
    batches = [batch(rounds) for _ in range(repeats)]
    host_bound = statistics.median(enqueued / total for total, enqueued in batches) > 0.9
    return summary([total / (rounds * len(calls)) for total, _ in batches], host_bound)


def host_seconds(call: Callable[[], Any], *, calls: int, repeats: int = REPEATS) -> float | None:
    """Median time until a call returns, with the device busy with something else all the while.

    None: the device was never busy until the end, so that the call waits for it.

    Args:
      call: enqueues work on torch's current stream, after the first time without waiting for it.
      calls: of a repeat: so few that the queue has room for what they enqueue.
      repeats: how often the device is made busy.
    """
    torch = torch_with_gpu()
    done, samples = torch.cuda.Event(), []
    cycles, tries = 50_000_000, 5  # some 25 ms, up to 400
    call()
    while len(samples) < repeats and tries > 0:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        done.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken = time.perf_counter() - start
        if done.query():  # what was measured may be the device
            cycles, tries = 2 * cycles, tries - 1
        else:
            samples.append(taken / calls)
    torch.cuda.synchronize()
    return statistics.median(samples) if samples else None


@functools.cache
def copy_rate(size: int = 1 << 30) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    torch = torch_with_gpu()
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: a copy inside a graph may go through the copy engines, which are slower.
    return 2 * size / seconds_of_each([lambda: torch.neg(source, out=target)], least_calls=5).median


def struct(*shape: int, dtype: str) -> Any:
    """The jax.ShapeDtypeStruct of an array on the GPU."""
    jax = jax_with_gpu()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cuda")[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def chained(function: Callable[..., Any]) -> Callable[[Sequence[Sequence[Any]]], list[Any]]:
    """A function of many sets of operands that calls `function` on one after the other.

    A barrier makes each call wait for the one before it: XLA would otherwise run kernels of different calls as one, or
    side by side. What depends on no operand, such as zeros to scatter into, it still makes for all calls at once.
    """
    import jax

    def run(sets: Sequence[Sequence[Any]]) -> list[Any]:
        results: list[Any] = []
        for operands in sets:
            if results:
                operands, results[-1] = jax.lax.optimization_barrier((tuple(operands), results[-1]))
            results.append(function(*operands))
        return results

    return run


def compile_all(programs: Mapping[Hashable, tuple[Callable[..., Any], Any]]) -> dict[Hashable, Callable[..., Any]]:
    """Jits functions for operands of given shapes, many at a time.

    Args:
      programs: by name, a function of one argument and that argument with `struct`s for arrays.

    Returns:
      The compiled programs by name.
    """
    import jax

    lowered = {name: jax.jit(function).lower(operand) for name, (function, operand) in programs.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda program: program.compile(), lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def groups_of(sets: Sequence[Any], size: int) -> list[list[Any]]:
    """All sets in groups of `size`, the last filled up from the front.

    >>> groups_of([1, 2, 3], 2)
    [[1, 2], [3, 1]]
    """
    return [[sets[(i + j) % len(sets)] for j in range(size)] for i in range(0, len(sets), size)]


def seconds_of_program(
    program: Callable[[Any], Any],
    groups: Sequence[Sequence[Any]],
    *,
    repeats: int = REPEATS // 2,
    seconds: float = 4e-3,
    executions: tuple[int, int] = (4, MOST_EXECUTIONS),
) -> Timing:
    """Time of one call of a compiled `chained` program, with the device's queue full.

    Args:
      program: takes one of `groups`.
      groups: sets of operands, as many in each as the program takes; executions take the groups in turn.
      repeats: batches of executions, timed by the host's clock from the first to the end of the last.
      seconds: a batch takes at least that long, where the most executions do.
      executions: the fewest and the most of a batch.
    """
    import jax

    turn = itertools.cycle(groups)

    def batch(size: int) -> tuple[float, float]:
        start = time.perf_counter()
        results = None
        for _ in range(size):
            del results  # the next execution takes its memory, and XLA's command buffers stay as they are
            results = program(next(turn))
        enqueued = time.perf_counter()
        jax.block_until_ready(results)
        return time.perf_counter() - start, enqueued - start

    batch(len(groups))
    fewest, most = executions
    once = batch(fewest)[0] / fewest
    size = min(max(fewest, math.ceil(seconds / once)), most)
    batches = [batch(size) for _ in range(repeats)]
    calls = size * len(groups[0])
    host_bound = statistics.median(enqueued / total for total, enqueued in batches) > 0.9
    return summary([total / calls for total, _ in batches], host_bound)


def choose_by(by: Sequence[str] | None) -> list[str]:
    """What to time, out of BY; None: all but what this machine lacks, which is said on standard error.

    Raises:
      ArgumentError: a name is not in BY.
      BenchError: something that was asked for is missing.
    """
    for name in by or ():
        if name not in BY:
            raise ArgumentError(f"--by: got {name}, expected {', '.join(BY)}")
    torch_with_gpu()
    if by is None:
        try:
            jax_with_gpu()
        except BenchError as error:
            print(f"bench: without jax and xla: {error}", file=sys.stderr)
            return ["c", "torch"]
        return list(BY)
    if "jax" in by or "xla" in by:
        jax_with_gpu()
    return list(by)


def columns(times: Mapping[str, Timing]) -> dict[str, Any]:
    """Microseconds by name, and under "spread" the 10th and 90th percentiles, under "host bound" names."""
    return {
        **{name: 1e6 * timing.median for name, timing in times.items()},
        "spread": {name: [1e6 * timing.low, 1e6 * timing.high] for name, timing in times.items()},
        "host bound": [name for name, timing in times.items() if timing.host_bound],
    }


def shown(row: Mapping[str, Any], names: Sequence[str], ours: str, peers: tuple[str, str]) -> dict[str, Any]:
    """A row for a table: columns with these names, "x torch" and "x xla" being the peers' time over ours.

    >>> row = {"a": 2.0, "b": 5.0, "host bound": ["b"]}
    >>> shown(row, ["a", "b", "x torch", "x xla"], "a", ("b", "c"))
    {'a': '2', 'b': '5*', 'x torch': '2.5', 'x xla': None}
    """

    def cell(value: float | None, star: bool = False) -> str | None:
        return None if value is None else (f"{value:.0f}" if value >= 100 else f"{value:.3g}") + "*" * star

    result = dict(row)
    for name in names:
        if isinstance(row.get(name), float):
            result[name] = cell(row[name], name in row["host bound"])
    for name, peer in zip(("x torch", "x xla"), peers, strict=True):
        known = row.get(ours) is not None and row.get(peer) is not None
        result[name] = cell(row[peer] / row[ours]) if known else None
    return {name: result.get(name) for name in names}

"""Timing: on the CPU batches of calls that take turns, on a GPU graphs and jitted programs over rotated operands.

`times_of` is what most benchmarks call; below it stand the ways of timing on a GPU, and the rates of a copy.
"""

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
from anabranch.bench import BenchError

L2_BYTES = 60 << 20
MOST_SETS = 64
REPEATS = 20
MOST_EXECUTIONS = 30  # XLA allows 32 in flight


class Timing(NamedTuple):
    """Seconds of one call.

    On a GPU `seconds` is the median of the repeats, low and high are their 10th and 90th percentiles. On the CPU it
    is the best of the repeats, which is low too, and high is their median.

    host_bound: the device waited for the host's launches, so the operation itself takes less.
    """

    seconds: float
    low: float
    high: float
    host_bound: bool = False


class Program(NamedTuple):
    """A compiled `chained` program, and groups of operand sets: as many in each group as the program takes."""

    run: Callable[[Any], Any]
    groups: Sequence[Sequence[Any]]


def fits(program: Program) -> bool:
    """Runs a program once; False: the device has too little memory for it."""
    import jax

    try:
        jax.block_until_ready(program.run(program.groups[0]))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def times_of(
    device: str,
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    programs: Mapping[str, Program] | None = None,
    *,
    quick: bool = False,
    **settings: Any,
) -> dict[str, Timing]:
    """Time of one call of each, by name.

    Args:
      device: "cpu" or "cuda".
      calls: by name, calls on different operands. On the CPU they return when their work is done, and the first is
        timed; on a GPU they enqueue work on torch's current stream.
      programs: by name, jitted programs.
      quick: shorter and fewer repeats.
      settings: of `seconds_of_each`, on a GPU alone.
    """
    programs = programs or {}
    if device == "cpu":
        functions = {name: sequence[0] for name, sequence in calls.items()}
        functions |= {name: functools.partial(_wait_for, program) for name, program in programs.items()}
        return interleaved(functions, seconds=0.1 if quick else 0.5, repeats=3 if quick else 7)
    settings = {"repeats": 5 if quick else REPEATS} | settings
    times = {name: seconds_of_each(sequence, **settings) for name, sequence in calls.items()}
    torch_on(device).cuda.synchronize()
    return times | {name: seconds_of_program(*program) for name, program in programs.items()}


def _wait_for(program: Program) -> None:
    jax_on("cpu").block_until_ready(program.run(program.groups[0]))


def interleaved(functions: Mapping[Any, Callable[[], Any]], *, seconds: float, repeats: int = 7) -> dict[Any, Timing]:
    """Times each function on the CPU in batches that take turns: a slow minute of the machine hits all of them.

    Args:
      functions: name to a call that returns when its work is done.
      seconds: time for all repeats of one function. A function that needs longer for one call is timed once, after
        its warm-up.
      repeats: batches of each function.
    """
    batches: dict[Any, int] = {}
    samples: dict[Any, list[float]] = {}

    def batch(name: Any, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            functions[name]()
        return (time.perf_counter() - start) / calls

    for name, function in functions.items():
        function()
        once = max(batch(name, 1), 1e-7)
        samples[name] = [once] if once > seconds else []
        batches[name] = max(1, min(1000, int(seconds / repeats / once)))
    for _ in range(repeats):
        for name in functions:
            if len(samples[name]) == 0 or batches[name] * samples[name][0] <= seconds:
                samples[name].append(batch(name, batches[name]))
    return {name: Timing(min(times), min(times), statistics.median(times)) for name, times in samples.items()}


def summary(samples: Sequence[float], host_bound: bool = False) -> Timing:
    """The Timing of at least two samples on a GPU.

    >>> summary([1.0, 2.0, 3.0]).seconds
    2.0
    """
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), deciles[0], deciles[-1], host_bound)


@functools.cache
def torch_on(device: str) -> Any:
    """torch, which gives the benchmarks their operands, and on a GPU streams and graphs.

    Raises:
      BenchError: torch is not installed, or sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise BenchError(explain("a benchmark", error)) from error
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchError("benchmarks of CUDA kernels need a GPU, and torch finds none")
    return torch


def normal_on(device: str, dtype: str, seed: int) -> Callable[..., Any]:
    """Draws torch's tensors of normal numbers: normal(*shape, scale=1.0)."""
    torch = torch_on(device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        values = torch.empty(shape, device=device, dtype=getattr(torch, dtype))
        return values.normal_(0.0, scale, generator=generator)

    return normal


@functools.cache
def jax_on(device: str) -> Any:
    """jax, which on a GPU shares the memory with torch.

    Raises:
      BenchError: jax is not installed, or sees no GPU.
    """
    if device == "cuda":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        jax.devices(device)  # starts it
    except ImportError as error:
        raise BenchError(explain("a benchmark through JAX", error)) from error
    except RuntimeError as error:
        raise BenchError(f"benchmarks through JAX need a GPU that JAX sees: {error}") from error
    return jax


@functools.cache
def capture_stream() -> Any:
    """The stream that everything is captured on. What autograd replays in a graph must have run on it before."""
    return torch_on("cuda").cuda.Stream()


def sets_past_cache(device: str, bytes_of_one: int, least: int = 2) -> int:
    """How many sets of operands to rotate on a GPU until the first has left the cache, at most MOST_SETS; 1 on a CPU.

    Args:
      device: "cpu" or "cuda".
      bytes_of_one: that a call reads and writes.
      least: 1 where a call that reads and writes more than the cache holds finds nothing of its own there.

    >>> [sets_past_cache("cuda", size) for size in (L2_BYTES, 1 << 40)], sets_past_cache("cuda", 1 << 40, least=1)
    ([2, 2], 1)
    """
    if device == "cpu":
        return 1
    return min(max(least, -(-2 * L2_BYTES // max(bytes_of_one, 1))), MOST_SETS)


def seconds_of_each(
    calls: Sequence[Callable[[], Any]], *, repeats: int = REPEATS, least_calls: int = 20, seconds: float = 4e-3
) -> Timing:
    """Time of one call in a CUDA graph that makes all `calls`.

    Args:
      calls: enqueue work on torch's current stream; each on other operands.
      repeats: replays of the graph.
      least_calls: calls of a graph, where that many take no more than `seconds`.
      seconds: see there.
    """
    torch = torch_on("cuda")
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
    """Time of one call as eager code makes it, with the device's queue full.

    Args:
      calls: enqueue work on torch's current stream; each on other operands.
      repeats: batches of calls, timed by the host's clock from the first to the end of the last.
      seconds: a batch takes at least that long.
    """
    torch = torch_on("cuda")

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
    return _of_batches([batch(rounds) for _ in range(repeats)], rounds * len(calls))


def _of_batches(batches: Sequence[tuple[float, float]], calls: int) -> Timing:
    """Of batches of `calls` calls: seconds until the work was done, and until it was enqueued."""
    host_bound = statistics.median(enqueued / total for total, enqueued in batches) > 0.9
    return summary([total / calls for total, _ in batches], host_bound)


def host_seconds(call: Callable[[], Any], *, calls: int, repeats: int = REPEATS) -> float | None:
    """Median time until a call returns while the device is busy with something else.

    None: the device never stayed busy until the end, so the call waits for it.

    Args:
      call: enqueues work on torch's current stream, after the first time without waiting for it.
      calls: of a repeat; few enough that the queue has room for what they enqueue.
      repeats: how often the device is made busy.
    """
    torch = torch_on("cuda")
    done = torch.cuda.Event()
    samples: list[float] = []
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


def copy_rate(device: str) -> float:
    """Bytes read and written per second by a large copy: within the GPU's memory, or by all threads of the CPU."""
    return _gpu_copy_rate() if device == "cuda" else _cpu_copy_rate()


@functools.cache
def _gpu_copy_rate(size: int = 1 << 30) -> float:
    torch = torch_on("cuda")
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: a copy inside a graph may go through the copy engines, which are slower.
    return 2 * size / seconds_of_each([lambda: torch.neg(source, out=target)], least_calls=5).seconds


def _cpu_copy_rate(size: int = 1 << 27, repeats: int = 9) -> float:
    import numpy as np

    threads = len(os.sched_getaffinity(0))
    source = np.ones((threads, size // threads), np.uint8)
    target = np.zeros_like(source)
    best = math.inf
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.copyto, target, source))  # numpy releases the lock while it copies
            best = min(best, time.perf_counter() - start)
    return 2 * source.size / best


def struct(device: str, *shape: int, dtype: str) -> Any:
    """The jax.ShapeDtypeStruct of an array on the device."""
    jax = jax_on(device)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices(device)[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def as_jax(tensor: Any) -> Any:
    """torch's tensor as an array of JAX: the memory itself, where JAX can share it."""
    import jax

    return jax.dlpack.from_dlpack(tensor.detach())


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
      seconds: a batch takes at least that long, if `executions` allows it.
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
    return _of_batches([batch(size) for _ in range(repeats)], size * len(groups[0]))


def available(operation: str, by: Sequence[str], asked: bool, device: str) -> list[str]:
    """The implementations to time; without those through JAX if it is missing and nobody asked for them by name.

    Raises:
      BenchError: torch, or JAX that was asked for, is missing or sees no GPU.
    """
    torch_on(device)
    of_jax = [name for name in by if name.startswith("jax") or name in ("xla", "ragged-dot")]
    if not of_jax:
        return list(by)
    try:
        jax_on(device)
    except BenchError as error:
        if asked:
            raise
        print(f"{operation}: without {', '.join(of_jax)}: {error}", file=sys.stderr)
        return [name for name in by if name not in of_jax]
    return list(by)

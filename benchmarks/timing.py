"""Timing: interleaved batches of calls on the CPU; graphs and jitted programs with rotated operands on a GPU.

Most benchmarks call `times_of`. The functions below it time calls on a GPU.
"""

import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch._packages import explain
from anabranch.bench import BenchError

L2_BYTES = 60 << 20
MOST_SETS = 64
REPEATS = 20
MOST_EXECUTIONS = 30  # XLA allows 32 in flight


class Timing(NamedTuple):
    """Seconds of one call.

    On a GPU `seconds` is the median of the repeats, and low and high are the 10th and 90th percentiles. On the CPU
    `seconds` and low are the best repeat, and high is the median.

    host_bound: the device waited for the host's launches, so the operation itself is faster.
    """

    seconds: float
    low: float
    high: float
    host_bound: bool = False


class Program(NamedTuple):
    """A jitted `chained` program, and groups of as many operand sets as the program takes."""

    run: Callable[[Any], Any]
    groups: Sequence[Sequence[Any]]


def times_of(
    device: str,
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    programs: Mapping[str, Program] | None = None,
    *,
    quick: bool = False,
    **settings: Any,
) -> dict[str, Timing]:
    """Times one call of each function and program.

    Args:
      device: "cpu" or "cuda".
      calls: calls on different operands, by name. On the CPU they are synchronous, and only the first is timed. On a
        GPU they enqueue work on torch's current stream.
      programs: jitted programs by name.
      quick: shorter and fewer repeats.
      settings: arguments of `seconds_of_each`, for a GPU.
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
    """Times functions on the CPU in interleaved batches, so that a slow phase of the machine affects all of them.

    All repeats of a function take `seconds`. A function that needs longer for one call is timed once, after a warm-up.
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
    """Returns the Timing of at least two GPU samples.

    >>> summary([1.0, 2.0, 3.0]).seconds
    2.0
    """
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), deciles[0], deciles[-1], host_bound)


@functools.cache
def torch_on(device: str) -> Any:
    """Returns torch; raises BenchError if it is not installed, or sees no GPU."""
    try:
        import torch
    except ImportError as error:
        raise BenchError(explain("a benchmark", error)) from error
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchError("benchmarks of CUDA kernels need a GPU, and torch finds none")
    return torch


def normal_on(device: str, dtype: str, seed: int) -> Callable[..., Any]:
    """Returns normal(*shape, scale=1.0), which draws torch tensors of normal numbers."""
    torch = torch_on(device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        values = torch.empty(shape, device=device, dtype=getattr(torch, dtype))
        return values.normal_(0.0, scale, generator=generator)

    return normal


@functools.cache
def jax_on(device: str) -> Any:
    """Returns jax, which shares a GPU's memory with torch; raises BenchError if it is not installed, or sees no GPU."""
    if device == "cuda":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        jax.devices(device)  # starts JAX
    except ImportError as error:
        raise BenchError(explain("a benchmark through JAX", error)) from error
    except RuntimeError as error:
        raise BenchError(f"benchmarks through JAX need a GPU that JAX sees: {error}") from error
    return jax


@functools.cache
def capture_stream() -> Any:
    """Returns the stream for captures. Autograd must have run on it before its work is captured."""
    return torch_on("cuda").cuda.Stream()


def sets_past_cache(device: str, bytes_of_one: int, least: int = 2) -> int:
    """Returns how many operand sets to rotate so that each has left the GPU's cache before its next use; 1 on the CPU.

    least: pass 1 if a call that reads and writes more bytes than the cache holds finds none of its operands there.

    >>> [sets_past_cache("cuda", size) for size in (L2_BYTES, 1 << 40)], sets_past_cache("cuda", 1 << 40, least=1)
    ([2, 2], 1)
    """
    if device == "cpu":
        return 1
    return min(max(least, -(-2 * L2_BYTES // max(bytes_of_one, 1))), MOST_SETS)


def seconds_of_each(
    calls: Sequence[Callable[[], Any]], *, repeats: int = REPEATS, least_calls: int = 20, seconds: float = 4e-3
) -> Timing:
    """Times one call, in replays of a CUDA graph of all `calls`; see `captured`."""
    return replays([captured(calls, least_calls, seconds)], repeats)[0]


def captured(calls: Sequence[Callable[[], Any]], least_calls: int = 20, seconds: float = 4e-3) -> tuple[Any, int]:
    """Returns a CUDA graph for `replays`, and the number of calls in it.

    Args:
      calls: functions that enqueue work on torch's current stream, each on other operands.
      least_calls: calls per graph, if they take no more than `seconds`.
      seconds: limit of the time per graph; see least_calls.
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
    # "thread_local", because XLA's threads may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def replays(graphs: Sequence[tuple[Any, int]], repeats: int) -> list[Timing]:
    """Times one call of each graph of `captured`. Replays are interleaved, so that clock drift affects all graphs."""
    torch = torch_on("cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for graph, _ in graphs:
        for _ in range(3):
            graph.replay()
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats):
        for (graph, calls), of_graph in zip(graphs, samples, strict=True):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            of_graph.append(start.elapsed_time(end) * 1e-3 / calls)
    return [summary(of_graph) for of_graph in samples]


def seconds_of_calls(calls: Sequence[Callable[[], Any]], *, repeats: int = REPEATS, seconds: float = 40e-3) -> Timing:
    """Times one eager call with the device's queue full.

    Args:
      calls: functions that enqueue work on torch's current stream, each on other operands.
      repeats: batches of calls, timed by the host's clock from the first launch to the end of the last call.
      seconds: the least time per batch.
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

    for _ in range(3):  # also compiles or captures, if the call does
        once = batch(1)[0]
    rounds = max(2, math.ceil(seconds / once))
    return _batch_timing([batch(rounds) for _ in range(repeats)], rounds * len(calls))


def _batch_timing(batches: Sequence[tuple[float, float]], calls: int) -> Timing:
    """Returns the Timing of batches of `calls` calls. A batch is (seconds until completion, seconds until enqueued)."""
    host_bound = statistics.median(enqueued / total for total, enqueued in batches) > 0.9
    return summary([total / calls for total, _ in batches], host_bound)


def host_seconds(call: Callable[[], Any], *, calls: int, repeats: int = REPEATS) -> float | None:
    """Returns the median time until a call returns while the device is busy with other work.

    Returns None if the device never stayed busy until the end, because then the call waits for the device.

    Args:
      call: enqueues work on torch's current stream. After its first run it must not wait for the device.
      calls: calls per repeat; few enough that their work fits into the queue.
      repeats: number of samples.
    """
    torch = torch_on("cuda")
    done = torch.cuda.Event()
    samples: list[float] = []
    cycles, tries = 50_000_000, 5  # about 25 ms, at most 400 ms
    call()
    while len(samples) < repeats and tries > 0:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        done.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken = time.perf_counter() - start
        if done.query():  # the measured time may be the device's
            cycles, tries = 2 * cycles, tries - 1
        else:
            samples.append(taken / calls)
    torch.cuda.synchronize()
    return statistics.median(samples) if samples else None


def as_jax(tensor: Any) -> Any:
    """Returns a torch tensor as a JAX array, without a copy where JAX can share the memory."""
    import jax

    return jax.dlpack.from_dlpack(tensor.detach())


def chained(function: Callable[..., Any]) -> Callable[[Sequence[Sequence[Any]]], list[Any]]:
    """Returns a function of many operand sets that calls `function` on each in sequence.

    A barrier makes each call wait for the previous one, because XLA would otherwise fuse kernels of different calls or
    run them concurrently. Values that depend on no operand, such as zeros to scatter into, are still computed once.
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


def groups_of(sets: Sequence[Any], size: int) -> list[list[Any]]:
    """Splits the sets into groups of `size`. Fills the last group up with sets from the front.

    >>> groups_of([1, 2, 3], 2)
    [[1, 2], [3, 1]]
    """
    return [[sets[(i + j) % len(sets)] for j in range(size)] for i in range(0, len(sets), size)]


def program(function: Callable[..., Any], sets: Sequence[Sequence[Any]], calls: int = 1) -> Program:
    """Returns a program of `calls` calls of `function` on arrays. It is compiled at its first run."""
    import jax

    return Program(jax.jit(chained(function)), groups_of(sets, calls))


def seconds_of_program(
    program: Callable[[Any], Any],
    groups: Sequence[Sequence[Any]],
    *,
    repeats: int = REPEATS // 2,
    seconds: float = 4e-3,
    executions: tuple[int, int] = (4, MOST_EXECUTIONS),
) -> Timing:
    """Times one call of a compiled `chained` program with the device's queue full.

    Args:
      program: a function of one of `groups`.
      groups: groups of as many operand sets as the program takes; executions rotate through the groups.
      repeats: batches of executions, timed by the host's clock from the first launch to the end of the last execution.
      seconds: the least time per batch, within the limits of `executions`.
      executions: the fewest and the most executions per batch.
    """
    import jax

    rotation = itertools.cycle(groups)

    def batch(size: int) -> tuple[float, float]:
        start = time.perf_counter()
        results = None
        for _ in range(size):
            del results  # the next execution reuses the memory, so XLA need not update its command buffers
            results = program(next(rotation))
        enqueued = time.perf_counter()
        jax.block_until_ready(results)
        return time.perf_counter() - start, enqueued - start

    batch(len(groups))
    fewest, most = executions
    once = batch(fewest)[0] / fewest
    size = min(max(fewest, math.ceil(seconds / once)), most)
    return _batch_timing([batch(size) for _ in range(repeats)], size * len(groups[0]))


def available(operation: str, requested: Sequence[str] | None, known: Sequence[str], device: str) -> list[str]:
    """Returns the requested implementations, or all known ones; without JAX, not those through JAX.

    Raises:
      BenchError: torch, or JAX if it was requested, is missing or sees no GPU.
    """
    torch_on(device)
    by = list(dict.fromkeys(requested or known))
    through_jax = [name for name in by if name.startswith("jax") or name in ("xla", "ragged-dot")]
    if through_jax:
        try:
            jax_on(device)
        except BenchError as error:
            if requested:
                raise
            print(f"{operation}: without {', '.join(through_jax)}: {error}", file=sys.stderr)
            return [name for name in by if name not in through_jax]
    return by

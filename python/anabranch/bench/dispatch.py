"""Plan, dispatch, combine and their backward passes beside torch eager, XLA, and the rate of a plain copy."""

import concurrent.futures
import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.bench.measure import interleaved
from anabranch.jax.ops.dispatch import combine_backward, combine_forward, dispatch_backward, dispatch_forward
from anabranch.jax.ops.plan import plan

CAPTION = (
    "microseconds, best of the repeats; copy: a plain copy of as many bytes, by all threads, in this run;\n"
    "torch: argsort, index_select, index_add; xla: argsort, take, segment_sum, jitted"
)

SHAPES = [(4096, 64, 8, 1024), (4096, 8, 2, 1024), (8192, 128, 8, 2048), (64, 64, 8, 1024)]  # T, E, K, D

Calls = dict[str, Callable[[], Any]]


def keep_freed_memory() -> None:
    """Makes glibc keep what is freed, for all implementations alike.

    Else every large result is fresh from the kernel, and its page faults take several times as long as the operation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max, arena_max = -1, -4, -8  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)
        mallopt(arena_max, 1)


def copy_rate(size: int = 1 << 27, repeats: int = 9) -> float:
    """Bytes read and written per second by a copy of `size` bytes on all usable CPUs, best of the repeats."""
    threads = len(os.sched_getaffinity(0))
    source = np.ones((threads, size // threads), np.uint8)
    target = np.zeros_like(source)
    best = math.inf
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.copyto, target, source))  # numpy lets other threads run while it copies
            best = min(best, time.perf_counter() - start)
    return 2 * source.size / best


def least_bytes(shape: tuple[int, ...], itemsize: int) -> dict[str, int]:
    """What every operation on T, E, K, D has to read and write at least."""
    T, E, K, D = shape
    tokens, rows, slots = T * D * itemsize, T * K * D * itemsize, T * K * 4
    return {
        "plan": 3 * slots + 12 * E,
        "dispatch": tokens + rows + 2 * slots,
        "dispatch backward": tokens + rows + slots,
        "combine": tokens + rows + 2 * slots,
        "combine backward": tokens + 2 * rows + 4 * slots,
    }


def _calls(functions: Mapping[str, Callable[..., Any]], arguments: Mapping[str, tuple[Any, ...]]) -> Calls:
    def call(function: Callable[..., Any], operands: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(function(*operands))

    return {name: call(jax.jit(function), arguments[name]) for name, function in functions.items()}


def _ours(experts: Any, x: Any, d_rows: Any, rows: Any, weights: Any, d_out: Any, E: int) -> Calls:
    layout = plan(experts, E)
    return _calls(
        {
            "plan": functools.partial(plan, num_experts=E),
            "dispatch": dispatch_forward,
            "dispatch backward": functools.partial(dispatch_backward, dtype=x.dtype),
            "combine": combine_forward,
            "combine backward": functools.partial(combine_backward, dtype=x.dtype),
        },
        {
            "plan": (experts,),
            "dispatch": (x, layout),
            "dispatch backward": (d_rows, layout),
            "combine": (rows, layout, weights),
            "combine backward": (d_out, rows, layout, weights),
        },
    )


def _xla(experts: Any, x: Any, d_rows: Any, rows: Any, weights: Any, d_out: Any, E: int) -> Calls:
    """The same as JAX users write it today."""
    T, K = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token = order // K

    def layout(experts):
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        return order, jnp.argsort(order), jnp.bincount(flat, length=E)

    def gather_sum(rows, weights):
        weighted = rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        return jax.ops.segment_sum(weighted, token, num_segments=T).astype(rows.dtype)

    def gather_sum_backward(d_out, rows, weights):
        gathered = d_out[token].astype(jnp.float32)
        d_rows = (gathered * weights.reshape(-1)[order][:, None]).astype(rows.dtype)
        d_weights = jnp.zeros(T * K, jnp.float32).at[order].set((gathered * rows).sum(1), unique_indices=True)
        return d_rows, d_weights.reshape(T, K)

    return _calls(
        {
            "plan": layout,
            "dispatch": lambda x: x[token],
            "dispatch backward": lambda d: gather_sum(d, jnp.ones((T, K), jnp.float32)),
            "combine": gather_sum,
            "combine backward": gather_sum_backward,
        },
        {
            "plan": (experts,),
            "dispatch": (x,),
            "dispatch backward": (d_rows,),
            "combine": (rows, weights),
            "combine backward": (d_out, rows, weights),
        },
    )


def _torch(experts: Any, x: Any, d_rows: Any, rows: Any, weights: Any, d_out: Any, E: int) -> Calls:
    """The same in torch eager; nothing where torch isn't installed."""
    try:
        import torch
    except ImportError:
        return {}
    float_dtype = getattr(torch, str(x.dtype))

    def tensor(array: Any) -> Any:
        values = torch.from_numpy(np.array(array, np.int64 if array.dtype == jnp.int32 else np.float32))
        return values.to(float_dtype) if array.dtype == x.dtype else values

    experts, x, d_rows, rows, weights, d_out = map(tensor, (experts, x, d_rows, rows, weights, d_out))
    T, K = experts.shape
    order = torch.argsort(experts.reshape(-1), stable=True)
    token = order // K

    def layout():
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        return order, torch.argsort(order), torch.bincount(flat, minlength=E)

    def gather_sum(rows, weights):
        weighted = rows.float() if weights is None else rows.float() * weights.reshape(-1)[order][:, None]
        return torch.zeros(T, rows.shape[1]).index_add_(0, token, weighted).to(rows.dtype)

    def gather_sum_backward():
        gathered = d_out.index_select(0, token).float()
        d_rows = (gathered * weights.reshape(-1)[order][:, None]).to(rows.dtype)
        d_weights = torch.empty(T * K).index_copy_(0, order, (gathered * rows).sum(1))
        return d_rows, d_weights.reshape(T, K)

    return {
        "plan": layout,
        "dispatch": lambda: x.index_select(0, token),
        "dispatch backward": lambda: gather_sum(d_rows, None),
        "combine": lambda: gather_sum(rows, weights),
        "combine backward": gather_sum_backward,
    }


def rows(*, dtypes: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """One row for every operation, shape and dtype."""
    keep_freed_memory()
    for dtype in dtypes:
        for shape in SHAPES[:1] if quick else SHAPES:
            T, E, K, D = shape
            rng = np.random.default_rng(0)
            chosen = np.argsort(rng.random((T, E)), axis=1)[:, :K]
            operands = (
                jnp.asarray(chosen, jnp.int32),
                jnp.asarray(rng.standard_normal((T, D), dtype=np.float32), dtype),
                jnp.asarray(rng.standard_normal((T * K, D), dtype=np.float32), dtype),
                jnp.asarray(rng.standard_normal((T * K, D), dtype=np.float32), dtype),
                jnp.asarray(rng.random((T, K), dtype=np.float32)),
                jnp.asarray(rng.standard_normal((T, D), dtype=np.float32), dtype),
            )
            makers = {"ours": _ours, "torch": _torch, "xla": _xla}
            calls = {who: make(*operands, E) for who, make in makers.items()}
            moved = least_bytes(shape, operands[1].dtype.itemsize)
            for operation, size in moved.items():
                functions = {who: named[operation] for who, named in calls.items() if named}
                rate = copy_rate()
                best = {who: timing.best for who, timing in interleaved(functions, seconds=1.0).items()}
                yield {
                    "operation": operation,
                    "T,E,K,D": ",".join(map(str, shape)),
                    "dtype": dtype,
                    **{who: best.get(who, math.nan) * 1e6 for who in makers},
                    "copy": size / rate * 1e6,
                    "GB/s": size / best["ours"] / 1e9,
                    "copy GB/s": rate / 1e9,
                }

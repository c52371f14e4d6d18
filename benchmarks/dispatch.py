"""Dispatch, combine, their backward passes and the chunk sort, against eager torch, XLA and the copy rate."""

import argparse
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import timing
from benchmarks.c_call import c_call
from benchmarks.options import add_by
from benchmarks.tables import columns

CAPTION = """microseconds per call. c: ours through C; jax: ours through JAX, jitted; torch: eager index_select and
index_add; xla: take and segment_sum, jitted. GB/s: least bytes to read and write, divided by the time of c; share: GB/s
divided by the copy rate of this run. to float32: from bfloat16 rows. On a GPU: median of graph replays that rotate
operands past the L2 cache. On the CPU: best of interleaved repeats"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16")}
BY = ("c", "jax", "torch", "xla")
_DEFAULT = {"cpu": BY, "cuda": ("c", "torch")}
#: T, E, K, D
SHAPES = {
    "cpu": [(4096, 64, 8, 1024), (4096, 8, 2, 1024), (8192, 128, 8, 2048), (64, 64, 8, 1024)],
    "cuda": [(32768, 128, K, D) for K in (8, 2) for D in (2048, 768, 1536, 2880, 4096, 7168)],
}

Calls = dict[str, Callable[[], Any]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_by(parser, BY, "all installed ones; on a GPU c and torch")


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, for all implementations alike.

    Otherwise every large result is newly mapped, and its page faults take several times as long as the operation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max, arena_max = -1, -4, -8  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)
        mallopt(arena_max, 1)


def least_bytes(shape: tuple[int, ...], itemsize: int) -> dict[str, int]:
    """Returns the least number of bytes that each operation must read and write for T, E, K, D."""
    T, _, K, D = shape
    tokens, rows, slots = T * D * itemsize, T * K * D * itemsize, T * K * 4
    return {
        "dispatch": tokens + rows + 2 * slots,
        "dispatch backward": tokens + rows + slots,
        "dispatch backward with addend": 2 * tokens + rows + slots,
        "dispatch backward to float32": 2 * tokens + rows + slots,
        "combine": tokens + rows + 2 * slots,
        "combine backward": tokens + 2 * rows + 4 * slots,
        "sort chunks": 2 * rows,
    }


class Operands:
    """Random tokens, rows and weights, and the gather and scatter indices for K distinct experts per token."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str, seed: int = 0):
        torch = timing.torch_on(device)
        tokens, E, K, D = shape
        generator = torch.Generator(device).manual_seed(seed)
        R, normal = tokens * K, timing.normal_on(device, dtype, seed)
        self.experts = torch.rand(tokens, E, device=device, generator=generator).argsort(1)[:, :K]
        order = self.experts.reshape(-1).argsort(stable=True)
        self.slot_of_row = order.to(torch.int32)
        self.row_of_slot = torch.empty_like(self.slot_of_row)
        self.row_of_slot[order] = torch.arange(R, device=device, dtype=torch.int32)
        self.row_of_slot = self.row_of_slot.reshape(tokens, K)
        self.x, self.d_out, self.rows = normal(tokens, D), normal(tokens, D), normal(R, D)
        self.weights = torch.rand(tokens, K, device=device, generator=generator)
        self.sizes = torch.bincount(self.experts.reshape(-1), minlength=E).to(torch.int32)
        self.order = torch.randperm(E, device=device, generator=generator).to(torch.int32)

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """Returns the arguments of the peers' operations."""
        return {
            "dispatch": (self.x,),
            "dispatch backward": (self.rows,),
            "combine": (self.rows, self.weights),
            "combine backward": (self.d_out, self.rows, self.weights),
        }


def c_calls(given: Operands) -> tuple[Calls, dict[str, Any]]:
    """Returns our call of each operation, and the tensors that the calls write."""
    import torch

    maps = {"row_of_slot": given.row_of_slot, "slot_of_row": given.slot_of_row}
    slots, weights = {"row_of_slot": given.row_of_slot}, {"weights": given.weights}
    out, rows, d_weights = (torch.empty_like(like) for like in (given.x, given.rows, given.weights))
    calls = {
        "dispatch": c_call("dispatch", x=given.x, rows=rows, **maps),
        "dispatch backward": c_call("combine", rows=given.rows, out=out, **slots),
        "dispatch backward with addend": c_call("combine", rows=given.rows, out=out, addend=given.x, **slots),
        "combine": c_call("combine", rows=given.rows, out=out, **slots, **weights),
        "combine backward": c_call(
            "combine_backward",
            d_out=given.d_out,
            rows=given.rows,
            d_rows=rows,
            d_weights=d_weights,
            **maps,
            **weights,
        ),
        "sort chunks": c_call(
            "sort_chunks", x=given.rows, split_sizes=given.sizes, sorted_indices=given.order, out=rows
        ),
    }
    if out.element_size() == 2:
        wide = torch.empty_like(out, dtype=torch.float32)
        calls["dispatch backward to float32"] = c_call("combine", rows=given.rows, out=wide, **slots)
    return calls, {"out": out, "rows": rows, "d_weights": d_weights}


def torch_calls(given: Operands) -> Calls:
    """Returns torch's call of each operation."""
    from benchmarks.peers.torch import dispatch

    arguments = given.arguments()
    return {name: functools.partial(f, *arguments[name]) for name, f in dispatch(given.experts).items()}


def jax_programs(given: list[Operands], by: str) -> dict[str, timing.Program]:
    """Returns our program ("jax") or XLA's for each operation, one call per program."""
    import jax

    from anabranch.jax.ops import dispatch as ours
    from anabranch.jax.ops.plan import plan
    from benchmarks.peers import xla

    functions: Mapping[str, Callable[..., Any]]
    experts, E = timing.as_jax(given[0].experts.int()), given[0].sizes.numel()
    if by == "jax":
        layout, dtype = plan(experts, E), timing.as_jax(given[0].x).dtype
        functions = {
            "dispatch": lambda x: ours.dispatch_forward(x, layout),
            "dispatch backward": lambda rows: ours.dispatch_backward(rows, layout, dtype=dtype),
            "combine": lambda rows, weights: ours.combine_forward(rows, layout, weights),
            "combine backward": lambda d_out, rows, weights: ours.combine_backward(
                d_out, rows, layout, weights, dtype=dtype
            ),
        }
    else:
        functions = xla.dispatch(experts)
    arguments = {name: tuple(map(timing.as_jax, of)) for name, of in given[0].arguments().items()}
    return {
        name: timing.Program(jax.jit(timing.chained(function)), [[arguments[name]]])
        for name, function in functions.items()
    }


def fit_to_memory(shape: tuple[int, ...], itemsize: int, device: str) -> tuple[int, ...]:
    """Returns the shape. On a GPU, T is halved until operands and torch's intermediate results fit into free memory."""
    T, E, K, D = shape
    if device == "cuda":
        free, _ = timing.torch_on(device).cuda.mem_get_info()
        while T * D * (10 * K + 10) * itemsize > 0.8 * free:
            T //= 2
    return T, E, K, D


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per operation, shape and dtype."""
    device = options.device
    by = timing.available("dispatch", options.by or _DEFAULT[device], options.by is not None, device)
    torch = timing.torch_on(device)
    if device == "cpu":
        keep_freed_memory()
    for dtype in options.dtype:
        itemsize = 4 if dtype == "float32" else 2
        for requested in SHAPES[device][:1] if options.quick else SHAPES[device]:
            if device == "cuda":
                torch.cuda.empty_cache()
            shape = fit_to_memory(requested, itemsize, device)
            moved = least_bytes(shape, itemsize)
            count = timing.sets_past_cache(device, moved["dispatch"])
            given = [Operands(shape, dtype, device, seed) for seed in range(count)]
            calls: dict[str, list[Calls]] = {}
            if "c" in by:
                calls["c"] = [c_calls(one)[0] for one in given]
            if "torch" in by:
                calls["torch"] = [torch_calls(one) for one in given]
            programs = {who: jax_programs(given, who) for who in by if who in ("jax", "xla")}
            for operation in moved:
                timed = {who: [one[operation] for one in sets] for who, sets in calls.items() if operation in sets[0]}
                timed_programs = {who: by_name[operation] for who, by_name in programs.items() if operation in by_name}
                if not timed and not timed_programs:
                    continue
                rate = timing.copy_rate(device)
                times = timing.times_of(device, timed, timed_programs, quick=options.quick, least_calls=8)
                ours = times.get("c")
                yield {
                    "operation": operation,
                    "T,E,K,D": ",".join(map(str, shape)),
                    "dtype": dtype,
                    **{who: None for who in by},
                    **columns(times),
                    "copy": 1e6 * moved[operation] / rate,
                    "GB/s": moved[operation] / ours.seconds / 1e9 if ours else None,
                    "share": moved[operation] / ours.seconds / rate if ours else None,
                    "copy GB/s": rate / 1e9,
                }
            del given, calls, programs

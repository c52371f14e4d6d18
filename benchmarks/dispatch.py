"""Dispatch, combine, their backward passes and the chunk sort, against eager torch and the copy rate."""

import argparse
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from benchmarks import beside, ceilings, flags, timing
from benchmarks.c_call import Calls, c_call
from benchmarks.shapes import ITEMSIZES, draw_experts
from benchmarks.tables import columns

CAPTION = """microseconds per call. c: ours through C; torch: eager index_select and index_add. GB/s: least bytes to
read and write, divided by the time of c; share: GB/s divided by the copy rate of this run. On a GPU: median of graph
replays that rotate operands past the L2 cache. On the CPU: best of interleaved repeats"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16")}
BY = ("c", "torch")
#: T, E, K, D
SHAPES = {
    "cpu": [(4096, 64, 8, 1024), (4096, 8, 2, 1024), (8192, 128, 8, 2048), (64, 64, 8, 1024)],
    "cuda": [(32768, 128, K, D) for K in (8, 2) for D in (2048, 768, 1536, 2880, 4096, 7168)],
}
OPTIONS = flags.by(BY)


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
        "combine": tokens + rows + 2 * slots,
        "combine backward": tokens + 2 * rows + 4 * slots,
        "sort chunks": 2 * rows,
    }


class Operands:
    """Random tokens, rows and weights, and the gather and scatter indices for K distinct experts per token."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str, seed: int = 0):
        torch = timing.torch_on(device)
        T, E, K, D = shape
        generator = torch.Generator(device).manual_seed(seed)
        normal = timing.normal_on(device, dtype, seed)
        self.experts = torch.from_numpy(draw_experts(T, E, K, seed)).to(device)
        order = self.experts.reshape(-1).argsort(stable=True)
        self.slot_of_row = order.to(torch.int32)
        self.row_of_slot = torch.empty_like(self.slot_of_row)
        self.row_of_slot[order] = torch.arange(T * K, device=device, dtype=torch.int32)
        self.row_of_slot = self.row_of_slot.reshape(T, K)
        self.x, self.d_out, self.rows = normal(T, D), normal(T, D), normal(T * K, D)
        self.weights = torch.rand(T, K, device=device, generator=generator)
        self.sizes = torch.bincount(self.experts.reshape(-1), minlength=E).to(torch.int32)
        self.order = torch.randperm(E, device=device, generator=generator).to(torch.int32)


def c_calls(given: Operands) -> Calls:
    """Returns our call of each operation. The calls share the tensors that they write."""
    import torch

    slots, weights = {"row_of_slot": given.row_of_slot}, {"weights": given.weights}
    maps = {**slots, "slot_of_row": given.slot_of_row}
    out, rows, d_weights = (torch.zeros_like(like) for like in (given.x, given.rows, given.weights))
    results = {"d_rows": rows, "d_weights": d_weights}
    chunks = {"split_sizes": given.sizes, "sorted_indices": given.order}
    return {
        "dispatch": c_call("dispatch", x=given.x, rows=rows, **maps),
        "dispatch backward": c_call("combine", rows=given.rows, out=out, **slots),
        "combine": c_call("combine", rows=given.rows, out=out, **slots, **weights),
        "combine backward": c_call(
            "combine_backward", d_out=given.d_out, rows=given.rows, **results, **maps, **weights
        ),
        "sort chunks": c_call("sort_chunks", x=given.rows, **chunks, out=rows),
    }


def torch_calls(given: Operands) -> Calls:
    """Returns torch's call of each operation but the chunk sort."""
    from benchmarks.peers.torch import dispatch

    arguments: dict[str, tuple[Any, ...]] = {
        "dispatch": (given.x,),
        "dispatch backward": (given.rows,),
        "combine": (given.rows, given.weights),
        "combine backward": (given.d_out, given.rows, given.weights),
    }
    return {name: functools.partial(f, *arguments[name]) for name, f in dispatch(given.experts).items()}


def fit_to_memory(shape: tuple[int, ...], itemsize: int, device: str) -> tuple[int, ...]:
    """Returns the shape. On a GPU, T is halved until operands and torch's intermediate results fit into free memory."""
    T, E, K, D = shape
    if device == "cuda":
        torch = timing.torch_on(device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        while T * D * (10 * K + 10) * itemsize > 0.8 * free:
            T //= 2
    return T, E, K, D


def cases(options: argparse.Namespace) -> Iterator[beside.Case]:
    """Yields the first columns of rows, sets of operands and our calls."""
    for dtype in options.dtype:
        for requested in SHAPES[options.device][:1] if options.quick else SHAPES[options.device]:
            shape = fit_to_memory(requested, ITEMSIZES[dtype], options.device)
            count = timing.sets_past_cache(options.device, least_bytes(shape, ITEMSIZES[dtype])["dispatch"])
            head = {"T,E,K,D": ",".join(map(str, shape)), "dtype": dtype}
            # The operands must not stay referenced here while the next ones are drawn.
            yield head, [Operands(shape, dtype, options.device, seed) for seed in range(count)], c_calls


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per operation, shape and dtype."""
    device, by = options.device, timing.available("dispatch", options.by, BY, options.device)
    if device == "cpu":
        keep_freed_memory()
    for head, given, make in cases(options):
        shape = tuple(map(int, head["T,E,K,D"].split(",")))
        calls: dict[str, list[Calls]] = {}
        if "c" in by:
            calls["c"] = [make(one) for one in given]
        if "torch" in by:
            calls["torch"] = [torch_calls(one) for one in given]
        for operation, size in least_bytes(shape, ITEMSIZES[head["dtype"]]).items():
            timed = {who: [one[operation] for one in sets] for who, sets in calls.items() if operation in sets[0]}
            if not timed:
                continue
            rate = ceilings.copy_rate(device)
            times = timing.times_of(device, timed, quick=options.quick, least_calls=8)
            ours = times.get("c")
            yield {
                "operation": operation,
                **head,
                **{who: None for who in by},
                **columns(times),
                "copy": 1e6 * size / rate,
                "GB/s": size / ours.seconds / 1e9 if ours else None,
                "share": size / ours.seconds / rate if ours else None,
                "copy GB/s": rate / 1e9,
            }
        del given, calls, timed

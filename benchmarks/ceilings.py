"""Ceilings: the rates of a large copy and of a large GEMM."""

import concurrent.futures
import ctypes
import functools
import math
import os
import time
from typing import Any

import ml_dtypes
import numpy as np

from anabranch import _library
from benchmarks import timing


def copy_rate(device: str) -> float:
    """Returns bytes read and written per second by a large copy, in GPU memory or by all CPU threads."""
    return _gpu_copy_rate() if device == "cuda" else _cpu_copy_rate()


@functools.cache
def _gpu_copy_rate(size: int = 1 << 30) -> float:
    torch = timing.torch_on("cuda")
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    # Use a kernel, because a copy inside a graph may use the copy engines, which are slower.
    return 2 * size / timing.seconds_of_each([lambda: torch.neg(source, out=target)], least_calls=5).seconds


def _cpu_copy_rate(size: int = 1 << 27, repeats: int = 9) -> float:
    threads = len(os.sched_getaffinity(0))
    source = np.ones((threads, size // threads), np.uint8)
    target = np.zeros_like(source)
    best = math.inf
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.copyto, target, source))  # numpy releases the GIL while it copies
            best = min(best, time.perf_counter() - start)
    return 2 * source.size / best


@functools.cache
def _onednn() -> ctypes.CDLL:
    """Returns the oneDNN library that the C library has loaded."""
    _library.load()
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "libdnnl.so" in line:
                return ctypes.CDLL(line.split(maxsplit=5)[5].strip())
    raise _library.LibraryError("libdnnl.so: not loaded by this build of the library")


def product_rate(device: str, dtype: str, **settings: Any) -> float | None:
    """Measures FLOP/s of a large GEMM: 8192^3 by torch (cuBLAS) on a GPU, 2048^3 by oneDNN with all threads on the CPU.

    Args:
      device: "cpu" or "cuda".
      dtype: dtype of the operands; on the CPU "float32" or "bfloat16" with float32 results.
      settings: arguments of `timing.seconds_of_each`.

    Returns:
      The rate, or None if oneDNN does not support that GEMM on this machine.
    """
    if device == "cpu":
        return _cpu_rate(dtype)
    torch, size = timing.torch_on(device), 8192
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2.0 * size**3 / timing.seconds_of_each([lambda: a @ b], **{"seconds": 40e-3} | settings).seconds


def _cpu_rate(dtype: str, size: int = 2048, seconds: float = 0.5) -> float | None:
    """Returns the best of as many repeats as fit into `seconds`."""
    library = _onednn()
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    c = np.zeros((size, size), np.float32)
    gemm = library.dnnl_sgemm
    if dtype == "bfloat16":
        a, b = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
        gemm = library.dnnl_gemm_bf16bf16f32
    long = ctypes.c_int64
    pointer = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c)]
    arguments = (
        ctypes.c_char(b"N"), ctypes.c_char(b"N"), long(size), long(size), long(size), ctypes.c_float(1.0),
        pointer[0], long(size), pointer[1], long(size), ctypes.c_float(0.0), pointer[2], long(size),
    )  # fmt: skip
    if gemm(*arguments) != 0:
        return None
    best, deadline = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        gemm(*arguments)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best

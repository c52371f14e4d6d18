"""The CPU's rate of a large matrix product, by oneDNN."""

import ctypes
import functools
import time

import ml_dtypes
import numpy as np

from anabranch import _library


@functools.cache
def _onednn() -> ctypes.CDLL:
    """The oneDNN that the C library has loaded."""
    _library.load()
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "libdnnl.so" in line:
                return ctypes.CDLL(line.split(maxsplit=5)[5].strip())
    raise _library.LibraryError("libdnnl.so: not loaded by this build of the library")


def matmul_flops(dtype: str, size: int = 2048, seconds: float = 0.5) -> float | None:
    """FLOP/s of oneDNN's product of two square matrices, best of several repeats; all threads.

    Args:
      dtype: "float32" or "bfloat16" (float32 result).
      size: rows and columns.
      seconds: time to spend.

    Returns:
      The rate, or None where oneDNN has no such product for this machine.
    """
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
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        gemm(*arguments)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best

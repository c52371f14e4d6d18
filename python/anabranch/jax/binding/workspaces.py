"""Bounds in bytes on the CUDA handlers' workspaces. The CPU library computes them from sizes while JAX traces.

include/anabranch/cuda_workspaces.h describes their contents. Letters are those of the tensors' axes.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from anabranch import _library

_size, _flag = ctypes.c_int64, ctypes.c_int32


def _dtype(dtype: Any) -> ctypes.c_int32:
    return ctypes.c_int32(_library.DTYPES[np.dtype(dtype).name])


def _bound(operation: str, *sizes: Any) -> int:
    bound, needed = getattr(_library.load(), f"ab_cuda_{operation}_workspace_bound"), ctypes.c_size_t()
    bound.restype = _library.Status
    status = bound(*sizes, ctypes.byref(needed))
    if status.code != 0:
        raise ValueError(f"{operation}: {status.message.decode()}")
    return needed.value


def statistics(T: int, B: int, E: int) -> int:
    """Workspace for partial sums per block of tokens; B: sequences with separate statistics."""
    return _bound("statistics", _size(T), _size(B), _size(E))


def quantile(T: int) -> int:
    """Workspace for per-token values of the router's forward pass when it counts thresholds."""
    return _bound("quantile", _size(T))


def plan(slots: int, E: int) -> int:
    """Workspace for the counts per block of assignments."""
    return _bound("plan", _size(slots), _size(E))


def sort_chunks(S: int) -> int:
    """Workspace for the first row of every chunk."""
    return _bound("sort_chunks", _size(S))


def grouped_matmul_dw(R: int, E: int, D: int, N: int, x_dtype: Any, d_y_dtype: Any) -> int:
    """Workspace for partial sums over the rows of long groups."""
    return _bound("grouped_matmul_dw", _size(R), _size(E), _size(D), _size(N), _dtype(x_dtype), _dtype(d_y_dtype))


def grouped_matmul_combine(R: int, E: int, D: int, N: int, dtype: Any, *, backward: bool = False) -> int:
    """Workspace for a chunk of columns of the rows [R, N]; dtype: of x [R, D], may be e4m3; backward: for gradients."""
    sizes = (_size(R), _size(E), _size(D), _size(N))
    return _bound("grouped_matmul_combine", *sizes, _flag(backward), _dtype(dtype))


def returning(R: int, P: int, T: int, N: int, dtype: Any) -> int:
    """Workspace instead of that of grouped_matmul_combine, for sums [P T, N] of `dtype` that return to P ranks."""
    return _bound("returning", _size(R), _size(P), _size(T), _size(N), _dtype(dtype))


def arriving(E: int) -> int:
    """Additional workspace of a call of the network on tokens that are arriving."""
    return _bound("arriving", _size(E))


def fp8_rows(R: int, D: int) -> int:
    """Workspace for quantising rows [R, D]."""
    return _bound("fp8_rows", _size(R), _size(D))


def lora(R: int, E: int, M: int, N: int, rank: int, dtype: Any, *, backward: bool = False) -> int:
    """Additional workspace for an adapter of a matrix [M, N], 0 for rank 0; dtype: of x; backward: with gradients."""
    if rank == 0:
        return 0
    return _bound("lora", *map(_size, (R, E, M, N, rank)), _flag(backward), _dtype(dtype))


def unpacked(R: int, E: int, N: int, C: int, dtype: Any, *, backward: bool = False) -> int:
    """Workspace for unpacked weights [E, N, C] of R rows in the dtype of x; backward: the GEMM does not sum over C."""
    return _bound("unpacked", *map(_size, (R, E, N, C)), _flag(backward), _dtype(dtype))


def ffn_forward(R: int, F: int, dtype: Any) -> int:
    """Workspace for the activations [R, F]."""
    return _bound("expert_ffn_forward", _size(R), _size(F), _dtype(dtype))


def ffn_backward(
    R: int,
    w_in: Sequence[int],
    dtype: Any,
    d_dtype: Any,
    *,
    weighted_a: bool = False,
    d_weights: bool = False,
    d_w_out: bool = False,
    d_w_in: bool = False,
) -> int:
    """Workspace for a backward call whose dh has its own memory.

    Args:
      R: rows.
      w_in: shape [E, D, P, F].
      dtype: dtype of x.
      d_dtype: dtype of the cotangent.
      weighted_a: whether the gradient of w_out needs w a, which has no memory of its own.
      d_weights, d_w_out, d_w_in: whether these gradients (with those of the biases) are requested.
    """
    needs = weighted_a | d_weights << 1 | d_w_out << 2 | d_w_in << 3  # ab_cuda_ffn_backward_need
    return _bound("expert_ffn_backward", *map(_size, (R, *w_in)), _dtype(dtype), _dtype(d_dtype), _flag(needs))

"""Packs and unpacks single matrices of numpy, by calls of the C library."""

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from anabranch import _library, _structs
from anabranch.packed import MX_BLOCK, MX_BYTES, Fp8Blocks, Mxfp4, is_packed
from anabranch.precision import BLOCK


def _tensor(array: np.ndarray, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Any:
    shape = array.shape if shape is None else shape
    tensor = _structs.Tensor(array.ctypes.data, _library.DTYPES[dtype or array.dtype.name], len(shape))
    tensor.shape[: len(shape)] = shape
    return ctypes.pointer(tensor)


def _call(name: str, **fields: Any) -> None:
    """Calls a function of the C library with all threads."""
    library, struct = _library.load(), _structs.ARGS[name]
    args = struct(size=ctypes.sizeof(struct), **fields)
    execution = _structs.Exec(size=ctypes.sizeof(_structs.Exec))
    function, query = (getattr(library, f"ab_{name}{ending}") for ending in ("", "_workspace"))
    function.restype = query.restype = _library.Status
    size = ctypes.c_size_t()
    _library.check_status(query(ctypes.byref(args), ctypes.byref(execution), ctypes.byref(size)))
    workspace = np.empty(size.value + 64, np.uint8)
    execution.workspace = workspace.ctypes.data + -workspace.ctypes.data % 64
    execution.workspace_size = size.value
    _library.check_status(function(ctypes.byref(args), ctypes.byref(execution)))


def pack(packed: str, w: np.ndarray) -> Mxfp4 | Fp8Blocks:
    """A matrix [N, C] packed as "mxfp4" (the scale rule is "floor") or as "fp8_blocks" (float32 scales)."""
    w = np.ascontiguousarray(w)
    N, C = w.shape
    if packed == "mxfp4":
        codes, scales = np.empty((N, C // MX_BLOCK, MX_BYTES), np.uint8), np.empty((N, C // MX_BLOCK), np.uint8)
        _call("pack_mxfp4", w=_tensor(w), codes=_tensor(codes, "float4_e2m1fn_x2", (N, C)), scales=_tensor(scales))
        return Mxfp4(codes, scales)
    q, scales = np.empty((1, N, C), ml_dtypes.float8_e4m3fn), np.empty((1, N // BLOCK, C // BLOCK), np.float32)
    _call("quantize_weights", w=_tensor(w, shape=(1, N, C)), q=_tensor(q), scales=_tensor(scales))
    return Fp8Blocks(q[0], scales[0])


def unpack(matrix: Any) -> np.ndarray:
    """The values of a matrix [N, C], plain or packed, as float32."""
    if not is_packed(matrix):
        return np.asarray(matrix).astype(np.float32)
    array, scales = (np.ascontiguousarray(part)[None] for part in matrix)
    N, C = array.shape[1], array.shape[2] * (MX_BLOCK if isinstance(matrix, Mxfp4) else 1)
    w = np.empty((1, N, C), np.float32)
    dtype = "float4_e2m1fn_x2" if isinstance(matrix, Mxfp4) else None
    _call("unpack", packed=_tensor(array, dtype, w.shape), scales=_tensor(scales), w=_tensor(w))
    return w[0]

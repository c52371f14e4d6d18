"""Calls of the C interface on numpy arrays or CUDA tensors of torch, prepared once and then cheap."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anabranch._library import DTYPES, Status


class Tensor(ctypes.Structure):
    """ab_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 6),
        ("strides", ctypes.c_void_p),
    )


class Exec(ctypes.Structure):
    """ab_exec."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    )


def view(array: Any) -> Tensor:
    """The ab_tensor of a contiguous array."""
    pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    result = Tensor(pointer, DTYPES[str(array.dtype).removeprefix("torch.")], len(array.shape))
    result.shape[: len(array.shape)] = tuple(array.shape)
    return result


def call(
    library: ctypes.CDLL,
    function: str,
    options: Sequence[tuple[str, Any]],
    tensors: Sequence[str],
    values: Mapping[str, Any],
    *,
    later: Sequence[tuple[str, Any]] = (),
    has_workspace: bool = True,
    allocate: Callable[[int], Any] = lambda size: np.zeros(size, np.uint8),
    stream: Callable[[], int] | None = None,
) -> Callable[[], None]:
    """A call of `function` with the args struct (size, options, tensor pointers, later options) and a workspace.

    Args:
      library: the C library.
      function: "ab_router_forward", for instance.
      options: names and ctypes of the struct's options, in order.
      tensors: names of its tensors, in order.
      values: options and arrays by name; what is missing is 0 or NULL.
      later: names and ctypes of the fields behind these, which newer versions have.
      has_workspace: whether there is a function of that name and "_workspace".
      allocate: makes a byte array of a size for the workspace.
      stream: the CUDA stream at the time of each call.

    Raises:
      RuntimeError: with the message of the status, from here or from the call.
    """
    fields = [("size", ctypes.c_size_t), *options, *((name, ctypes.POINTER(Tensor)) for name in tensors), *later]
    struct = type("Args", (ctypes.Structure,), {"_fields_": fields})
    args = struct(size=ctypes.sizeof(struct))
    for name, value in values.items():
        setattr(args, name, ctypes.pointer(view(value)) if hasattr(value, "shape") else value)
    execution = Exec(size=ctypes.sizeof(Exec))
    run = getattr(library, function)
    run.restype = Status

    def checked(status: Status) -> None:
        if status.code != 0:
            raise RuntimeError(status.message.decode())

    alive: list[Any] = [values]  # what the structs point at
    if has_workspace:
        query, needed = getattr(library, function + "_workspace"), ctypes.c_size_t()
        query.restype = Status
        checked(query(ctypes.byref(args), ctypes.byref(execution), ctypes.byref(needed)))
        workspace = allocate(needed.value + 64)
        alive.append(workspace)
        execution.workspace = (view(workspace).data + 63) // 64 * 64
        execution.workspace_size = needed.value

    def run_once(_: Any = alive) -> None:
        if stream is not None:
            execution.stream = stream()
        checked(run(ctypes.byref(args), ctypes.byref(execution)))

    return run_once

"""Calls of the C functions on torch tensors. Arguments are prepared once, so that a call is cheap."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from anabranch import _library, _structs
from anabranch.bench import ArgumentError

Calls = dict[str, Callable[[], Any]]
"""Calls by name."""

_library_of_calls: ctypes.CDLL | None = None  # another than the current one; see `through`


@contextlib.contextmanager
def through(path: str | None) -> Iterator[None]:
    """Makes `c_call` prepare calls of another build of the library within the block; None: of the current one.

    Raises:
      ArgumentError: the library can't be loaded.
    """
    global _library_of_calls
    try:
        _library_of_calls = None if path is None else ctypes.CDLL(path)
    except OSError as error:
        raise ArgumentError(f"--beside: got {path}, expected a build of the library: {error}") from error
    try:
        yield
    finally:
        _library_of_calls = None


def _view(tensor: Any) -> _structs.Tensor:
    """Returns the ab_tensor of a contiguous tensor."""
    assert tensor.is_contiguous()
    result = _structs.Tensor(tensor.data_ptr(), _library.DTYPES[str(tensor.dtype).removeprefix("torch.")], tensor.ndim)
    result.shape[: tensor.ndim] = tuple(tensor.shape)
    return result


def _check(status: _library.Status) -> None:
    if status.code != 0:
        raise RuntimeError(status.message.decode())


def c_call(operation: str, **values: Any) -> Callable[[], dict[str, Any]]:
    """Returns a call of ab_OPERATION or ab_cuda_OPERATION on the current stream, with its own workspace.

    The call returns the tensors that it was given.

    Args:
      operation: name, for example "router_forward".
      values: the fields of the argument struct: options, and tensors on one device. A missing field is 0 or NULL.

    Raises:
      RuntimeError: the operation returned an error; raised here or by the call.
    """
    import torch

    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    (device,) = {tensor.device for tensor in tensors.values()}
    cuda = device.type == "cuda"
    library = _library_of_calls or (_library.load_cuda() if cuda else _library.load())
    function = ("ab_cuda_" if cuda else "ab_") + operation
    struct = _structs.ARGS[operation]
    assert values.keys() <= {name for name, _ in struct._fields_}, values.keys()  # ctypes would ignore unknown names
    pointers = {name: ctypes.pointer(_view(tensor)) for name, tensor in tensors.items()}
    args = struct(size=ctypes.sizeof(struct), **values | pointers)
    execution = _structs.Exec(size=ctypes.sizeof(_structs.Exec))
    alive: list[Any] = [*tensors.values()]  # keeps the memory that the structs point to
    if hasattr(library, f"{function}_workspace"):
        query, needed = getattr(library, f"{function}_workspace"), ctypes.c_size_t()
        query.restype = _library.Status
        _check(query(ctypes.byref(args), ctypes.byref(execution), ctypes.byref(needed)))
        workspace = torch.empty(needed.value + 64, dtype=torch.uint8, device=device)
        alive.append(workspace)
        execution.workspace = (workspace.data_ptr() + 63) // 64 * 64
        execution.workspace_size = needed.value
    run = getattr(library, function)
    run.restype = _library.Status

    def call(_: Any = alive) -> dict[str, Any]:
        if cuda:
            execution.stream = torch.cuda.current_stream().cuda_stream
        _check(run(ctypes.byref(args), ctypes.byref(execution)))
        return tensors

    return call

"""Calls of the two C libraries on torch's tensors through ctypes: nothing is built against torch.

An `Operation` knows the argument struct of its C function (`_structs`). `PreparedCalls` holds everything but addresses
that one of torch's operations needs for its C calls: structs, shapes, allocations, the size of the workspace. It is
made once per options, dtypes and shapes.
"""

import array
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch import _library, _structs
from anabranch.checks import INDEX_LIMIT

_DTYPES = {getattr(torch, name): number for name, number in _library.DTYPES.items()}
#: Alignment in bytes of tensors that share working memory, that of CUDA's allocations.
_ALIGNMENT = 512


_ERRORS = {1: ValueError, 2: NotImplementedError, 3: MemoryError}
_Shape = tuple[int, ...]


def _check(status: _library.Status) -> None:
    if status.code != 0:
        raise _ERRORS.get(status.code, RuntimeError)(status.message.decode())


def _strides(shape: _Shape, order: _Shape) -> tuple[_Shape, _Shape]:
    """The shape and strides that the C function sees: its axis i is the tensor's axis order[i]."""
    steps = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        steps[axis - 1] = steps[axis] * shape[axis]
    return tuple(shape[axis] for axis in order), tuple(steps[axis] for axis in order)


class Call(NamedTuple):
    """One call of a C function, described by meta tensors; see `Operation.__call__`."""

    operation: "Operation"
    tensors: Mapping[str, Tensor]
    orders: Mapping[str, _Shape]
    options: Mapping[str, Any]


class Operation:
    """One function of the C interface.

    Args:
      name: "router_forward" of `ab_router_forward`.
    """

    def __init__(self, name: str):
        self.name = name
        self.struct = _structs.ARGS[name]

    def __call__(
        self, tensors: Mapping[str, Tensor | None], orders: Mapping[str, _Shape] | None = None, **options: Any
    ) -> Call:
        """Describes a call, for `PreparedCalls`.

        Args:
          tensors: contiguous inputs and outputs by field; None: not given or not requested.
          orders: by field, for tensors whose axes have another order than those of the C function: the tensor's axis
            for each axis of the function.
          options: by field; missing options are 0.
        """
        for field, value in options.items():
            if isinstance(value, int) and not -INDEX_LIMIT <= value < INDEX_LIMIT:  # ctypes would wrap around
                raise ValueError(f"{field}: got {value}, expected an integer that int32 holds")
        return Call(self, {name: t for name, t in tensors.items() if t is not None}, orders or {}, options)


class PreparedCalls:
    """The C calls of one of torch's operations for given options, dtypes and shapes on one device.

    Args:
      given: meta tensors in the place of the operation's tensor arguments, without those that are not given.
      results: meta tensors in the place of its results.
      calls: the C calls in order. They may name further meta tensors: working memory, which is one allocation together
        with the workspace that the calls share.
      device: the device that the calls run on.
      threads: number of CPU threads; 0 on a GPU.
    """

    def __init__(
        self,
        given: Sequence[Tensor],
        results: Sequence[Tensor],
        calls: Sequence[Call],
        device: torch.device,
        threads: int,
    ):
        self.device, self.on_cuda, self.calls = device, threads == 0, calls
        self.results = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
        self.working_size = self.memory_size = 0
        #: (index of a memory, offset in bytes) of each tensor of the calls, in order.
        self.places: list[tuple[int, int]] = []
        # Each of these meta tensors has a storage of its own, even where an operation gets one tensor twice.
        memories = {t.untyped_storage()._cdata: (i, 0) for i, t in enumerate([*given, *results])}
        for call in calls:
            for tensor in call.tensors.values():
                assert tensor.is_contiguous() and tensor.storage_offset() == 0
                storage = tensor.untyped_storage()
                if storage._cdata not in memories:
                    memories[storage._cdata] = len(given) + len(results), self.working_size
                    self.working_size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
                self.places.append(memories[storage._cdata])
        structs = bytearray(len(self.places) * ctypes.sizeof(_structs.Tensor))
        self.tensors = (_structs.Tensor * len(self.places)).from_buffer(structs)
        #: The field `data` of each of `tensors`.
        self.addresses = memoryview(structs).cast("Q")[:: ctypes.sizeof(_structs.Tensor) // 8]
        self.execution = _structs.Exec(size=ctypes.sizeof(_structs.Exec), num_threads=threads)
        self.functions: list[tuple[Any, Any]] = []
        self.strides: list[Any] = []  # which the structs point to

    def run(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the calls on contiguous tensors, on the current stream of their device; returns the results.

        Raises:
          ValueError, NotImplementedError, MemoryError, RuntimeError: by the status of a C function.
        """
        if not self.on_cuda or torch._C._cuda_getDevice() == self.device.index:
            return self._run(given)
        with torch.cuda.device(self.device.index):
            return self._run(given)

    def _run(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        device = self.device
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results]
        addresses = [tensor.data_ptr() for tensor in given]
        addresses += [tensor.data_ptr() for tensor in results]
        if not self.functions:
            self._prepare(addresses)
        working = 0
        if self.memory_size > 0:
            memory = torch.empty(self.memory_size, dtype=torch.uint8, device=device)
            working = memory.data_ptr()
        self._write(addresses, working)
        execution = self.execution
        execution.workspace = working + self.working_size
        if self.on_cuda:
            execution.stream = torch._C._cuda_getCurrentRawStream(device.index)
        for function, arguments in self.functions:
            _check(function(*arguments))
        return tuple(results)

    def _write(self, addresses: list[int], working: int) -> None:
        """Writes the addresses of the tensors into the structs."""
        memories = [*addresses, working]
        self.addresses[:] = array.array("Q", [memories[memory] + offset for memory, offset in self.places])

    def _prepare(self, addresses: list[int]) -> None:
        """Makes the structs and queries the size of the workspace."""
        library, prefix = (_library.load_cuda(), "ab_cuda_") if self.on_cuda else (_library.load(), "ab_")
        working = torch.empty(self.working_size, dtype=torch.uint8, device=self.device)
        self._write(addresses, working.data_ptr())
        described, functions, workspace_size = iter(self.tensors), [], 0
        for call in self.calls:
            args = call.operation.struct(size=ctypes.sizeof(call.operation.struct), **call.options)
            for field, tensor in call.tensors.items():
                setattr(args, field, ctypes.pointer(self._describe(next(described), tensor, call.orders.get(field))))
            name, size = prefix + call.operation.name, ctypes.c_size_t()
            if hasattr(library, f"{name}_workspace"):
                query = getattr(library, f"{name}_workspace")
                query.restype = _library.Status
                _check(query(ctypes.byref(args), ctypes.byref(self.execution), ctypes.byref(size)))
            workspace_size = max(workspace_size, size.value)
            function = getattr(library, name)
            function.restype = _library.Status
            functions.append((function, (ctypes.byref(args), ctypes.byref(self.execution))))
        self.execution.workspace_size = workspace_size
        self.memory_size = self.working_size + workspace_size
        self.functions, self.calls = functions, ()  # the descriptions are no longer needed

    def _describe(self, view: _structs.Tensor, tensor: Tensor, order: _Shape | None) -> _structs.Tensor:
        """Fills in a struct but for the address."""
        shape = tuple(tensor.shape)
        if order is not None:
            shape, strides = _strides(shape, order)
            held = (ctypes.c_int64 * len(strides))(*strides)
            view.strides = ctypes.addressof(held)
            self.strides.append(held)
        view.dtype, view.rank = _DTYPES[tensor.dtype], tensor.dim()
        view.shape[: len(shape)] = shape
        return view


router_forward = Operation("router_forward")
router_backward = Operation("router_backward")
moe_aux_loss = Operation("moe_aux_loss")
plan = Operation("plan")
dispatch = Operation("dispatch")
combine = Operation("combine")
combine_backward = Operation("combine_backward")
sort_chunks = Operation("sort_chunks")
expand_row_id_map = Operation("expand_row_id_map")
quantize_rows = Operation("quantize_rows")
quantize_weights = Operation("quantize_weights")
grouped_matmul = Operation("grouped_matmul")
grouped_matmul_dw = Operation("grouped_matmul_dw")
grouped_matmul_combine = Operation("grouped_matmul_combine")
expert_ffn_forward = Operation("expert_ffn_forward")
expert_ffn_backward = Operation("expert_ffn_backward")

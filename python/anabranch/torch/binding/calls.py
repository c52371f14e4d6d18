"""Calls of the two C libraries on torch's tensors through ctypes: nothing is built against torch.

An `Operation` knows the argument struct of its C function (`_structs`). `PreparedCalls` holds what one of torch's
operations needs for its C calls, made once per options, dtypes and ranks.
"""

import array
import ctypes
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from anabranch import _library, _structs
from anabranch.phases import phase_of
from anabranch.torch.binding import private
from anabranch.torch.binding.described import Described, Size, Sizes, check_int32
from anabranch.torch.binding.ranges import range_of

_DTYPES = {getattr(torch, name): number for name, number in _library.DTYPES.items()}
#: Alignment in bytes of tensors that share working memory, that of CUDA's allocations.
_ALIGNMENT = 512
#: The alignment in bytes of arguments below which the libraries may choose other kernels.
_ALIGNMENT_OF_PATHS = 16
_CELLS = {4: ctypes.c_int32, 8: ctypes.c_int64}

_Shape = tuple[Any, ...]


def array_of(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """The address, ab_dtype and shape of a contiguous tensor."""
    return tensor.data_ptr(), _DTYPES[tensor.dtype], tuple(tensor.shape)


def _strides(shape: _Shape, order: _Shape) -> tuple[_Shape, _Shape]:
    """The shape and strides that the C function sees: its axis i is the tensor's axis order[i]."""
    steps = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        steps[axis - 1] = steps[axis] * shape[axis]
    return tuple(shape[axis] for axis in order), tuple(steps[axis] for axis in order)


class Call(NamedTuple):
    """One call of a C function; see `Operation.__call__`."""

    operation: "Operation"
    tensors: Mapping[str, Described]
    orders: Mapping[str, _Shape]
    options: Mapping[str, Any]
    after_error: bool = False
    """Whether it runs only after an error of an earlier call, before memory is freed."""


class Operation:
    """One function of the C interface.

    Args:
      name: "router_forward" of `ab_router_forward`.
    """

    def __init__(self, name: str):
        self.name = name
        self.struct = _structs.ARGS[name]

    def __call__(
        self, tensors: Mapping[str, Described | None], orders: Mapping[str, _Shape] | None = None, **options: Any
    ) -> Call:
        """Describes a call, for `PreparedCalls`.

        Args:
          tensors: inputs and outputs by field; None: not given or not requested.
          orders: by field, for tensors whose axes have another order than those of the C function: the tensor's axis
            for each axis of the function.
          options: by field; missing options are 0.
        """
        for field, value in options.items():
            if isinstance(value, int | Size):  # ctypes would wrap around
                check_int32(field, value)
        return Call(self, {name: t for name, t in tensors.items() if t is not None}, orders or {}, options)


class PreparedCalls:
    """The C calls of one of torch's operations for given options, dtypes and ranks on one device.

    Addresses are written in each call; sizes, and the numbers computed from them, when they differ from the last ones.

    Args:
      given: descriptions of the operation's tensor arguments, without those that are not given.
      results: descriptions of its results; None: a result that was not requested, for native code alone.
      calls: the C calls in order, the last of them those after an error. They may name further tensors: working memory,
        which is one allocation together with the workspace that the calls share.
      sizes: records the numbers. Its inputs are the sizes of the arguments.
      device: the device that the calls run on.
      threads: number of CPU threads; 0 on a GPU.
    """

    def __init__(
        self,
        given: Sequence[Described],
        results: Sequence[Described | None],
        calls: Sequence[Call],
        sizes: Sizes,
        device: torch.device,
        threads: int,
    ):
        self.device, self.on_cuda, self.sizes = device, threads == 0, sizes
        #: (shape, dtype) of each result; sizes are indices of numbers, here and below.
        self.results = [t if t is None else (tuple(map(sizes.index, t.shape)), t.dtype) for t in results]
        #: (index of a memory, offset in bytes) of each tensor of the calls, in order. Memories are the arguments, the
        #: results, and the working memory.
        self.places: list[tuple[int, int]] = []
        #: Numbers in the structs: (address, number of bytes, index of the number).
        self.cells: list[tuple[int, int, int]] = []
        self.execution = _structs.Exec(size=ctypes.sizeof(_structs.Exec), num_threads=threads)
        #: For each call: the function, the function that returns its workspace's size or None, and the struct.
        self.functions: list[tuple[Any, Any, Any]] = []
        #: The phase of each call, see `phase_of`.
        self.phases = [phase_of(call.operation.name, call.tensors, call.options) for call in calls]
        self._held: list[Any] = []  # memory that the structs point to
        # Each description has a memory of its own, even where an operation gets one tensor twice.
        memories: dict[int, tuple[int, Any]] = {
            id(t.memory): (i, 0) for i, t in enumerate([*given, *results]) if t is not None
        }
        working_size: Any = 0
        for call in calls:
            for tensor in call.tensors.values():
                if id(tensor.memory) not in memories:
                    memories[id(tensor.memory)] = len(given) + len(results), working_size
                    self._held.append(tensor.memory)  # its id stays its own
                    working_size = working_size + -(-tensor.num_bytes() // _ALIGNMENT) * _ALIGNMENT
                memory, start = memories[id(tensor.memory)]
                self.places.append((memory, sizes.index(start + tensor.offset)))
        self.working_size = sizes.index(working_size)
        structs = bytearray(len(self.places) * ctypes.sizeof(_structs.Tensor))
        self.tensors = (_structs.Tensor * len(self.places)).from_buffer(structs)
        #: The field `data` of each of `tensors`.
        self.addresses = memoryview(structs).cast("Q")[:: ctypes.sizeof(_structs.Tensor) // 8]
        views = iter(self.tensors)
        library, prefix = (_library.load_cuda(), "ab_cuda_") if self.on_cuda else (_library.load(), "ab_")
        for call in calls:
            self._describe_call(call, library, prefix + call.operation.name, views)
        exec_reference = ctypes.byref(self.execution)
        launches = [(function, (ctypes.byref(args), exec_reference)) for function, _, args in self.functions]
        self.num_after_error = sum(call.after_error for call in calls)
        first = len(calls) - self.num_after_error
        self._launches, self._after_error = launches[:first], launches[first:]
        self._inputs: Any = None
        self._misaligned = False

    def _describe_call(self, call: Call, library: Any, name: str, views: Iterator[_structs.Tensor]) -> None:
        struct = call.operation.struct
        args = struct(size=ctypes.sizeof(struct))
        for field, value in call.options.items():
            if isinstance(value, Size):
                place = getattr(struct, field)
                self.cells.append((ctypes.addressof(args) + place.offset, place.size, value.index))
            else:
                setattr(args, field, value)
        for field, tensor in call.tensors.items():
            view = next(views)
            shape, order = tensor.shape, call.orders.get(field)
            if order is not None:
                shape, strides = _strides(shape, order)
                held = (ctypes.c_int64 * len(strides))()
                view.strides = ctypes.addressof(held)
                self._held.append(held)
                self._describe_sizes(ctypes.addressof(held), strides)
            view.dtype, view.rank = _DTYPES[tensor.dtype], len(shape)
            self._describe_sizes(ctypes.addressof(view) + _structs.Tensor.shape.offset, shape)
            setattr(args, field, ctypes.pointer(view))
        function, query = getattr(library, name), getattr(library, f"{name}_workspace", None)
        for entry in (function, query):
            if entry is not None:
                entry.restype = _library.Status
        self.functions.append((function, query, args))

    def _describe_sizes(self, address: int, numbers: Sequence[Any]) -> None:
        self.cells += [(address + 8 * i, 8, self.sizes.index(number)) for i, number in enumerate(numbers)]

    def fit(self, inputs: Sequence[Any]) -> bool:
        """Prepares for sizes (shapes and integers); False if these calls do not hold for them."""
        if inputs == self._inputs:
            return True
        values = self.sizes.evaluate(flat_sizes(inputs))
        if values is None:
            return False
        for address, num_bytes, index in self.cells:
            _CELLS[num_bytes].from_address(address).value = values[index]
        self._shapes = [
            (tuple(values[i] for i in shape), dtype) for shape, dtype in cast(list[tuple[Any, Any]], self.results)
        ]
        self._offsets = [(memory, values[offset]) for memory, offset in self.places]
        self._memory_size = self._working_size = values[self.working_size]
        self._inputs, self._has_workspace = inputs, False
        return True

    def run(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the calls on contiguous tensors, on the current stream of their device; returns the results.

        Raises:
          ValueError, NotImplementedError, MemoryError, RuntimeError: by the status of a C function.
        """
        if not self.on_cuda or private.current_device() == self.device.index:
            return self._run(given)
        with torch.cuda.device(self.device.index):
            return self._run(given)

    def _run(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        device, execution = self.device, self.execution
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._shapes]
        memories = [tensor.data_ptr() for tensor in given]
        misaligned = functools.reduce(operator.or_, memories, 0) % _ALIGNMENT_OF_PATHS != 0
        memories += [tensor.data_ptr() for tensor in results]
        if not self._has_workspace or misaligned != self._misaligned:
            self._query_workspace(memories, misaligned)
        working = 0
        if self._memory_size > 0:
            memory = torch.empty(self._memory_size, dtype=torch.uint8, device=device)
            working = memory.data_ptr()
        self._write([*memories, working])
        execution.workspace = working + self._working_size
        if self.on_cuda:
            execution.stream = private.current_stream(device.index)
        try:
            if private.is_profiling():
                self._run_in_phases()
            else:
                for function, arguments in self._launches:
                    _library.check_status(function(*arguments))
        except BaseException:
            for function, arguments in self._after_error:
                function(*arguments)  # the first error is the one to report
            raise
        return tuple(results)

    def _run_in_phases(self) -> None:
        """Runs the calls with ranges that torch.profiler shows."""
        phases = self.phases[: len(self._launches)]
        for (function, arguments), phase in zip(self._launches, phases, strict=True):
            with range_of(phase):
                _library.check_status(function(*arguments))

    def _write(self, memories: list[int]) -> None:
        """Writes the addresses of the tensors into the structs."""
        self.addresses[:] = array.array("Q", [memories[memory] + offset for memory, offset in self._offsets])

    def _query_workspace(self, memories: list[int], misaligned: bool) -> None:
        """Queries the size of the workspace. It may depend on the kernels that an alignment allows."""
        self._write([*memories, _ALIGNMENT])  # the address of memory that is not there yet; queries do not read it
        largest, size = 0, ctypes.c_size_t()
        for _, query, args in self.functions:
            if query is not None:
                _library.check_status(query(ctypes.byref(args), ctypes.byref(self.execution), ctypes.byref(size)))
                largest = max(largest, size.value)
        self.execution.workspace_size = largest
        self._memory_size = self._working_size + largest
        self._misaligned, self._has_workspace = misaligned, True


def prepare(
    allocate: Callable[..., Any],
    calls: Callable[..., Any],
    described: Sequence[Any],
    sizes: Sizes,
    device: torch.device,
    threads: int,
) -> PreparedCalls:
    """Prepares the calls of an operation.

    Args:
      allocate, calls: see `define`.
      described: its arguments, with descriptions in the place of tensors.
      sizes, device, threads: see `PreparedCalls`.
    """
    results = allocate(*described)
    c_calls = calls(results, *described)
    return PreparedCalls(
        [d for d in described if isinstance(d, Described)],
        (results,) if isinstance(results, Described) else results,
        (c_calls,) if isinstance(c_calls, Call) else c_calls,
        sizes,
        device,
        threads,
    )


def flat_sizes(inputs: Sequence[Any]) -> list[int]:
    """The numbers in a list of shapes and integers, in order."""
    numbers: list[int] = []
    for item in inputs:
        if isinstance(item, int):
            numbers.append(item)
        else:
            numbers += item
    return numbers


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
pack_mxfp4 = Operation("pack_mxfp4")
unpack = Operation("unpack")
grouped_matmul = Operation("grouped_matmul")
grouped_matmul_dw = Operation("grouped_matmul_dw")
grouped_matmul_combine = Operation("grouped_matmul_combine")
expert_ffn_forward = Operation("expert_ffn_forward")
expert_ffn_backward = Operation("expert_ffn_backward")
exchange_all_gather = Operation("exchange_all_gather")
exchange_all_to_all = Operation("exchange_all_to_all")
exchange_sum = Operation("exchange_sum")
exchange_release = Operation("exchange_release")

"""Calls of the two C libraries on torch's tensors, by ctypes: nothing is built against torch.

An `Operation` has the fields of its args struct (include/anabranch/*.h). What the calls of one of torch's operations
need beside addresses (structs, shapes, what is allocated, the size of the workspace) is a `Layout`, made once for given
options, dtypes and shapes.
"""

import array
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch import _library
from anabranch.checks import INDEX_LIMIT

_DTYPES = {getattr(torch, name): number for name, number in _library.DTYPES.items()}
_MAX_RANK = 6
#: Bytes, of which tensors that share working memory begin at multiples, as CUDA's allocations do.
_ALIGNMENT = 512


class _Tensor(ctypes.Structure):
    """ab_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MAX_RANK),
        ("strides", ctypes.c_void_p),
    )


class _Exec(ctypes.Structure):
    """ab_exec."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    )


_FIELDS = {"i": ctypes.c_int32, "f": ctypes.c_float, "t": ctypes.POINTER(_Tensor)}
_ERRORS = {1: ValueError, 2: NotImplementedError, 3: MemoryError}
_Shape = tuple[int, ...]


def _check(status: _library.Status) -> None:
    if status.code != 0:
        raise _ERRORS.get(status.code, RuntimeError)(status.message.decode())


def _strides(shape: _Shape, order: _Shape) -> tuple[_Shape, _Shape]:
    """The shape that the C function sees of an array, and its strides: axis i of it is the array's axis order[i]."""
    steps = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        steps[axis - 1] = steps[axis] * shape[axis]
    return tuple(shape[axis] for axis in order), tuple(steps[axis] for axis in order)


class Call(NamedTuple):
    """One call of a C function, described by tensors without memory; see `Operation.__call__`."""

    operation: "Operation"
    tensors: Mapping[str, Tensor]
    orders: Mapping[str, _Shape]
    options: Mapping[str, Any]


class Operation:
    """One function of the C interface.

    Args:
      name: "router_forward" of `ab_router_forward`.
      fields: its args struct behind `size`, in order: "i:" int32, "f:" float and "t:" tensors, each with names.
    """

    def __init__(self, name: str, fields: str):
        self.name = name
        members: list[tuple[str, Any]] = [("size", ctypes.c_size_t)]
        for part in fields.split():
            kind, names = part.split(":")
            members += [(field, _FIELDS[kind]) for field in names.split(",")]
        self.struct: Any = type(name, (ctypes.Structure,), {"_fields_": members})

    def __call__(
        self, tensors: Mapping[str, Tensor | None], orders: Mapping[str, _Shape] | None = None, **options: Any
    ) -> Call:
        """Describes a call, for a `Layout`.

        Args:
          tensors: by field, inputs and outputs, contiguous; None: not given or not wanted.
          orders: by field, of tensors whose axes stand in another order than the C function's: the tensor's axis that
            each of the function's is.
          options: by field; what is missing is 0.
        """
        for field, value in options.items():
            if isinstance(value, int) and not -INDEX_LIMIT <= value < INDEX_LIMIT:  # ctypes would wrap it
                raise ValueError(f"{field}: got {value}, expected an integer that int32 holds")
        return Call(self, {name: t for name, t in tensors.items() if t is not None}, orders or {}, options)


class Layout:
    """The calls of one of torch's operations, for given options, dtypes and shapes, on one device.

    Args:
      given: the tensors that the operation takes, on the "meta" device, without those that are not given.
      results: those that it returns, made there.
      calls: of the C functions, in this order. They may name other tensors, too, that are made there: working memory,
        which is one allocation with the workspace that they share.
      device: where it runs.
      threads: of the CPU; 0 elsewhere.
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
        #: Of the calls' tensors, one after the other: in which memory each is, and how many bytes from its beginning.
        self.places: list[tuple[int, int]] = []
        # Of each tensor here the storage is another one, also where an operation is given one tensor twice.
        memories = {t.untyped_storage()._cdata: (i, 0) for i, t in enumerate([*given, *results])}
        for call in calls:
            for tensor in call.tensors.values():
                assert tensor.is_contiguous() and tensor.storage_offset() == 0
                storage = tensor.untyped_storage()
                if storage._cdata not in memories:
                    memories[storage._cdata] = len(given) + len(results), self.working_size
                    self.working_size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
                self.places.append(memories[storage._cdata])
        structs = bytearray(len(self.places) * ctypes.sizeof(_Tensor))
        self.tensors = (_Tensor * len(self.places)).from_buffer(structs)
        #: `data` of each of `tensors`.
        self.addresses = memoryview(structs).cast("Q")[:: ctypes.sizeof(_Tensor) // 8]
        self.execution = _Exec(size=ctypes.sizeof(_Exec), num_threads=threads)
        self.functions: list[tuple[Any, Any]] = []
        self.kept: list[Any] = []

    def run(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs on contiguous tensors, on their device's current stream; returns the results.

        Raises:
          ValueError, NotImplementedError, MemoryError, RuntimeError: what the status says.
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
        """Tells the calls where their tensors are."""
        memories = [*addresses, working]
        self.addresses[:] = array.array("Q", [memories[memory] + offset for memory, offset in self.places])

    def _prepare(self, addresses: list[int]) -> None:
        """Makes the structs, and asks how large the workspace is."""
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
        self.functions, self.calls = functions, ()  # which are not needed any more

    def _describe(self, view: _Tensor, tensor: Tensor, order: _Shape | None) -> _Tensor:
        """Fills in all but the address."""
        shape = tuple(tensor.shape)
        if order is not None:
            shape, strides = _strides(shape, order)
            held = (ctypes.c_int64 * len(strides))(*strides)
            view.strides = ctypes.addressof(held)
            self.kept.append(held)
        view.dtype, view.rank = _DTYPES[tensor.dtype], tensor.dim()
        view.shape[: len(shape)] = shape
        return view


router_forward = Operation(
    "router_forward",
    "i:topk,score_function,normalize,num_groups,group_topk f:scaling_factor "
    "t:logits,expert_bias,token_mask,forced_experts,weights,experts,tokens_per_expert,score_sum,lse,probs,routing_map,"
    "aux_scores i:group_score_topk t:qb_bin_bounds,qb_histogram",
)
router_backward = Operation(
    "router_backward",
    "i:topk,score_function,normalize f:scaling_factor "
    "t:logits,experts,token_mask,lse,d_weights,d_probs,d_score_sum,d_aux_scores,d_lse,d_logits,routing_map",
)
moe_aux_loss = Operation(
    "moe_aux_loss", "i:topk,num_experts f:coeff t:probs,tokens_per_expert,num_tokens,d_loss,loss,d_probs"
)
plan = Operation(
    "plan",
    "i:num_experts,align_size,num_destinations "
    "t:experts,routing_map,tokens_per_expert,group_sizes,offsets,row_of_slot,slot_of_row,dropped,row_id_map",
)
dispatch = Operation("dispatch", "t:x,row_of_slot,slot_of_row,weights,rows")
combine = Operation("combine", "t:rows,row_of_slot,weights,out,addend")
combine_backward = Operation("combine_backward", "t:d_out,rows,row_of_slot,slot_of_row,weights,d_rows,d_weights")
sort_chunks = Operation("sort_chunks", "i:inverse t:x,split_sizes,sorted_indices,out,row_id_map")
expand_row_id_map = Operation("expand_row_id_map", "t:row_id_map,pad_offsets,row_of_slot,slot_of_row")
quantize_rows = Operation("quantize_rows", "i:fp8_scales t:x,q,scales")
quantize_weights = Operation("quantize_weights", "i:fp8_scales t:w,q,q_transposed,scales")
grouped_matmul = Operation(
    "grouped_matmul", "i:transpose_w t:x,w,group_sizes,y i:precision,fp8_scales t:x_scales,w_q,w_scales"
)
grouped_matmul_dw = Operation("grouped_matmul_dw", "i:accumulate t:x,d_y,group_sizes,d_w i:precision,reserved")
grouped_matmul_combine = Operation(
    "grouped_matmul_combine",
    "i:transpose_w,weight_early,skip_rest t:x,w,group_sizes,bias,slot_of_row,row_of_slot,weights,addend,out "
    "i:backward,precision,fp8_scales t:x_scales,w_q,w_scales",
)
expert_ffn_forward = Operation(
    "expert_ffn_forward",
    "i:activation,weight_early,topk,skip_rest t:x,slot_of_row,group_sizes,w_in,b_in,w_out,b_out,weights,y,h,a "
    "f:activation_alpha,activation_limit i:precision,fp8_scales t:w_in_q,w_in_scales,w_out_q,w_out_scales,a_scales,"
    "x_q,x_scales",
)
expert_ffn_backward = Operation(
    "expert_ffn_backward",
    "i:activation,topk,accumulate,skip_rest "
    "t:x,slot_of_row,group_sizes,w_in,w_out,b_out,weights,h,d_out,dh,dx_rows,d_w_in,d_b_in,d_w_out,d_b_out,d_weights,"
    "weighted_a f:activation_alpha,activation_limit i:precision,fp8_scales "
    "t:w_in_q,w_in_scales,w_out_q,w_out_scales,dh_q,dh_scales,d_out_q,d_out_scales",
)

#: Every operation, by name.
OPERATIONS = {value.name: value for value in list(globals().values()) if isinstance(value, Operation)}

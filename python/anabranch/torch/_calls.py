"""Calls of the two C libraries on torch's tensors, by ctypes: nothing is built against torch.

An `Operation` has the fields of its args struct (include/anabranch/*.h). What a call needs beside addresses (structs,
shapes, the size of the workspace) is laid out once for given options, dtypes and shapes, and kept by each thread.
"""

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import torch

from anabranch import _library

_DTYPES = {getattr(torch, name): number for name, number in _library.DTYPES.items()}
_MAX_RANK = 6
#: Prepared calls that a thread keeps of an operation: when there are more, all are forgotten.
_MOST_PREPARED = 4096


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


class _Prepared:
    """The structs of a call, all but the addresses of the tensors, in memory of their own."""

    def __init__(self, operation: "Operation", on_cuda: bool, options: Mapping[str, Any], tensors: Any, orders: Any):
        library = _library.load_cuda() if on_cuda else _library.load()
        name = f"ab_cuda_{operation.name}" if on_cuda else f"ab_{operation.name}"
        self.run = getattr(library, name)
        self.run.restype = _library.Status
        self.args = operation.struct(size=ctypes.sizeof(operation.struct), **options)
        self.execution = _Exec(size=ctypes.sizeof(_Exec))
        self.views: list[_Tensor] = []
        self.kept: list[Any] = []
        for field, tensor in tensors.items():
            if tensor is None:
                continue
            view = _Tensor(tensor.data_ptr(), _DTYPES[tensor.dtype], tensor.dim())
            shape = tuple(tensor.shape)
            if field in orders:
                shape, strides = _strides(shape, orders[field])
                held = (ctypes.c_int64 * len(strides))(*strides)
                view.strides = ctypes.addressof(held)
                self.kept.append(held)
            view.shape[: len(shape)] = shape
            setattr(self.args, field, ctypes.pointer(view))
            self.views.append(view)
        self.arguments = ctypes.byref(self.args), ctypes.byref(self.execution)
        self.workspace_size = 0
        query, needed = getattr(library, f"{name}_workspace", None), ctypes.c_size_t()
        if query is not None:
            query.restype = _library.Status
            self.execution.num_threads = 0 if on_cuda else torch.get_num_threads()
            _check(query(*self.arguments, ctypes.byref(needed)))
            self.workspace_size = needed.value


class _Cache(threading.local):
    """The prepared calls of a thread: their structs are written to."""

    def __init__(self) -> None:
        self.prepared: dict[Any, _Prepared] = {}


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
        self._cache = _Cache()

    def __call__(
        self, tensors: Mapping[str, torch.Tensor | None], orders: Mapping[str, _Shape] | None = None, **options: Any
    ) -> None:
        """Runs on contiguous tensors of one device, on its current stream.

        Args:
          tensors: by field, inputs and outputs; None: not given or not wanted.
          orders: by field, of tensors whose axes stand in another order than the C function's: the tensor's axis that
            each of the function's is.
          options: by field; what is missing is 0.

        Raises:
          ValueError, NotImplementedError, MemoryError, RuntimeError: what the status says.
        """
        given = [tensor for tensor in tensors.values() if tensor is not None]
        device = given[0].device
        on_cuda, threads = device.type == "cuda", 0 if device.type == "cuda" else torch.get_num_threads()
        key = (
            on_cuda,
            threads,
            tuple(options.items()),
            tuple([None if t is None else (field, t.dtype, t.shape) for field, t in tensors.items()]),
            None if orders is None else tuple(orders.items()),
        )
        cache = self._cache.prepared
        prepared = cache.get(key)
        if prepared is None:
            if len(cache) >= _MOST_PREPARED:
                cache.clear()
            prepared = cache[key] = _Prepared(self, on_cuda, options, tensors, orders or {})
        for view, tensor in zip(prepared.views, given, strict=True):
            view.data = tensor.data_ptr()
        execution = prepared.execution
        execution.num_threads = threads
        size = prepared.workspace_size
        if size > 0:
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
            execution.workspace, execution.workspace_size = workspace.data_ptr(), size
        if not on_cuda:
            _check(prepared.run(*prepared.arguments))
            return
        index = device.index
        execution.stream = torch._C._cuda_getCurrentRawStream(index)
        if torch._C._cuda_getDevice() == index:
            _check(prepared.run(*prepared.arguments))
        else:
            with torch.cuda.device(index):
                _check(prepared.run(*prepared.arguments))


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
grouped_matmul = Operation("grouped_matmul", "i:transpose_w t:x,w,group_sizes,y")
grouped_matmul_dw = Operation("grouped_matmul_dw", "i:accumulate t:x,d_y,group_sizes,d_w")
grouped_matmul_combine = Operation(
    "grouped_matmul_combine",
    "i:transpose_w,weight_early,skip_rest t:x,w,group_sizes,bias,slot_of_row,row_of_slot,weights,addend,out i:backward",
)
expert_ffn_forward = Operation(
    "expert_ffn_forward",
    "i:activation,weight_early,topk,skip_rest t:x,slot_of_row,group_sizes,w_in,b_in,w_out,b_out,weights,y,h,a "
    "f:activation_alpha,activation_limit",
)
expert_ffn_backward = Operation(
    "expert_ffn_backward",
    "i:activation,topk,accumulate,skip_rest "
    "t:x,slot_of_row,group_sizes,w_in,w_out,b_out,weights,h,d_out,dh,dx_rows,d_w_in,d_b_in,d_w_out,d_b_out,d_weights,"
    "weighted_a f:activation_alpha,activation_limit",
)

#: Every operation, by name.
OPERATIONS = {value.name: value for value in list(globals().values()) if isinstance(value, Operation)}

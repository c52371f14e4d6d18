"""Private names of torch. No other file of anabranch.torch uses one.

Names are looked up once, at import. If a release of torch lacks a name, a fallback takes its place. It is slower or
refuses more calls, but it computes no other results.
"""

import contextlib
import functools
import importlib
import operator
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

#: (module:path, use) of every name; `Module()` stands for an instance.
_NAMES = {
    "torch._C:_are_functorch_transforms_active": "whether torch.func transforms a call",
    "torch._C._functorch:is_functorch_wrapped_tensor": "whether a tensor belongs to a transformation of torch.func",
    "torch.autograd.forward_ad:_current_level": "whether forward mode is active",
    "torch._C:_len_torch_dispatch_stack": "whether a TorchDispatchMode is active",
    "torch._C:_len_torch_function_stack": "whether a TorchFunctionMode is active",
    "torch._C:_get_function_stack_at": "whether that mode is only a default device",
    "torch.utils._device:DeviceContext": "the mode of a default device",
    "torch._functorch.utils:unwrap_dead_wrappers": "a part of torch.autograd.Function.apply, called without the others",
    "torch.autograd.function:_SingleLevelFunction": "an autograd function for one level of torch.func",
    "torch._functorch.utils:enable_single_level_autograd_function": "permits such a function inside torch.func",
    "torch._C:_AutoDispatchBelowAutograd": "calls an operation below autograd",
    "torch._C:_after_autograd_keyset": "the dispatch keys below autograd",
    "torch._C:DispatchKey": "dispatch keys of plain tensors, for a shortcut around the dispatcher",
    "torch._C:DispatchKeySet": "sets of dispatch keys",
    "torch.autograd:_profiler_enabled": "whether torch.profiler runs, for names of phases",
    "torch._C:_current_graph_task_id": "whether a backward pass runs, which recomputes checkpoints",
    "torch:Tensor._base": "the tensor of which a weight is a view",
    "torch:Tensor._is_view": "whether a weight is a view",
    "torch:Tensor._version": "counts writes in place",
    "torch:ops.aten._unsafe_view": "a view without aliasing information",
    "torch:_foreach_norm": "the norms of several tensors",
    "torch:_foreach_mul_": "scales several tensors",
    "torch.utils._python_dispatch:TorchDispatchMode": "records which tensors an activation reads",
    "torch.utils._python_dispatch:_disable_current_modes": "evaluates an activation outside active tracers",
    "torch.nn.parallel:DistributedDataParallel._active_ddp_module": "the wrapper whose forward pass runs",
    "torch.nn:Module()._forward_pre_hooks": "whether a call of the gate has effects besides its result",
    "torch.nn:Module()._forward_hooks": "as above",
    "torch.nn:Module()._backward_pre_hooks": "as above",
    "torch.nn:Module()._backward_hooks": "as above",
    "torch.nn.modules.module:_global_forward_pre_hooks": "as above",
    "torch.nn.modules.module:_global_forward_hooks": "as above",
    "torch.nn.modules.module:_global_backward_pre_hooks": "as above",
    "torch.nn.modules.module:_global_backward_hooks": "as above",
    "torch.nn:Module()._apply": "MoE overrides it to keep the expert bias in float32; gives meta parameters memory",
    "torch.nn:Module()._load_from_state_dict": "MoE and its shared expert override it, for older state dicts",
}
_CUDA_NAMES = {
    "torch._C:_cuda_getDevice": "the current device",
    "torch._C:_cuda_getCurrentRawStream": "the current stream of a device",
}
_DISTRIBUTED_NAMES = {
    "torch:ops._c10d_functional.all_reduce": "collectives that torch.compile can trace",
    "torch:ops._c10d_functional.all_gather_into_tensor": "as above",
    "torch:ops._c10d_functional.all_to_all_single": "as above",
    "torch:ops._c10d_functional.wait_tensor": "as above",
    "torch.distributed.distributed_c10d:_resolve_process_group": "the process group with a given name",
    "torch.distributed.distributed_c10d:_world.pg_map": "the store of a process group",
}
#: Attributes that torch reads or sets without declaring them: (name, use).
_DDP_MARKS = {
    "_ddp_params_and_buffers_to_ignore": "names of parameters that DistributedDataParallel ignores",
    "_ddp_ignored": "marks such parameters",
}
_FSDP_MARK = "_is_fsdp_managed_module"  # set by fully_shard on every module whose parameters it shards
_CONSTANT_MARK = "_dynamo_marked_constant"  # set by torch.compiler.assume_constant_result on a function
_GUARD = "torch.fx.experimental.symbolic_shapes:guard_or_false"  # importing its module takes long


def _look_up(name: str) -> Any:
    """The object with a name; None without it."""
    module, path = name.split(":")
    try:
        owner: Any = importlib.import_module(module)
        if path.startswith("Module()."):
            owner, path = owner.Module(), path.removeprefix("Module().")
        value = operator.attrgetter(path)(owner)
    except (ImportError, AttributeError):
        return None
    return _IS_NONE if value is None else value


_IS_NONE = object()
_CAN_DISTRIBUTE = dist.is_available()
_found = {
    name: _look_up(name)
    for name in (
        *_NAMES,
        *(_CUDA_NAMES if torch.version.cuda else ()),
        *(_DISTRIBUTED_NAMES if _CAN_DISTRIBUTE else ()),
    )
}


def _has(*names: str) -> bool:
    return all(_found.get(name) is not None for name in names)


def _ddp_marks() -> Sequence[str]:
    """The marks that DistributedDataParallel sets."""
    setter = _look_up(
        "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model.__code__.co_names"
    )
    return setter or ()


def _sets_mark(file: str, mark: str) -> bool:
    """Whether a file of torch sets a mark. Its text is searched, since importing it takes long."""
    try:
        return f".{mark} = True".encode() in (pathlib.Path(torch.__file__).parent / file).read_bytes()
    except OSError:
        return False


_HAS_DDP_MARKS = set(_DDP_MARKS) <= set(_ddp_marks())
_HAS_FSDP_MARK = not _CAN_DISTRIBUTE or _sets_mark("distributed/fsdp/_fully_shard/_fully_shard.py", _FSDP_MARK)
_HAS_CONSTANT_MARK = _sets_mark("_dynamo/decorators.py", _CONSTANT_MARK)


def missing() -> list[str]:
    """The names that the installed torch lacks."""
    names = [name for name, value in _found.items() if value is None]
    if _CAN_DISTRIBUTE:
        names += [
            f"torch.nn.parallel:DistributedDataParallel, {mark}" for mark in _DDP_MARKS if mark not in _ddp_marks()
        ]
        names += [] if _HAS_FSDP_MARK else [f"torch.distributed.fsdp:fully_shard, {_FSDP_MARK}"]
    names += [] if _HAS_CONSTANT_MARK else [f"torch.compiler:assume_constant_result, {_CONSTANT_MARK}"]
    return [name.replace(":", ".") for name in (*names, *([] if _look_up(_GUARD) else [_GUARD]))]


def _unsupported(what: str, *names: str) -> NotImplementedError:
    lacking = " and ".join(name.replace(":", ".") for name in names)
    return NotImplementedError(f"torch: got {torch.__version__} without {lacking}, which {what} needs")


# ---------------------------------------------------------------- the state of a call

# Without a name below, every call is treated as one that is transformed or observed.

functorch_is_active: Callable[[], bool] = _found["torch._C:_are_functorch_transforms_active"] or (lambda: True)

#: The level of forward mode; negative if it is inactive.
forward_level: Callable[[], Any] = (
    functools.partial(operator.getitem, vars(forward_ad), "_current_level")
    if _has("torch.autograd.forward_ad:_current_level")
    else lambda: 0
)

num_dispatch_modes: Callable[[], int] = _found["torch._C:_len_torch_dispatch_stack"] or (lambda: 1)
num_function_modes: Callable[[], int] = _found["torch._C:_len_torch_function_stack"] or (lambda: 2)
function_mode_at: Callable[[int], Any] = _found["torch._C:_get_function_stack_at"] or (lambda index: None)
DeviceContext: Any = _found["torch.utils._device:DeviceContext"]


# ---------------------------------------------------------------- profiles

#: Whether torch.profiler runs. Without torch's function, its traces have no phases of calls through ctypes.
is_profiling: Callable[[], bool] = _found["torch.autograd:_profiler_enabled"] or (lambda: False)


# ---------------------------------------------------------------- autograd functions

SingleLevelFunction: Any = _found["torch.autograd.function:_SingleLevelFunction"] or torch.autograd.Function
unwrap_dead_wrappers: Callable[[tuple[Any, ...]], tuple[Any, ...]] = _found[
    "torch._functorch.utils:unwrap_dead_wrappers"
] or (lambda arguments: arguments)

#: torch.autograd.Function.apply calls `super(apply_below, function).apply` outside torch.func. None: it may do more.
apply_below: Any = None
if (
    _has(
        "torch.autograd.function:_SingleLevelFunction",
        "torch._functorch.utils:unwrap_dead_wrappers",
        "torch._C:_are_functorch_transforms_active",
    )
    and torch.autograd.Function.__mro__[1] is SingleLevelFunction
):
    apply_below = torch.autograd.Function


@contextlib.contextmanager
def _no_single_level_function() -> Any:
    if functorch_is_active():
        raise _unsupported("a gradient of an operation inside torch.func", *_SINGLE_LEVEL)
    yield


_SINGLE_LEVEL = (
    "torch.autograd.function:_SingleLevelFunction",
    "torch._functorch.utils:enable_single_level_autograd_function",
)
#: A context in which a SingleLevelFunction may be applied.
single_level_function: Callable[[], Any] = (
    _found[_SINGLE_LEVEL[1]] if _has(*_SINGLE_LEVEL) else _no_single_level_function
)


# ---------------------------------------------------------------- dispatch below autograd

below_autograd: Callable[[], Any] = _found["torch._C:_AutoDispatchBelowAutograd"] or contextlib.nullcontext


def _after_autograd() -> Any:
    keys = _found["torch._C:_after_autograd_keyset"]
    if keys is None:
        try:
            keys = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutogradOther)
        except AttributeError:
            raise ImportError(
                f"torch: got {torch.__version__} without torch._C._after_autograd_keyset, expected a release in which "
                "operations can be called below autograd"
            ) from None
    return keys


after_autograd_keys = _after_autograd()

#: Dispatch keys of a call on plain tensors, without modes, subclasses and torch.func. Empty: no call is one.
plain_keys: tuple[Any, ...] = ()
if _has("torch._C:DispatchKey", "torch._C:DispatchKeySet", "torch._C:_AutoDispatchBelowAutograd"):
    plain_keys = tuple(
        torch._C.DispatchKeySet(backend) | torch._C.DispatchKeySet(autograd)
        for backend, autograd in (
            (torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU),
            (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.AutogradCUDA),
        )
    )


# ---------------------------------------------------------------- devices and tensors

current_device: Callable[[], int] = _found.get("torch._C:_cuda_getDevice") or torch.cuda.current_device
current_stream: Callable[[int], int] = _found.get("torch._C:_cuda_getCurrentRawStream") or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)

#: (tensor, sizes): a view of an unshared tensor that does not count as one.
unsafe_view: Callable[..., Tensor] = _found["torch:ops.aten._unsafe_view"] or Tensor.reshape


def _norms(tensors: Sequence[Tensor], order: float, *, dtype: torch.dtype) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


foreach_norm: Callable[..., Any] = _found["torch:_foreach_norm"] or _norms
foreach_mul_: Callable[..., None] = _found["torch:_foreach_mul_"] or _scale_all

_is_wrapped: Callable[[Tensor], bool] = _found["torch._C._functorch:is_functorch_wrapped_tensor"] or (
    lambda tensor: functorch_is_active()
)
_COUNTS_WRITES = _has("torch:Tensor._base", "torch:Tensor._is_view", "torch:Tensor._version")


def version(tensor: Tensor) -> tuple[int, int] | None:
    """(id of the base tensor, version counter) of a tensor; None if torch does not count its in-place writes."""
    if not _COUNTS_WRITES or tensor.is_inference() or _is_wrapped(tensor):
        return None
    base: Any = tensor._base if tensor._is_view() else tensor
    return id(base), tensor._version


def guard_or_false(condition: Any) -> bool:
    """A condition on symbolic sizes; False if it depends on data. Without torch's function, that raises."""
    try:
        from torch.fx.experimental.symbolic_shapes import guard_or_false as guard
    except ImportError:
        return bool(condition)
    return bool(guard(condition))


def _in_backward() -> bool:
    """Whether a backward pass runs, by torch's other name for that."""
    node = getattr(torch._C, "_current_autograd_node", None)
    if node is None:
        raise _unsupported("counting tokens per expert", "torch._C:_current_graph_task_id")
    return node() is not None


#: -1 outside a backward pass.
graph_task: Callable[[], int] = _found["torch._C:_current_graph_task_id"] or (lambda: 0 if _in_backward() else -1)


@contextlib.contextmanager
def _without_tracers() -> Any:
    if num_dispatch_modes() > 0:
        raise _unsupported(
            "evaluating an activation under a mode", "torch.utils._python_dispatch:_disable_current_modes"
        )
    yield


#: A context without dispatch modes.
disable_modes: Callable[[], Any] = _found["torch.utils._python_dispatch:_disable_current_modes"] or _without_tracers


class _NoDispatchMode:
    def __init__(self) -> None:
        raise _unsupported("recognising an activation", "torch.utils._python_dispatch:TorchDispatchMode")


TorchDispatchMode: Any = _found["torch.utils._python_dispatch:TorchDispatchMode"] or _NoDispatchMode


# ---------------------------------------------------------------- modules

_HAS_HOOKS = _has(*(name for name in _NAMES if name.endswith("_hooks")))


def has_hooks(module: Any) -> bool:
    """Whether a call of a module may run hooks. If torch's hooks are elsewhere, every module may have some."""
    if not _HAS_HOOKS:
        return True
    every = torch.nn.modules.module
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or every._global_forward_pre_hooks
        or every._global_forward_hooks
        or every._global_backward_pre_hooks
        or every._global_backward_hooks
    )


def parameter(module: Any, name: str) -> Any:
    """`getattr(module, name)`, which torch finds for a parameter only after a search that fails."""
    parameters = vars(module).get("_parameters", ())
    return parameters[name] if name in parameters else getattr(module, name)


def is_fsdp_managed(module: Any) -> bool:
    """Whether fully_shard shards a module's parameters. Without its mark, whether it has been called at all."""
    if _HAS_FSDP_MARK:
        return bool(getattr(module, _FSDP_MARK, False))
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(fsdp.FSDPModule.__subclasses__())


def constant_when_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compiler.assume_constant_result`, which imports the compiler; that takes as long as importing torch."""
    if not _HAS_CONSTANT_MARK:
        return torch.compiler.assume_constant_result(function)  # type: ignore[no-any-return]
    setattr(function, _CONSTANT_MARK, True)
    return function


_HAS_ACTIVE_DDP = _has("torch.nn.parallel:DistributedDataParallel._active_ddp_module")


def active_ddp() -> Any:
    """The DistributedDataParallel module whose forward pass runs, or None."""
    if _HAS_ACTIVE_DDP:
        return torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if torch.compiler.is_compiling():
        raise _unsupported(
            "a compiled layer with a group", "torch.nn.parallel:DistributedDataParallel._active_ddp_module"
        )
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.nn.parallel.DistributedDataParallel.forward.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def ignored_by_ddp(model: Any) -> Sequence[str]:
    """The names of a model's parameters and buffers that DistributedDataParallel ignores."""
    return tuple(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(model: Any, names: Any) -> None:
    """Makes DistributedDataParallel ignore names, an iterable."""
    if not _HAS_DDP_MARKS:
        raise _unsupported("ddp_ignore_experts", *_DDP_MARKS)
    model._ddp_params_and_buffers_to_ignore = names


def mark_ignored(tensor: Any) -> None:
    """Marks a parameter or buffer that DistributedDataParallel ignores."""
    tensor._ddp_ignored = True


def is_marked_ignored(tensor: Any) -> bool:
    """Whether `mark_ignored` has marked a tensor."""
    return bool(getattr(tensor, "_ddp_ignored", False))


# ---------------------------------------------------------------- process groups


class _Collectives:
    """torch's functional collectives by the public functions, which torch.compile may be unable to trace."""

    @staticmethod
    def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
        assert operation == "sum"
        total = tensor.clone()
        dist.all_reduce(total, group=resolve_group(group))
        return total

    @staticmethod
    def all_gather_into_tensor(tensor: Tensor, ranks: int, group: str) -> Tensor:
        gathered = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, tensor, group=resolve_group(group))
        return gathered

    @staticmethod
    def all_to_all_single(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
        arrived = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(arrived, tensor, list(received), list(sent), group=resolve_group(group))
        return arrived

    @staticmethod
    def wait_tensor(tensor: Tensor) -> Tensor:
        return tensor


#: Collectives on tensors and names of groups.
collectives: Any = _Collectives
if _has(*(name for name in _DISTRIBUTED_NAMES if "_c10d_functional" in name)):
    collectives = torch.ops._c10d_functional

_groups: dict[str, Any] = {}
_RESOLVES = not _CAN_DISTRIBUTE or _has("torch.distributed.distributed_c10d:_resolve_process_group")


def note_group(group: Any) -> None:
    """Keeps a group for `resolve_group`, if torch's own function is missing."""
    if not _RESOLVES:
        _groups[group.group_name] = group


#: The process group with a name.
resolve_group: Callable[[str], Any] = (
    _found.get("torch.distributed.distributed_c10d:_resolve_process_group") or _groups.__getitem__
)


class _GatheredTexts:
    """Exchanges texts of ranks like a store, with a collective."""

    def __init__(self, group: Any):
        self.group, self.text = group, ""

    def set(self, key: str, text: str) -> None:
        self.text = text

    def multi_get(self, keys: Sequence[str]) -> list[Any]:
        texts: list[Any] = [None] * len(keys)
        dist.all_gather_object(texts, self.text, group=self.group)
        return texts

    def delete_key(self, key: str) -> None:
        pass


#: Whether texts are exchanged through stores. Otherwise all ranks must exchange in the same calls.
has_stores = not _CAN_DISTRIBUTE or _has("torch.distributed.distributed_c10d:_world.pg_map")


def store_of(group: Any) -> Any:
    """The store of a process group, or None if it has none."""
    if not has_stores:
        return _GatheredTexts(group)
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return store

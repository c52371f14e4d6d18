"""Argument checks for tensors, with errors in the form "argument: got X, expected Y".

They read shapes, dtypes and devices, never values, so the host does not wait for the device.
"""

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch._text import shown
from anabranch.checks import INDEX_LIMIT, boolean, choice, describe, integer, number
from anabranch.rows import check_num_rows
from anabranch.torch.binding import private
from anabranch.torch.binding.described import Size

__all__ = (
    "BOOL",
    "FLOATS",
    "INDEX_LIMIT",
    "INDICES",
    "CheckCache",
    "as_indices",
    "boolean",
    "choice",
    "describe",
    "exceeds_int32",
    "float_dtype",
    "host_values",
    "indices",
    "integer",
    "num_rows",
    "number",
    "optional_tensor",
    "same_device",
    "size",
    "smaller",
    "tensor",
    "writable",
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int16, torch.int32, torch.int64)
BOOL = (torch.bool,)

# An axis is a size, a name (any size), or (name, size). A leading `...` stands for any leading axes.
Axis = Any


def _axis_text(axis: Axis) -> str:
    if axis is Ellipsis:
        return "..."
    return f"{axis[0]}={axis[1]}" if isinstance(axis, tuple) else str(axis)


def _fits(shape: Sequence[int], axes: Sequence[Axis]) -> bool:
    if axes and axes[0] is Ellipsis:
        axes, shape = axes[1:], shape[len(shape) - len(axes) + 1 :]
    if len(shape) != len(axes):
        return False
    for axis, size in zip(axes, shape, strict=True):
        expected = axis[1] if isinstance(axis, tuple) else axis
        if not isinstance(expected, str) and expected != size:
            return False
    return True


def _expected(dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> str:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{names} [{', '.join(map(_axis_text, shape))}]"


def tensor(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> Tensor:
    """Returns `value` if it is a dense tensor with one of `dtypes` and the given shape, on the CPU or a CUDA device.

    Raises:
      TypeError: it is no dense tensor or has another dtype.
      ValueError: it has another shape, or is on another kind of device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, expected a tensor, {_expected(dtypes, shape)}")
    if value.is_nested and value.layout == torch.strided:  # such a tensor has no shape
        raise TypeError(f"{name}: got a nested tensor, expected a dense one, {_expected(dtypes, shape)}")
    if value.layout != torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name}: got {describe(value)} of layout {layout}, expected a dense tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got {describe(value)}, expected {_expected(dtypes, shape)}")
    if value.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}: got {describe(value)} on {value.device}, expected the CPU or a CUDA device")
    if not _fits(value.shape, shape):
        raise ValueError(f"{name}: got {describe(value)}, expected {_expected(dtypes, shape)}")
    return value


def float_dtype(name: str, value: Any) -> torch.dtype:
    """Returns `value` if it is one of `FLOATS`."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}: got {shown(value)}, expected a torch.dtype")
    if value not in FLOATS:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise TypeError(f"{name}: got {str(value).removeprefix('torch.')}, expected {names}")
    return value


def optional_tensor(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> Tensor | None:
    """Like `tensor`, but accepts None."""
    return None if value is None else tensor(name, value, dtypes, shape)


def size(name: str, value: Any, minimum: int = 0, maximum: int = INDEX_LIMIT - 1) -> int:
    """Like `integer`, for a number that may be computed from shapes. A symbolic number stays symbolic."""
    return value if isinstance(value, torch.SymInt) else integer(name, value, minimum, maximum)  # type: ignore[return-value]


def num_rows(name: str, value: Any, align_size: int = 0, num_destinations: int = 1) -> int:
    """`check_num_rows`, where a symbolic number stays symbolic."""
    return check_num_rows(name, value, align_size, num_destinations, size)


def exceeds_int32(number: Any) -> bool:
    """Whether a number exceeds int32. In a traced program, False for a size that depends on data."""
    exceeds = number >= INDEX_LIMIT
    if isinstance(exceeds, bool):
        return exceeds
    return private.guard_or_false(exceeds)


#: Torch 2.11 cannot compile sym_min inside `torch.device(...)`. Strict export with an align_size limits T there.
_SYM_MIN_IS_TRACED = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def smaller(first: Any, second: Any) -> Any:
    """The smaller of two sizes, as an expression in a traced program: a comparison would limit a dynamic size."""
    if isinstance(first, Size):
        return first.smaller(second)
    if isinstance(second, Size):
        return second.smaller(first)
    if torch.compiler.is_dynamo_compiling() and not _SYM_MIN_IS_TRACED:
        return min(first, second)
    return torch.sym_min(first, second)


def writable(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> Tensor:
    """Like `tensor`, for a tensor that is written to. Its elements must not overlap in memory."""
    value = tensor(name, value, dtypes, shape)
    if value.is_contiguous():
        return value
    reach = 0
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and step <= reach:
            raise ValueError(
                f"{name}: got {describe(value)} with strides {value.stride()}, expected elements that do not overlap"
            )
        reach += step * (size - 1)
    return value


def indices(name: str, value: Any, shape: Sequence[Axis]) -> Tensor:
    """Checks indices or sizes and converts them to int32; those out of range stay out of range."""
    return as_indices(tensor(name, value, INDICES, shape))


def as_indices(value: Tensor) -> Tensor:
    """Converts checked indices or sizes to int32; those out of range stay out of range."""
    if value.dtype == torch.int64:
        value = value.clamp(-INDEX_LIMIT, INDEX_LIMIT - 1)
    return value.to(torch.int32)


def host_values(value: Tensor) -> Any:
    """The values of a CPU tensor as nested lists, or None in a traced program or a transformation."""
    eager = not (torch.compiler.is_compiling() or private.functorch_is_active())
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu"
    return value.tolist() if eager and plain and private.num_dispatch_modes() == 0 else None


def same_device(name: str, first: Tensor, **others: Tensor | None) -> None:
    """Raises if one of `others` is on another device than the tensor `first`, which messages call `name`."""
    for other, value in others.items():
        if value is not None and value.device != first.device:
            raise ValueError(f"{other}: got a tensor on {value.device}, expected {first.device}, where {name} is")


#: Numbers of tokens below this one share the result of a check; larger ones may exceed limits such as that of int32.
_FEW_TOKENS = 2**16


class CheckCache:
    """Results of argument checks, by types, dtypes, shapes and options. Equal arguments are not checked again.

    The number of tokens does not count, as long as all arguments agree on it.

    Args:
      max_entries: size of the cache. The entry that was used least recently is removed when it is full.
    """

    def __init__(self, max_entries: int = 256):
        self.max_entries = max_entries
        self.results: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.last: Any = None  # the result that was used last
        self.lock = threading.Lock()

    def check(
        self,
        per_token: Iterable[Any],
        tensors: Iterable[Any],
        options: Iterable[Any],
        check: Callable[[], Any],
        described: Any = None,
    ) -> Any:
        """Returns the cached result for these arguments, or calls `check`.

        Args:
          per_token: tensors or None, whose leading dimensions are those of the first, [..., D].
          tensors: tensors or None. `check` may depend on type, dtype, shape, layout and device, not on values.
          options: everything else that `check` depends on.
          check: runs the checks. Its result must not hold a tensor, nor depend on the leading dimensions.
          described: further options, an `ExpertsOptions`.
        """
        if torch.compiler.is_compiling():
            return check()
        try:
            first, *others = per_token
            leading = first.shape[:-1]
            rank = len(leading)
            key = (
                rank if leading.numel() < _FEW_TOKENS else leading,
                (type(first), first.dtype, first.shape[-1], first.layout, first.device),
                *[
                    t
                    if t is None
                    else (type(t), t.dtype, t.shape[:rank] == leading or t.shape, t.shape[rank:], t.layout, t.device)
                    for t in others
                ],
                *[t if t is None else (type(t), t.dtype, t.shape, t.layout, t.device) for t in tensors],
                *options,
                *map(type, options),  # 2.0 and True are distinct from 2
                described and described.key(),
            )
            with self.lock:
                if (result := self.results.get(key)) is not None:
                    if result is not self.last:  # a tuple does not keep its hash, so each use of the key takes time
                        self.results.move_to_end(key)
                        self.last = result
                    return result
        except (TypeError, AttributeError, RuntimeError, IndexError):  # not a tensor: `check` raises the error
            return check()
        result = check()
        with self.lock:
            self.results[key] = self.last = result
            if len(self.results) > self.max_entries:
                self.results.popitem(last=False)
        return result

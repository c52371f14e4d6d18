"""Checks of tensors, in the one error style of `anabranch.checks`: "argument: got X, expected Y".

Shapes, dtypes and devices are looked at, values never: that would wait for the device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from anabranch.checks import INDEX_LIMIT, boolean, choice, describe, integer, number
from anabranch.rows import check_num_rows

__all__ = (
    "BOOL",
    "FLOATS",
    "INDEX_LIMIT",
    "INDICES",
    "RightBefore",
    "as_indices",
    "boolean",
    "choice",
    "describe",
    "host_values",
    "indices",
    "integer",
    "num_rows",
    "number",
    "on_device_of",
    "optional_tensor",
    "size",
    "smaller",
    "tensor",
    "too_many",
    "written",
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int16, torch.int32, torch.int64)
BOOL = (torch.bool,)

# An axis is a size, a name (any size), or (name, size); `...` first: any leading axes.
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
        wanted = axis[1] if isinstance(axis, tuple) else axis
        if not isinstance(wanted, str) and wanted != size:
            return False
    return True


def _expected(dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> str:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{names} [{', '.join(map(_axis_text, shape))}]"


def tensor(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> Tensor:
    """Returns `value`, a dense tensor of one of `dtypes` and of the given shape, on the CPU or a CUDA device.

    Raises:
      TypeError: not a tensor, a sparse or nested one, or another dtype.
      ValueError: another shape, or another kind of device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, expected a tensor, {_expected(dtypes, shape)}")
    if value.is_nested and value.layout == torch.strided:  # which has no shape
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


def optional_tensor(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> Tensor | None:
    """Like `tensor`; None stays None."""
    return None if value is None else tensor(name, value, dtypes, shape)


def size(name: str, value: Any, minimum: int = 0, maximum: int = INDEX_LIMIT - 1) -> int:
    """Like `integer`, of a number that may follow from shapes: a symbolic one stays symbolic in an exported program."""
    return value if isinstance(value, torch.SymInt) else integer(name, value, minimum, maximum)  # type: ignore[return-value]


def num_rows(name: str, value: Any, align_size: int = 1) -> int:
    """Returns a number of rows that is a multiple of align_size and below 2^31; a symbolic one as in `size`."""
    return check_num_rows(name, value, align_size, size)


def too_many(number: Any) -> bool:
    """Whether there are too many of something for int32; of a size that depends on data nobody knows in a program."""
    return bool(guard_or_false(number >= INDEX_LIMIT))


#: Torch 2.11 can't compile sym_min inside of `torch.device(...)`; strict export with an align_size then limits T there.
_SYM_MIN_IS_TRACED = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def smaller(first: Any, second: Any) -> Any:
    """The smaller of two sizes. A program gets an expression, where a comparison would limit a dynamic size."""
    if torch.compiler.is_dynamo_compiling() and not _SYM_MIN_IS_TRACED:
        return min(first, second)
    return torch.sym_min(first, second)


def written(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Axis]) -> Tensor:
    """Like `tensor`, of one that is written to: its elements have to be numbers of their own."""
    value = tensor(name, value, dtypes, shape)
    if value.is_contiguous():
        return value
    reach = 0
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and step <= reach:
            raise ValueError(
                f"{name}: got {describe(value)} with strides {value.stride()}, expected no element in another's place"
            )
        reach += step * (size - 1)
    return value


def indices(name: str, value: Any, shape: Sequence[Axis]) -> Tensor:
    """Indices or sizes of any of INDICES as int32, an index or size out of range as one that is out of range."""
    return as_indices(tensor(name, value, INDICES, shape))


def as_indices(value: Tensor) -> Tensor:
    """The same of a tensor that has been checked."""
    if value.dtype == torch.int64:
        value = value.clamp(-INDEX_LIMIT, INDEX_LIMIT - 1)
    return value.to(torch.int32)


def host_values(value: Tensor) -> Any:
    """The numbers of a CPU tensor as nested lists; None where they are a program's or a transformation's."""
    eager = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu"
    return value.tolist() if eager and plain and torch._C._len_torch_dispatch_stack() == 0 else None


def on_device_of(name: str, first: Tensor, **others: Tensor | None) -> None:
    """Refuses tensors on another device than the first, which is called `name`."""
    for other, value in others.items():
        if value is not None and value.device != first.device:
            raise ValueError(f"{other}: got a tensor on {value.device}, expected {first.device}, where {name} is")


class RightBefore:
    """What checks found of arguments that were right: the same again needs no checks.

    Args:
      most: how many calls it keeps; with one more all are forgotten.
    """

    def __init__(self, most: int = 256):
        self.most = most
        self.found: dict[Any, Any] = {}

    def check(
        self, tensors: Iterable[Any], options: Iterable[Any], check: Callable[[], Any], described: Any = None
    ) -> Any:
        """What `check` returns or has returned.

        Args:
          tensors: of which it looks at type, dtype, shape, layout and device alone; None where not given.
          options: whatever else it looks at.
          check: the checks; returns nothing that holds a tensor.
          described: an object whose attributes are further options.
        """
        if torch.compiler.is_compiling():
            return check()
        options = tuple(options) if described is None else (*options, *vars(described).values())
        try:
            of_tensors = [t if t is None else (type(t), t.dtype, t.shape, t.layout, t.device) for t in tensors]
            key = (*of_tensors, *options, *map(type, options))  # 2.0 and True are not 2
            found = self.found.get(key)
        except (TypeError, AttributeError, RuntimeError):  # no tensor, or no hash: the checks say what is wrong
            return check()
        if found is None:
            found = check()
            if len(self.found) >= self.most:
                self.found.clear()
            self.found[key] = found
        return found

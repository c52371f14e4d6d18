"""What every autograd function of ours has in common."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers


class Function(torch.autograd.Function):
    """An autograd function of operations: its backward pass is not differentiable, and vmap runs it slice by slice.

    Attributes:
      tensors: names of what its forward pass takes as `*tensors`. Where there is no gradient, torch.compile tells one
        that takes a context from one that takes none by the number of parameters.
    """

    tensors: Sequence[str] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        signature, kind = inspect.signature(cls.forward), inspect.Parameter.POSITIONAL_OR_KEYWORD
        if cls.tensors:
            named = [p for p in signature.parameters.values() if p.kind == kind]
            named += [inspect.Parameter(name, kind) for name in cls.tensors]
            signature = signature.replace(parameters=named)
        cls.forward.__signature__ = signature  # type: ignore[attr-defined]  # torch asks for it at each call

    @classmethod
    def call(cls, *arguments: Any) -> Any:
        """`apply`; outside of torch.func without what that spends on arguments' defaults, which there are none of."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return cls.apply(*arguments)
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc]

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> Any:
        """See `in_slices`."""
        return in_slices(cls.apply, info, in_dims, arguments)


def in_slices(function: Callable[..., Any], info: Any, in_dims: Any, arguments: Any) -> Any:
    """The rule of torch.vmap for a function: one slice after the other, since a slice by itself fills the machine.

    Returns:
      (what the function returns, its tensors with a dimension in front, the dimensions of the slices there).

    Raises:
      ValueError: there is no slice, of which the shapes of results could be told.
    """
    if info.batch_size == 0:
        raise ValueError("vmap: got a dimension of size 0, expected at least one slice")
    slices = [
        function(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(slices[0], Tensor):
        return torch.stack(slices), 0
    outputs = tuple(torch.stack(of) if isinstance(of[0], Tensor) else of[0] for of in zip(*slices, strict=True))
    return outputs, tuple(0 if isinstance(output, Tensor) else None for output in outputs)


def without_autocast(device: torch.device) -> Any:
    """A context in which nothing is rounded but by us."""
    if has_autocast(device) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def has_autocast(device: torch.device) -> bool:
    """Whether torch.autocast knows a device; of tensors on "meta" there is nothing to compute."""
    return device.type in ("cpu", "cuda")


def wants_gradient(context: Any, index: int) -> bool:
    """Whether an argument of `forward` needs a gradient, for its place among them."""
    wanted: bool = context.needs_input_grad[index]
    return wanted

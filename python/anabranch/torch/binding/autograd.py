"""The base class of all autograd functions."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import private
from anabranch.torch.binding.derivatives import once_differentiable, without_forward_mode
from anabranch.torch.binding.native import python_errors


class Function(torch.autograd.Function):
    """An autograd function. Double backward raises an error, and vmap loops over the batch.

    The backward pass must depend only on cotangents and on tensors saved with `save_for_backward`.

    Attributes:
      tensors: names for the arguments that `forward` takes as `*tensors`. If no gradient is needed, torch.compile uses
        the number of parameters to tell whether `forward` takes a context.
    """

    tensors: Sequence[str] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.backward = staticmethod(once_differentiable(cls.__name__.lstrip("_"), cls.backward))  # type: ignore[method-assign]
        signature, kind = inspect.signature(cls.forward), inspect.Parameter.POSITIONAL_OR_KEYWORD
        if cls.tensors:
            named = [p for p in signature.parameters.values() if p.kind == kind]
            named += [inspect.Parameter(name, kind) for name in cls.tensors]
            signature = signature.replace(parameters=named)
        cls.forward.__signature__ = signature  # type: ignore[attr-defined]  # torch reads it at each call

    @classmethod
    def call(cls, *arguments: Any) -> Any:
        """Like `apply`. Outside torch.func it skips the binding of default arguments."""
        if torch.compiler.is_compiling():
            # Views: torch.compile does not see that inputs of torch.func.grad need a gradient, and would keep only the
            # forward pass.
            return cls.apply(*(a.view_as(a) if isinstance(a, Tensor) else a for a in arguments))
        if private.functorch_is_active() or private.forward_level() >= 0:
            with without_forward_mode(cls.__name__.lstrip("_")), python_errors():
                return cls.apply(*arguments)
        return cls.call_eager(*private.unwrap_dead_wrappers(arguments))

    @classmethod
    def call_eager(cls, *arguments: Any) -> Any:
        """Like `call`, in the plain eager case (see `is_plain_eager`)."""
        with python_errors():
            return super(private.apply_below or Function, cls).apply(*arguments)  # type: ignore[misc,arg-type]

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> Any:
        """See `loop_batch`."""
        return loop_batch(cls.apply, info, in_dims, arguments)


def loop_batch(function: Callable[..., Any], info: Any, in_dims: Any, arguments: Any) -> Any:
    """The torch.vmap rule of a function: a loop over the batch. One call already fills the machine.

    Returns:
      (results with a leading batch dimension, their batch dimensions).

    Raises:
      ValueError: the batch is empty, so the shapes of the results are unknown.
    """
    if info.batch_size == 0:
        raise ValueError("vmap: got a dimension of size 0, expected at least one slice")
    slices = [
        function(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(slices[0], Tensor):
        return torch.stack(slices), 0
    outputs = tuple(torch.stack(o) if isinstance(o[0], Tensor) else o[0] for o in zip(*slices, strict=True))
    return outputs, tuple(0 if isinstance(output, Tensor) else None for output in outputs)


def needs_gradient(context: Any, index: int) -> bool:
    """Whether the argument of `forward` with this index needs a gradient."""
    needed: bool = context.needs_input_grad[index]
    return needed

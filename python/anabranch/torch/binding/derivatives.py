"""Double backward and forward mode are unsupported and raise instead of silently returning zeros.

`once_differentiable` marks the results of a backward pass. `reject_derivative` guards an operation where torch drops
the autograd function around it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anabranch.torch.binding import private
from anabranch.torch.binding.native import python_errors


@contextlib.contextmanager
def without_forward_mode(name: str) -> Iterator[None]:
    """Replaces torch's error about a missing `jvp` with one that names our function.

    Defining `jvp` is no alternative: torch.compile does not support autograd functions that have one.
    """
    try:
        yield
    except NotImplementedError as error:
        if "jvp function" not in str(error):
            raise
        raise NotImplementedError(
            f"{name}: got a forward-mode derivative, expected reverse mode: forward mode is unsupported"
        ) from None


# ---------------------------------------------------------------- backward passes


class _Gradients(torch.autograd.Function):
    """The identity on gradients, with a backward pass that raises."""

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Takes `count` gradients, followed by the tensors that they depend on."""
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: got a derivative of its gradient, expected a first derivative: double backward is unsupported"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, count: int, *tensors: Tensor) -> Any:
        return _Gradients.apply(name, count, *tensors), in_dims[2 : 2 + count]


class _Unpacked:
    """A context whose saved tensors are unpacked once: a checkpoint does not unpack them again."""

    def __init__(self, context: Any) -> None:
        self._context, self.saved_tensors = context, context.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def once_differentiable(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a backward pass: a derivative of its results by cotangents or saved tensors raises.

    torch's own `once_differentiable` ignores saved tensors, and inside torch.func everything. A derivative of a
    gradient would silently be zero.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *cotangents: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *cotangents)
        unpacked = _Unpacked(ctx)
        with torch.no_grad():
            found = backward(unpacked, *cotangents)
        found = list(found) if isinstance(found, tuple) else [found]
        places = [i for i, gradient in enumerate(found) if gradient is not None]
        if not places:
            return tuple(found)
        causes = [t for t in (*cotangents, *unpacked.saved_tensors) if t is not None and t.dtype.is_floating_point]
        with without_forward_mode(name):
            gradients = _Gradients.apply(name, len(places), *(found[i] for i in places), *causes)
        for i, gradient in zip(places, gradients, strict=True):
            found[i] = gradient
        return tuple(found)

    return checked


# ---------------------------------------------------------------- operations


class _RejectDerivative(private.SingleLevelFunction):  # type: ignore[misc]
    """An operation whose backward pass raises.

    The base class handles one level of torch.func. An operation's kernel already runs inside a level;
    `torch.autograd.Function` would enter all levels again.
    """

    @staticmethod
    def forward(operation: Any, keys: Any, *arguments: Any) -> Any:
        return _below_autograd(operation, keys, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operation = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.operation}: got a request for its derivative, expected one for the function that calls it: double "
            "backward is unsupported, and torch.compile may have dropped an autograd function inside torch.func"
        )


def _below_autograd(operation: Any, keys: Any, arguments: Sequence[Any]) -> Any:
    # An autograd function disables gradients, also for outer levels of torch.func, which still need theirs. torch
    # enables them in the same way when it passes from level to level.
    below = torch.enable_grad() if private.functorch_is_active() else contextlib.nullcontext()
    with python_errors(), private.below_autograd(), below:
        return operation.redispatch(keys & private.after_autograd_keys, *arguments)


def reject_derivative(operation: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel of an operation: a derivative raises.

    Derivatives come from the autograd functions that call operations. Without one in between, as in a gradient of a
    gradient, a derivative would silently be zero.

    Args:
      operation: the operation, for dispatch by torch.
      run: its implementation for plain tensors, called directly to save the dispatch.
    """

    def record(keys: Any, *arguments: Any) -> Any:
        if private.forward_level() >= 0 and any(_has_tangent(a) for a in arguments):
            raise NotImplementedError(f"{operation}: got a tangent, expected none: forward mode is unsupported")
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
            with private.single_level_function():
                return _RejectDerivative.apply(operation, keys, *arguments)
        if keys in private.plain_keys:
            return run(*arguments)
        return _below_autograd(operation, keys, arguments)

    return record


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None

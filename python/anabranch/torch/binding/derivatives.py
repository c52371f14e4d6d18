"""A derivative that there is none of is an error, never a zero: of a gradient, and of an operation by itself.

Gradients of our functions have no derivatives. A backward pass says so of its results (`once`), and an operation of its
own, for where torch drops the autograd function around it (`undifferentiable`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad


@contextlib.contextmanager
def without_forward_mode(name: str) -> Iterator[None]:
    """Torch's refusal of a forward-mode derivative of an autograd function, in words that name ours.

    torch.compile takes no autograd function that has a `jvp` of its own.
    """
    try:
        yield
    except NotImplementedError as error:
        if "jvp function" not in str(error):
            raise
        raise NotImplementedError(
            f"{name}: got a forward-mode derivative to take, expected none: anabranch has reverse mode only"
        ) from None


# ---------------------------------------------------------------- backward passes


class _Gradients(torch.autograd.Function):
    """Gradients as they are, whose derivative by what they depend on is an error."""

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of `count` gradients and of what they depend on."""
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: got a derivative of its gradient to take, expected none: no function of anabranch is "
            "differentiable twice"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, count: int, *tensors: Tensor) -> Any:
        return _Gradients.apply(name, count, *tensors), in_dims[2 : 2 + count]


class _Unpacked:
    """The context of a backward pass with what it saved unpacked: a checkpoint unpacks once."""

    def __init__(self, context: Any) -> None:
        self._context, self.saved_tensors = context, context.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose results know that they depend on cotangents and on what was saved, and no more than that.

    torch's `once_differentiable` forgets what was saved, and all of it inside of torch.func: then a derivative of a
    gradient is zero without a word.
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


class _Undifferentiable(torch.autograd.function._SingleLevelFunction):
    """An operation whose results have no derivative: taking one raises.

    The base class is torch's own for one level of torch.func: an operation's kernel already runs inside of a level, and
    `torch.autograd.Function` would enter all of them again.
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
            f"{ctx.operation}: got a derivative to take of it, expected none: no gradient of anabranch is "
            "differentiable, and torch.compile may have lost the rule of a function inside torch.func"
        )


def _below_autograd(operation: Any, keys: Any, arguments: Sequence[Any]) -> Any:
    # Inside of an autograd function gradients are off, for the layers of torch.func below, too, which have theirs to
    # take; torch's own way through the layers switches them on alike.
    below = torch.enable_grad() if torch._C._are_functorch_transforms_active() else contextlib.nullcontext()
    with torch._C._AutoDispatchBelowAutograd(), below:
        return operation.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


#: What autograd gets keys of where nothing but it and the machine has a say: no modes, no subclasses, no torch.func.
_PLAIN = tuple(
    torch._C.DispatchKeySet(machine) | torch._C.DispatchKeySet(autograd)
    for machine, autograd in (
        (torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU),
        (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.AutogradCUDA),
    )
)


def undifferentiable(operation: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """What autograd does with an operation, whose derivatives are those of the autograd functions outside.

    Where none of them stands between, as in a gradient of a gradient, a derivative would be zero without a word.

    Args:
      operation: as torch calls it.
      run: the same on plain tensors, which saves the way through torch.
    """

    def record(keys: Any, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0 and any(_has_tangent(a) for a in arguments):
            raise NotImplementedError(f"{operation}: got a tangent, expected none: there is no forward-mode derivative")
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
            with enable_single_level_autograd_function():
                return _Undifferentiable.apply(operation, keys, *arguments)  # type: ignore[attr-defined]
        if keys in _PLAIN:
            return run(*arguments)
        return _below_autograd(operation, keys, arguments)

    return record


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None

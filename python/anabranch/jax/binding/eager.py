"""Calls outside of jitted programs: the steps of an operation are one program instead of a program each.

Outside of `jax.jit`, JAX dispatches every step of a function on its own, and `jax.grad` differentiates every step again
in each call. There, a function decorated with `compiled` is a jitted program, which JAX also differentiates as a whole.
While a program is traced, the function is called directly, so that the program does not change.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType

from anabranch.jax.binding.sharding import axes_with_type, on_shards

Function = TypeVar("Function", bound=Callable[..., Any])

#: While a compiled function is differentiated for an eager call, which only first derivatives do.
_differentiated_once: contextvars.ContextVar[bool] = contextvars.ContextVar("differentiated_once", default=False)


def is_differentiated_once() -> bool:
    """Whether JAX is computing the first derivative of a compiled function for an eager call."""
    return _differentiated_once.get()


def _is_derivative_of_array(tracer: jax.core.Tracer) -> bool:
    """Whether a tracer belongs to an eager first derivative, and not to a program, a vmap or a shard_map."""
    primal = getattr(tracer, "primal", None)
    return primal is not None and not isinstance(primal, jax.core.Tracer)


def _has_whole_arrays() -> bool:
    """Whether arrays are whole: outside of a jax.shard_map and of a TokenCall's function."""
    return not on_shards() and not axes_with_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)


def compiled(static_argnums: tuple[int, ...] = ()) -> Callable[[Function], Function]:
    """Decorator: compiles a function of positional arguments for eager calls.

    There is one program per static arguments (hashable), shapes, dtypes and shardings. These and JAX's own options must
    determine what the function does.
    """

    def decorate(function: Function) -> Function:
        # inline: a program that is being traced may close over all operands; it then contains the steps.
        alone = jax.jit(function, static_argnums=static_argnums, inline=True)
        # JAX would differentiate an inlined program step by step.
        differentiated = jax.jit(function, static_argnums=static_argnums)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            operands = [argument for i, argument in enumerate(arguments) if i not in static_argnums]
            tracers = [leaf for leaf in jax.tree.leaves(operands) if isinstance(leaf, jax.core.Tracer)]
            if not _has_whole_arrays() or not all(map(_is_derivative_of_array, tracers)):
                return function(*arguments)
            if not tracers:
                return alone(*arguments)
            before = _differentiated_once.set(True)
            try:
                return differentiated(*arguments)
            finally:
                _differentiated_once.reset(before)

        return call  # type: ignore[return-value]

    return decorate

"""Functions with a rule for reverse mode alone: a forward-mode derivative is an error that names the function.

The tangent of each operand goes through a linear operation that can be transposed but not run. Reverse mode transposes
it; `jax.jvp`, `jax.jacfwd` and what `jax.linearize` returns run it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _refuse(*_: Any, name: str, **__: Any) -> Any:
    raise TypeError(
        f"{name}: got a forward-mode derivative to take, expected jax.grad or jax.vjp: anabranch has reverse mode only"
    )


_tangent = Primitive("anabranch_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda tangent, *, name: tangent)
ad.deflinear2(_tangent, lambda cotangent, _, *, name: [cotangent])
batching.primitive_batchers[_tangent] = lambda tangents, axes, *, name: (_tangent.bind(*tangents, name=name), *axes)
mlir.register_lowering(_tangent, _refuse)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _operand(name: str, value: jax.Array) -> jax.Array:
    return value


@_operand.defjvp
def _operand_jvp(name: str, primals: Any, tangents: Any) -> Any:
    return primals[0], _tangent.bind(tangents[0], name=name)


class ReverseMode:
    """`jax.custom_vjp` of a function of positional arguments, whose forward-mode derivative is an error of ours."""

    def __init__(self, function: Callable[..., Any], name: str, nondiff_argnums: tuple[int, ...]):
        functools.update_wrapper(self, function)
        self._name, self._static = name, nondiff_argnums
        self._rule = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)
        self.defvjp = self._rule.defvjp

    def __call__(self, *arguments: Any) -> Any:
        """The function's results."""
        return self._rule(
            *(a if i in self._static else jax.tree.map(self._differentiable, a) for i, a in enumerate(arguments))
        )

    def _differentiable(self, leaf: Any) -> Any:
        # What is not traced has no tangent, and what is called without a transformation does no more than before.
        if isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            return _operand(self._name, leaf)
        return leaf


def reverse_mode(name: str, nondiff_argnums: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], ReverseMode]:
    """A decorator: `jax.custom_vjp` for the public function `name`."""
    return lambda function: ReverseMode(function, name, nondiff_argnums)

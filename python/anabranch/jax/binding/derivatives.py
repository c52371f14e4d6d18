"""Functions with a reverse-mode rule only: a forward-mode derivative raises an error that names the function.

Every operand passes through an identity whose tangent is a linear operation that JAX can transpose but not evaluate.
Reverse mode transposes it. `jax.jvp`, `jax.jacfwd` and the function that `jax.linearize` returns evaluate it or map it
with vmap, which raises.
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
        f"{name}: got a forward-mode derivative, expected jax.grad or jax.vjp: anabranch supports reverse mode only"
    )


_tangent = Primitive("anabranch_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda tangent, *, name: tangent)
ad.deflinear2(_tangent, lambda cotangent, _, *, name: [cotangent])
mlir.register_lowering(_tangent, _refuse)
# Reverse mode never maps tangents: vmap maps _operand before differentiation, or the result after transposition.
batching.primitive_batchers[_tangent] = _refuse


def _operand_jvp(primals: Any, tangents: Any, *, name: str) -> Any:
    (value,), (tangent,) = primals, tangents
    zero = isinstance(tangent, ad.Zero)
    return _operand.bind(value, name=name), tangent if zero else _tangent.bind(tangent, name=name)


_operand = Primitive("anabranch_operand")
_operand.def_impl(lambda value, *, name: value)
_operand.def_abstract_eval(lambda value, *, name: value)
ad.primitive_jvps[_operand] = _operand_jvp
mlir.register_lowering(_operand, lambda _, value, *, name: [value])
batching.primitive_batchers[_operand] = lambda values, axes, *, name: (_operand.bind(*values, name=name), *axes)


class ReverseMode:
    """`jax.custom_vjp` of a function of positional arguments that refuses forward-mode derivatives."""

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
        # Values that are not traced have no tangent; leaving them alone keeps eager calls unchanged.
        if isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            return _operand.bind(leaf, name=self._name)
        return leaf


def reverse_mode(name: str, nondiff_argnums: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], ReverseMode]:
    """Decorator: `jax.custom_vjp` for the public function `name`, without forward mode."""
    return lambda function: ReverseMode(function, name, nondiff_argnums)

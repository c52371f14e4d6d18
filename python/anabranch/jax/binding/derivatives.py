"""Functions with a reverse-mode rule only: a forward-mode derivative raises an error that names the function.

Every operand passes through an identity whose tangent is a linear operation that JAX can transpose but not evaluate.
Reverse mode transposes it. `jax.jvp`, `jax.jacfwd` and the function that `jax.linearize` returns evaluate it or map it
with vmap, which raises.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from anabranch.jax.binding.eager import compiled, is_differentiated_once


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
    # A derivative of the derivative has to pass _operand again. Without that, residuals are the operands, not copies.
    primal = value if is_differentiated_once() else _operand.bind(value, name=name)
    return primal, tangent if zero else _tangent.bind(tangent, name=name)


_operand = Primitive("anabranch_operand")
_operand.def_impl(lambda value, *, name: value)
_operand.def_abstract_eval(lambda value, *, name: value)
ad.primitive_jvps[_operand] = _operand_jvp
mlir.register_lowering(_operand, lambda _, value, *, name: [value])
batching.primitive_batchers[_operand] = lambda values, axes, *, name: (_operand.bind(*values, name=name), *axes)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Structure:
    """The structure of the operands; part of that of the residuals."""

    tree: Any


_BITS = 16
"""Flags in one dimension of the shape."""


def _as_shape(flags: Sequence[bool]) -> jax.Array:
    """An array without elements whose shape contains flags.

    The backward rule must know the flags while JAX traces it. They must not be part of the structure of the residuals:
    JAX keeps one structure per program, that of the forward rule which it traced last.
    """
    groups = (flags[i : i + _BITS] for i in range(0, len(flags), _BITS))
    return jnp.zeros((0, *(sum(flag << i for i, flag in enumerate(group)) for group in groups)), bool)


def _flags(array: jax.Array, number: int) -> list[bool]:
    """The flags in the shape of an array."""
    return [bool(array.shape[1 + i // _BITS] >> i % _BITS & 1) for i in range(number)]


def _as_array(cotangent: Any) -> Any:
    """A cotangent of a rule with symbolic zeros as an array; that of an integer stays as it is."""
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero) and cotangent.dtype != jax.dtypes.float0
    return ad.instantiate_zeros(ad.Zero(cotangent.aval)) if is_zero else cotangent  # with its sharding


class ReverseMode:
    """`jax.custom_vjp` of a function of positional arguments that refuses forward-mode derivatives."""

    def __init__(self, function: Callable[..., Any], name: str, nondiff_argnums: tuple[int, ...]):
        functools.update_wrapper(self, function)
        self._name, self._nondiff_argnums = name, nondiff_argnums
        self._rule = rule = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)
        self.defvjp = rule.defvjp

        def run(*arguments: Any) -> Any:
            operands = (a if i in nondiff_argnums else self._differentiable(a) for i, a in enumerate(arguments))
            return rule(*operands)

        run.__name__ = run.__qualname__ = name  # the program's name
        self._run = compiled(nondiff_argnums)(run)

    def define_gradients(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Like `defvjp`, for a backward rule that computes only the gradients that are needed.

        backward(*options, needed, residuals, cotangents): `needed` has the structure of the operands, with a bool for
        each array: whether the derivative with respect to it is not known to be zero. Its gradient is ignored
        otherwise, and may be None.
        """
        options = len(self._nondiff_argnums)

        def forward_rule(*arguments: Any) -> Any:
            primals = arguments[options:]
            values = (jax.tree.map(lambda primal: primal.value, tree) for tree in primals)
            flags, structure = jax.tree.flatten([jax.tree.map(lambda p: bool(p.perturbed), tree) for tree in primals])
            results, residuals = forward(*arguments[:options], *values)
            return results, (_Structure(structure), _as_shape(flags), residuals)

        def backward_rule(*arguments: Any) -> Any:
            given, (operands, flags, residuals), cotangents = arguments[:options], arguments[-2], arguments[-1]
            needed = jax.tree.unflatten(operands.tree, _flags(flags, operands.tree.num_leaves))
            return backward(*given, *needed, residuals, jax.tree.map(_as_array, cotangents))

        self._rule.defvjp(forward_rule, backward_rule, symbolic_zeros=True)

    def __call__(self, *arguments: Any) -> Any:
        """The function's results."""
        return self._run(*arguments)

    def _differentiable(self, operands: Any) -> Any:
        def guarded(leaf: Any) -> Any:
            # Values that are not traced have no tangent.
            if isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact):
                return _operand.bind(leaf, name=self._name)
            return leaf

        return jax.tree.map(guarded, operands)


def reverse_mode(name: str, nondiff_argnums: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], ReverseMode]:
    """Decorator: `jax.custom_vjp` for the public function `name`, without forward mode."""
    return lambda function: ReverseMode(function, name, nondiff_argnums)

"""Selects the framework in which a test calls an operation, so that cases and checks are shared.

`both` marks a test and `BOTH` a module that runs in every framework; `only_torch` marks a test that runs in torch only.
`in_torch()` returns whether the current framework is torch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FRAMEWORKS = ("jax", "torch")
#: The pytestmark of a module whose tests run in every framework.
BOTH = [
    pytest.mark.usefixtures("platform", "framework"),
    pytest.mark.parametrize("framework", FRAMEWORKS, indirect=True),
]
_current = "jax"


def both(test):
    """Runs a test in every framework."""
    return pytest.mark.usefixtures("framework")(pytest.mark.parametrize("framework", FRAMEWORKS, indirect=True)(test))


def only_torch(test):
    """Runs a test in torch, on the platform of the module."""
    return pytest.mark.usefixtures("framework")(pytest.mark.parametrize("framework", ["torch"], indirect=True)(test))


def in_torch():
    """Whether the running test calls the operations of torch."""
    return _current == "torch"


def choose(name):
    """Selects the framework of later calls; used by the fixture."""
    global _current
    _current = name


def vjp(jax_function, torch_function, operands):
    """(result, pull) of the current framework's function at named operands; tensors are returned as arrays.

    pull(cotangent): the gradients by the names of the floating operands.
    """
    if in_torch():
        from in_torch import arrays
        from in_torch import vjp as vjp_in_torch

        result, pull = vjp_in_torch(torch_function, operands)
        return arrays(result), pull

    given, integers = _split(operands)
    result, jax_pull = jax.vjp(lambda given: jax_function(**given, **integers), given)
    return result, lambda cotangent: jax_pull(jax.tree.map(jax.device_put, cotangent))[0]


def with_gradients(jax_function, torch_function, operands, cotangent):
    """(result, gradients) of `vjp` for a cotangent; in JAX one compiled program."""
    if in_torch():
        result, pull = vjp(jax_function, torch_function, operands)
        return result, pull(cotangent)
    given, integers = _split(operands)

    @jax.jit
    def both_passes(given, integers, cotangent):
        result, pull = jax.vjp(lambda given: jax_function(**given, **integers), given)
        return result, pull(cotangent)[0]

    return both_passes(given, integers, cotangent)


def _split(operands):
    """(floating operands, integer ones) without those that are None."""
    given = {name: value for name, value in operands.items() if value is not None}
    integers = {name: given.pop(name) for name in list(given) if not jnp.issubdtype(given[name].dtype, jnp.floating)}
    return given, integers


def call(jax_function, torch_function, *arguments, **options):
    """The result of the current framework's function; torch's tensors are converted from and to arrays."""
    if not in_torch():
        return jax_function(*arguments, **options)
    from in_torch import arrays, tensor

    def given(value):
        return tensor(value) if isinstance(value, (np.ndarray, jax.Array)) else value

    return arrays(torch_function(*map(given, arguments), **{name: given(value) for name, value in options.items()}))

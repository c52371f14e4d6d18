"""Initialisers of the layers' parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check

Initializer = Callable[..., jax.Array]

_variance_scaling = jax.nn.initializers.variance_scaling
#: The fan-in is that of one expert, because the expert axis is a batch axis.
default_gate_init = _variance_scaling(1.0, "fan_in", "truncated_normal")
default_in_init = _variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=(2, 3), batch_axis=0)
default_shared_in_init = _variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2))
default_out_init = _variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0)


def initializer(name: str, given: Any, default: Initializer | None = None) -> Initializer:
    """Returns the given initialiser, wrapped in a check of what it returns, or the default.

    Args:
      name: the argument's name, for errors.
      given: called with (key, shape, dtype); None: the default, if there is one.
      default: a built-in initialiser.
    """
    if given is None and default is not None:
        return default
    if not callable(given):
        raise TypeError(f"{name}: got {check.describe(given)}, expected a function of (key, shape, dtype)")

    def checked(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        try:
            value = given(key, shape, dtype)
        except TypeError as error:  # usually a function with other arguments
            raise TypeError(f"{name}(key, shape, dtype): got {error!r}, expected an array of that shape") from error
        # A Flax initialiser may wrap the array in a box with its sharding.
        leaves = jax.tree.leaves(getattr(value, "raw_value", value))
        array = leaves[0] if len(leaves) == 1 else value
        check.array(f"{name}(key, shape, dtype)", array, (str(jnp.dtype(dtype)),), shape)
        return value

    return checked

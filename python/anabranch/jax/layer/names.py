"""Names of what the layer keeps for its backward pass, for policies of `jax.checkpoint` that choose by name.

They stand where a value comes from, so that what is saved is not computed again for what is not.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name


def named_x(x: jax.Array) -> jax.Array:
    """The layer's x."""
    return checkpoint_name(x, "moe_x")


def named_logits(logits: jax.Array) -> jax.Array:
    """The router's logits [T, E]."""
    return checkpoint_name(logits, "moe_logits")


def named_routing(arrays: Any) -> Any:
    """Weights, experts, lse and sums of the router, and the integers of plans and transports; a pytree."""
    return jax.tree.map(lambda array: checkpoint_name(array, "moe_routing"), arrays)


def named_h(h: jax.Array | None) -> jax.Array | None:
    """The hidden rows [R, P, F]; None where no gradient is wanted."""
    return None if h is None else checkpoint_name(h, "moe_h")

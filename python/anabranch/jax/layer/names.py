"""Names of the layer's residuals, for `jax.checkpoint` policies that select by name.

A name is set where a value is computed, so that saving the value avoids recomputing it for other values.
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
    """The router's weights, experts, lse and sums, and the integers of plans and transports; a pytree."""
    return jax.tree.map(lambda array: checkpoint_name(array, "moe_routing"), arrays)


def named_u(u: jax.Array | None) -> jax.Array | None:
    """The rows u [R, r] of an adapter of w_in; None if there is none, or no gradient is needed."""
    return None if u is None else checkpoint_name(u, "moe_lora_u")


def named_h(h: jax.Array | None) -> jax.Array | None:
    """The intermediate rows h [R, P, F]; None if no gradient is needed."""
    return None if h is None else checkpoint_name(h, "moe_h")


def named_output(output: jax.Array) -> jax.Array:
    """The layer's output, for blocks in which the gradient of a later step reads it."""
    return checkpoint_name(output, "moe_output")

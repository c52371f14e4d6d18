"""Routing of the layer's tokens, some or all of which may replay a recorded routing."""

import jax
import jax.numpy as jnp

from anabranch.jax.layer.operands import Operands
from anabranch.jax.ops.router import Requested, RouterOutputs, route_forward
from anabranch.options import RouterOptions

_SELECTION_ONLY = Requested(tokens_per_expert=False, score_sum=False, lse=False)


def route_tokens(options: RouterOptions, logits: jax.Array, operands: Operands, requested: Requested) -> RouterOutputs:
    """The experts and weights of logits [T, E]: replayed ones for replayed tokens, the router's for the others.

    With a mask the router runs twice. The first call selects experts for the tokens that are not replayed. The second
    call gets the selection of all tokens and computes weights and statistics for it. The histogram of quantile
    balancing comes from the first call, so it counts only tokens that the router selects experts for.
    """
    o, replayed = operands, operands.replay_mask
    if replayed is None:
        routing = route_forward(
            options, logits, o.expert_bias, o.token_mask, o.replay_experts, o.qb_bin_bounds, requested
        )
    else:
        assert o.replay_experts is not None
        routed = ~replayed if o.token_mask is None else o.token_mask & ~replayed
        first = route_forward(options, logits, o.expert_bias, routed, None, o.qb_bin_bounds, _SELECTION_ONLY)
        experts = jnp.where(replayed[:, None], o.replay_experts, first.experts)
        routing = route_forward(options.without_selection(), logits, None, o.token_mask, experts, None, requested)
        routing = routing._replace(qb_histogram=first.qb_histogram)
    if o.replay_weights is None:
        return routing
    weights = jnp.where(routing.experts >= 0, o.replay_weights, 0)
    if replayed is not None:
        weights = jnp.where(replayed[:, None], weights, routing.weights)
    return routing._replace(weights=weights)


def experts_weighed_by_router(operands: Operands, experts: jax.Array) -> jax.Array:
    """The experts [T, K] of the layer, with -1 for those whose recorded weights have no gradient."""
    if operands.replay_weights is None:
        return experts
    if operands.replay_mask is None:
        return jnp.full_like(experts, -1)
    return jnp.where(operands.replay_mask[:, None], -1, experts)

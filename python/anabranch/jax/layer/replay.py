"""Routing of the layer's tokens, some or all of which may replay a recorded routing."""

import jax
import jax.numpy as jnp

from anabranch.jax.layer.operands import Operands
from anabranch.jax.ops.router import Requested, RouterOutputs, route_forward
from anabranch.options import RouterOptions


def route_tokens(options: RouterOptions, logits: jax.Array, operands: Operands, requested: Requested) -> RouterOutputs:
    """The experts and weights of logits [T, E]: replayed ones for replayed tokens, the router's for the others.

    With recorded weights, a mask, or options of the selection, the router runs twice. The first call is that of a layer
    without replay, so its statistics have the same bits. The second call gets the selection of all tokens and computes
    their weights and counts.
    """
    o, replayed = operands, operands.replay_mask
    arrays = (o.expert_bias, o.token_mask, o.replay_experts, o.qb_bin_bounds)
    has_record = o.replay_weights is not None or replayed is not None
    if o.replay_experts is None or not (has_record or o.expert_bias is not None or options.num_groups):
        return route_forward(options, logits, *arrays, requested)
    own = route_forward(
        options, logits, o.expert_bias, o.token_mask, None, o.qb_bin_bounds, requested._replace(tokens_per_expert=False)
    )
    experts = o.replay_experts if replayed is None else jnp.where(replayed[:, None], o.replay_experts, own.experts)
    counts_only = Requested(requested.tokens_per_expert, score_sum=False, lse=False)
    merged = route_forward(options.without_selection(), logits, None, o.token_mask, experts, None, counts_only)
    weights = merged.weights
    if o.replay_weights is not None:
        recorded = jnp.where(merged.experts >= 0, o.replay_weights, 0)
        weights = recorded if replayed is None else jnp.where(replayed[:, None], recorded, weights)
    return own._replace(weights=weights, experts=merged.experts, tokens_per_expert=merged.tokens_per_expert)


def experts_weighed_by_router(operands: Operands, experts: jax.Array) -> jax.Array:
    """The experts [T, K] of the layer, with -1 for those whose recorded weights have no gradient."""
    if operands.replay_weights is None:
        return experts
    if operands.replay_mask is None:
        return jnp.full_like(experts, -1)
    return jnp.where(operands.replay_mask[:, None], -1, experts)

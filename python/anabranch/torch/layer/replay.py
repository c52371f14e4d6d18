"""Routing of the layer's tokens, some or all of which may replay a recorded routing."""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.options import RouterOptions
from anabranch.torch.layer.operands import Operands
from anabranch.torch.ops.router import Requested, run_route


class TokenRouting(NamedTuple):
    """The results of `run_route`, and what the backward pass needs."""

    weights: Tensor
    experts: Tensor
    tokens_per_expert: Tensor
    score_sum: Tensor
    lse: Tensor
    qb_histogram: Tensor
    experts_weighed_by_router: Tensor | None = None
    """`experts` with -1 where the weights are recorded, so that they have no gradient; None without such weights."""


def route_tokens(options: RouterOptions, logits: Tensor, operands: Operands, requested: Requested) -> TokenRouting:
    """The experts and weights of logits [T, E]: replayed ones for replayed tokens, the router's for the others.

    With a mask the router runs twice. The first call selects experts for the tokens that are not replayed. The second
    call gets the selection of all tokens and computes weights and statistics for it. The histogram of quantile
    balancing comes from the first call, so it counts only tokens that the router selects experts for.
    """
    o, replayed = operands, operands.replay_mask
    if replayed is None:
        routing = TokenRouting(
            *run_route(
                options, logits, o.expert_bias, o.token_mask, o.replay_experts, o.qb_bin_bounds, requested=requested
            )
        )
    else:
        assert o.replay_experts is not None
        routed = ~replayed if o.token_mask is None else o.token_mask & ~replayed
        first = TokenRouting(
            *run_route(
                options, logits, o.expert_bias, routed, None, o.qb_bin_bounds, requested=Requested(False, False, False)
            )
        )
        experts = torch.where(replayed[:, None], o.replay_experts, first.experts)
        second = run_route(options.without_selection(), logits, None, o.token_mask, experts, None, requested=requested)
        routing = TokenRouting(*second)._replace(qb_histogram=first.qb_histogram)
    if o.replay_weights is None:
        return routing
    weights = torch.where(routing.experts >= 0, o.replay_weights, 0)
    weighed = torch.full_like(routing.experts, -1)
    if replayed is not None:
        weights = torch.where(replayed[:, None], weights, routing.weights)
        weighed = torch.where(replayed[:, None], weighed, routing.experts)
    return routing._replace(weights=weights, experts_weighed_by_router=weighed)

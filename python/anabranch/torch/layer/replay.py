"""Routing of the layer's tokens, some or all of which may replay a recorded routing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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


def needs_two_calls(options: RouterOptions, replay: Sequence[Any], expert_bias: Any) -> bool:
    """Whether `route_tokens` calls the router twice. replay: the fields of a Replay, all None without one."""
    experts, weights, mask = replay
    if experts is None:
        return False
    return weights is not None or mask is not None or expert_bias is not None or options.num_groups > 0


def route_tokens(options: RouterOptions, logits: Tensor, operands: Operands, requested: Requested) -> TokenRouting:
    """The experts and weights of logits [T, E]: replayed ones for replayed tokens, the router's for the others.

    With recorded weights, a mask, or options of the selection, the router runs twice. The first call is that of a layer
    without replay, so its statistics have the same bits. The second call gets the selection of all tokens and computes
    their weights and counts.
    """
    o, replayed = operands, operands.replay_mask
    if not needs_two_calls(options, o.replay(), o.expert_bias):
        arrays = (o.expert_bias, o.token_mask, o.replay_experts, o.qb_bin_bounds)
        return TokenRouting(*run_route(options, logits, *arrays, requested=requested))
    assert o.replay_experts is not None
    statistics = requested._replace(tokens_per_expert=False)
    arrays = (o.expert_bias, o.token_mask, None, o.qb_bin_bounds)
    own = TokenRouting(*run_route(options, logits, *arrays, requested=statistics))
    experts = o.replay_experts if replayed is None else torch.where(replayed[:, None], o.replay_experts, own.experts)
    counts = Requested(requested.tokens_per_expert, score_sum=False, lse=False)
    arrays = (None, o.token_mask, experts, None)
    merged = TokenRouting(*run_route(options.without_selection(), logits, *arrays, requested=counts))
    weights, experts, weighed = merged.weights, merged.experts, None
    if o.replay_weights is not None:
        weights, weighed = torch.where(experts >= 0, o.replay_weights, 0), torch.full_like(experts, -1)
        if replayed is not None:
            weights = torch.where(replayed[:, None], weights, merged.weights)
            weighed = torch.where(replayed[:, None], weighed, experts)
    return TokenRouting(weights, experts, merged.tokens_per_expert, own.score_sum, own.lse, own.qb_histogram, weighed)

"""Routing: the experts and weights of each token, and the statistics that losses need."""

import dataclasses
import math
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from anabranch.options import ROUTER_NAMES, RouterKeywords, RouterOptions, check_names, router_options, takes_options
from anabranch.torch.binding import check
from anabranch.torch.binding.autograd import Function
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.quantile import bin_bounds


class Routing(NamedTuple):
    """The result of `route` for logits [..., E].

    Attributes:
      weights: float32[..., K], 0 where the expert is -1.
      experts: int32[..., K], best first; -1: no expert.
      tokens_per_expert: int32[E] ([..., E] with sequence_stats).
      score_sum: float32[E] ([..., E] with sequence_stats), the sum over tokens of the auxiliary scores.
      lse: float32[...], logsumexp of the logits; 0 for a masked token.
      qb_histogram: int32[E, bins] with qb_bin_bounds, else None.
    """

    weights: Tensor
    experts: Tensor
    tokens_per_expert: Tensor
    score_sum: Tensor
    lse: Tensor
    qb_histogram: Tensor | None = None


class Requested(NamedTuple):
    """The optional results that `run_route` computes; the others have no elements."""

    tokens_per_expert: bool = True
    score_sum: bool = True
    lse: bool = True


_ALL = Requested()


def run_route(
    options: RouterOptions,
    logits: Tensor,
    expert_bias: Tensor | None,
    token_mask: Tensor | None,
    forced_experts: Tensor | None,
    bounds: Tensor | None,
    sequences: int = -1,
    requested: Requested = _ALL,
) -> Any:
    """Calls the operation on checked, flat arguments: logits [T, E], mask [T], forced experts [T, K]."""
    return torch_ops.route(
        logits,
        expert_bias,
        token_mask,
        forced_experts,
        bounds,
        sequences,
        options.qb_bins,
        *requested,
        *options.numbers(),
    )


def logits_gradient(
    options: RouterOptions,
    logits: Tensor,
    experts: Tensor,
    token_mask: Tensor | None,
    lse: Tensor,
    d_weights: Tensor | None,
    d_score_sum: Tensor | None,
    d_lse: Tensor | None,
) -> Tensor:
    """d_logits in the dtype of the logits, for flat tokens. None stands for a zero cotangent."""
    if d_weights is None and d_score_sum is None and d_lse is None:
        return torch.zeros_like(logits)
    if d_weights is None:
        options = dataclasses.replace(options, scaling_factor=1.0)  # it applies to weights only
    gradient: Tensor = torch_ops.route_backward(
        logits,
        None if d_weights is None else experts,
        token_mask,
        lse,
        d_weights,
        d_score_sum,
        d_lse,
        *options.numbers(),
    )
    return gradient


class _Route(Function):
    @staticmethod
    def forward(options, logits, expert_bias, token_mask, forced_experts, bounds, sequences):
        return run_route(options, logits, expert_bias, token_mask, forced_experts, bounds, sequences)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[0]
        _, experts, counts, _, lse, histogram = output
        ctx.mark_non_differentiable(experts, counts, histogram)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1], experts, inputs[3], lse)

    @staticmethod
    def backward(ctx, d_weights, _experts, _counts, d_score_sum, d_lse, _histogram):
        logits, experts, token_mask, lse = ctx.saved_tensors
        d_logits = logits_gradient(ctx.options, logits, experts, token_mask, lse, d_weights, d_score_sum, d_lse)
        return None, d_logits, None, None, None, None, None


def check_slots(leading: tuple[int, ...], topk: int) -> None:
    """Raises for more than 2^31 - 1 slots: indices are int32."""
    tokens = math.prod(leading)
    if check.exceeds_int32(tokens * topk):
        raise ValueError(f"logits: got {tokens} tokens with topk {topk}, expected fewer than 2^31 slots")


def quantile_operand(options: RouterOptions, like: Tensor, expert_bias: Any, qb_bin_bounds: Any) -> Tensor | None:
    """Checks the arguments of quantile balancing and returns the bounds, or None without quantile balancing."""
    if (options.qb_bins > 0) != (qb_bin_bounds is not None):
        got = "qb_bin_bounds" if qb_bin_bounds is not None else "qb_bins"
        raise ValueError(f"{got}: got one by itself, expected qb_bin_bounds and qb_bins or neither")
    if qb_bin_bounds is None:
        return None
    if expert_bias is None:
        raise ValueError("expert_bias: got None with quantile balancing, expected one, zeros at first")
    return bin_bounds(qb_bin_bounds, like)


def router_operands(
    options: RouterOptions,
    num_experts: int,
    leading: tuple[int, ...],
    expert_bias: Any,
    token_mask: Any,
    forced_experts: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Checks the optional tensors for logits [*leading, E]: (expert_bias, token_mask, forced_experts)."""
    check_slots(leading, options.topk)
    expert_bias = check.optional_tensor("expert_bias", expert_bias, check.FLOATS, (("E", num_experts),))
    token_mask = check.optional_tensor("token_mask", token_mask, check.BOOL, leading)
    if forced_experts is not None:
        forced_experts = check.indices("forced_experts", forced_experts, (*leading, options.topk))
        for name, given in (("expert_bias", expert_bias is not None), ("num_groups", options.num_groups > 0)):
            if given:
                raise ValueError(f"{name}: got one together with forced_experts, expected none")
    return expert_bias, token_mask, forced_experts


@takes_options(RouterKeywords)
def route(
    logits: Tensor,
    topk: int,
    *,
    expert_bias: Tensor | None = None,
    token_mask: Tensor | None = None,
    forced_experts: Tensor | None = None,
    sequence_stats: bool = False,
    qb_bin_bounds: Tensor | tuple[float, float] | None = None,
    qb_bins: int | None = None,
    **options: Unpack[RouterKeywords],
) -> Routing:
    """Selects the topk experts of every token and computes their weights.

    The highest logits are selected; ties go to the lower expert. Scores are softmax over all experts, sigmoid, or
    sqrt(softplus). A weight is the score, optionally normalised over the selected experts, times scaling_factor.
    Arithmetic is float32.

    Args:
      logits: float32, bfloat16 or float16 [..., E].
      topk: K, 1 <= K <= E.
      expert_bias: float [E], added to the scores for selection only (DeepSeek-V3's loss-free balancing).
      token_mask: bool [...]; False marks padding, which gets expert -1 and weight 0 and is not counted.
      forced_experts: integer [..., K]: a given selection (replay); -1 or out of range: no expert. Excludes expert_bias
        and groups. If all forced experts of a token have logit -inf, weights normalised by softmax and their gradients
        are NaN (0 / 0); other weights are 0.
      sequence_stats: logits are [..., S, E] and statistics keep the leading axes: one row per sequence of S tokens.
      qb_bin_bounds, qb_bins: quantile balancing: bounds as float32 [2] or a pair, lower < upper, and the number of bins
        between them, at most 2^20. The threshold of a token is its (K+1)-th largest biased score. `qb_histogram` of the
        result counts per expert how far the threshold is above the expert's score; the first and the last bin are
        open-ended. `quantile_bias` computes a bias from it. Requires expert_bias and K < E; excludes groups.
      {options}
        The score of a group is the sum of its group_score_topk best biased scores: 1 is DeepSeek-V2's maximum, 2 is
        DeepSeek-V3's rule in most libraries. None, with groups: the sum of its K / group_topk best scores (logits for a
        normalised softmax without a bias).

    Returns:
      A Routing.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: of logits, from weights, score_sum and lse in one pass; none of expert_bias. No double backward.

    Source: semantics, sections 1 and 2; expert_bias and groups are DeepSeek-V3's (arXiv:2412.19437).

    >>> routing = route(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    >>> routing.experts.tolist(), routing.tokens_per_expert.tolist()
    ([[1, 2]], [0, 1, 1])
    """
    logits = check.tensor("logits", logits, check.FLOATS, (..., "E"))
    *leading, E = logits.shape
    check_names("route", ROUTER_NAMES, options)
    checked = router_options(E, topk, sequence_stats=sequence_stats, qb_bins=qb_bins, **options)
    if checked.sequence_stats and not leading:
        raise ValueError(f"logits: got {check.describe(logits)}, expected [..., S, E] with sequence_stats")
    bias, mask, forced = router_operands(checked, E, tuple(leading), expert_bias, token_mask, forced_experts)
    bounds = quantile_operand(checked, logits, bias, qb_bin_bounds)
    check.same_device("logits", logits, expert_bias=bias, token_mask=mask, forced_experts=forced, qb_bin_bounds=bounds)
    T, K = math.prod(leading), checked.topk
    sequences = leading[:-1] if checked.sequence_stats else []
    weights, experts, counts, score_sum, lse, histogram = _Route.call(
        checked,
        logits.reshape(T, E),
        bias,
        None if mask is None else mask.reshape(T),
        None if forced is None else forced.reshape(T, K),
        bounds,
        math.prod(sequences) if checked.sequence_stats else -1,
    )
    return Routing(
        weights.reshape(*leading, K),
        experts.reshape(*leading, K),
        counts.reshape(*sequences, E),
        score_sum.reshape(*sequences, E),
        lse.reshape(leading),
        histogram if checked.qb_bins else None,
    )

"""The router with TransformerEngine's interface: dense probabilities and routing maps.

Code that calls `transformer_engine.pytorch.router` only needs another import. Differences: every score function
supports quantile balancing, leading axes are preserved, `topk_indices` excludes a map format, and an option without
effect is an error. Exceptions are use_pre_softmax with other scores than softmax, and values that mean "not used".
"""

import math
from typing import Any

import torch
from torch import Tensor

from anabranch.dense_router import (
    RoutingMapFormat,
    check_bins,
    check_histogram_mode,
    check_index_dtype,
    check_map_format,
    check_map_or_indices,
    check_no_histogram,
    normalizes,
)
from anabranch.options import SCORE_FUNCTIONS, RouterOptions, router_options
from anabranch.torch.binding import check
from anabranch.torch.binding.autograd import Function
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.router import check_slots, quantile_operand


class _Dense(Function):
    @staticmethod
    def forward(options, map_format, logits, expert_bias, bounds):
        return torch_ops.route_dense(
            logits,
            expert_bias,
            bounds,
            map_format,
            options.qb_bins,
            *options.numbers(),
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[0]
        _, routing_map, experts, histogram = output
        ctx.mark_non_differentiable(routing_map, experts, histogram)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[2], experts)

    @staticmethod
    def backward(ctx, d_probs, _map, _experts, _histogram):
        logits, experts = ctx.saved_tensors
        router = ctx.options.numbers()
        d_logits = None if d_probs is None else torch_ops.route_dense_backward(logits, experts, d_probs, *router)
        return None, None, d_logits, None, None


class _AuxScores(Function):
    @staticmethod
    def forward(logits, topk, score_function, map_format):
        return torch_ops.aux_scores(logits, topk, score_function, map_format)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.score_function = inputs[2]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, d_scores, _map):
        (logits,) = ctx.saved_tensors
        d_logits = None if d_scores is None else torch_ops.aux_scores_backward(logits, d_scores, ctx.score_function)
        return d_logits, None, None, None


def _histogram(options: dict[str, Any], num_experts: int, histogram: Any, bounds: Any, mode: Any) -> Tensor | None:
    """Checks the arguments of quantile balancing and adds `qb_bins` to the router's options."""
    if histogram is None:
        check_no_histogram(bounds, mode)
        return None
    check_histogram_mode(mode)
    if bounds is None:
        raise ValueError("qb_bin_bounds: got None with qb_histogram, expected float32 [2] or a pair")
    counts = check.writable("qb_histogram", histogram, (torch.int32,), (("E", num_experts), "bins"))
    options["qb_bins"] = check_bins(counts)
    return counts


def _indices(value: Any, leading: tuple[int, ...], num_experts: int, options: RouterOptions) -> Tensor | None:
    """Checks `topk_indices`."""
    if value is None:
        return None
    indices = check.writable("topk_indices", value, check.INDICES, (*leading, ("K", options.topk)))
    check_index_dtype("topk_indices", str(indices.dtype).removeprefix("torch."), num_experts)
    return indices


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: str | int | RoutingMapFormat = RoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | tuple[float, float] | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores, top-k selection and weights in TransformerEngine's dense form.

    Args:
      logits: float32, bfloat16 or float16 [..., E].
      topk: K, 1 <= K <= E.
      use_pre_softmax: raw softmax scores as weights; False: softmax over the selected logits. Other score functions
        ignore it: sigmoid and sqrtsoftplus scores are normalised if topk > 1.
      num_groups, group_topk: as in `route`; None, 0 or -1: no groups.
      scaling_factor: finite Python number; multiplies the probabilities. None: 1.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus".
      expert_bias: float [E], added to sigmoid and sqrtsoftplus scores for selection only.
      routing_map_format: a RoutingMapFormat, its value or its name.
      topk_indices: int16, int32 or int64 [..., K]. The experts of every token, best first, are written to it, and it
        replaces the map as the second result. Requires the default routing_map_format.
      qb_histogram: int32 [E, bins]: quantile balancing, as in `route`; requires expert_bias and qb_bin_bounds. The
        counts are added to it in place and saturate at 2^31 - 1.
      qb_bin_bounds: float32 [2] or a pair, lower < upper.
      qb_histogram_mode: "two_kernel" or "fused_atomic"; both have the same effect.

    Returns:
      probs [..., E] in the logits' dtype, zero where not selected, and the routing map, or topk_indices.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: of logits, from the probabilities; cotangents of unselected experts are ignored. No double backward.
    Source: TransformerEngine, transformer_engine/pytorch/router.py (interface).

    >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
    >>> probs, routing_map = fused_topk_with_score_function(logits, 1, False, None, None, None, "softmax", None)
    >>> probs.tolist(), routing_map.tolist()
    ([[0.0, 1.0, 0.0]], [[False, True, False]])
    """
    logits = check.tensor("logits", logits, check.FLOATS, (..., "E"))
    *leading, E = logits.shape
    name = check.choice("score_function", score_function, SCORE_FUNCTIONS)
    pre_softmax = check.boolean("use_pre_softmax", use_pre_softmax)
    if expert_bias is not None and name == "softmax":
        raise ValueError("expert_bias: got one with score_function 'softmax', expected none")
    given: dict[str, Any] = {"num_groups": num_groups, "group_topk": group_topk}
    histogram = _histogram(given, E, qb_histogram, qb_bin_bounds, qb_histogram_mode)
    options = router_options(
        E,
        topk,
        score_function=name,
        normalize=normalizes(name, check.integer("topk", topk, 1, E), pre_softmax),
        scaling_factor=1.0 if scaling_factor is None else scaling_factor,
        **given,
    )
    check_slots(tuple(leading), options.topk)
    bias = check.optional_tensor("expert_bias", expert_bias, check.FLOATS, (("E", E),))
    map_format = check_map_format(routing_map_format)
    indices = _indices(topk_indices, tuple(leading), E, options)
    if indices is not None:
        check_map_or_indices(map_format, "topk_indices")
    bounds = quantile_operand(options, logits, bias, qb_bin_bounds)
    check.same_device(
        "logits", logits, expert_bias=bias, topk_indices=indices, qb_histogram=histogram, qb_bin_bounds=bounds
    )
    probs, routing_map, experts, counts = _Dense.call(
        options,
        map_format.name.lower() if indices is None else "",
        logits.reshape(math.prod(leading), E),
        bias,
        bounds,
    )
    if histogram is not None:
        histogram.add_(torch.minimum(counts, check.INDEX_LIMIT - 1 - histogram))
    if indices is not None:
        indices.copy_(experts.reshape(indices.shape))
        return probs.reshape(logits.shape), indices
    return probs.reshape(logits.shape), routing_map.reshape(*leading, routing_map.shape[1])


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor,
    topk: int,
    score_function: str,
    routing_map_format: str | int | RoutingMapFormat = RoutingMapFormat.BYTEMAP,
) -> tuple[Tensor, Tensor]:
    """The scores for load-balancing losses, and the map of the topk highest logits.

    Args:
      logits: float32, bfloat16 or float16 [..., E].
      topk: K, 1 <= K <= E.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus".
      routing_map_format: a RoutingMapFormat, its value or its name.

    Returns:
      The routing map, and scores float32 [..., E], normalised to sum 1.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: of logits, from the scores. No double backward.
    Source: TransformerEngine, transformer_engine/pytorch/router.py (interface).

    >>> routing_map, scores = fused_compute_score_for_moe_aux_loss(torch.tensor([[0.0, 0.0]]), 1, "softmax")
    >>> routing_map.tolist(), scores.tolist()
    ([[True, False]], [[0.5, 0.5]])
    """
    logits = check.tensor("logits", logits, check.FLOATS, (..., "E"))
    *leading, E = logits.shape
    options = router_options(E, topk, score_function=score_function)
    check_slots(tuple(leading), options.topk)
    map_format = check_map_format(routing_map_format).name.lower()
    flat = logits.reshape(math.prod(leading), E)
    scores, routing_map = _AuxScores.call(flat, options.topk, options.numbers().score_function, map_format)
    return routing_map.reshape(*leading, routing_map.shape[1]), scores.reshape(logits.shape)

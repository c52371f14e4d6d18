"""Routing: selects the experts of each token and their weights, and computes the statistics of the losses."""

import dataclasses
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import TokenCall, all_manual, current_mesh, vary_alike
from anabranch.jax.ops.quantile import bin_bounds
from anabranch.options import ROUTER_NAMES, RouterKeywords, RouterOptions, check_names, router_options, takes_options


class Routing(NamedTuple):
    """The result of `route`, for logits [..., E].

    Attributes:
      weights: float32[..., K], 0 where the expert is -1.
      experts: int32[..., K], best first; -1: no expert.
      tokens_per_expert: int32[E] ([..., E] with sequence_stats).
      score_sum: float32[E] ([..., E] with sequence_stats), the sum over tokens of the auxiliary scores.
      lse: float32[...], logsumexp of the logits; 0 for a masked token.
      qb_histogram: int32[E, bins] with qb_bin_bounds, else None.
    """

    weights: jax.Array
    experts: jax.Array
    tokens_per_expert: jax.Array
    score_sum: jax.Array
    lse: jax.Array
    qb_histogram: jax.Array | None = None


class RouterResiduals(NamedTuple):
    """The values saved for the backward pass: inputs in their own dtype, integers, and float32."""

    logits: jax.Array
    experts: jax.Array
    token_mask: jax.Array | None
    lse: jax.Array | None


class Requested(NamedTuple):
    """The optional results that `route_forward` computes; those not requested are None."""

    tokens_per_expert: bool = True
    score_sum: bool = True
    lse: bool = True


_EVERYTHING = Requested()


class RouterOutputs(NamedTuple):
    """The result of `route_forward`: the fields of Routing."""

    weights: jax.Array
    experts: jax.Array
    tokens_per_expert: jax.Array | None
    score_sum: jax.Array | None
    lse: jax.Array | None
    qb_histogram: jax.Array | None


def forward_workspace(options: RouterOptions, requested: Requested, T: int, B: int, E: int) -> int:
    """Workspace bytes of the forward pass for T tokens in B sequences with separate statistics."""
    statistics = workspaces.statistics(T, B, E) if requested.tokens_per_expert or requested.score_sum else 0
    return statistics + (workspaces.quantile(T) if options.qb_bins else 0)


def route_forward(
    options: RouterOptions,
    logits: jax.Array,
    expert_bias: jax.Array | None,
    token_mask: jax.Array | None,
    forced_experts: jax.Array | None,
    qb_bin_bounds: jax.Array | None = None,
    requested: Requested = _EVERYTHING,
) -> RouterOutputs:
    """The forward rule of `route` on checked arguments: [..., E] logits, bool mask, int32 forced experts."""
    *leading, E = logits.shape
    T, K = math.prod(leading), options.topk
    sequences = leading[:-1] if options.sequence_stats else []
    stats = (math.prod(sequences), E) if options.sequence_stats else (E,)
    struct = jax.ShapeDtypeStruct
    results = ffi.call(
        "ab_xla_router_forward",
        {
            "logits": logits.reshape(T, E),
            "expert_bias": expert_bias,
            "token_mask": None if token_mask is None else token_mask.reshape(T),
            "forced_experts": None if forced_experts is None else forced_experts.reshape(T, K),
            "qb_bin_bounds": qb_bin_bounds,
        },
        {
            "weights": struct((T, K), jnp.float32),
            "experts": struct((T, K), jnp.int32),
            "tokens_per_expert": struct(stats, jnp.int32) if requested.tokens_per_expert else None,
            "score_sum": struct(stats, jnp.float32) if requested.score_sum else None,
            "lse": struct((T,), jnp.float32) if requested.lse else None,
            "qb_histogram": struct((E, options.qb_bins), jnp.int32) if options.qb_bins else None,
        },
        workspace=forward_workspace(options, requested, T, math.prod(sequences) if options.sequence_stats else 1, E),
        **options.numbers().forward(),
    )
    counts, score_sum, lse = (results[name] for name in ("tokens_per_expert", "score_sum", "lse"))
    return RouterOutputs(
        results["weights"].reshape(*leading, K),
        results["experts"].reshape(*leading, K),
        None if counts is None else counts.reshape(*sequences, E),
        None if score_sum is None else score_sum.reshape(*sequences, E),
        None if lse is None else lse.reshape(leading),
        results["qb_histogram"],
    )


def route_backward(
    options: RouterOptions,
    residuals: RouterResiduals,
    d_weights: jax.Array | None,
    d_score_sum: jax.Array | None,
    d_lse: jax.Array | None,
) -> jax.Array:
    """The backward rule of `route`: d_logits, in the logits' dtype; a cotangent of None means zero."""
    logits, experts, token_mask, lse = residuals
    if d_weights is None and d_score_sum is None and d_lse is None:
        return jnp.zeros_like(logits)
    *leading, E = logits.shape
    T, K = math.prod(leading), options.topk
    stats = (math.prod(leading[:-1]), E) if options.sequence_stats else (E,)
    if d_weights is None:
        options = dataclasses.replace(options, scaling_factor=1.0)  # affects weights only
    results = ffi.call(
        "ab_xla_router_backward",
        {
            "logits": logits.reshape(T, E),
            "experts": None if d_weights is None else experts.reshape(T, K),
            "token_mask": None if token_mask is None else token_mask.reshape(T),
            "lse": lse.reshape(T) if lse is not None and (options.reads_lse or d_lse is not None) else None,
            "d_weights": None if d_weights is None else d_weights.reshape(T, K),
            "d_score_sum": None if d_score_sum is None else d_score_sum.reshape(stats),
            "d_lse": None if d_lse is None else d_lse.reshape(T),
        },
        {"d_logits": jax.ShapeDtypeStruct((T, E), logits.dtype)},
        **options.numbers().backward(),
    )
    return results["d_logits"].reshape(logits.shape)


@takes_options(RouterKeywords)
def route(
    logits: jax.Array,
    topk: int,
    *,
    expert_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    forced_experts: jax.Array | None = None,
    sequence_stats: bool = False,
    qb_bin_bounds: jax.Array | tuple[float, float] | None = None,
    qb_bins: int | None = None,
    **options: Unpack[RouterKeywords],
) -> Routing:
    """Selects topk experts for every token and computes their weights.

    The largest logits win, ties go to the lower index. Scores are softmax over all experts, sigmoid, or sqrt(softplus).
    A weight is the score, optionally normalised over the selected experts, times scaling_factor. Arithmetic is float32.

    Args:
      logits: float32, bfloat16 or float16 [..., E].
      topk: K, 1 <= K <= E.
      expert_bias: float [E], added to the scores for the selection only (DeepSeek-V3's auxiliary-loss-free balancing).
      token_mask: bool [...], True for unmasked tokens. Masked ones have expert -1, weight 0 and are not counted.
      forced_experts: integer [..., K]: gives the selection (replay); -1 or out of range: no expert. It excludes
        expert_bias and groups. If all logits of a token's forced experts are -inf, weights normalised by softmax are
        NaN (0 / 0), and so are the token's gradients; other weights are 0.
      sequence_stats: logits are [..., S, E] and statistics keep the leading axes: one row per sequence of S tokens.
      qb_bin_bounds, qb_bins: quantile balancing: bounds, float32 [2] or a pair with lower < upper, and the number of
        bins between them, at most 2^20. The result's `qb_histogram` counts, per expert, the distance of a token's
        threshold, its (K+1)-th largest score with bias, above the expert's score; the first and the last bin are
        open-ended. `quantile_bias` computes a bias from it. Requires expert_bias and K < E, and excludes groups.
      {options}
        A group's score is the sum of its group_score_topk best scores with their bias: 1 is DeepSeek-V2's maximum, 2
        DeepSeek-V3's rule in most libraries. None, with groups: the sum of its K / group_topk best scores (logits for a
        normalised softmax without a bias).

    Returns:
      A Routing.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: for logits, from weights, score_sum and lse in one pass; none for expert_bias.

    Source: semantics, sections 1 and 2; expert_bias and groups as in DeepSeek-V3 (arXiv:2412.19437).

    >>> routing = route(jnp.array([[1.0, 3.0, 2.0]]), 2)
    >>> routing.experts.tolist(), routing.tokens_per_expert.tolist()
    ([[1, 2]], [0, 1, 1])
    """
    logits = check.array("logits", logits, check.FLOATS, (..., "E"))
    *leading, E = logits.shape
    check_names("route", ROUTER_NAMES, options)
    checked = router_options(E, topk, sequence_stats=sequence_stats, qb_bins=qb_bins, **options)
    if checked.sequence_stats and not leading:
        raise ValueError(f"logits: got {check.describe(logits)}, expected [..., S, E] with sequence_stats")
    operands = router_operands(checked, E, tuple(leading), expert_bias, token_mask, forced_experts)
    bounds = quantile_operand(checked, operands[0], qb_bin_bounds)
    run = _compiled_route if all_manual(current_mesh(logits)) else _route
    return run(checked, *vary_alike(logits, *operands, bounds))


def quantile_operand(options: RouterOptions, expert_bias: Any, qb_bin_bounds: Any) -> jax.Array | None:
    """Checks the array arguments of quantile balancing; returns the bounds, None if it is not used."""
    if (options.qb_bins > 0) != (qb_bin_bounds is not None):
        got = "qb_bin_bounds" if qb_bin_bounds is not None else "qb_bins"
        raise ValueError(f"{got}: got one by itself, expected qb_bin_bounds and qb_bins or neither")
    if qb_bin_bounds is None:
        return None
    if expert_bias is None:
        raise ValueError("expert_bias: got None with quantile balancing, expected one (zeros at the start)")
    return bin_bounds(qb_bin_bounds)


def router_operands(
    options: RouterOptions,
    num_experts: int,
    leading: tuple[int, ...],
    expert_bias: Any,
    token_mask: Any,
    forced_experts: Any,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Checks the optional arrays for logits [*leading, E]: (expert_bias, token_mask, forced_experts)."""
    check_slots(leading, options.topk)
    expert_bias = check.optional_array("expert_bias", expert_bias, check.FLOATS, (("E", num_experts),))
    token_mask = check.optional_array("token_mask", token_mask, check.BOOL, leading)
    if forced_experts is not None:
        forced_experts = check.indices("forced_experts", forced_experts, (*leading, options.topk))
        for name, given in (("expert_bias", expert_bias is not None), ("num_groups", options.num_groups > 0)):
            if given:
                raise ValueError(f"{name}: got one together with forced_experts, expected none")
    return expert_bias, token_mask, forced_experts


def check_slots(leading: tuple[int, ...], topk: int) -> None:
    """Refuses 2^31 or more assignments: indices are int32."""
    tokens = math.prod(leading)
    if tokens * topk >= check.INDEX_LIMIT:
        raise ValueError(f"logits: got {tokens} tokens with topk {topk}, expected fewer than 2^31 slots")


def _forward(options: RouterOptions, *arrays: Any) -> tuple[jax.Array, ...]:
    return tuple(array for array in route_forward(options, *arrays) if array is not None)


def _backward(options: RouterOptions, logits, experts, token_mask, lse, *cotangents) -> tuple[jax.Array, ...]:
    return (route_backward(options, RouterResiduals(logits, experts, token_mask, lse), *cotangents),)


def _token_axes(options: RouterOptions, logits: jax.Array) -> tuple[int, int]:
    """The number of leading token axes, and how many of them the statistics keep."""
    tokens = logits.ndim - 1
    return tokens, tokens - 1 if options.sequence_stats else 0


@reverse_mode("route", nondiff_argnums=(0,))
def _route(
    options: RouterOptions,
    logits: jax.Array,
    expert_bias: jax.Array | None,
    token_mask: jax.Array | None,
    forced_experts: jax.Array | None,
    qb_bin_bounds: jax.Array | None,
) -> Routing:
    t, s = _token_axes(options, logits)
    results = (t, t, s, s, t) if qb_bin_bounds is None else (t, t, s, s, t, 0)
    call = TokenCall(_forward, options, operands=(t, 0, t, t, 0), results=results)
    return Routing(*call(logits, expert_bias, token_mask, forced_experts, qb_bin_bounds))


def _route_fwd(options, *primals):
    arrays = [None if primal is None else primal.value for primal in primals]
    routing = _route(options, *arrays)
    return routing, RouterResiduals(arrays[0], routing.experts, arrays[2], routing.lse)


def _route_bwd(options, residuals, cotangents):
    d_weights, _, _, d_score_sum, d_lse = map(ffi.cotangent, cotangents[:5])
    t, s = _token_axes(options, residuals.logits)
    call = TokenCall(_backward, options, operands=(t, t, t, t, t, s, t), results=(t,))
    return *call(*residuals, d_weights, d_score_sum, d_lse), None, None, None, None


# symbolic_zeros: results without a cotangent add no work to the backward pass.
_route.defvjp(_route_fwd, _route_bwd, symbolic_zeros=True)

# A jax.shard_map that is not compiled does not support symbolic zeros.
_compiled_route = jax.jit(_route, static_argnums=0)

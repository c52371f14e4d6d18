"""TransformerEngine's router functions: dense probabilities and routing maps.

To move code from `transformer_engine.jax.router`, change the import. Differences: every score function works in every
layout, `topk_indices_dtype` returns indices instead of a map, leading axes are preserved, and an option without effect
is an error. Three kinds of options are ignored instead: those that `compute_aux_scores` does not use,
`use_pre_softmax` with scores other than softmax, and values that mean "not used".
"""

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import TokenCall, vary_alike
from anabranch.jax.ops.router import check_slots, quantile_operand
from anabranch.options import RouterOptions, router_options


class ScoreFunction(enum.IntEnum):
    """Score functions. Functions accept the member or its name in any case, but not a number.

    The values are TransformerEngine's. ab_score_function in C has others: 0 softmax, 1 sigmoid, 2 sqrtsoftplus.
    """

    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2


@dataclasses.dataclass(frozen=True)
class _DenseOptions:
    router: RouterOptions
    map_shape: int  # size of the map's last axis
    map_dtype: str
    auxiliary: bool  # auxiliary scores, instead of probabilities


def score_function_name(value: Any) -> str:
    """The score function's name for `route`, from a ScoreFunction or a name in any case."""
    if isinstance(value, ScoreFunction):
        return value.name.lower()
    names = [member.name.lower() for member in ScoreFunction]
    return check.choice("score_function", value.lower() if isinstance(value, str) else value, names)


def _index_dtype(value: Any, num_experts: int) -> str:
    name = check.dtype("topk_indices_dtype", value, check.INDICES)
    check_index_dtype("topk_indices_dtype", name, num_experts)
    return name


def fused_topk_with_score_function(
    logits: jax.Array,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    score_function: str | ScoreFunction = ScoreFunction.SOFTMAX,
    expert_bias: jax.Array | None = None,
    compute_aux_scores: bool = False,
    routing_map_format: str | int | RoutingMapFormat = RoutingMapFormat.BYTEMAP,
    topk_indices_dtype: Any = None,
    qb_histogram: jax.Array | None = None,
    qb_bin_bounds: jax.Array | tuple[float, float] | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[jax.Array, ...]:
    """Scores, top-k and weights with TransformerEngine's dense results.

    Args:
      logits: float32, bfloat16 or float16 [..., E].
      topk: K, 1 <= K <= E.
      use_pre_softmax: use raw softmax scores as weights; otherwise softmax over the selected logits. Other score
        functions ignore it: sigmoid and sqrtsoftplus scores are normalised if topk > 1.
      num_groups, group_topk: as in `route`; None, 0 or -1: no groups.
      scaling_factor: finite Python number; multiplies the probabilities.
      score_function: a ScoreFunction or its name.
      expert_bias: float [E], added to sigmoid and sqrtsoftplus scores for the selection only.
      compute_aux_scores: return the scores that load-balancing losses use instead: softmax, or scores divided by
        their sum, of all experts, and the map of the topk largest logits. The options above, except score_function, are
        then unused.
      routing_map_format: a RoutingMapFormat, its value or its name.
      topk_indices_dtype: int16, int32 or int64: the second result is the indices [..., K], best first, instead of a
        map; requires the default routing_map_format.
      qb_histogram: int32 [E, bins]: quantile balancing, as in `route`, which needs expert_bias and qb_bin_bounds. The
        third result is qb_histogram plus the counts of this call; a count saturates at 2^31 - 1.
      qb_bin_bounds: float32 [2] or a pair, lower < upper.
      qb_histogram_mode: "two_kernel" or "fused_atomic"; both give the same result here.

    Returns:
      probs [..., E] in the logits' dtype, zero where not selected (with compute_aux_scores: float32 auxiliary scores of
      all experts), and the routing map; with qb_histogram also the updated histogram.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: for logits, from the first result; cotangents at unselected probabilities are ignored.
    Source: TransformerEngine, transformer_engine/jax/router.py (interface).

    >>> probs, routing_map = fused_topk_with_score_function(jnp.array([[1.0, 3.0, 2.0]]), 1)
    >>> probs.tolist(), routing_map.tolist()
    ([[0.0, 1.0, 0.0]], [[False, True, False]])
    """
    logits = check.array("logits", logits, check.FLOATS, (..., "E"))
    E = logits.shape[-1]
    name = score_function_name(score_function)
    bins = _qb_bins(E, qb_histogram, qb_bin_bounds, qb_histogram_mode)
    if check.boolean("compute_aux_scores", compute_aux_scores):
        if bins is not None:
            raise ValueError("qb_histogram: got one with compute_aux_scores, expected none")
        options = router_options(E, topk, score_function=name)
        expert_bias = None
    else:
        pre_softmax = check.boolean("use_pre_softmax", use_pre_softmax)
        if expert_bias is not None and name == "softmax":
            raise ValueError("expert_bias: got one with score_function 'softmax', expected none")
        options = router_options(
            E,
            topk,
            score_function=name,
            normalize=normalizes(name, check.integer("topk", topk, 1, E), pre_softmax),
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
            qb_bins=bins,
        )
        expert_bias = check.optional_array("expert_bias", expert_bias, check.FLOATS, (("E", E),))
    check_slots(logits.shape[:-1], options.topk)
    map_format = check_map_format(routing_map_format)
    if topk_indices_dtype is not None:
        check_map_or_indices(map_format, "topk_indices_dtype")
        layout = options.topk, _index_dtype(topk_indices_dtype, E)
    elif map_format is RoutingMapFormat.BYTEMAP:
        layout = E, "bool"
    else:
        layout = math.ceil(E / 8), "uint8"
    dense = _DenseOptions(options, *layout, bool(compute_aux_scores))
    bounds = quantile_operand(options, expert_bias, qb_bin_bounds)
    first, routing_map, counts = _dense(dense, *vary_alike(logits, expert_bias, bounds))
    if qb_histogram is None:
        return first, routing_map
    return first, routing_map, qb_histogram + jnp.minimum(counts, check.INDEX_LIMIT - 1 - qb_histogram)


def _qb_bins(num_experts: int, histogram: Any, bounds: Any, mode: Any) -> int | None:
    """The number of bins of the histogram; None: no quantile balancing."""
    if histogram is None:
        check_no_histogram(bounds, mode)
        return None
    check_histogram_mode(mode)
    if bounds is None:
        raise ValueError("qb_bin_bounds: got None with qb_histogram, expected float32 [2] or a pair")
    return check_bins(check.array("qb_histogram", histogram, ("int32",), (("E", num_experts), "bins")))


def fused_compute_score_for_moe_aux_loss(
    logits: jax.Array,
    topk: int,
    score_function: str | ScoreFunction,
    routing_map_format: str | int | RoutingMapFormat = RoutingMapFormat.BYTEMAP,
) -> tuple[jax.Array, jax.Array]:
    """The scores that load-balancing losses use, and the map of the topk largest logits.

    Args:
      logits: float32, bfloat16 or float16 [..., E].
      topk: K, 1 <= K <= E.
      score_function: a ScoreFunction or its name.
      routing_map_format: a RoutingMapFormat, its value or its name.

    Returns:
      The routing map, and scores float32 [..., E] that sum to 1: softmax, or scores divided by their sum.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: for logits, from the scores.
    Source: TransformerEngine, transformer_engine/jax/router.py (interface).

    >>> routing_map, scores = fused_compute_score_for_moe_aux_loss(jnp.array([[0.0, 0.0]]), 1, "softmax")
    >>> routing_map.tolist(), scores.tolist()
    ([[True, False]], [[0.5, 0.5]])
    """
    scores, routing_map = fused_topk_with_score_function(
        logits,
        topk,
        score_function=score_function,
        compute_aux_scores=True,
        routing_map_format=routing_map_format,
    )
    return routing_map, scores


def _dense_forward(
    options: _DenseOptions, logits: jax.Array, expert_bias: Any, qb_bin_bounds: Any
) -> tuple[jax.Array, ...]:
    """(probs or auxiliary scores, routing map, experts unless the scores are auxiliary, counts with qb_bin_bounds)."""
    *leading, E = logits.shape
    T, router, struct = math.prod(leading), options.router, jax.ShapeDtypeStruct
    dense = struct((T, E), jnp.float32 if options.auxiliary else logits.dtype)
    results = ffi.call(
        "ab_xla_router_forward",
        {"logits": logits.reshape(T, E), "expert_bias": expert_bias, "qb_bin_bounds": qb_bin_bounds},
        {
            "probs": None if options.auxiliary else dense,
            "aux_scores": dense if options.auxiliary else None,
            "routing_map": struct((T, options.map_shape), np.dtype(options.map_dtype)),
            "experts": None if options.auxiliary else struct((T, router.topk), jnp.int32),
            "qb_histogram": struct((E, router.qb_bins), jnp.int32) if router.qb_bins else None,
        },
        workspace=workspaces.quantile(T) if router.qb_bins else 0,
        **router.numbers().forward(),
    )
    counts = results.pop("qb_histogram")
    dense_results = (a.reshape(*leading, a.shape[-1]) for a in results.values() if a is not None)
    return (*dense_results,) if counts is None else (*dense_results, counts)


def _dense_backward(options: _DenseOptions, logits: jax.Array, d_first: jax.Array, experts: Any) -> tuple[jax.Array]:
    *leading, E = logits.shape
    T, K = math.prod(leading), options.router.topk
    results = ffi.call(
        "ab_xla_router_backward",
        {
            "logits": logits.reshape(T, E),
            "experts": None if experts is None else experts.reshape(T, K),
            "d_aux_scores" if options.auxiliary else "d_probs": d_first.reshape(T, E),
        },
        {"d_logits": jax.ShapeDtypeStruct((T, E), logits.dtype)},
        **options.router.numbers().backward(),
    )
    return (results["d_logits"].reshape(logits.shape),)


@reverse_mode("fused_topk_with_score_function", nondiff_argnums=(0,))
def _dense(options: _DenseOptions, *operands: jax.Array | None) -> tuple[jax.Array, ...]:
    """(probs or auxiliary scores, routing map, counts or None) from logits, expert_bias, qb_bin_bounds."""
    return _dense_fwd(options, *operands)[0]


def _dense_fwd(options, logits, expert_bias, qb_bin_bounds):
    t = logits.ndim - 1
    results = (t, t) if options.auxiliary else (t, t, t)
    counted = () if qb_bin_bounds is None else (0,)
    call = TokenCall(_dense_forward, options, (t, 0, 0), results + counted)
    first, routing_map, *others = call(logits, expert_bias, qb_bin_bounds)
    counts = others.pop() if counted else None
    return (first, routing_map, counts), (logits, *others)


def _dense_bwd(options, residuals, cotangents):
    logits, *experts = residuals
    t = logits.ndim - 1
    call = TokenCall(_dense_backward, options, (t, t, t), (t,))
    return *call(logits, cotangents[0], *(experts or [None])), None, None


_dense.defvjp(_dense_fwd, _dense_bwd)

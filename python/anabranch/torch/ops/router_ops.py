"""The router's operations: routing in its compact and dense forms, and the auxiliary loss."""

import torch

from anabranch.options import SCORE_FUNCTIONS, Router, schema_of
from anabranch.torch.binding import calls
from anabranch.torch.binding.define import define

_SOFTMAX = SCORE_FUNCTIONS.index("softmax")
_ROUTER = schema_of(Router)


def allocate_route(
    logits, expert_bias, token_mask, forced_experts, qb_bin_bounds,
    sequences, qb_bins, needs_counts, needs_score_sum, needs_lse, *router,
):  # fmt: skip
    """Empty results of `route`."""
    topk = Router(*router).topk
    (T, E), empty = logits.shape, logits.new_empty
    stats = (sequences, E) if sequences >= 0 else (E,)
    return (
        empty((T, topk), dtype=torch.float32),
        empty((T, topk), dtype=torch.int32),
        empty(stats if needs_counts else (0,), dtype=torch.int32),
        empty(stats if needs_score_sum else (0,), dtype=torch.float32),
        empty((T,) if needs_lse else (0,), dtype=torch.float32),
        empty((E, qb_bins), dtype=torch.int32),
    )


def route_calls(
    results, logits, expert_bias, token_mask, forced_experts, qb_bin_bounds,
    sequences, qb_bins, needs_counts, needs_score_sum, needs_lse, *router,
):  # fmt: skip
    """The C call of `route`."""
    weights, experts, tokens_per_expert, score_sum, lse, histogram = results
    return calls.router_forward(
        {
            "logits": logits,
            "expert_bias": expert_bias,
            "token_mask": token_mask,
            "forced_experts": forced_experts,
            "weights": weights,
            "experts": experts,
            "tokens_per_expert": tokens_per_expert if needs_counts else None,
            "score_sum": score_sum if needs_score_sum else None,
            "lse": lse if needs_lse else None,
            "qb_bin_bounds": qb_bin_bounds,
            "qb_histogram": histogram if qb_bins else None,
        },
        **Router(*router).forward(),
    )


#: Statistics are [E], or [sequences, E] if sequences >= 0; the histogram is [E, qb_bins]. Results not requested are
#: [0].
route = define(
    "route(Tensor logits, Tensor? expert_bias, Tensor? token_mask, Tensor? forced_experts, Tensor? qb_bin_bounds, "
    f"SymInt sequences, int qb_bins, bool needs_counts, bool needs_score_sum, bool needs_lse, {_ROUTER}) -> "
    "(Tensor weights, Tensor experts, Tensor tokens_per_expert, Tensor score_sum, Tensor lse, Tensor qb_histogram)",
    allocate_route,
    route_calls,
)


def route_backward_calls(d_logits, logits, experts, token_mask, lse, d_weights, d_score_sum, d_lse, *router):
    """The C call of `route_backward`."""
    options = Router(*router)
    return calls.router_backward(
        {
            "logits": logits,
            "experts": experts,
            "token_mask": token_mask,
            "lse": lse if options.score_function == _SOFTMAX or d_lse is not None else None,
            "d_weights": d_weights,
            "d_score_sum": d_score_sum,
            "d_lse": d_lse,
            "d_logits": d_logits,
        },
        **options.backward(),
    )


route_backward = define(
    "route_backward(Tensor logits, Tensor? experts, Tensor? token_mask, Tensor? lse, Tensor? d_weights, "
    f"Tensor? d_score_sum, Tensor? d_lse, {_ROUTER}) -> Tensor",
    lambda logits, *_: logits.new_empty(logits.shape),
    route_backward_calls,
)


def _allocate_map(logits, map_format):
    T, E = logits.shape
    shape = {"bytemap": (T, E), "bitmap_u8": (T, -(-E // 8)), "": (0,)}[map_format]
    return logits.new_empty(shape, dtype=torch.uint8 if map_format == "bitmap_u8" else torch.bool)


def _allocate_route_dense(logits, expert_bias, qb_bin_bounds, map_format, qb_bins, *router):
    (T, E), empty, topk = logits.shape, logits.new_empty, Router(*router).topk
    return (
        empty((T, E)),
        _allocate_map(logits, map_format),
        empty((T, topk), dtype=torch.int32),
        empty((E, qb_bins), dtype=torch.int32),
    )


def _route_dense(
    results, logits, expert_bias, qb_bin_bounds, map_format, qb_bins, *router
):  # fmt: skip
    probs, routing_map, experts, histogram = results
    return calls.router_forward(
        {
            "logits": logits,
            "expert_bias": expert_bias,
            "experts": experts,
            "probs": probs,
            "routing_map": routing_map if map_format else None,
            "qb_bin_bounds": qb_bin_bounds,
            "qb_histogram": histogram if qb_bins else None,
        },
        **Router(*router).forward(),
    )


#: Probabilities [T, E], the routing map in the named RoutingMapFormat ("": no map, [0]), experts [T, K], histogram.
route_dense = define(
    f"route_dense(Tensor logits, Tensor? expert_bias, Tensor? qb_bin_bounds, str map_format, int qb_bins, {_ROUTER}) "
    "-> (Tensor probs, Tensor routing_map, Tensor experts, Tensor qb_histogram)",
    _allocate_route_dense,
    _route_dense,
)


def _route_dense_backward(d_logits, logits, experts, d_probs, *router):
    return calls.router_backward(
        {"logits": logits, "experts": experts, "d_probs": d_probs, "d_logits": d_logits},
        **Router(*router).backward(),
    )


route_dense_backward = define(
    f"route_dense_backward(Tensor logits, Tensor experts, Tensor d_probs, {_ROUTER}) -> Tensor",
    lambda logits, *_: logits.new_empty(logits.shape),
    _route_dense_backward,
)


def _aux_scores(results, logits, topk, score_function, map_format):
    scores, routing_map = results
    return calls.router_forward(
        {"logits": logits, "aux_scores": scores, "routing_map": routing_map},
        topk=topk,
        score_function=score_function,
        normalize=1,
        scaling_factor=1.0,
    )


#: Auxiliary scores [T, E], float32, and the routing map of the topk highest logits.
aux_scores = define(
    "aux_scores(Tensor logits, int topk, int score_function, str map_format) -> (Tensor scores, Tensor routing_map)",
    lambda logits, topk, score_function, map_format: (
        logits.new_empty(logits.shape, dtype=torch.float32),
        _allocate_map(logits, map_format),
    ),
    _aux_scores,
)


def _aux_scores_backward(d_logits, logits, d_scores, score_function):
    return calls.router_backward(
        {"logits": logits, "d_aux_scores": d_scores, "d_logits": d_logits},
        topk=1,
        score_function=score_function,
        normalize=1,
        scaling_factor=1.0,
    )


aux_scores_backward = define(
    "aux_scores_backward(Tensor logits, Tensor d_scores, int score_function) -> Tensor",
    lambda logits, *_: logits.new_empty(logits.shape),
    _aux_scores_backward,
)


def _moe_aux_loss(loss, probs, tokens_per_expert, num_tokens, topk, num_experts, coeff):
    return calls.moe_aux_loss(
        {"probs": probs, "tokens_per_expert": tokens_per_expert, "num_tokens": num_tokens, "loss": loss},
        topk=topk,
        num_experts=num_experts,
        coeff=coeff,
    )


moe_aux_loss = define(
    "moe_aux_loss(Tensor probs, Tensor tokens_per_expert, Tensor num_tokens, int topk, int num_experts, float coeff) "
    "-> Tensor",
    lambda probs, *_: probs.new_empty((), dtype=torch.float32),
    _moe_aux_loss,
)


def _moe_aux_loss_backward(
    d_probs, d_loss, tokens_per_expert, num_tokens, rows, dtype, topk, num_experts, coeff
):  # fmt: skip
    return calls.moe_aux_loss(
        {"tokens_per_expert": tokens_per_expert, "num_tokens": num_tokens, "d_loss": d_loss, "d_probs": d_probs},
        topk=topk,
        num_experts=num_experts,
        coeff=coeff,
    )


#: The gradient of probs, [rows, C] in `dtype`.
moe_aux_loss_backward = define(
    "moe_aux_loss_backward(Tensor d_loss, Tensor tokens_per_expert, Tensor num_tokens, SymInt rows, ScalarType dtype, "
    "int topk, int num_experts, float coeff) -> Tensor",
    lambda d_loss, tokens_per_expert, num_tokens, rows, dtype, *_: d_loss.new_empty(
        (rows, tokens_per_expert.shape[0]), dtype=dtype
    ),
    _moe_aux_loss_backward,
)

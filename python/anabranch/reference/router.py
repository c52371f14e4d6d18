"""The router in numpy float64: weights, statistics, dense outputs and their gradients.

`docs/semantics.md`, sections 1, 2 and 4, as code. Inputs of any floating dtype are converted to float64 first. Leading
dimensions are preserved; "T" below means any number of them.
"""

import math
from typing import NamedTuple

import numpy as np

from .scores import as_float64, logsumexp, score_gradient, scores
from .selection import groups_in_use, select, selection_agrees, selection_keys

__all__ = [
    "Routing",
    "aux_scores",
    "aux_scores_backward",
    "count_tokens",
    "dense",
    "dense_backward",
    "logsumexp",
    "route",
    "route_backward",
    "score_gradient",
    "scores",
    "select",
    "selection_agrees",
    "selection_keys",
    "unpack_bitmap",
]

EPSILON = 1e-20  # added to every sum of scores in a denominator


class Routing(NamedTuple):
    """The result of `route`; B is present only if `sequences` is given.

    weights: float64[..., K], 0 where the expert is -1.
    experts: int32[..., K], best first.
    tokens_per_expert: int32[E] or [B, E].
    score_sum: float64[E] or [B, E], the sum of the auxiliary scores over the unmasked tokens.
    lse: float64[...], logsumexp of the logits, 0 for a masked token.
    """

    weights: np.ndarray
    experts: np.ndarray
    tokens_per_expert: np.ndarray
    score_sum: np.ndarray
    lse: np.ndarray


def _selected_experts(z, topk, forced_experts, replay, experts, token_mask, selection):
    """Experts int64[..., K]: forced, given, replayed or selected; indices out of range become -1."""
    if forced_experts is not None:
        grouping = (selection[name] for name in ("num_groups", "group_topk", "group_score_topk"))
        grouped = groups_in_use(*grouping) is not None
        given = {"expert_bias": selection["expert_bias"] is not None, "groups": grouped, "replay": replay is not None}
        clash = [name for name, there in (given | {"experts": experts is not None}).items() if there]
        if clash:
            raise ValueError(f"forced_experts: got it together with {', '.join(clash)}, expected it alone")
        experts = forced_experts
    if experts is None:
        experts = select(z, topk, token_mask=token_mask, **selection).astype(np.int64)
        if replay is None:
            return experts
        experts = np.where(replay.replayed(), replay.experts, experts)
    experts = np.asarray(experts)
    if experts.dtype.kind not in "iu":
        raise TypeError(f"experts: got dtype {experts.dtype}, expected an integer dtype")
    if experts.shape != (*z.shape[:-1], topk):
        raise ValueError(f"experts: got shape {experts.shape}, expected {(*z.shape[:-1], topk)}")
    experts = experts.astype(np.int64)
    experts = np.where((experts < 0) | (experts >= z.shape[-1]), -1, experts)
    return experts if token_mask is None else np.where(np.asarray(token_mask)[..., None], experts, -1)


# ---------------------------------------------------------------- weights


def _take_selected(array, experts):
    """array[..., E] at the experts, 0 for expert -1. [..., K]."""
    taken = np.take_along_axis(array, np.maximum(experts, 0), axis=-1)
    return np.where(experts >= 0, taken, 0.0)


def _add_at_selected(values, experts, num_experts):
    """out[..., E] with values[..., K] added at the experts; repeated experts add up, -1 is skipped."""
    rows = experts.reshape(-1, experts.shape[-1])
    out = np.zeros((rows.shape[0], num_experts))
    token, slot = np.nonzero(rows >= 0)
    np.add.at(out, (token, rows[token, slot]), values.reshape(rows.shape)[token, slot])
    return out.reshape(*experts.shape[:-1], num_experts)


def _unscaled_weights(z, experts, score_function, normalize):
    """Weights before scaling_factor, float64[..., K].

    A row that contains NaN or +inf has only NaN softmax weights, even if that logit is not selected.
    """
    valid = experts >= 0
    if score_function == "softmax" and normalize:
        selected = np.where(valid, _take_selected(z, experts), -np.inf)
        # exp(z - max) / sum; a row without experts has no maximum to subtract.
        top = np.where(valid.any(-1), selected.max(-1), 0.0)[..., None]
        with np.errstate(invalid="ignore"):
            numerator = np.exp(selected - top)
            weights = numerator / np.where(valid.any(-1), numerator.sum(-1), 1.0)[..., None]
        broken = (np.isnan(z) | (z == np.inf)).any(-1)[..., None]
        return np.where(valid, np.where(broken, np.nan, weights), 0.0)
    s = _take_selected(scores(z, score_function), experts)
    if score_function == "softmax" or not normalize:
        return s
    with np.errstate(invalid="ignore"):
        return np.where(valid, s / (s.sum(-1, keepdims=True) + EPSILON), 0.0)


def _valid_tokens(shape, token_mask):
    """bool[...], True for unmasked tokens."""
    if token_mask is None:
        return np.ones(shape, bool)
    mask = np.asarray(token_mask)
    if mask.dtype != bool or mask.shape != tuple(shape):
        raise ValueError(f"token_mask: got {mask.dtype}{mask.shape}, expected bool{tuple(shape)}")
    return mask


def count_tokens(experts, num_experts):
    """int32[E]: the number of assignments per expert; -1 is not counted."""
    experts = np.asarray(experts).ravel()
    return np.bincount(experts[experts >= 0], minlength=num_experts).astype(np.int32)


def route(
    logits,
    topk,
    *,
    score_function="softmax",
    normalize=True,
    expert_bias=None,
    num_groups=None,
    group_topk=None,
    group_score_topk=None,
    scaling_factor=1.0,
    token_mask=None,
    forced_experts=None,
    replay=None,
    experts=None,
    sequences=None,
):
    """Computes weights, experts and statistics of every token.

    Args:
      logits: [..., E], any floating dtype.
      topk: K.
      score_function, normalize, expert_bias [E], num_groups, group_topk, group_score_topk,
        scaling_factor, token_mask bool[...], forced_experts int[..., K]: section 1.
      replay: a `Replay`, section 14.
      experts: int[..., K], a selection that was already made, for example by a backend. Unlike `forced_experts` it may
        be combined with every option; options that only affect selection then have no effect.
      sequences: B. The tokens are B equal contiguous sequences; tokens_per_expert and score_sum are [B, E].

    Returns: `Routing`.
    """
    z = as_float64(logits, "logits")
    selection = {
        "score_function": score_function,
        "normalize": normalize,
        "expert_bias": expert_bias,
        "num_groups": num_groups,
        "group_topk": group_topk,
        "group_score_topk": group_score_topk,
    }
    real = _valid_tokens(z.shape[:-1], token_mask)
    chosen = _selected_experts(z, topk, forced_experts, replay, experts, token_mask, selection)
    weights = _unscaled_weights(z, chosen, score_function, normalize) * scaling_factor
    if replay is not None and replay.weights is not None:
        weights = np.where(replay.replayed(), as_float64(replay.weights, "replay.weights"), weights)
    weights = np.where(chosen >= 0, weights, 0.0)
    auxiliary = aux_scores(z, score_function, token_mask)
    num_experts = z.shape[-1]
    if sequences is None:
        counts = count_tokens(chosen, num_experts)
        score_sum = auxiliary.reshape(-1, num_experts).sum(axis=0)
    else:
        per_sequence = chosen.reshape(sequences, -1)
        counts = np.stack([count_tokens(one, num_experts) for one in per_sequence])
        score_sum = auxiliary.reshape(sequences, -1, num_experts).sum(axis=1)
    return Routing(weights, chosen.astype(np.int32), counts, score_sum, np.where(real, logsumexp(z), 0.0))


def route_backward(
    logits,
    topk,
    d_weights=None,
    d_score_sum=None,
    d_lse=None,
    *,
    score_function="softmax",
    normalize=True,
    expert_bias=None,
    num_groups=None,
    group_topk=None,
    group_score_topk=None,
    scaling_factor=1.0,
    token_mask=None,
    forced_experts=None,
    replay=None,
    experts=None,
    sequences=None,
):
    """d_logits, float64[..., E], from the cotangents of `route`'s differentiable results.

    Args: d_weights [..., K], d_score_sum [E] ([B, E] with `sequences`), d_lse [...]; None means zero. Other arguments
    as in `route`. Implements the formulas of section 4.
    """
    z = as_float64(logits, "logits")
    selection = {
        "score_function": score_function,
        "normalize": normalize,
        "expert_bias": expert_bias,
        "num_groups": num_groups,
        "group_topk": group_topk,
        "group_score_topk": group_score_topk,
    }
    real = _valid_tokens(z.shape[:-1], token_mask)
    d_logits = np.zeros_like(z)
    if d_weights is not None:
        chosen = _selected_experts(z, topk, forced_experts, replay, experts, token_mask, selection)
        g = np.where(chosen >= 0, as_float64(d_weights, "d_weights") * scaling_factor, 0.0)
        through_weights = _weights_backward(z, chosen, g, score_function, normalize)
        if replay is not None and replay.weights is not None:  # recorded weights are constants
            through_weights = np.where(replay.replayed(), 0.0, through_weights)
        d_logits += through_weights
    if d_score_sum is not None:
        num_experts = z.shape[-1]
        d_score_sum = as_float64(d_score_sum, "d_score_sum")
        tokens = z.size // num_experts if num_experts else 0
        each = d_score_sum if sequences is None else np.repeat(d_score_sum, tokens // sequences, axis=0)
        g = np.broadcast_to(each, (tokens, num_experts)).reshape(z.shape)
        d_logits += aux_scores_backward(z, g, score_function, token_mask)
    if d_lse is not None:
        d_logits += as_float64(d_lse, "d_lse")[..., None] * scores(z, "softmax")
    return np.where(real[..., None], d_logits, 0.0)


def _weights_backward(z, experts, g, score_function, normalize):
    num_experts = z.shape[-1]
    if score_function == "softmax" and normalize:
        # dz_k = w_k (g_k - sum_R g w)
        w = _unscaled_weights(z, experts, score_function, normalize)
        return _add_at_selected(w * (g - (g * w).sum(-1, keepdims=True)), experts, num_experts)
    s = scores(z, score_function)
    s_selected = _take_selected(s, experts)
    if score_function == "softmax":
        # dz_e = s_e ([e in R] g_e - sum_R g s), for all e
        inner = (g * s_selected).sum(-1, keepdims=True)
        return s * (_add_at_selected(g, experts, num_experts) - inner)
    ds = _normalized_backward(s_selected, g) if normalize else g
    d_selected = ds * _take_selected(score_gradient(z, score_function), experts)
    return _add_at_selected(d_selected, experts, num_experts)


def _normalized_backward(s, g):
    """ds of s_k / S, S = sum s + 1e-20:  ds_k = (g_k - sum_j g_j s_j / S) / S."""
    total = s.sum(-1, keepdims=True) + EPSILON
    with np.errstate(invalid="ignore"):
        return (g - (g * s).sum(-1, keepdims=True) / total) / total


# ---------------------------------------------------------------- auxiliary scores


def aux_scores(logits, score_function, token_mask=None):
    """a of section 3, float64[..., E]: softmax, or s / (sum_E s + 1e-20); 0 for a masked token."""
    z = as_float64(logits, "logits")
    s = scores(z, score_function)
    if score_function != "softmax":
        with np.errstate(invalid="ignore"):
            s = s / (s.sum(-1, keepdims=True) + EPSILON)
    return np.where(_valid_tokens(z.shape[:-1], token_mask)[..., None], s, 0.0)


def aux_scores_backward(logits, d_scores, score_function, token_mask=None):
    """d_logits, float64[..., E], from the cotangent [..., E] of `aux_scores`."""
    z = as_float64(logits, "logits")
    g = as_float64(d_scores, "d_scores")
    s = scores(z, score_function)
    if score_function == "softmax":
        d_logits = s * (g - (g * s).sum(-1, keepdims=True))
    else:
        d_logits = _normalized_backward(s, g) * score_gradient(z, score_function)
    return np.where(_valid_tokens(z.shape[:-1], token_mask)[..., None], d_logits, 0.0)


# ---------------------------------------------------------------- dense outputs


def dense(weights, experts, num_experts, routing_map_format="bytemap", index_dtype=np.int32):
    """The dense form of a routing: (probs float64[..., E], routing map).

    routing_map_format: "bytemap": bool[..., E]; "bitmap_u8": uint8[..., ceil(E/8)], expert e is bit
    e%8 of byte e/8; "indices": `experts` as index_dtype.
    """
    experts = np.asarray(experts, np.int64)
    probs = _add_at_selected(as_float64(weights, "weights"), experts, num_experts)
    bytemap = _add_at_selected(np.ones(experts.shape), experts, num_experts) > 0
    if routing_map_format == "bytemap":
        return probs, bytemap
    if routing_map_format == "bitmap_u8":
        return probs, np.packbits(bytemap, axis=-1, bitorder="little")
    if routing_map_format == "indices":
        return probs, experts.astype(index_dtype)
    raise ValueError(f"routing_map_format: got {routing_map_format!r}, expected 'bytemap', 'bitmap_u8' or 'indices'")


def dense_backward(d_probs, experts):
    """The cotangent of the weights [..., K] from that of the probs [..., E]; unselected ones are ignored."""
    return _take_selected(as_float64(d_probs, "d_probs"), np.asarray(experts, np.int64))


def unpack_bitmap(bitmap, num_experts):
    """bool[..., E] of a uint8[..., ceil(E/8)] bitmap; bits past E must be 0."""
    bits = np.unpackbits(np.asarray(bitmap, np.uint8), axis=-1, bitorder="little").astype(bool)
    if bits.shape[-1] != math.ceil(num_experts / 8) * 8:
        raise ValueError(f"bitmap: got {bits.shape[-1] // 8} bytes, expected {math.ceil(num_experts / 8)}")
    if bits[..., num_experts:].any():
        raise ValueError(f"bitmap: got a bit set at or past {num_experts}, expected unused bits 0")
    return bits[..., :num_experts]

"""Load-balance and z losses in numpy float64, with their gradients. Semantics, section 3."""

import numpy as np

from .scores import as_float64


def _per_token_squared(coeff, num_experts, topk, num_tokens):
    """coeff E / (K N^2), 0 where N = 0."""
    n = np.asarray(num_tokens, np.float64)
    return np.where(n > 0, coeff * num_experts / (topk * np.where(n > 0, n, 1.0) ** 2), 0.0)


def _load_balance_scale(score_sum, topk, coeff, num_tokens):
    """d loss / d (score_sum * tokens_per_expert), broadcast over the last axis."""
    num_experts = score_sum.shape[-1]
    scale = np.broadcast_to(_per_token_squared(coeff, num_experts, topk, num_tokens), score_sum.shape[:-1])
    return scale[..., None] / max(scale.size, 1)


def load_balance_loss(score_sum, tokens_per_expert, topk, coeff, num_tokens):
    """coeff E / (K N^2) sum_e score_sum[e] tokens_per_expert[e], or its mean over B sequences.

    Args:
      score_sum, tokens_per_expert: [E], or [B, E] for the sequence-level loss.
      topk: K. coeff: a number.
      num_tokens: N, the unmasked tokens of the batch, or int[B] per sequence. A sequence with N = 0 contributes 0.

    Returns: float64 scalar.
    """
    score_sum = as_float64(score_sum, "score_sum")
    scale = _load_balance_scale(score_sum, topk, coeff, num_tokens)
    products = score_sum * np.asarray(tokens_per_expert, np.float64)
    return np.where(scale != 0, scale * products, 0.0).sum()


def load_balance_loss_backward(score_sum, tokens_per_expert, topk, coeff, num_tokens, d_loss=1.0):
    """d_score_sum, [E] or [B, E]; the counts get no gradient."""
    score_sum = as_float64(score_sum, "score_sum")
    scale = _load_balance_scale(score_sum, topk, coeff, num_tokens)
    return float(d_loss) * scale * np.asarray(tokens_per_expert, np.float64)


def z_loss(lse, coeff, num_tokens):
    """coeff / N sum_t lse[t]^2; lse [...], 0 for a masked token; N unmasked tokens. 0 if N = 0."""
    lse = as_float64(lse, "lse")
    return coeff / num_tokens * (lse**2).sum() if num_tokens > 0 else np.float64(0.0)


def z_loss_backward(lse, coeff, num_tokens, d_loss=1.0):
    """d_lse [...] = 2 coeff / N lse."""
    lse = as_float64(lse, "lse")
    return float(d_loss) * 2 * coeff / num_tokens * lse if num_tokens > 0 else np.zeros_like(lse)


def _fused_scale(probs, topk, coeff, total_num_tokens, num_experts):
    num_experts = probs.shape[1] if num_experts is None else num_experts
    if probs.shape[1] % num_experts:
        raise ValueError(f"num_experts: got {num_experts}, expected a divisor of {probs.shape[1]} columns")
    total_num_tokens = probs.shape[0] if total_num_tokens is None else total_num_tokens
    return float(_per_token_squared(coeff, num_experts, topk, total_num_tokens))


def fused_moe_aux_loss(probs, tokens_per_expert, topk, coeff, total_num_tokens=None, num_experts=None):
    """TransformerEngine's formula: coeff E / (K N^2) sum_j (sum_t probs[t, j]) tokens_per_expert[j].

    Args:
      probs: [T, C]. The C columns are the E experts, or several sequences' experts side by side.
      tokens_per_expert: [C], any integer dtype or float32.
      total_num_tokens: N, T by default. num_experts: E, C by default.

    Returns: float64 scalar.
    """
    probs = as_float64(probs, "probs")
    scale = _fused_scale(probs, topk, coeff, total_num_tokens, num_experts)
    return scale * (probs.sum(axis=0) * np.asarray(tokens_per_expert, np.float64)).sum() if scale else 0.0


def fused_moe_aux_loss_backward(
    probs, tokens_per_expert, topk, coeff, total_num_tokens=None, num_experts=None, d_loss=1.0
):
    """d_probs float64[T, C], with equal rows."""
    probs = as_float64(probs, "probs")
    scale = float(d_loss) * _fused_scale(probs, topk, coeff, total_num_tokens, num_experts)
    return np.broadcast_to(scale * np.asarray(tokens_per_expert, np.float64), probs.shape).copy()

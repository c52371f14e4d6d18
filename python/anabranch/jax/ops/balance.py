"""Load-balancing losses on the statistics that `route` returns.

For [E]- and [T]-sized data jax.numpy is as fast as a kernel, and JAX fuses, shards and differentiates it. Only the
column sums of dense scores, which read [T, E], have a kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.eager import compiled
from anabranch.jax.binding.sharding import TokenCall

_COUNTS = (*check.INTEGERS, "float32")


def _num_tokens(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """Converts a number of tokens, a Python int or an array (a scalar, or of `shape`), to float32."""
    if isinstance(value, int):
        # Other than jnp.float32, device_put of a NumPy number runs no program.
        return jax.device_put(np.float32(check.integer(name, value, 0, check.INDEX_LIMIT - 1)))
    scalar = getattr(value, "shape", shape) == ()
    tokens = check.amounts(name, value, _COUNTS, () if scalar else shape, minimum=0)
    return jax.lax.stop_gradient(tokens).astype(jnp.float32)


def _balance(
    score_sum: jax.Array, counts: jax.Array, num_experts: int, topk: int, coeff: float, tokens: jax.Array
) -> jax.Array:
    """coeff E / (K N^2) sum_e score_sum[e] counts[e] over the last axis; 0 if N = 0."""
    has_tokens = ~(tokens <= 0)  # NaN stays NaN
    scale = jnp.where(has_tokens, coeff * num_experts / topk / jnp.where(has_tokens, tokens, 1.0) ** 2, 0.0)
    counts = jax.lax.stop_gradient(counts).astype(jnp.float32)
    score_sum = jnp.where(has_tokens[..., None], score_sum, 0.0)
    return scale * jnp.sum(score_sum * counts, axis=-1)


@compiled(static_argnums=(0, 1))
def _mean_balance(topk: int, coeff: float, score_sum: jax.Array, counts: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean of `_balance` over the sequences."""
    losses = _balance(score_sum, counts, score_sum.shape[-1], topk, coeff, tokens)
    return jnp.sum(losses) / max(losses.size, 1)


def load_balance_loss(
    score_sum: jax.Array,
    tokens_per_expert: jax.Array,
    topk: int,
    coeff: float,
    num_tokens: int | jax.Array,
) -> jax.Array:
    """The load-balancing loss, coeff E / (K N^2) sum_e score_sum[e] tokens_per_expert[e].

    In a sharded program, sum score_sum, tokens_per_expert and num_tokens over the shards first.

    Args:
      score_sum: float32 [E], or [..., E] with one row per sequence (sequence_stats of `route`).
      tokens_per_expert: integers or float32, shaped like score_sum.
      topk: K, 1 <= K <= E.
      coeff: finite Python number.
      num_tokens: N, the number of unmasked tokens: an int or a scalar; with sequences also one per sequence, [...]. On
        the host it must be in [0, 2^31). On a device it is not checked: negative counts as 0, NaN makes the loss NaN.

    Returns:
      float32 scalar; with sequences the mean over them. A sequence with N = 0 contributes 0.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: for score_sum only.
    Source: Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4.

    >>> float(load_balance_loss(jnp.array([2.0, 2.0]), jnp.array([2, 2]), 1, 1.0, 4))
    1.0
    """
    score_sum = check.array("score_sum", score_sum, ("float32",), (..., "E"))
    *leading, E = score_sum.shape
    counts = check.amounts("tokens_per_expert", tokens_per_expert, _COUNTS, score_sum.shape)
    topk, coeff = check.integer("topk", topk, 1, E), check.number("coeff", coeff)
    tokens = _num_tokens("num_tokens", num_tokens, tuple(leading))
    return _mean_balance(topk, coeff, score_sum, counts, tokens)


def z_loss(
    lse: jax.Array,
    coeff: float,
    token_mask: jax.Array | None = None,
    num_tokens: int | jax.Array | None = None,
) -> jax.Array:
    """The router z-loss, coeff / N sum_t lse[t]^2 over the unmasked tokens, which keeps logits small.

    Args:
      lse: float32 [...], from `route`.
      coeff: finite Python number.
      token_mask: bool [...], True for unmasked tokens; None: no token is masked.
      num_tokens: N, an int or a scalar; None: the unmasked tokens of this call. A sharded program passes the number of
        the whole batch and sums the shards' losses. Checked as in `load_balance_loss`.

    Returns:
      float32 scalar; 0 if N = 0.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: for lse.
    Source: ST-MoE, https://arxiv.org/abs/2202.08906, equation 5.

    >>> float(z_loss(jnp.array([1.0, 3.0]), 0.1))
    0.5
    """
    lse = check.array("lse", lse, ("float32",), (...,))
    coeff = check.number("coeff", coeff)
    mask = check.optional_array("token_mask", token_mask, check.BOOL, lse.shape)
    tokens = None if num_tokens is None else _num_tokens("num_tokens", num_tokens, ())
    return _mean_square(coeff, lse, mask, tokens)


@compiled(static_argnums=(0,))
def _mean_square(coeff: float, lse: jax.Array, mask: jax.Array | None, tokens: jax.Array | None) -> jax.Array:
    """`mean_of_squares` over the unmasked tokens; tokens: their number, None: counted here."""
    if tokens is None:
        tokens = jnp.float32(lse.size) if mask is None else jnp.sum(mask).astype(jnp.float32)
    if mask is not None:
        lse = jnp.where(mask, lse, 0.0)
    return mean_of_squares(jnp.sum(jnp.square(lse)), coeff, tokens)


def mean_of_squares(squares: jax.Array, coeff: float, tokens: jax.Array) -> jax.Array:
    """The z-loss from the sum of lse^2 over float32 [] tokens; 0 without tokens."""
    has_tokens = ~(tokens <= 0)  # NaN stays NaN
    return jnp.where(has_tokens, coeff / jnp.where(has_tokens, tokens, 1.0), 0.0) * squares


def fused_moe_aux_loss(
    probs: jax.Array,
    tokens_per_expert: jax.Array,
    topk: int,
    coeff: float,
    total_num_tokens: int | jax.Array | None = None,
    num_experts: int | None = None,
) -> jax.Array:
    """The load-balancing loss of dense scores, coeff E / (K N^2) sum_e tokens_per_expert[e] sum_t probs[t, e].

    Args:
      probs: float32, bfloat16 or float16 [T, C], the auxiliary scores; C is E, or a multiple of it for the scores of
        several sequences side by side.
      tokens_per_expert: integers or float32 [C].
      topk: K, 1 <= K <= E.
      coeff: finite Python number.
      total_num_tokens: N, an int or a scalar array; None: T. Checked as in `load_balance_loss`.
      num_experts: E; None: C.

    Returns:
      float32 scalar for every dtype of probs; 0 if N = 0.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: for probs only.
    Source: TransformerEngine (interface); Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4.

    >>> float(fused_moe_aux_loss(jnp.full((4, 2), 0.5), jnp.array([2, 2]), 1, 1.0))
    1.0
    """
    probs = check.array("probs", probs, check.FLOATS, ("T", "C"))
    T, C = probs.shape
    counts = check.amounts("tokens_per_expert", tokens_per_expert, _COUNTS, (("C", C),))
    E = C if num_experts is None else check.integer("num_experts", num_experts, 1, check.INDEX_LIMIT - 1)
    if C % max(E, 1):
        raise ValueError(f"num_experts: got {E}, expected a divisor of the {C} columns of probs")
    topk, coeff = check.integer("topk", topk, 1, E), check.number("coeff", coeff)
    tokens = _num_tokens("total_num_tokens", T if total_num_tokens is None else total_num_tokens, ())
    return _dense_balance(E, topk, coeff, probs, counts, tokens)


def _sum(_: None, scores: jax.Array) -> tuple[jax.Array]:
    T, C = scores.shape
    results = {"score_sum": jax.ShapeDtypeStruct((C,), jnp.float32)}
    workspace = workspaces.statistics(T, 1, C)
    return (ffi.call("ab_xla_score_sum", {"scores": scores}, results, workspace=workspace)["score_sum"],)


def _spread(_: None, like: jax.Array, d_sum: jax.Array) -> tuple[jax.Array]:
    return (jnp.broadcast_to(d_sum.astype(like.dtype), (like.shape[0], d_sum.shape[0])),)


@reverse_mode("fused_moe_aux_loss")
def _score_sum(scores: jax.Array) -> jax.Array:
    """float32 column sums of [T, C], in an order that does not depend on the number of threads."""
    return TokenCall(_sum, None, operands=(1,), results=(0,))(scores)[0]


def _score_sum_fwd(scores):
    return _score_sum(scores), scores[:, :1]  # one column: the backward pass needs the tokens' sharding only


def _score_sum_bwd(like, d_sum):
    return TokenCall(_spread, None, operands=(1, 0), results=(1,))(like, d_sum)


_score_sum.defvjp(_score_sum_fwd, _score_sum_bwd)


@compiled(static_argnums=(0, 1, 2))
def _dense_balance(
    num_experts: int, topk: int, coeff: float, probs: jax.Array, counts: jax.Array, tokens: jax.Array
) -> jax.Array:
    """`_balance` of dense scores."""
    return _balance(_score_sum(probs), counts, num_experts, topk, coeff, tokens)

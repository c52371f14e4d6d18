"""The routing and the plan in JAX: ours, and as users of plain JAX write them, for XLA to compile."""

from typing import Any

import jax
import jax.numpy as jnp

from anabranch.bench.router_case import RouterCase
from anabranch.jax import Routing, fused_topk_with_score_function, route


def ours_dense(case: RouterCase, logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dense probabilities and byte map [T, E] from anabranch; `bias` [E] is for cases that have one."""
    return fused_topk_with_score_function(
        logits,
        case.K,
        use_pre_softmax=case.score_function == "softmax" and not case.normalize,
        num_groups=case.groups[0],
        group_topk=case.groups[1],
        score_function=case.score_function,
        expert_bias=bias if case.bias else None,
    )


def ours_balanced(case: RouterCase, logits: jax.Array, bias: jax.Array) -> Routing:
    """The same with the histogram of quantile balancing."""
    return ours_compact(case, logits, bias, qb_bin_bounds=(-1.0, 1.0), qb_bins=1000)


def ours_compact(case: RouterCase, logits: jax.Array, bias: jax.Array, **options: Any) -> Routing:
    """The same routing from `route`, with all its statistics."""
    return route(
        logits,
        case.K,
        score_function=case.score_function,
        normalize=case.normalize,
        num_groups=case.groups[0],
        group_topk=case.groups[1],
        expert_bias=bias if case.bias else None,
        **options,
    )


def xla_dense(case: RouterCase, logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dense probabilities and byte map as JAX users write them: lax.top_k and a scatter."""
    z = logits.astype(jnp.float32)
    softmax = case.score_function == "softmax"
    scores = jax.nn.softmax(z) if softmax else jax.nn.sigmoid(z)
    keys = scores + bias if case.bias else z
    groups, kept = case.groups
    if groups:
        grouped = keys.reshape(-1, groups, case.E // groups)
        best = jax.lax.top_k(jax.lax.top_k(grouped, case.K // kept)[0].sum(-1), kept)[1]
        keep = jnp.zeros(grouped.shape[:2], bool).at[jnp.arange(z.shape[0])[:, None], best].set(True)
        keys = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(z.shape)
    experts = jax.lax.top_k(keys, case.K)[1]
    weights = jnp.take_along_axis(z if softmax and case.normalize else scores, experts, -1)
    if case.normalize:
        weights = jax.nn.softmax(weights) if softmax else weights / (weights.sum(-1, keepdims=True) + 1e-20)
    token = jnp.arange(z.shape[0])[:, None]
    probs = jnp.zeros_like(logits).at[token, experts].set(weights.astype(logits.dtype))
    return probs, jnp.zeros(z.shape, bool).at[token, experts].set(True)


def xla_plan(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A plan without align_size, of experts [T, K] in [0, E).

    Returns:
      tokens_per_expert [E], offsets [E+1], row_of_slot [T, K] and slot_of_row [T*K].
    """
    keys = experts.ravel()
    slot_of_row = jnp.argsort(keys, stable=True).astype(jnp.int32)
    counts = jnp.bincount(keys, length=num_experts).astype(jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    row_of_slot = jnp.zeros_like(slot_of_row).at[slot_of_row].set(jnp.arange(keys.size, dtype=jnp.int32))
    return counts, offsets, row_of_slot.reshape(experts.shape), slot_of_row

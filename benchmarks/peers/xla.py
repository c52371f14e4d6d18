"""Routing, plan and the layer in plain JAX, as users write them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.shapes import RouterCase


def dense(case: RouterCase, logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes dense probabilities and the byte map with lax.top_k and a scatter."""
    z = logits.astype(jnp.float32)
    softmax = case.score_function == "softmax"
    scores = jax.nn.softmax(z) if softmax else jax.nn.sigmoid(z)
    keys = scores + bias if case.bias else z
    groups, group_topk = case.groups
    if groups:
        grouped = keys.reshape(-1, groups, case.E // groups)
        best = jax.lax.top_k(jax.lax.top_k(grouped, case.K // group_topk)[0].sum(-1), group_topk)[1]
        keep = jnp.zeros(grouped.shape[:2], bool).at[jnp.arange(z.shape[0])[:, None], best].set(True)
        keys = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(z.shape)
    experts = jax.lax.top_k(keys, case.K)[1]
    weights = jnp.take_along_axis(z if softmax and case.normalize else scores, experts, -1)
    if case.normalize:
        weights = jax.nn.softmax(weights) if softmax else weights / (weights.sum(-1, keepdims=True) + 1e-20)
    token = jnp.arange(z.shape[0])[:, None]
    probs = jnp.zeros_like(logits).at[token, experts].set(weights.astype(logits.dtype))
    return probs, jnp.zeros(z.shape, bool).at[token, experts].set(True)


def plan(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes the plan of experts [T, K] in [0, E), without align_size.

    Returns:
      tokens_per_expert [E], offsets [E+1], row_of_slot [T, K] and slot_of_row [T*K].
    """
    keys = experts.ravel()
    slot_of_row = jnp.argsort(keys, stable=True).astype(jnp.int32)
    counts = jnp.bincount(keys, length=num_experts).astype(jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    row_of_slot = jnp.zeros_like(slot_of_row).at[slot_of_row].set(jnp.arange(keys.size, dtype=jnp.int32))
    return counts, offsets, row_of_slot.reshape(experts.shape), slot_of_row


def network(
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    token: jax.Array,
    sizes: jax.Array,
    product: Callable[..., jax.Array] = jax.lax.ragged_dot,
) -> jax.Array:
    """Computes SwiGLU experts on rows grouped by expert. Row r reads x[token[r]]."""
    E, D, _, F = w_in.shape
    h = product(x[token], w_in.reshape(E, D, 2 * F), sizes)
    return product(jax.nn.silu(h[:, :F]) * h[:, F:], w_out, sizes)


def select(
    x: jax.Array, gate: jax.Array, experts: jax.Array | None, *, topk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns weights and experts [T, K], and tokens_per_expert [E]. Selects the top K if experts is None."""
    logits = jnp.dot(x, gate.astype(x.dtype), preferred_element_type=jnp.float32)
    if experts is None:
        top, experts = jax.lax.top_k(logits, topk)
    else:
        top = jnp.take_along_axis(logits, experts, -1)
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[1]).astype(jnp.int32)
    return jax.nn.softmax(top), experts, sizes


def layer(
    x: jax.Array,
    gate: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    experts: jax.Array | None = None,
    *,
    topk: int,
    product: Callable[..., jax.Array] = jax.lax.ragged_dot,
) -> jax.Array:
    """Computes the layer with top_k, argsort, ragged_dot and segment_sum."""
    weights, experts, sizes = select(x, gate, experts, topk=topk)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token = order // topk
    y = network(x, w_in, w_out, token, sizes, product)
    weighted = (y * weights.reshape(-1)[order][:, None]).astype(x.dtype)
    return jax.ops.segment_sum(weighted, token, num_segments=x.shape[0])

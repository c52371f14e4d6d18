"""Plan, dispatch, experts and combine: on each shard inside a jax.shard_map, and an error where rows would be cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import P, assert_no_traffic_of_tokens, assert_trees_close, mesh_of, put

from anabranch.jax import (
    combine,
    dispatch,
    expert_ffn,
    grouped_matmul,
    plan,
    route,
    sort_chunks_by_index,
    token_combine,
    token_dispatch,
)

T, E, K, D, F = 64, 6, 2, 12, 16
_rng = np.random.default_rng(0)


def normal(*shape):
    return _rng.standard_normal(shape).astype(np.float32)


X, LOGITS, D_OUT, W_IN, W_OUT = normal(T, D), normal(T, E), normal(T, D), normal(E, D, 2, F), normal(E, F, D)
EXPERTS = np.argsort(-LOGITS, axis=1)[:, :K].astype(np.int32)


def layer(x, logits, w_in, w_out):
    routing = route(logits, K)
    layout = plan(routing.experts, E, align_size=4)
    y = expert_ffn(dispatch(x, layout), w_in, w_out, layout.group_sizes)
    return combine(y, layout, routing.weights)


def dense_layer(x, logits, w_in, w_out):
    """The same by TransformerEngine's names and single grouped products."""
    routing = route(logits, K)
    n = x.shape[0] * K
    chosen = jnp.any(routing.experts[:, :, None] == jnp.arange(E), axis=1)
    probs = jnp.sum(jnp.where(routing.experts[:, :, None] == jnp.arange(E), routing.weights[:, :, None], 0), axis=1)
    rows = token_dispatch(x, chosen, n)
    h = grouped_matmul(rows.output, w_in.reshape(E, D, 2 * F), rows.tokens_per_expert)
    a = jax.nn.silu(h[:, :F]) * h[:, F:]
    y = grouped_matmul(a, w_out, rows.tokens_per_expert)
    return token_combine(y, rows.row_id_map, probs)


@pytest.mark.parametrize("function", [layer, dense_layer])
def test_a_layer_of_pieces_inside_a_shard_map(axis_type, function):
    """Output and every gradient; those of the weights, which every shard has, are sums over the shards."""
    mesh = mesh_of(axis_type, a=4, b=2)
    tokens = P(("a", "b"))
    on_shards = jax.shard_map(function, mesh=mesh, in_specs=(tokens, tokens, P(), P()), out_specs=tokens)

    def step(function, x, logits, w_in, w_out, d_out):
        output, pull = jax.vjp(function, x, logits, w_in, w_out)
        return output, pull(d_out)

    want = jax.jit(lambda *a: step(function, *a))(X, LOGITS, W_IN, W_OUT, D_OUT)
    sharded = [put(mesh, a, ("a", "b")) for a in (X, LOGITS)] + [put(mesh, a) for a in (W_IN, W_OUT)]
    sharded.append(put(mesh, D_OUT, ("a", "b")))
    assert_trees_close(jax.jit(lambda *a: step(on_shards, *a))(*sharded), want, rtol=1e-5, atol=2e-5)
    assert_no_traffic_of_tokens(lambda *a: step(on_shards, *a), sharded, W_IN.size)


CALLS = {
    "plan": (lambda e: plan(e, E), EXPERTS),
    "dispatch": (lambda x: dispatch(x, plan(EXPERTS, E)), X),
    "combine": (lambda rows: combine(rows, plan(EXPERTS, E)), normal(T * K, D)),
    "grouped_matmul": (lambda x: grouped_matmul(x, W_OUT.swapaxes(1, 2), np.full(E, 4, np.int32)), X),
    "expert_ffn_forward": (lambda x: expert_ffn(x, W_IN, W_OUT, np.full(E, 4, np.int32)), X),
    "sort_chunks": (lambda x: sort_chunks_by_index(x, np.array([8, 8]), np.array([1, 0]))[0], X),
}


@pytest.mark.parametrize("name", CALLS)
def test_sharded_rows_are_refused_with_what_to_do_instead(axis_type, name):
    """Rows are counted over all tokens: to cut them is to gather them, which nobody has asked for."""
    function, array = CALLS[name]
    mesh = mesh_of(axis_type, a=8)
    whole = jax.jit(function)(put(mesh, array))
    assert_trees_close(whole, jax.jit(function)(array))
    message = (
        rf"{name}: got {array.dtype}\[{array.shape[0]}, {array.shape[1]}\] sharded.*expected whole arrays.*moe\(\)"
    )
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.jit(function)(put(mesh, array, "a"))

"""Plan, dispatch, experts and combine on sharded tokens and inside a jax.shard_map; errors for sharded rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
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
    """`layer` from TransformerEngine's functions and single grouped GEMMs."""
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
    """The output and every gradient; weights are replicated, so their gradients are sums over the shards."""
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


#: Experts of 64 tokens in two orders of dimensions, and options of the plan.
PLANS = {
    "plain": {},
    "aligned": {"align_size": 4},
    "aligned, rows that do not suffice": {"align_size": 8, "num_rows": 96},
    "few rows": {"num_rows": 5},
    "destinations": {"num_destinations": 3, "align_size": 8},
    "destinations that drop": {"num_destinations": 2, "num_rows": 60},
}
#: Shapes of the tokens, and the shardings of their dimensions over a mesh with a = 4, b = 2.
TOKENS = {
    "one axis": ((T,), ("a",)),
    "two axes": ((T,), (("a", "b"),)),
    "two axes, the other way round": ((T,), (("b", "a"),)),
    "sequences": ((8, 8), ("a", None)),
    "positions of one sequence": ((1, T), (None, ("a", "b"))),
}


def experts_with_holes(shape):
    """Experts with an unused one, a popular one, -1 and wrong indices."""
    rng = np.random.default_rng(6)
    experts = np.minimum(rng.integers(0, 2 * E, (T, K)), E - 1)
    experts[experts == 2] = E - 1
    experts[::7, 1], experts[5], experts[9, 0] = -1, (E, -3), 2**30
    return experts.astype(np.int32).reshape(*shape, K)


def pieces(options, experts, x, weights, d_out):
    """Plan, rows, outputs and every gradient."""
    layout = plan(experts, E, **options)
    rows, pull = jax.vjp(lambda x: dispatch(x, layout), x)
    output, pull_back = jax.vjp(lambda rows, w: combine(jnp.sin(rows), layout, w), rows, weights)
    plain = combine(rows, layout)
    d_rows, d_weights = pull_back(d_out)
    return layout, rows, output, plain, d_weights, d_rows, pull(d_rows)[0], layout.expert_of_row


@functools.cache
def pieces_on_one_device(shape, name):
    """The operands and the fields of a plan."""
    arrays = (experts_with_holes(shape), X.reshape(*shape, D), normal(*shape, K), D_OUT.reshape(*shape, D))
    return arrays, jax.jit(functools.partial(pieces, PLANS[name]))(*arrays)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_pieces_of_sharded_tokens_are_those_of_one_device(tokens, name):
    """Plan, rows, output and gradients have equal bits; devices exchange sums and no tokens.

    Types of axes alternate, so that each meets every plan and every sharding.
    """
    shape, spec = TOKENS[tokens]
    explicit = (list(PLANS).index(name) + list(TOKENS).index(tokens)) % 2
    mesh = mesh_of(AxisType.Explicit if explicit else AxisType.Auto, a=4, b=2)
    step = functools.partial(pieces, PLANS[name])
    arrays, want = pieces_on_one_device(shape, name)
    sharded = [put(mesh, array, *spec) for array in arrays]
    got = jax.jit(step)(*sharded)
    assert_trees_close(got, want, rtol=0, atol=0)
    for array in (got[0].row_of_slot, *got[2:5], got[6]):
        assert not array.sharding.is_fully_replicated
    assert_no_traffic_of_tokens(step, sharded, want[1].size)


def test_rows_of_other_dtypes(axis_type):
    mesh = mesh_of(axis_type, a=8)
    for dtype in ("bfloat16", "float16", "bool", "uint8", "int16", "int32"):
        x = jnp.asarray(np.abs(X) * 3, dtype)
        rows = jax.jit(lambda x: dispatch(x, plan(EXPERTS, E)))
        assert_trees_close(rows(put(mesh, x, "a")), rows(x), rtol=0, atol=0)


def test_positions_of_several_sequences_are_refused(axis_type):
    """The rows of a shard would interleave with those of others."""
    mesh = mesh_of(axis_type, a=8)
    experts = experts_with_holes((8, 8))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="experts: got a sharding of token dimension 1"):
        jax.jit(lambda e: plan(e, E))(put(mesh, experts, None, "a"))


#: Public function: its argument, the call, the array, and the start of XLA's error for automatic axes.
CALLS = {
    "combine": ("rows", lambda rows: combine(rows, plan(EXPERTS, E)), normal(T * K, D), "combine: got "),
    "grouped_matmul": (
        "x",
        lambda x: grouped_matmul(x, W_OUT.swapaxes(1, 2), np.full(E, 4, np.int32)),
        X,
        "grouped_matmul: got x ",
    ),
    "expert_ffn": (
        "rows",
        lambda x: expert_ffn(x, W_IN, W_OUT, np.full(E, 4, np.int32)),
        X,
        "expert_ffn_forward: got x ",
    ),
    "sort_chunks_by_index": (
        "inp",
        lambda x: sort_chunks_by_index(x, np.array([8, 8]), np.array([1, 0]))[0],
        X,
        "sort_chunks: got x ",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_sharded_rows_are_refused_with_advice(axis_type, name):
    """Rows are numbered over all tokens, so sharded rows would need a gather that no one requested."""
    argument, function, array, xla_error = CALLS[name]
    mesh = mesh_of(axis_type, a=8)
    whole = jax.jit(function)(put(mesh, array))
    assert_trees_close(whole, jax.jit(function)(array))
    got = rf"{array.dtype}\[{array.shape[0]}, {array.shape[1]}\] sharded.*expected whole (arrays|rows)"
    with pytest.raises(ValueError, match=f"^{argument}: got {got}.*{name}"):
        function(put(mesh, array, "a"))
    automatic = axis_type == AxisType.Auto  # inside a program XLA decides, and raises its own error
    error, words = (jax.errors.JaxRuntimeError, xla_error) if automatic else (ValueError, f"^{argument}: got ")
    with pytest.raises(error, match=words + got):
        jax.jit(function)(put(mesh, array, "a"))

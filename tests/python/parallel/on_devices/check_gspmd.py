"""Automatic axes with GSPMD instead of Shardy: equal results and no more traffic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import assert_no_traffic_of_tokens, assert_trees_close, collectives, mesh_of, placed, put

from anabranch.jax import (
    Parallel,
    combine,
    dispatch,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    load_balance_loss,
    plan,
    route,
)
from moe_cases import check_layer, operands

B, S, E, K = 16, 8, 12, 3
_rng = np.random.default_rng(0)
LOGITS = _rng.standard_normal((B, S, E)).astype(np.float32)
D_WEIGHTS = _rng.standard_normal((B, S, K)).astype(np.float32)
SPECS = pytest.mark.parametrize("spec", [("a",), ("a", "b"), (("b", "a"),)], ids=str)


@pytest.fixture(autouse=True)
def gspmd():
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip(f"JAX {jax.__version__} HAS NO GSPMD: nothing to check")
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


def routed(logits, d_weights):
    def loss(logits):
        routing = route(logits, K)
        balance = load_balance_loss(routing.score_sum, routing.tokens_per_expert, K, 3.0, B * S)
        return jnp.sum(routing.weights * d_weights) + balance, routing

    return jax.value_and_grad(loss, has_aux=True)(logits)


def dense(logits, d_weights):
    def loss(logits):
        probs, routing_map = fused_topk_with_score_function(logits, K)
        return jnp.sum(probs[..., :K] * d_weights), (probs, routing_map)

    return jax.value_and_grad(loss, has_aux=True)(logits)


@SPECS
@pytest.mark.parametrize("step", [routed, dense])
def test_routing_and_its_gradient(spec, step):
    mesh = mesh_of(a=4, b=2)
    arrays = [put(mesh, a, *spec) for a in (LOGITS, D_WEIGHTS)]
    assert_trees_close(jax.jit(step)(*arrays), jax.jit(step)(LOGITS, D_WEIGHTS))
    assert_no_traffic_of_tokens(step, arrays, E)


@pytest.mark.parametrize("spec", [(), ("a",), (("a", "b"),)], ids=str)
def test_the_loss_of_dense_scores(spec):
    scores, counts = LOGITS.reshape(-1, E) ** 2, np.arange(E, dtype=np.int32)
    step = jax.value_and_grad(lambda scores: fused_moe_aux_loss(scores, counts, K, 2.0))
    placed_scores = put(mesh_of(a=4, b=2), scores, *spec)
    got = jax.jit(step)(placed_scores)
    assert_trees_close(got, jax.jit(step)(scores))
    assert got[1].sharding.is_equivalent_to(placed_scores.sharding, 2)
    assert_no_traffic_of_tokens(step, [placed_scores], E)


def test_tokens_that_are_made_in_the_program_are_whole_until_something_divides_them():
    """GSPMD queries a call's partitioning before it knows the sharding of the tokens."""
    mesh = mesh_of(a=4, b=2)
    bias = np.linspace(-1, 1, E, dtype=np.float32)

    def step(bias, d_weights):
        routing = route(jnp.asarray(LOGITS), K, score_function="sigmoid", expert_bias=bias)
        return routing.experts, jnp.sum(routing.weights * d_weights, axis=-1)

    arrays = [put(mesh, bias), put(mesh, D_WEIGHTS, "a")]
    assert_trees_close(jax.jit(step)(*arrays), jax.jit(step)(bias, D_WEIGHTS))


@pytest.mark.parametrize("spec", [("a",), (("b", "a"),)], ids=str)
def test_plan_dispatch_and_combine(spec):
    def step(logits, d_weights):
        experts = route(logits, K).experts
        layout = plan(experts, E, align_size=4)
        rows, pull = jax.vjp(lambda x: dispatch(x, layout), logits)
        output, pull_back = jax.vjp(lambda rows, weights: combine(jnp.sin(rows), layout, weights), rows, d_weights)
        d_rows, d_again = pull_back(jnp.cos(output))
        return layout, rows, output, d_again, pull(d_rows)[0]

    mesh = mesh_of(a=4, b=2)
    arrays = [put(mesh, a, *spec) for a in (LOGITS, D_WEIGHTS)]
    want = jax.jit(step)(LOGITS, D_WEIGHTS)
    assert_trees_close(jax.jit(step)(*arrays), want)
    assert_no_traffic_of_tokens(step, arrays, want[1].size)


def test_logits_sharded_over_experts_are_gathered_once():
    mesh = mesh_of(a=4, b=2)
    logits = put(mesh, LOGITS, None, None, "a")
    forward = functools.partial(route, topk=K)
    assert_trees_close(tuple(jax.jit(forward)(logits)), tuple(jax.jit(forward)(LOGITS)))
    assert [name for name, _ in collectives(forward, logits)] == ["all-gather"]


@pytest.mark.parametrize("transport", [None, "ring", "all_to_all", "ragged"])
def test_the_layer_and_every_gradient(transport):
    arrays = operands(64, 8, 2, 16, 24, bias=True, skew=2.0, cold=1)
    if transport is None:
        mesh = mesh_of(a=4, b=2)
        place = functools.partial(_tokens_over, mesh)
        check_layer(arrays, put=place, topk=2, aux_loss_coeff=0.3)
    else:
        mesh = mesh_of(expert=4, data=2)
        parallel = Parallel(mesh=mesh, expert_axis="expert", data_axes="data", transport=transport)
        check_layer(arrays, put=placed(mesh, parallel), topk=2, aux_loss_coeff=0.3, parallel=parallel)


def _tokens_over(mesh, name, array):
    return put(mesh, array, *(("a",) if name in ("x", "output") else ()))

"""The router, its statistics, losses and dense outputs on sharded tokens: equal results and global sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import AXIS_TYPES, P, assert_no_traffic_of_tokens, assert_trees_close, collectives, mesh_of, put

from anabranch.jax import (
    custom_calls,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    load_balance_loss,
    quantile_bias,
    route,
    routing_map_to_selected_experts,
    z_loss,
)
from pairs import pairs

B, S, E, K = 16, 8, 12, 3
#: Token dimensions over one axis, over one axis each, over two axes together, and the second dimension alone.
SPECS = [("a",), ("a", "b"), (("a", "b"),), (None, "b"), (("b", "a"), None)]
specs = pytest.mark.parametrize("spec", SPECS, ids=str)

_rng = np.random.default_rng(0)
LOGITS = _rng.standard_normal((B, S, E)).astype(np.float32)
D_WEIGHTS = _rng.standard_normal((B, S, K)).astype(np.float32)
D_PROBS = _rng.standard_normal((B, S, E)).astype(np.float32)
BIAS = (0.1 * _rng.standard_normal(E)).astype(np.float32)
MASK = _rng.random((B, S)) < 0.7


def mesh(axis_type):
    return mesh_of(axis_type, a=4, b=2)


# The functions below stand at the top, so that one device's program is compiled once for all shardings.
@functools.partial(jax.jit, static_argnames="sequence_stats")
def routed(logits, d_weights, mask, bias, **options):
    """All results of a routing, and the gradient of the weights, the losses and lse together."""

    def loss(logits):
        routing = route(logits, K, score_function="sigmoid", expert_bias=bias, token_mask=mask, **options)
        tokens = jnp.sum(mask, axis=-1) if options else jnp.sum(mask)
        balance = load_balance_loss(routing.score_sum, routing.tokens_per_expert, K, 3.0, tokens)
        total = jnp.sum(routing.weights * d_weights) + balance + z_loss(routing.lse, 0.1, mask)
        return total, (routing, balance)

    return jax.value_and_grad(loss, has_aux=True)(logits)


@pytest.mark.parametrize(*pairs(axis_type=AXIS_TYPES, spec=SPECS, options=[{}, {"sequence_stats": True}]), ids=str)
def test_routing_and_its_gradient(axis_type, spec, options):
    arrays = [put(mesh(axis_type), a, *spec) for a in (LOGITS, D_WEIGHTS, MASK)] + [put(mesh(axis_type), BIAS)]

    step = functools.partial(routed, **options)
    want, got = step(LOGITS, D_WEIGHTS, MASK, BIAS), step(*arrays)
    assert_trees_close(got, want)
    assert got[1].sharding == arrays[0].sharding or got[1].sharding.is_equivalent_to(arrays[0].sharding, 3)
    # Sums of [E] or [B, E] only, no array over tokens.
    assert_no_traffic_of_tokens(step, arrays, B * E if options else E)


@functools.partial(jax.jit, static_argnames="auxiliary")
def dense(logits, d_probs, auxiliary):
    def loss(logits):
        if auxiliary:
            routing_map, probs = fused_compute_score_for_moe_aux_loss(logits, K, "softmax")
        else:
            probs, routing_map = fused_topk_with_score_function(logits, K, scaling_factor=2.0)
        return jnp.sum(probs * d_probs), (probs, routing_map)

    return jax.value_and_grad(loss, has_aux=True)(logits)


@pytest.mark.parametrize(*pairs(axis_type=AXIS_TYPES, spec=SPECS, auxiliary=[False, True]), ids=str)
def test_dense_forms_and_their_gradients(axis_type, spec, auxiliary):
    step = functools.partial(dense, auxiliary=auxiliary)
    arrays = [put(mesh(axis_type), a, *spec) for a in (LOGITS, D_PROBS)]
    assert_trees_close(step(*arrays), step(LOGITS, D_PROBS))
    assert_no_traffic_of_tokens(step, arrays, 1)


@jax.jit
def histograms(logits, mask, bias, bounds):
    options = {"score_function": "sigmoid", "expert_bias": bias}
    routing = route(logits, K, token_mask=mask, qb_bin_bounds=bounds, qb_bins=20, **options)
    before = jnp.ones((E, 20), jnp.int32)
    added = fused_topk_with_score_function(logits, K, qb_histogram=before, qb_bin_bounds=bounds, **options)[2]
    return routing.qb_histogram, added, quantile_bias(routing.qb_histogram, bounds[0], bounds[1], K)


@specs
def test_histograms_are_summed_over_shards(axis_type, spec):
    bounds = np.array([-1.0, 1.0], np.float32)
    arrays = [
        *(put(mesh(axis_type), a, *spec) for a in (LOGITS, MASK)),
        *(put(mesh(axis_type), a) for a in (BIAS, bounds)),
    ]
    got, want = histograms(*arrays), histograms(LOGITS, MASK, BIAS, bounds)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert_trees_close(got[2], want[2])
    assert int(got[0].sum()) == MASK.sum() * E
    assert_no_traffic_of_tokens(histograms, arrays, 20 * E)


@pytest.mark.parametrize("spec", [("a",), (("a", "b"),)], ids=str)
def test_the_loss_of_dense_scores_is_that_of_the_whole_batch(axis_type, spec):
    scores = np.asarray(jax.nn.softmax(LOGITS.reshape(-1, E)))
    counts = np.arange(E, dtype=np.int32)

    def step(scores, counts):
        return jax.value_and_grad(lambda s: fused_moe_aux_loss(s, counts, K, 2.0))(scores)

    arrays = [put(mesh(axis_type), scores, *spec), put(mesh(axis_type), counts)]
    got = jax.jit(step)(*arrays)
    assert_trees_close(got, jax.jit(step)(scores, counts))
    assert got[1].sharding.is_equivalent_to(arrays[0].sharding, 2)
    assert_no_traffic_of_tokens(step, arrays, E)


def test_selected_experts_of_a_map(axis_type):
    probs, routing_map = fused_topk_with_score_function(LOGITS, K)

    def step(probs, routing_map, d_probs):
        def loss(probs):
            experts, chosen = routing_map_to_selected_experts(probs, routing_map, K)
            return jnp.sum(chosen * d_probs), (experts, chosen)

        return jax.value_and_grad(loss, has_aux=True)(probs)

    arrays = [put(mesh(axis_type), np.asarray(a), "a", "b") for a in (probs, routing_map, D_WEIGHTS)]
    assert_trees_close(jax.jit(step)(*arrays), jax.jit(step)(probs, routing_map, D_WEIGHTS))
    assert_no_traffic_of_tokens(step, arrays, 1)


def test_inside_a_shard_map(axis_type):
    """Statistics inside are those of the shard; their sum over the mesh, and losses of the sum, are the batch's."""

    def shards(logits, d_weights, mask, bias):
        routing = route(logits, K, score_function="sigmoid", expert_bias=bias, token_mask=mask)
        axes = ("a", "b")
        sums = jax.lax.psum((routing.score_sum, routing.tokens_per_expert, jnp.sum(mask)), axes)
        balance = load_balance_loss(*sums[:2], K, 3.0, sums[2])
        squares = jax.lax.psum(z_loss(routing.lse, 0.1, mask, sums[2]), axes)
        return jax.lax.psum(jnp.sum(routing.weights * d_weights), axes) + balance + squares

    tokens = P("a", "b")
    over_mesh = jax.shard_map(shards, mesh=mesh(axis_type), in_specs=(*(tokens,) * 3, P()), out_specs=P())
    arrays = [put(mesh(axis_type), a, "a", "b") for a in (LOGITS, D_WEIGHTS, MASK)] + [put(mesh(axis_type), BIAS)]
    step = jax.value_and_grad(over_mesh)
    (want, _), gradient = jax.jit(routed)(LOGITS, D_WEIGHTS, MASK, BIAS)
    assert_trees_close(jax.jit(step)(*arrays), (want, gradient))
    assert_no_traffic_of_tokens(step, arrays, E)


def test_inside_a_shard_map_that_is_not_compiled(axis_type):
    over_mesh = jax.shard_map(
        lambda z: tuple(route(z, K)[:2]), mesh=mesh(axis_type), in_specs=P("a", "b"), out_specs=P("a", "b")
    )
    assert_trees_close(over_mesh(put(mesh(axis_type), LOGITS, "a", "b")), tuple(route(LOGITS, K)[:2]))


@pytest.mark.parametrize("kind,size", [(AxisType.Explicit, 4), (AxisType.Explicit, 1), (AxisType.Auto, 1)], ids=str)
def test_inside_a_shard_map_over_another_axis(kind, size):
    """Remaining explicit axes shard the tokens; remaining automatic axes must have one device."""
    mesh = mesh_of(kind, stage=8 // size, a=size)
    logits, d_weights = (np.stack([(-1) ** i * a for i in range(8 // size)]) for a in (LOGITS, D_WEIGHTS))

    def loss(logits, d_weights):
        routing = route(logits, K)
        return jnp.sum(routing.weights * d_weights) + jnp.sum(jnp.square(routing.score_sum))

    def stage(logits, d_weights):
        return jax.value_and_grad(loss)(logits.reshape(B, S, E), d_weights.reshape(B, S, K))[1][None]

    staged = jax.shard_map(stage, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), axis_names={"stage"})
    got = jax.jit(staged)(put(mesh, logits, "stage", "a"), put(mesh, d_weights, "stage", "a"))
    want = np.stack([jax.jit(jax.grad(loss))(*pair) for pair in zip(logits, d_weights, strict=True)])
    assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


def test_logits_sharded_over_experts_are_gathered_once_or_refused():
    """The top-k is never per shard: automatic axes gather the row, explicit ones raise an error."""
    automatic, explicit = mesh_of(a=4, b=2), mesh_of(AxisType.Explicit, a=4, b=2)
    logits = put(automatic, LOGITS, "a", None, "b")

    def step(logits):
        return route(logits, K)

    assert_trees_close(jax.jit(step)(logits), jax.jit(step)(LOGITS))
    gathers = [size for name, size in collectives(step, logits) if name == "all-gather"]
    assert gathers == [B // 4 * S * E]
    with pytest.raises(ValueError, match=r"sharding: got float32\[16, 8, 12\] sharded over 'b'.*reshard"):
        jax.jit(step)(put(explicit, LOGITS, "a", None, "b"))


def test_eager_calls_on_sharded_tokens(axis_type):
    logits = put(mesh(axis_type), LOGITS, "a", "b")
    with jax.set_mesh(mesh(axis_type)):
        routing = route(logits, K)
    assert routing.weights.sharding.spec[:2] == ("a", "b")
    assert_trees_close(routing, route(LOGITS, K))


def test_vmap_scan_and_remat(axis_type):
    def loss(logits, d_weights):
        routing = route(logits, K)
        return jnp.sum(routing.weights * d_weights) + jnp.sum(jnp.square(routing.score_sum))

    def step(logits, d_weights):
        one = jax.grad(jax.checkpoint(loss))
        mapped = jax.vmap(one)(logits, d_weights)
        scanned = jax.lax.scan(lambda c, pair: (c, one(*pair)), 0, (logits, d_weights))[1]
        return mapped, scanned

    arrays = [np.stack([a, 2 * a]) for a in (LOGITS, D_WEIGHTS)]
    sharded = [put(mesh(axis_type), a, None, "a", "b") for a in arrays]
    assert_trees_close(jax.jit(step)(*sharded), jax.jit(step)(*arrays), rtol=1e-5, atol=1e-5)


def test_export_with_explicit_axes():
    on_mesh = put(mesh_of(AxisType.Explicit, a=8), LOGITS, "a")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls()]
    exported = jax.export.export(jax.jit(lambda z: tuple(route(z, K))), disabled_checks=allowed)(on_mesh)
    loaded = jax.export.deserialize(bytearray(exported.serialize()))
    assert_trees_close(tuple(loaded.call(on_mesh)), tuple(route(LOGITS, K)))

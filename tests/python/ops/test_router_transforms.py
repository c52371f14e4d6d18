"""jit, grad, vmap over any axis, scan, remat and export; leading axes; sequences; dtypes of cotangents."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from anabranch.jax import fused_topk_with_score_function, route
from anabranch.jax.ops.router import RouterResiduals, route_backward, router_options
from anabranch.reference import router as reference
from oracle import assert_close
from router_cases import BOUND, logits

pytestmark = pytest.mark.usefixtures("platform")

OPTIONS = {"score_function": "sigmoid", "scaling_factor": 1.5}


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def loss(z, cotangent, **options):
    routing = route(z, 4, **options)
    return sum(
        jnp.sum(c * r) for c, r in zip(cotangent, (routing.weights, routing.score_sum, routing.lse), strict=True)
    )


def cotangent_like(z):
    rng = np.random.default_rng(1)
    shapes = [(*z.shape[:-1], 4), z.shape[-1:], z.shape[:-1]]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_jit_gives_the_same_bits():
    z = logits(33, 24)
    assert_same(jax.jit(lambda z: route(z, 4, **OPTIONS))(z), route(z, 4, **OPTIONS))
    cotangent = cotangent_like(z)
    gradient = jax.grad(loss)
    assert_same(jax.jit(lambda z: gradient(z, cotangent, **OPTIONS))(z), gradient(z, cotangent, **OPTIONS))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_over_any_axis_is_a_loop(axis):
    batch = logits(5 * 7, 24).reshape(5, 7, 24)
    moved = np.moveaxis(batch, 0, axis)
    got = jax.vmap(lambda z: route(z, 4, **OPTIONS), in_axes=axis)(moved)
    want = [route(z, 4, **OPTIONS) for z in batch]
    assert_same(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *want))

    cotangent = cotangent_like(batch[0])
    gradient = jax.grad(lambda z: loss(z, cotangent, **OPTIONS))
    assert_same(
        jax.jit(jax.vmap(gradient, in_axes=axis, out_axes=axis))(moved),
        np.moveaxis(np.stack([gradient(z) for z in batch]), 0, axis),
    )


@pytest.mark.parametrize("mapped", [m for m in itertools.product([0, None], repeat=3) if any(a == 0 for a in m)])
def test_vmap_over_any_operand(mapped):
    rng = np.random.default_rng(0)
    operands = [
        rng.standard_normal((3, 7, 24)).astype(np.float32),
        (0.1 * rng.standard_normal((3, 24))).astype(np.float32),
        rng.random((3, 7)) < 0.6,
    ]
    chosen = [operand if axis == 0 else operand[0] for operand, axis in zip(operands, mapped, strict=True)]

    def one(z, bias, mask):
        return route(z, 4, expert_bias=bias, token_mask=mask, **OPTIONS)

    got = jax.vmap(one, in_axes=mapped)(*chosen)
    want = [one(*(x[i] if axis == 0 else x for x, axis in zip(chosen, mapped, strict=True))) for i in range(3)]
    assert_same(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *want))


def test_dense_form_under_vmap_and_grad():
    batch = logits(3 * 7, 24).reshape(3, 7, 24)

    def one(z):
        return jax.value_and_grad(lambda z: jnp.sum(fused_topk_with_score_function(z, 4)[0] ** 2))(z)

    got = jax.vmap(one)(batch)
    assert_same(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *[one(z) for z in batch]))


def test_scan_and_remat():
    batch = logits(5 * 7, 24).reshape(5, 7, 24)
    cotangent = cotangent_like(batch[0])

    def scanned(batch, body):
        return jax.lax.scan(lambda total, z: (total + body(z), None), 0.0, batch)[0]

    def body(z):
        return loss(z, cotangent, **OPTIONS)

    want = np.stack([jax.grad(body)(z) for z in batch])
    assert_same(jax.jit(jax.grad(lambda b: scanned(b, body)))(batch), want)
    assert_same(jax.jit(jax.grad(lambda b: scanned(b, jax.checkpoint(body))))(batch), want)


def test_export_and_reload():
    z = logits(33, 24)
    cotangent = cotangent_like(z)

    def step(z):
        return route(z, 4, **OPTIONS), jax.grad(lambda z: loss(z, cotangent, **OPTIONS))(z)

    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in ("ab_xla_router_forward", "ab_xla_router_backward")
    ]
    exported = jax.export.export(jax.jit(step), disabled_checks=checks)(jax.ShapeDtypeStruct(z.shape, z.dtype))
    jax.export.register_namedtuple_serialization(type(route(z, 4)), serialized_name="anabranch.Routing")
    reloaded = jax.export.deserialize(exported.serialize())
    assert_same(reloaded.call(z), step(z))


@pytest.mark.parametrize("leading", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)])
def test_leading_axes_are_kept(leading):
    E, K = 16, 4
    z = np.random.default_rng(0).standard_normal((*leading, E)).astype(np.float32)
    mask = np.random.default_rng(1).random(leading) < 0.7
    routing = route(z, K, token_mask=jnp.asarray(mask), **OPTIONS)
    assert routing.weights.shape == routing.experts.shape == (*leading, K)
    assert routing.lse.shape == leading
    assert routing.tokens_per_expert.shape == routing.score_sum.shape == (E,)
    want = reference.route(z.reshape(-1, E), K, token_mask=mask.reshape(-1), **OPTIONS)
    assert_close(routing.weights, want.weights.reshape(*leading, K), BOUND, "weights")
    np.testing.assert_array_equal(routing.tokens_per_expert, want.tokens_per_expert)
    assert_close(routing.score_sum, want.score_sum, BOUND, "score_sum")


@pytest.mark.parametrize("leading", [(7,), (1, 7), (6, 5), (2, 3, 5), (3, 200), (4, 0), (0, 4)])
@pytest.mark.parametrize("score_function", ["softmax", "sqrtsoftplus"])
def test_sequence_statistics_keep_the_batch_axes(leading, score_function):
    E, K = 16, 4
    z = np.random.default_rng(0).standard_normal((*leading, E)).astype(np.float32)
    mask = np.random.default_rng(1).random(leading) < 0.7
    B = int(np.prod(leading[:-1]))
    options = {"score_function": score_function, "token_mask": mask}

    def sums(z):
        routing = route(z, K, sequence_stats=True, **options)
        return routing.score_sum, routing.tokens_per_expert

    score_sum, pull, counts = jax.vjp(sums, jnp.asarray(z), has_aux=True)
    assert score_sum.shape == counts.shape == (*leading[:-1], E)
    if 0 in leading:
        assert not score_sum.any() and not counts.any()
        return
    flat = dict(options, token_mask=mask.reshape(-1), sequences=B)
    want = reference.route(z.reshape(-1, E), K, **flat)
    np.testing.assert_array_equal(counts.reshape(B, E), want.tokens_per_expert)
    assert_close(score_sum.reshape(B, E), want.score_sum, BOUND, "score_sum")
    g = np.random.default_rng(2).standard_normal((*leading[:-1], E)).astype(np.float32)
    d_want = reference.route_backward(z.reshape(-1, E), K, None, g.reshape(B, E), **flat)
    assert_close(pull(jnp.asarray(g))[0].reshape(-1, E), d_want, BOUND, "d_logits")


@pytest.mark.parametrize("dtypes", list(itertools.product(["float32", "bfloat16", "float16"], repeat=3)))
def test_cotangents_of_any_dtype(dtypes):
    T, E, K = 33, 24, 4
    z = logits(T, E, "bfloat16")
    cast = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    cotangent = [c.astype(cast[d]) for c, d in zip(cotangent_like(z), dtypes, strict=True)]
    options = router_options(E, K, **OPTIONS)
    routing = route(z, K, **OPTIONS)
    residuals = RouterResiduals(jnp.asarray(z), routing.experts, None, routing.lse)
    got = route_backward(options, residuals, *map(jnp.asarray, cotangent))
    want = reference.route_backward(z, K, *cotangent, **OPTIONS)
    assert got.dtype == z.dtype
    assert_close(got, want, BOUND + 2.0**-8, "d_logits")


def test_outputs_without_a_cotangent_are_not_computed():
    z = logits(7, 24)
    text = str(jax.make_jaxpr(jax.grad(lambda z: jnp.sum(route(z, 4).weights ** 2)))(z))
    assert "d_weights" in text and "d_score_sum" not in text and "d_lse" not in text
    options = router_options(24, 4)
    residuals = RouterResiduals(jnp.asarray(z), route(z, 4).experts, None, route(z, 4).lse)
    assert not route_backward(options, residuals, None, None, None).any()


def test_the_bias_gets_no_gradient():
    z, bias = logits(7, 24), np.ones(24, np.float32)
    gradient = jax.grad(lambda b: jnp.sum(route(z, 4, expert_bias=b, **OPTIONS).weights ** 2))(bias)
    assert gradient.dtype == np.float32 and not gradient.any()


def test_every_run_has_the_same_bits():
    z = logits(1000, 130)
    cotangent = cotangent_like(z)
    step = jax.jit(lambda z: (route(z, 4), jax.grad(lambda z: loss(z, cotangent))(z)))
    first = step(z)
    for _ in range(5):
        assert_same(step(z), first)

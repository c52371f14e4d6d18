"""plan, dispatch and combine under jit, grad, vmap, scan, remat and export."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import combine, custom_calls, dispatch, plan, sort_chunks_by_index, token_combine, token_dispatch
from oracle import assert_close

pytestmark = pytest.mark.usefixtures("platform")

T, E, K, D = 12, 5, 2, 6
RNG = np.random.default_rng(0)
X = RNG.standard_normal((T, D)).astype(np.float32)
WEIGHTS = RNG.standard_normal((T, K)).astype(np.float32)
EXPERTS = RNG.integers(-1, E, (T, K)).astype(np.int32)
ROUTED = RNG.random((T, E)) < 0.4
PROBS = RNG.random((T, E)).astype(np.float32)
SIZES, ORDER = np.array([3, 0, 4], np.int32), np.array([2, 0, 1], np.int32)


def layer(x, weights, experts):
    layout = plan(experts, E, align_size=8)
    return combine(jnp.sin(dispatch(x, layout)), layout, weights)


def token_layer(x, probs, routed):
    output, permuted, row_id_map, pad_offsets, _ = token_dispatch(x, routed, T * E, probs, 8)
    return token_combine(jnp.sin(output) * permuted[:, None], row_id_map, probs, pad_offsets)


def sort(x, sizes, order):
    return sort_chunks_by_index(x, sizes, order)[0]


FUNCTIONS = {
    "layer": (layer, (X, WEIGHTS, EXPERTS), (0, 1)),
    "token_layer": (token_layer, (X, PROBS, ROUTED), (0, 1)),
    "sort": (sort, (X, SIZES, ORDER), (0,)),
}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


def gradient(function, differentiable):
    """The gradient of a random projection."""
    return jax.grad(lambda *a: (function(*a) * jnp.cos(jnp.arange(D))).sum(), differentiable)


def assert_same(got, want):
    """Integers have to be equal; floats may differ by the order of XLA's own sums."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, np.asarray(b), 5e-7 if jnp.issubdtype(b.dtype, jnp.floating) else 0.0, "result")


def varied(array, i):
    """Slice i of a batch: floats are scaled, integers and booleans are rolled along the tokens."""
    return array * (1 + i) if jnp.issubdtype(array.dtype, jnp.floating) else jnp.roll(array, i, 0)


def test_jit(function):
    f, operands, differentiable = function
    assert_same(jax.jit(f)(*operands), f(*operands))
    assert_same(jax.jit(gradient(f, differentiable))(*operands), gradient(f, differentiable)(*operands))


def test_vmap_over_any_operands_and_axes(function):
    f, operands, differentiable = function
    for mapped in (1, 2, 4, 7)[: len(operands) + 1]:  # one operand at a time, then all
        axes = [(i + mapped) % (a.ndim + 1) if mapped >> i & 1 else None for i, a in enumerate(operands)]
        slices = [[varied(a, s) if x is not None else a for a, x in zip(operands, axes, strict=True)] for s in range(3)]
        batch = [
            a if x is None else jnp.stack([s[i] for s in slices], x)
            for i, (a, x) in enumerate(zip(operands, axes, strict=True))
        ]
        for g in (f, gradient(f, differentiable)):
            got = jax.jit(jax.vmap(g, axes))(*batch)
            want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[jax.jit(g)(*s) for s in slices])
            assert_same(got, want)


def test_vmap_of_each_operation_alone():
    layouts = [plan(jnp.roll(EXPERTS, i, 0), E, align_size=8) for i in range(3)]
    stacked = jax.vmap(lambda e: plan(e, E, align_size=8), in_axes=2)(
        jnp.stack([jnp.roll(EXPERTS, i, 0) for i in range(3)], 2)
    )
    assert_same(stacked, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layouts))
    rows = jax.vmap(dispatch, in_axes=(None, 0))(X, stacked)
    assert_same(rows, jnp.stack([dispatch(X, p) for p in layouts]))
    out = jax.vmap(combine, in_axes=(0, 0, None))(rows, stacked, WEIGHTS)
    assert_same(out, jnp.stack([combine(dispatch(X, p), p, WEIGHTS) for p in layouts]))


def test_scan(function):
    f, operands, differentiable = function

    def scanned(x, *rest):
        return jax.lax.scan(lambda x, _: (f(x, *rest), None), x, None, length=3)[0]

    def unrolled(x, *rest):
        return f(f(f(x, *rest), *rest), *rest)

    assert_same(scanned(*operands), unrolled(*operands))
    assert_same(*(jax.jit(gradient(g, differentiable))(*operands) for g in (scanned, unrolled)))


def test_remat(function):
    f, operands, differentiable = function
    assert_same(jax.jit(gradient(jax.checkpoint(f), differentiable))(*operands), gradient(f, differentiable)(*operands))


def test_export(function, platform):
    f, operands, differentiable = function
    g = gradient(f, differentiable)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls()]
    platforms = ["cuda" if platform == "gpu" else platform]
    exported = jax.export.export(jax.jit(g), platforms=platforms, disabled_checks=checks)(*operands)
    assert_same(exported.call(*operands), g(*operands))


def test_grad_through_experts_that_another_function_chose():
    """Integer operands of a custom_vjp have empty tangents under vmap of grad."""

    @jax.custom_vjp
    def route(x):
        return x[:, :K] * 2, jnp.argsort(x, axis=1)[:, :K].astype(jnp.int32)

    def backward(_, d):
        return (jnp.pad(d[0] * 2, ((0, 0), (0, D - K))),)

    route.defvjp(lambda x: (route(x), None), backward)

    def loss(x):
        weights, experts = route(x)
        layout = plan(experts, D)
        routed = token_dispatch(x, jax.nn.one_hot(experts[:, 0], D, dtype=jnp.int32), T)
        integers = dispatch(experts, layout)
        return (combine(dispatch(x, layout), layout, weights).sum() + routed.output.sum()) * (1 + 0 * integers.sum())

    batch = jnp.stack([X, 2 * X])
    assert_same(jax.vmap(jax.grad(loss))(batch), jnp.stack([jax.grad(loss)(x) for x in batch]))


def test_residuals_are_the_plan_and_needed_operands():
    layout = plan(EXPERTS, E)
    integers = {a.shape for a in layout}
    _, pull = jax.vjp(lambda x: dispatch(x, layout), X)
    assert {a.shape for a in jax.tree.leaves(pull)} <= integers
    rows = dispatch(X, layout)
    _, pull = jax.vjp(lambda rows: combine(rows, layout), rows)
    assert {a.shape for a in jax.tree.leaves(pull)} <= integers
    _, pull = jax.vjp(lambda rows, w: combine(rows, layout, w), rows, WEIGHTS)
    assert {a.shape for a in jax.tree.leaves(pull)} <= integers | {rows.shape, WEIGHTS.shape}

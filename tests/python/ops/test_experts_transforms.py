"""jit, grad, vmap over any operand and axis, scan, remat and export."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import network, random_array

from anabranch.jax import expert_ffn, grouped_matmul

pytestmark = pytest.mark.usefixtures("platform")

SIZES = (4, 0, 5)


def operands(seed=0):
    net = network(np.random.default_rng(seed), SIZES, 6, 2, 5, spare=1)
    return dict(net.arrays, group_sizes=jnp.asarray(net.group_sizes)), net.d_y


def loss(arrays, d_y):
    return (expert_ffn(**arrays).astype(jnp.float32) * d_y).sum()


def gradient(arrays, d_y):
    floats = {name: array for name, array in arrays.items() if name != "group_sizes"}
    return jax.grad(lambda floats: loss(dict(floats, group_sizes=arrays["group_sizes"]), d_y))(floats)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6, atol=2e-6)


def test_jit_is_the_same():
    arrays, d_y = operands()
    assert_same(jax.jit(gradient)(arrays, d_y), gradient(arrays, d_y))


@pytest.mark.parametrize("name", ["rows", "w_in", "w_out", "b_in", "b_out", "weights", "group_sizes"])
def test_vmap_over_each_operand_and_axis(name):
    arrays, d_y = operands()
    other, _ = operands(1)
    if name == "group_sizes":
        other["group_sizes"] = jnp.asarray([2, 7, 0], jnp.int32)
    pair = (arrays[name], other[name])
    want = [gradient(dict(arrays, **{name: array}), d_y) for array in pair]
    want = jax.tree.map(lambda a, b: jnp.stack([a, b]), *want)
    for axis in range(arrays[name].ndim + 1):
        batched = jnp.stack(pair, axis)
        axes = dict.fromkeys(arrays) | {name: axis}
        got = jax.vmap(gradient, in_axes=(axes, None))(dict(arrays, **{name: batched}), d_y)
        assert_same(got, want)


def test_gradient_of_vmap():
    arrays, d_y = operands()
    other, _ = operands(1)
    batched = jnp.stack([arrays["rows"], other["rows"]])

    def total(w_in):
        return jax.vmap(lambda rows: loss(dict(arrays, rows=rows, w_in=w_in), d_y))(batched).sum()

    want = sum(gradient(dict(arrays, rows=rows), d_y)["w_in"] for rows in batched)
    assert_same(jax.grad(total)(arrays["w_in"]), want)


def test_scan_and_remat():
    arrays, d_y = operands()

    def step(rows, _):
        return rows + jax.checkpoint(lambda rows: expert_ffn(**dict(arrays, rows=rows)))(rows), None

    def scanned(rows):
        return (jax.lax.scan(step, rows, None, length=3)[0] * d_y).sum()

    def unrolled(rows):
        for _ in range(3):
            rows = rows + expert_ffn(**dict(arrays, rows=rows))
        return (rows * d_y).sum()

    assert_same(jax.jit(jax.grad(scanned))(arrays["rows"]), jax.grad(unrolled)(arrays["rows"]))


def test_donated_and_reused_residuals_are_not_overwritten():
    """dh overwrites h's buffer, so a second pullback must return the same gradients."""
    arrays, d_y = operands()
    floats = {name: array for name, array in arrays.items() if name != "group_sizes"}
    _, pull = jax.vjp(lambda floats: expert_ffn(**floats, group_sizes=arrays["group_sizes"]), floats)
    first = pull(d_y)
    second = pull(d_y)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_export(platform):
    arrays, d_y = operands()
    targets = ("ab_xla_expert_ffn_forward", "ab_xla_expert_ffn_backward")
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    platforms = ["cuda" if platform == "gpu" else platform]
    exported = jax.export.export(jax.jit(gradient), platforms=platforms, disabled_checks=checks)(arrays, d_y)
    reloaded = jax.export.deserialize(exported.serialize())
    assert_same(reloaded.call(arrays, d_y), gradient(arrays, d_y))


@pytest.mark.parametrize("transpose_w", [False, True])
def test_grouped_matmul_transforms(transpose_w):
    rng = np.random.default_rng(0)
    x, w = random_array(rng, (2, 9, 6)), random_array(rng, (3, 4, 6) if transpose_w else (3, 6, 4))
    d_y = random_array(rng, (9, 4))
    sizes = jnp.asarray(SIZES, jnp.int32)

    def gradients(x, w):
        return jax.grad(lambda x, w: (grouped_matmul(x, w, sizes, transpose_w=transpose_w) * d_y).sum(), (0, 1))(x, w)

    want = jax.tree.map(lambda a, b: jnp.stack([a, b]), gradients(x[0], w), gradients(x[1], w))
    assert_same(jax.jit(jax.vmap(gradients, (0, None)))(x, w), want)
    assert_same(jax.vmap(gradients, (1, None))(x.swapaxes(0, 1), w), want)

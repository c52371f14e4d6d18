"""ragged_dot beside jax.lax.ragged_dot, and grouped_dense: results and gradients, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import grouped_dense, ragged_dot
from anabranch.reference import experts as reference
from oracle import assert_close, assert_close_per_expert

pytestmark = pytest.mark.usefixtures("platform")

BOUND = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = tuple(BOUND)


def operands(dtype, sizes, m=40, k=24, n=32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (m, k), "w": (len(sizes), k, n), "bias": (len(sizes), n), "d_y": (m, n)}
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def float64(*arrays):
    return [np.asarray(array, np.float64) for array in arrays]


SIZES = ([7, 0, 12, 21], [0, 0, 0, 40], [3, 5, 2, 1])  # the last leaves rows over


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ragged_dot_is_jaxs_own(sizes, dtype):
    """The same call, the same shapes and dtypes, the same numbers, forward and backward."""
    a, group_sizes = operands(dtype, sizes), jnp.array(sizes, jnp.int32)

    def both(function):
        def call(x, w):
            return function(x, w, group_sizes, precision=jax.lax.Precision.HIGHEST, preferred_element_type=x.dtype)

        y, pull = jax.vjp(jax.jit(call), a["x"], a["w"])
        return y, *pull(a["d_y"])

    got, want = both(ragged_dot), both(jax.lax.ragged_dot)
    exact_y = reference.grouped_matmul(*float64(a["x"], a["w"]), sizes)
    exact = (exact_y, *reference.grouped_matmul_backward(*float64(a["d_y"], a["x"], a["w"]), sizes))
    for name, ours, theirs, right in zip(("y", "d_lhs", "d_rhs"), got, want, exact, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert_close(np.asarray(ours, np.float64), right, BOUND[dtype], name)
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), np.asarray(theirs, np.float64), rtol=4 * BOUND[dtype], atol=8 * BOUND[dtype]
        )


def test_ragged_dot_under_vmap_and_inside_a_network():
    a, sizes = operands("float32", SIZES[0]), jnp.array(SIZES[0])

    def network(function, batches, x, w):
        return jnp.sum(jnp.sin(batches(lambda x: function(jnp.cos(x), w, sizes), jnp.stack([x, -x, 2 * x]))))

    def mapped(f, xs):
        return jax.vmap(f)(xs)

    def in_turn(f, xs):  # JAX's own has no vmap over the left factor alone
        return jnp.stack([f(x) for x in xs])

    got = jax.jit(jax.grad(lambda *g: network(ragged_dot, mapped, *g), (0, 1)))(a["x"], a["w"])
    with jax.default_matmul_precision("highest"):  # JAX's own rounds to tf32 otherwise
        want = jax.grad(lambda *g: network(jax.lax.ragged_dot, in_turn, *g), (0, 1))(a["x"], a["w"])
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES[::2], ids=str)
def test_grouped_dense(sizes, transposed, with_bias, dtype):
    a = operands(dtype, sizes)
    kernel = jnp.swapaxes(a["w"], 1, 2) if transposed else a["w"]
    dims = ((1,), (2,)) if transposed else ((1,), (1,))
    bias = a["bias"] if with_bias else None
    y, pull = jax.vjp(lambda *g: grouped_dense(g[0], g[1], jnp.array(sizes), dims, g[2]), a["x"], kernel, bias)
    d_x, d_kernel, d_bias = pull(a["d_y"])
    x, w, b, d_y = float64(a["x"], a["w"], a["bias"], a["d_y"])
    group = np.repeat(np.arange(len(sizes)), sizes)
    want = reference.grouped_matmul(x, w, sizes)
    if with_bias:
        want[: len(group)] += b[group]
    assert_close(np.asarray(y, np.float64), want, 2 * BOUND[dtype], "y")
    assert not np.asarray(y)[len(group) :].any()
    want_x, want_w = reference.grouped_matmul_backward(d_y, x, w, sizes)
    assert_close(np.asarray(d_x, np.float64), want_x, BOUND[dtype], "d_x")
    got = np.asarray(d_kernel, np.float64)
    assert_close_per_expert(got.swapaxes(1, 2) if transposed else got, want_w, BOUND[dtype], "d_kernel")
    if with_bias:
        want_b = np.stack([d_y[: len(group)][group == g].sum(0) for g in range(len(sizes))])
        assert_close_per_expert(np.asarray(d_bias, np.float64), want_b, 2 * BOUND[dtype], "d_bias")


X, W, N = np.ones((6, 3), np.float32), np.ones((2, 3, 4), np.float32), np.array([2, 4])
BAD = [
    (ragged_dot, "lhs", dict(lhs=np.ones(3, np.float32)), ValueError),
    (ragged_dot, "rhs", dict(rhs=np.ones((2, 5, 4), np.float32)), ValueError),
    (ragged_dot, "rhs", dict(rhs=W.astype(np.float16)), TypeError),
    (ragged_dot, "group_sizes", dict(group_sizes=np.ones(2, np.float32)), TypeError),
    (ragged_dot, "precision", dict(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32), ValueError),
    (ragged_dot, "precision", dict(precision="sharp"), ValueError),
    (ragged_dot, "preferred_element_type", dict(preferred_element_type=jnp.bfloat16), ValueError),
    (ragged_dot, "group_offset", dict(group_offset=np.array([1])), ValueError),
    (ragged_dot, "out_sharding", dict(out_sharding=jax.sharding.PartitionSpec("a")), ValueError),
    (grouped_dense, "kernel", dict(kernel=W[:, :2]), ValueError),
    (grouped_dense, "bias", dict(bias=np.ones((2, 3), np.float32)), ValueError),
    (grouped_dense, "contracting_dims", dict(contracting_dims=((0,), (0,))), ValueError),
    (grouped_dense, "contracting_dims", dict(contracting_dims=1), ValueError),
    (grouped_dense, "kernel_amax", dict(kernel_amax=np.ones(2, np.float32)), ValueError),
    (grouped_dense, "quantizer_set", dict(quantizer_set="fp8"), ValueError),
    (grouped_dense, "kernel_fsdp_info", dict(kernel_fsdp_info=("fsdp", 1)), ValueError),
]


@pytest.mark.parametrize("function,name,change,error", BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_arguments_are_named(function, name, change, error):
    good = dict(lhs=X, rhs=W) if function is ragged_dot else dict(x=X, kernel=W)
    with pytest.raises(error, match=rf"^{name}: got"):
        function(**{**good, "group_sizes": N} | change)

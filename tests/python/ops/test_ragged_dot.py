"""ragged_dot, ragged_dot_general and gmm against JAX's, and grouped_dense: results, gradients and errors."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import (
    expert_ffn,
    gmm,
    grouped_dense,
    grouped_matmul,
    ragged_dot,
    ragged_dot_general,
    sort_chunks_by_index,
)
from anabranch.reference import experts as reference
from oracle import assert_close

pytestmark = pytest.mark.usefixtures("platform")

#: Relative to the float64 result rounded once to the dtype: float32 sums move few values to a neighbouring number. An
#: additional rounding to 16 bits moves a third of them, and exceeds the bound several times.
BOUND = {"float32": 2e-6, "bfloat16": 3e-4, "float16": 1e-4}
SIZES = ([7, 0, 12, 21], [0, 0, 0, 40], [3, 5, 2, 1])  # the last does not use all rows


def form(contracting, rhs_group_dimensions, lhs_ragged_dimension=0, batch=((), ())):
    return jax.lax.RaggedDotDimensionNumbers((contracting, batch), (lhs_ragged_dimension,), rhs_group_dimensions)


ROWS, TRANSPOSED, CONTRACTED = form(((1,), (1,)), (0,)), form(((1,), (2,)), (0,)), form(((0,), (0,)), ())


def numbers(dtype, *shape, seed=0):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)))


def float64(*arrays):
    return [np.asarray(array, np.float64) for array in arrays]


def assert_rounded_once(got, want, name):
    dtype = str(got.dtype)
    assert_close(np.asarray(got, np.float64), np.asarray(jnp.asarray(want, dtype), np.float64), BOUND[dtype], name)


#: Dtypes of lhs and rhs, preferred_element_type, sizes.
DTYPES = [
    ("float32", "float32", None, SIZES[0]),
    ("bfloat16", "bfloat16", None, SIZES[1]),
    ("float16", "float16", "float16", SIZES[2]),
    ("bfloat16", "bfloat16", "float32", SIZES[2]),
    ("float16", "float16", "float32", SIZES[0]),
    ("float32", "bfloat16", None, SIZES[0]),
    ("bfloat16", "float32", "bfloat16", SIZES[2]),
]


@pytest.mark.parametrize(("lhs", "rhs", "preferred", "sizes"), DTYPES, ids=[f"{d[0]}-{d[1]}-{d[2]}" for d in DTYPES])
def test_results_match_jax_and_the_oracle(lhs, rhs, preferred, sizes):
    """Results and gradients have JAX's dtypes and shapes, and are near JAX's values and the oracle's, rounded once."""
    m, k, n = 40, 24, 16
    a, b, rows = numbers(lhs, m, k), numbers(rhs, len(sizes), k, n, seed=1), numbers(rhs, m, n, seed=2)
    flipped, group_sizes = jnp.swapaxes(b, 1, 2), jnp.array(sizes, jnp.int32)
    options = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=preferred)
    calls = {"ragged_dot": (functools.partial(ragged_dot, **options), jax.lax.ragged_dot, (a, b))}
    for name, dims, right in (("rows", ROWS, b), ("transposed", TRANSPOSED, flipped), ("contracted", CONTRACTED, rows)):
        ours, theirs = (
            functools.partial(f, ragged_dot_dimension_numbers=dims, **options)
            for f in (ragged_dot_general, jax.lax.ragged_dot_general)
        )
        calls[name] = ours, theirs, (a, right)
    if preferred:
        transposed_gmm = functools.partial(gmm, preferred_element_type=preferred, transpose_rhs=True)
        calls["gmm"] = transposed_gmm, calls["transposed"][1], (a, flipped)
    d_y = {name: numbers("float32", *((4, k, n) if name == "contracted" else (m, n)), seed=3) for name in calls}

    def all_calls(which):
        found = {}
        for name, (*functions, operands) in calls.items():
            function = functools.partial(functions[which], group_sizes=group_sizes, **({} if which == 0 else options))
            if which == 1 and name == "contracted":  # JAX does not differentiate it
                found[name] = (function(*operands),)
                continue
            y, pull = jax.vjp(function, *operands)
            found[name] = (y, *pull(d_y[name].astype(y.dtype)))
        return found

    got, theirs = jax.jit(all_calls, static_argnums=0)(0), jax.jit(all_calls, static_argnums=0)(1)
    for name, (_, _, operands) in calls.items():
        x, w = float64(*operands)
        d = float64(d_y[name].astype(got[name][0].dtype))[0]
        if name == "contracted":
            d_w = x, w, sizes
            want = (
                reference.grouped_matmul_backward(w, x, np.zeros((4, k, n)), sizes)[1],
                reference.grouped_matmul(w, d.swapaxes(1, 2), sizes),
                reference.grouped_matmul(x, d, sizes),
            )
        else:
            turned = w.swapaxes(1, 2) if operands[1] is flipped else w
            d_x, d_w = reference.grouped_matmul_backward(d, x, turned, sizes)
            d_w = d_w.swapaxes(1, 2) if operands[1] is flipped else d_w
            want = reference.grouped_matmul(x, turned, sizes), d_x, d_w
        for ours, right, of in zip(got[name], want, ("y", "d_lhs", "d_rhs"), strict=True):
            assert_rounded_once(ours, right, f"{name} {of}")
        for ours, other in zip(got[name], theirs[name], strict=False):
            assert (ours.shape, ours.dtype) == (other.shape, other.dtype)
            np.testing.assert_allclose(*float64(ours, other), rtol=0.02, atol=0.05)


def test_vmap_has_the_bits_of_a_loop():
    """vmap over either operand, under jit and grad, returns the same bits as a loop of calls."""
    sizes, d_y = jnp.array(SIZES[0]), numbers("float32", 40, 4, seed=3)
    lhs, rhs, rows = numbers("bfloat16", 2, 40, 8), numbers("bfloat16", 4, 8, 4, seed=1), numbers("bfloat16", 40, 4)

    def loss(x, w, rows):
        y = ragged_dot(x, w, sizes, preferred_element_type="float32")
        d_w = ragged_dot_general(x, rows, sizes, CONTRACTED, preferred_element_type="float32")
        return jnp.sum(y * d_y) + jnp.sum(jnp.sin(d_w))

    gradient = jax.grad(loss, (0, 1, 2))
    together = jax.jit(jax.vmap(gradient, (0, None, None)))(lhs, rhs, rows)
    single = jax.jit(gradient)
    jax.tree.map(
        lambda t, *s: np.testing.assert_array_equal(t, np.stack(s)), together, *(single(x, rhs, rows) for x in lhs)
    )


#: Sizes of another dtype, and equivalent int32 sizes: values outside int32 are larger than all rows, or negative.
INTEGERS = [
    (np.array([3, 4], np.int8), [3, 4]),
    (np.array([-2, 4], np.int8), [0, 4]),
    (np.array([3, 200], np.uint8), [3, 200]),
    (np.array([3, 4], np.uint16), [3, 4]),
    (np.array([3, 2**32 - 1], np.uint32), [3, 6]),
    (np.array([2**63, 5], np.uint64), [6, 0]),
    (np.array([-(2**63), 2], np.int64), [0, 2]),
]


@pytest.mark.parametrize(("sizes", "same"), INTEGERS, ids=lambda v: str(getattr(v, "dtype", "")))
def test_sizes_of_any_integer_dtype(sizes, same):
    x, w = numbers("float32", 6, 3), numbers("float32", 2, 3, 4)
    w_in, w_out = numbers("float32", 2, 3, 2, 5), numbers("float32", 2, 5, 3)
    calls = [
        lambda s: ragged_dot(x, w, s),
        lambda s: ragged_dot_general(x, x, s, CONTRACTED),
        lambda s: gmm(x, w, s),
        lambda s: grouped_matmul(x, w, s),
        lambda s: grouped_dense(x, w, s),
        lambda s: expert_ffn(x, w_in, w_out, s),
        lambda s: sort_chunks_by_index(x, s, np.array([1, 0]))[0],
    ]
    variants = [sizes, jnp.asarray(sizes)] if sizes.dtype.itemsize < 8 else [sizes]
    for call in calls:
        want = call(np.array(same, np.int32))
        for given in variants:
            np.testing.assert_array_equal(call(given), want)


#: Dtypes of x, kernel, bias (None: none) and the preferred one; whether the kernel is transposed; sizes.
DENSE = [
    ("float32", "float32", "float32", None, False, SIZES[0]),
    ("bfloat16", "bfloat16", "bfloat16", None, True, SIZES[2]),
    ("float16", "float16", None, None, True, SIZES[0]),
    ("bfloat16", "bfloat16", None, "float32", False, SIZES[2]),
    ("bfloat16", "float32", "bfloat16", None, True, SIZES[2]),
    ("bfloat16", "bfloat16", "float32", "bfloat16", False, SIZES[0]),
]


@pytest.mark.parametrize(("x", "kernel", "bias", "preferred", "transposed", "sizes"), DENSE, ids=str)
def test_grouped_dense(x, kernel, bias, preferred, transposed, sizes):
    x, w, bias = numbers(x, 40, 24), numbers(kernel, 4, 24, 16, seed=1), bias and numbers(bias, 4, 16, seed=2)
    given = jnp.swapaxes(w, 1, 2) if transposed else w
    dims = ((1,), (2,)) if transposed else ((1,), (1,))
    y, pull = jax.vjp(
        lambda *g: grouped_dense(g[0], g[1], jnp.array(sizes), dims, g[2], preferred_element_type=preferred),
        x, given, bias,
    )  # fmt: skip
    alike = {a.dtype for a in (x, w, bias) if a is not None}
    assert y.dtype == (preferred or (next(iter(alike)) if len(alike) == 1 else "float32"))
    d_y = numbers(y.dtype, 40, 16, seed=3)
    d_x, d_kernel, d_bias = pull(d_y)
    group = np.repeat(np.arange(len(sizes)), sizes)
    left, right, d = float64(x, w, d_y)
    want = reference.grouped_matmul(left, right, sizes)
    if bias is not None:
        want[: len(group)] += float64(bias)[0][group]
        assert_rounded_once(d_bias, np.stack([d[: len(group)][group == g].sum(0) for g in range(4)]), "d_bias")
    assert_rounded_once(y, want, "y")
    want_x, want_w = reference.grouped_matmul_backward(d, left, right, sizes)
    assert_rounded_once(d_x, want_x, "d_x")
    assert_rounded_once(jnp.swapaxes(d_kernel, 1, 2) if transposed else d_kernel, want_w, "d_kernel")


X, W, N = np.ones((6, 3), np.float32), np.ones((2, 3, 4), np.float32), np.array([2, 4])
BAD = [
    (ragged_dot, "lhs", dict(lhs=np.ones(3, np.float32)), ValueError),
    (ragged_dot, "rhs", dict(rhs=np.ones((2, 5, 4), np.float32)), ValueError),
    (ragged_dot, "rhs", dict(rhs=W.astype(np.int32)), TypeError),
    (ragged_dot, "group_sizes", dict(group_sizes=np.ones(2, np.float32)), TypeError),
    (ragged_dot, "precision", dict(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32), ValueError),
    (ragged_dot, "precision", dict(precision="sharp"), ValueError),
    (ragged_dot, "preferred_element_type", dict(preferred_element_type=jnp.int32), TypeError),
    (ragged_dot, "group_sizes", dict(group_sizes=np.ones(2, bool)), TypeError),
    (ragged_dot, "group_offset", dict(group_offset=np.array([1])), ValueError),
    (ragged_dot, "out_sharding", dict(out_sharding=jax.sharding.PartitionSpec("a")), ValueError),
    (ragged_dot_general, "ragged_dot_dimension_numbers", dict(ragged_dot_dimension_numbers="rows"), TypeError),
    *[
        (ragged_dot_general, "ragged_dot_dimension_numbers", dict(ragged_dot_dimension_numbers=dims), ValueError)
        for dims in (form(((1,), (0,)), (1,)), form(((0,), (1,)), (0,), 1), form(((), ()), (), 0, ((0,), (0,))))
    ],
    (ragged_dot_general, "rhs", dict(rhs=X[:5], ragged_dot_dimension_numbers=CONTRACTED), ValueError),
    (ragged_dot_general, "group_offset", dict(group_offset=0), ValueError),
    (gmm, "rhs", dict(transpose_rhs=True), ValueError),
    (gmm, "preferred_element_type", dict(preferred_element_type=None), TypeError),
    (gmm, "tiling", dict(tiling=(128, 0, 128)), ValueError),
    (gmm, "group_offset", dict(group_offset=np.array(0)), ValueError),
    (gmm, "existing_out", dict(existing_out=X), ValueError),
    (gmm, "interpret", dict(interpret="yes"), TypeError),
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
    good = dict(x=X, kernel=W) if function is grouped_dense else dict(lhs=X, rhs=W)
    if function is ragged_dot_general:
        good["ragged_dot_dimension_numbers"] = ROWS
    with pytest.raises(error, match=rf"^{name}: got"):
        function(**{**good, "group_sizes": N} | change)


def test_gmm_has_megabloxs_arguments():
    megablox = pytest.importorskip("jax.experimental.pallas.ops.tpu.megablox.gmm")
    theirs, ours = (inspect.signature(f).parameters.values() for f in (megablox.gmm, gmm))
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]

"""grouped_matmul against the oracle: the result and both gradients, with w as stored and transposed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import FLOAT32, UNIT_ROUNDOFF, random_array, random_sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import torch
from anabranch.jax import grouped_matmul
from anabranch.reference import experts as reference
from frameworks import both, with_gradients
from oracle import assert_close_per_expert, assert_rows_close

pytestmark = pytest.mark.usefixtures("platform")


def check(rng, sizes, width, columns, *, dtype="float32", transpose_w=False, spare=0):
    sizes = np.asarray(sizes, np.int32)
    E, R = len(sizes), int(sizes.sum()) + spare
    x = random_array(rng, (R, width), dtype)
    w = random_array(rng, (E, columns, width) if transpose_w else (E, width, columns), dtype)
    d_y = random_array(rng, (R, columns), dtype)

    functions = (partial(f, transpose_w=transpose_w) for f in (grouped_matmul, torch.grouped_matmul))
    operands = {"x": np.asarray(x), "w": np.asarray(w), "group_sizes": sizes}
    y, gradients = with_gradients(*functions, operands, np.asarray(d_y))
    d_x, d_w = gradients["x"], gradients["w"]
    assert y.dtype == d_x.dtype == d_w.dtype == dtype
    plain_w = np.asarray(w, np.float64)
    plain_w = plain_w.swapaxes(1, 2) if transpose_w else plain_w
    want_y = reference.grouped_matmul(x, plain_w, sizes)
    want_x, want_w = reference.grouped_matmul_backward(d_y, x, plain_w, sizes)
    # A sum of few terms may cancel, so errors are relative to the norm of the terms.
    y_terms = np.sqrt(reference.grouped_matmul(square(x), square(plain_w), sizes))
    x_terms, w_terms = map(np.sqrt, reference.grouped_matmul_backward(square(d_y), square(x), square(plain_w), sizes))
    if transpose_w:
        want_w, w_terms = want_w.swapaxes(1, 2), w_terms.swapaxes(1, 2)
    limit = FLOAT32 if dtype == "float32" else UNIT_ROUNDOFF[dtype]  # operands are exact: only the result is rounded
    assert_rows_close(y, want_y, sizes, limit, "y", y_terms)
    assert_rows_close(d_x, want_x, sizes, limit, "d_x", x_terms)
    assert_close_per_expert(d_w, want_w, limit, "d_w", terms=w_terms)


def square(array):
    return np.asarray(array, np.float64) ** 2


@both
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "width", "columns"),
    [
        ([1], 1, 1),
        ([3, 0, 1, 7], 5, 9),
        ([300, 1, 0, 270], 70, 520),
        ([33, 40], 1100, 33),
        ([20, 30], 16, 1024),
        ([0, 0], 4, 3),
    ],
)
def test_shapes(sizes, width, columns, dtype, transpose_w):
    check(np.random.default_rng(1), sizes, width, columns, dtype=dtype, transpose_w=transpose_w, spare=3)


@both
@pytest.mark.parametrize("num_experts", [1, 3, 64, 130])
def test_uneven_groups(num_experts):
    rng = np.random.default_rng(2)
    check(rng, random_sizes(rng, 700, num_experts), 23, 31)


@both
@pytest.mark.parametrize("sizes", [[-1, 3], [2**31 - 1, 2**31 - 1, 5], [4, -(2**31), 9]])
def test_sizes_are_clipped_to_the_rows(sizes):
    rng = np.random.default_rng(3)
    x, w = random_array(rng, (6, 4)), random_array(rng, (len(sizes), 4, 5))
    clipped, left = [], 6
    for size in sizes:
        clipped.append(min(max(size, 0), left))
        left -= clipped[-1]
    got = grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32))
    assert_rows_close(got, reference.grouped_matmul(x, w, clipped), clipped, FLOAT32, "y")


def test_sizes_of_64_bits_do_not_wrap_around():
    with jax.enable_x64(True):
        sizes = jnp.asarray([2**32 + 1, 2], jnp.int64)
        y = grouped_matmul(jnp.ones((3, 1), jnp.float32), jnp.asarray([[[2.0]], [[5.0]]], jnp.float32), sizes)
    assert y.ravel().tolist() == [2.0, 2.0, 2.0]


@both
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    width=st.integers(8, 40),
    columns=st.integers(1, 40),
    transpose_w=st.booleans(),
    spare=st.integers(0, 4),
)
def test_any_shape(seed, sizes, width, columns, transpose_w, spare):
    check(np.random.default_rng(seed), sizes, width, columns, transpose_w=transpose_w, spare=spare)

"""precision="tf32" of grouped_matmul and expert_ffn against the oracle and "highest", with the bounds of `tf32`."""

from functools import partial

import numpy as np
import pytest
from expert_cases import (
    assert_weight_gradient_close,
    network,
    oracle,
    random_array,
    weight_gradient_scale,
)

import tf32
from anabranch import torch
from anabranch.jax import expert_ffn, grouped_matmul
from anabranch.reference import experts as reference
from frameworks import BOTH, with_gradients
from oracle import assert_close_per_expert, assert_rows_close

pytestmark = BOTH

#: Uneven groups: one without rows, one of a single row; three rows follow the groups.
SIZES = np.array([70, 0, 41, 1, 90], np.int32)
R = int(SIZES.sum()) + 3


def gemm(precision, dtype, transpose_w, exact=False):
    """Operands, cotangent, y and gradients of grouped_matmul; exact: TF32 represents the operands exactly."""
    rng, D, N = np.random.default_rng(5), 72, 56
    x, d_y = random_array(rng, (R, D), dtype), random_array(rng, (R, N), dtype)
    w = random_array(rng, (len(SIZES), N, D) if transpose_w else (len(SIZES), D, N), dtype)
    if exact:
        x, w, d_y = map(tf32.exact, (x, w, d_y))
    options = dict(transpose_w=transpose_w, precision=precision)
    operands = {"x": np.asarray(x), "w": np.asarray(w), "group_sizes": SIZES}
    functions = (partial(function, **options) for function in (grouped_matmul, torch.grouped_matmul))
    y, gradients = with_gradients(*functions, operands, np.asarray(d_y))
    return (x, w, d_y), {"y": y} | gradients


def ffn(precision, dtype="float32"):
    """The network, and y and every gradient of expert_ffn."""
    net = network(np.random.default_rng(6), SIZES, 33, 2, 47, dtype=dtype, spare=3)
    operands = {name: np.asarray(array) for name, array in net.arrays.items()} | {"group_sizes": SIZES}
    functions = (partial(function, precision=precision) for function in (expert_ffn, torch.expert_ffn))
    y, gradients = with_gradients(*functions, operands, np.asarray(net.d_y))
    return net, {"y": y} | gradients


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_a_rounded_gemm_is_within_its_bound(transpose_w, exact):
    """The error with operands that TF32 represents exactly is that of float32 sums."""
    (x, w, d_y), got = gemm("tf32", "float32", transpose_w, exact)
    x, w, d_y = (np.asarray(array, np.float64) for array in (x, w, d_y))
    w = w.swapaxes(1, 2) if transpose_w else w

    def results(x, w, d_y):
        d_x, d_w = reference.grouped_matmul_backward(d_y, x, w, SIZES)
        d_w = d_w.swapaxes(1, 2) if transpose_w else d_w
        return {"y": reference.grouped_matmul(x, w, SIZES), "x": d_x, "w": d_w}

    want, sizes_of_terms = results(x, w, d_y), results(abs(x), abs(w), abs(d_y))
    terms = {"y": w.shape[1], "x": w.shape[2], "w": max(SIZES)}
    for name, value in want.items():
        error = abs(np.asarray(got[name], np.float64) - value)
        assert (error <= tf32.element_bound(terms[name], exact) * sizes_of_terms[name]).all(), name
    assert_rows_close(got["y"], want["y"], SIZES, 2 * tf32.U, "y")
    assert_rows_close(got["x"], want["x"], SIZES, 2 * tf32.U, "x")
    assert_close_per_expert(got["w"], want["w"], 2 * tf32.U, "w")


def test_a_rounded_network_is_within_its_bounds():
    net, got = ffn("tf32")
    want, gradients = oracle(net, "silu")
    assert got.keys() == {"y"} | gradients.keys()
    assert_rows_close(got["y"], want, SIZES, tf32.bound("y"), "y")
    assert_rows_close(got["rows"], gradients["rows"], SIZES, tf32.bound("rows"), "rows")
    for name in ("w_in", "w_out", "b_in", "b_out"):
        assert_close_per_expert(got[name], gradients[name], tf32.bound(name), name)
    scale = weight_gradient_scale(net, "silu")
    assert_weight_gradient_close(got["weights"], gradients["weights"], scale, SIZES, tf32.bound("weights"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_float32_on_a_gpu_is_rounded(platform, dtype):
    """Where kernels round, every GEMM result differs from "highest"; elsewhere all bits are equal."""
    _, highest = gemm("highest", dtype, False)
    _, rounded = gemm("tf32", dtype, False)
    for name, value in highest.items():
        assert np.array_equal(value, rounded[name]) != tf32.rounds(platform, dtype), name
    if dtype == "float16":  # two are enough
        return
    _, highest = ffn("highest", dtype)
    _, rounded = ffn("tf32", dtype)
    for name, value in highest.items():
        is_sum_of_products = name != "b_out"
        assert np.array_equal(value, rounded[name]) != (tf32.rounds(platform, dtype) and is_sum_of_products), name

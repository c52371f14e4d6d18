"""GEMMs that sum rows by token return the same bits as a GEMM followed by sums, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import network, random_array

from anabranch.jax.ops.dispatch import gather_sum
from anabranch.jax.ops.ffn import (
    DOWN,
    UP,
    WITH_DH,
    FfnConfig,
    FfnOperands,
    Saved,
    down_gradients,
    ffn_backward,
    ffn_backward_by_slot,
    ffn_forward,
    ffn_forward_by_slot,
    rows_gradient,
    up_gradients,
)
from anabranch.reference import dispatch
from pairs import pairs

WANTED = ("x", "weights", *UP, *WITH_DH, *DOWN)

pytestmark = pytest.mark.usefixtures("platform")

T, E, K, D, F = 40, 6, 3, 24, 16


def assert_same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    *pairs(
        dtype=["float32", "bfloat16", "float16"],
        parts=[1, 2],
        biases=[False, True],
        weight_early=[False, True],
        rows=[(0, None, True), (8, None, False), (8, 64, True)],
    )
)
def test_fused_rules_have_the_bits_of_the_rules_on_rows(dtype, parts, biases, weight_early, rows):
    align_size, num_rows, w_out_comes_first = rows
    rng = np.random.default_rng(4)
    selected = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32)
    selected[rng.random((T, K)) < 0.1] = -1
    plan = dispatch.plan(selected, E, align_size, num_rows)
    row_of_slot, taken = jnp.asarray(plan.row_of_slot), int(plan.group_sizes.sum())  # rows past it are undefined
    net = network(rng, plan.group_sizes, D, parts, F, dtype=dtype, weights=None)
    weights = random_array(rng, (T, K))
    operands = FfnOperands(
        random_array(rng, (T, D), dtype),
        jnp.asarray(plan.slot_of_row),
        jnp.asarray(plan.group_sizes),
        net.w_in,
        net.w_out,
        net.b_in if biases else None,
        net.b_out if biases else None,
        weights,
    )
    config = FfnConfig(weight_early=weight_early, topk=K, skip_rest=True)
    forward = operands if weight_early else operands._replace(weights=None)
    late = None if weight_early else weights
    d_out = random_array(rng, (T, D), dtype)
    addend = random_array(rng, (T, D))

    @jax.jit
    def by_rows(forward, operands, d_out):
        y, saved = ffn_forward(config, forward, save=True)
        gradients = ffn_backward(config, operands, saved, d_out, WANTED)
        out = gather_sum(y, row_of_slot, late, y.dtype)
        d_x = gather_sum(gradients.pop("x"), row_of_slot, None, dtype, addend)
        return out, saved.h[:taken], d_x, gradients

    @jax.jit
    def by_slot(forward, operands, d_out):
        y, (h, u) = ffn_forward_by_slot(config, forward, save=True)
        first = dtype if w_out_comes_first else None
        undefined_h = Saved(h.at[taken:].set(jnp.nan), u)
        intermediate = ffn_backward_by_slot(config, operands, undefined_h, d_out, WANTED, first)
        out = y.sum(row_of_slot, late, y.x.dtype)
        d_x = rows_gradient(config, operands, intermediate).sum(row_of_slot, None, dtype, addend)
        gradients = up_gradients(config, operands, intermediate, WANTED, dtype) | intermediate.parameters
        if not w_out_comes_first:
            undefined = intermediate._replace(weighted_a=intermediate.weighted_a.at[taken:].set(jnp.nan))
            gradients |= down_gradients(config, operands, undefined, d_out, WANTED, dtype)
        return out, h[:taken], d_x, gradients | {"weights": intermediate.weights}

    jax.tree.map(assert_same, by_slot(forward, operands, d_out), by_rows(forward, operands, d_out))


def test_vmap_of_the_sums():
    rng = np.random.default_rng(5)
    plan = dispatch.plan(np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32), E, 0, None)
    net = network(rng, plan.group_sizes, D, 2, F, dtype="float32", weights=None)
    config = FfnConfig(topk=K)

    def out(x):
        operands = FfnOperands(
            x, jnp.asarray(plan.slot_of_row), jnp.asarray(plan.group_sizes), net.w_in, net.w_out, None, None, None
        )
        return ffn_forward_by_slot(config, operands, save=False)[0].sum(jnp.asarray(plan.row_of_slot), None, x.dtype)

    batch = random_array(rng, (3, T, D), "float32")
    assert_same(jax.vmap(out)(batch), jnp.stack([out(x) for x in batch]))

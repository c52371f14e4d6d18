"""The forward and backward rules over tokens and a plan, as the whole layer composes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import Network, assert_matches_oracle, network, random_array

from anabranch.activation import Activation
from anabranch.jax.ops.ffn import DOWN, UP, FfnConfig, FfnOperands, ffn_backward, ffn_forward
from anabranch.reference import dispatch

pytestmark = pytest.mark.usefixtures("platform")


def routed(rng, num_tokens, num_experts, topk, *, align_size=0, num_rows=None):
    """A plan with distinct experts per token, a few of them masked."""
    selected = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :topk].astype(np.int32)
    selected[rng.random((num_tokens, topk)) < 0.1] = -1
    return dispatch.plan(selected, num_experts, align_size, num_rows)


def check(rng, plan, num_tokens, num_experts, topk, *, dtype="float32", d_dtype=None, parts=2, weight_early=False):
    width, expert_width = 19, 23
    slots = plan.slot_of_row
    real = slots >= 0
    token = np.where(real, slots, 0) // topk
    net = network(rng, plan.group_sizes, width, parts, expert_width, dtype=dtype, weights=None)
    x = random_array(rng, (num_tokens, width), dtype)
    d_out = random_array(rng, (num_tokens, width), d_dtype or dtype)
    weights = random_array(rng, (num_tokens, topk))
    operands = FfnOperands(
        x, jnp.asarray(slots), jnp.asarray(plan.group_sizes), net.w_in, net.w_out, net.b_in, net.b_out, weights
    )
    config = FfnConfig(Activation("gelu"), weight_early=weight_early, topk=topk)

    @jax.jit
    def both(operands, d_out):
        y, saved = ffn_forward(config, operands, save=True)
        return y, saved.h, ffn_backward(config, operands, saved, d_out, ("x", "weights", *UP, *DOWN))

    y, h, gradients = both(operands, d_out)
    assert h.shape == (len(slots), parts, expert_width) and h.dtype == x.dtype

    row_weights = np.where(real, np.asarray(weights).reshape(-1)[np.where(real, slots, 0)], 0.0)
    rows = Network(
        x[token], net.w_in, net.w_out, plan.group_sizes, net.b_in, net.b_out, jnp.asarray(row_weights), d_out[token]
    )
    got = dict(
        rows=gradients["x"],
        **{name: gradients[name] for name in ("w_in", "w_out", "b_in", "b_out")},
        weights=jnp.where(real, gradients["weights"].reshape(-1)[np.where(real, slots, 0)], 0.0),
    )
    assert_matches_oracle(rows, "gelu", y, got, slots)
    for name in ("y", "rows"):
        padding = np.asarray({"y": y, "rows": gradients["x"]}[name])[~real]
        assert not padding.astype(np.float64).any(), name
    assert not np.asarray(h)[~real].astype(np.float64).any()
    without_row = np.delete(np.asarray(gradients["weights"]).reshape(-1), slots[real])
    assert not without_row.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "topk"), [(1, 1, 1), (7, 3, 3), (50, 8, 2), (40, 64, 8), (30, 130, 5), (3, 64, 64)]
)
def test_tokens_and_a_plan(num_tokens, num_experts, topk, dtype):
    rng = np.random.default_rng(1)
    plan = routed(rng, num_tokens, num_experts, topk)
    check(rng, plan, num_tokens, num_experts, topk, dtype=dtype)


@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize("align_size", [8, 128])
def test_aligned_groups_have_zero_padding(align_size, weight_early):
    rng = np.random.default_rng(2)
    plan = routed(rng, 60, 7, 2, align_size=align_size)
    check(rng, plan, 60, 7, 2, weight_early=weight_early)


def test_bounded_rows():
    rng = np.random.default_rng(3)
    plan = routed(rng, 60, 7, 2, align_size=8, num_rows=72)
    assert plan.dropped > 0
    check(rng, plan, 60, 7, 2)


@pytest.mark.parametrize("d_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cotangents_of_another_dtype(dtype, d_dtype):
    rng = np.random.default_rng(4)
    check(rng, routed(rng, 40, 5, 2), 40, 5, 2, dtype=dtype, d_dtype=d_dtype, parts=1)


def test_late_weights_elsewhere_give_the_same_gradients():
    """Combine applies late weights: the forward rule gets none, the backward rule gets them."""
    rng = np.random.default_rng(5)
    plan = routed(rng, 40, 5, 2)
    net = network(rng, plan.group_sizes, 9, 2, 11, weights=None)
    weights = random_array(rng, (40, 2))
    operands = FfnOperands(
        random_array(rng, (40, 9)),
        jnp.asarray(plan.slot_of_row),
        jnp.asarray(plan.group_sizes),
        net.w_in,
        net.w_out,
        net.b_in,
        net.b_out,
        None,
    )
    config = FfnConfig(topk=2)
    weighted = operands._replace(weights=weights)
    y, saved = ffn_forward(config, operands, save=True)
    weighted_y, same = ffn_forward(config, weighted, save=True)
    np.testing.assert_array_equal(np.asarray(saved.h), np.asarray(same.h))
    slots = np.asarray(plan.slot_of_row)
    w = np.where(slots >= 0, np.asarray(weights).reshape(-1)[np.maximum(slots, 0)], 0.0)
    np.testing.assert_allclose(np.asarray(weighted_y), w[:, None] * np.asarray(y), rtol=1e-5, atol=1e-6)

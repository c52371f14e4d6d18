"""expert_ffn against the oracle: forward and every gradient, random cotangents, a tensor and an expert."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import assert_matches_oracle, network, oracle, random_sizes, weight_gradient_scale
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.jax import expert_ffn
from anabranch.jax._ffn import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("platform")


def run(net, activation="silu", weight_early=False):
    """(y, gradients by name) of expert_ffn."""

    def ffn(arrays):
        return expert_ffn(
            **arrays,
            group_sizes=jnp.asarray(net.group_sizes),
            activation=activation,
            weight_early=weight_early and net.weights is not None,
        )

    y, pull = jax.vjp(jax.jit(ffn), net.arrays)
    return y, pull(net.d_y)[0]


def check(net, activation="silu", weight_early=False):
    assert_matches_oracle(net, activation, *run(net, activation, weight_early))


@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_activations_gating_and_weighting(dtype, activation, parts, weight_early):
    rng = np.random.default_rng(1)
    check(network(rng, [70, 0, 41, 90], 33, parts, 47, dtype=dtype, spare=3), activation, weight_early)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "width", "hidden"),
    [
        ([1], 8, 8),
        ([5], 3, 7),
        ([1, 0, 1], 17, 9),  # single rows, a cold expert
        ([300, 0, 1, 513], 40, 530),  # groups longer than a tile, hidden wider than a tile
        ([257, 16], 530, 20),  # width above a tile
        ([31, 2], 1100, 1040),  # more than two blocks of terms in every sum
        ([100], 64, 1024),  # rows of the weights whole pages apart
        ([0, 0, 0], 5, 4),
    ],
)
def test_shapes(sizes, width, hidden, dtype):
    rng = np.random.default_rng(2)
    check(network(rng, sizes, width, 2, hidden, dtype=dtype, spare=2), "gelu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_experts", [1, 3, 64, 130])
def test_uneven_groups(num_experts, dtype):
    rng = np.random.default_rng(3)
    sizes = random_sizes(rng, 800, num_experts)
    assert num_experts < 64 or (sizes == 0).any()
    check(network(rng, sizes, 29, 2, 35, dtype=dtype))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("weights", [None, "float32", "bfloat16", "float16"])
def test_optional_operands(biases, weights):
    rng = np.random.default_rng(4)
    check(network(rng, [6, 0, 9], 12, 2, 8, spare=1, biases=biases, weights=weights))


@pytest.mark.parametrize("weight_early", [False, True])
def test_a_weight_of_zero_gets_its_gradient(weight_early):
    rng = np.random.default_rng(5)
    net = network(rng, [4, 3], 6, 2, 5)
    net.weights = net.weights.at[jnp.array([1, 5])].set(0.0)
    y, gradients = run(net, weight_early=weight_early)
    assert not np.asarray(y)[[1, 5]].any()
    assert np.asarray(gradients["weights"])[[1, 5]].all()
    check(net, weight_early=weight_early)


def test_no_rows():
    rng = np.random.default_rng(6)
    net = network(rng, [0, 0], 4, 2, 3)
    y, gradients = run(net)
    assert y.shape == (0, 4)
    for name, gradient in gradients.items():
        assert not np.asarray(gradient).any(), name


@pytest.mark.parametrize("sizes", [[3, 50], [50, 50], [-4, 9, 100], [2**31 - 1, 2**31 - 1], [-(2**31), 4]])
def test_sizes_are_clipped_to_the_rows(sizes):
    rng = np.random.default_rng(7)
    clipped, left = [], 12
    for size in sizes:
        clipped.append(min(max(size, 0), left))
        left -= clipped[-1]
    net = network(rng, clipped, 5, 2, 4, spare=left)
    unclipped = dataclasses.replace(net, group_sizes=np.asarray(sizes, np.int32))
    assert_matches_oracle(net, "silu", *run(unclipped))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_arguments_of_the_activation_stay_exact(dtype):
    for activation in ACTIVATIONS:
        values = np.array([-3e4, -300, -100, -88, -20, -16.5, -1e-3, -0.0, 0.0, 1e-30, 1e-3, 16.5, 20, 100, 300])
        net = network(np.random.default_rng(8), [len(values)], 1, 1, 1, dtype=dtype, biases=False, weights=None)
        net.rows = jnp.asarray(values[:, None], dtype)
        net.w_in = net.w_out = jnp.ones((1, 1, 1, 1), dtype)
        net.w_out = net.w_out[0]
        net.d_y = jnp.ones((len(values), 1), dtype)
        y, gradients = run(net, activation)
        want_y, want = oracle(net, activation)
        scale = 2.0**-7 if dtype == "bfloat16" else 4e-6
        np.testing.assert_allclose(np.asarray(y, np.float64), want_y, rtol=scale, atol=1e-37)
        np.testing.assert_allclose(np.asarray(gradients["rows"], np.float64), want["rows"], rtol=scale, atol=2e-6)


def test_not_a_number_stays_with_its_row_and_its_expert():
    rng = np.random.default_rng(9)
    net = network(rng, [3, 4], 5, 2, 4, spare=2)
    net.rows = net.rows.at[1, 2].set(jnp.nan).at[8, 0].set(jnp.nan)
    y, gradients = run(net)
    broken = np.isnan(np.asarray(y)).any(axis=1)
    assert broken.tolist() == [False, True] + [False] * 7
    assert np.isnan(np.asarray(gradients["w_in"])[0]).any()
    assert np.isfinite(np.asarray(gradients["w_in"])[1]).all()


def test_same_bits_on_every_run():
    rng = np.random.default_rng(10)
    net = network(rng, random_sizes(rng, 900, 16), 96, 2, 144)
    first_y, first = run(net)
    for _ in range(5):
        y, gradients = run(net)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(first_y))
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(np.asarray(gradient), np.asarray(first[name]), name)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    spare=st.integers(0, 5),
    width=st.integers(8, 40),
    parts=st.integers(1, 2),
    hidden=st.integers(8, 40),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    biases=st.booleans(),
    weights=st.sampled_from([None, "float32", "bfloat16"]),
    weight_early=st.booleans(),
)
def test_any_network(seed, sizes, spare, width, parts, hidden, activation, dtype, biases, weights, weight_early):
    rng = np.random.default_rng(seed)
    net = network(rng, sizes, width, parts, hidden, dtype=dtype, spare=spare, biases=biases, weights=weights)
    # Single values may cancel: absolute errors, in units of the tensor's largest value.
    y, gradients = run(net, activation, weight_early)
    want_y, want = oracle(net, activation)
    units = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    for name, got, expected in [("y", y, want_y), *((name, gradients[name], want[name]) for name in want)]:
        largest = np.abs(weight_gradient_scale(net, activation) if name == "weights" else expected).max(initial=0.0)
        unit = max(units[dtype], units[str(got.dtype)])
        np.testing.assert_allclose(
            np.asarray(got, np.float64), expected, rtol=0, atol=40 * unit * largest + 1e-30, err_msg=name
        )

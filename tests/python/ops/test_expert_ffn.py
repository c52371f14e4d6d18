"""expert_ffn against the oracle: forward and every gradient, with random cotangents, per tensor and per expert."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import (
    ACTIVATIONS,
    assert_matches_oracle,
    network,
    oracle,
    parts_of,
    random_sizes,
    weight_gradient_scale,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import torch
from anabranch.activation import PLAIN, Activation
from anabranch.jax import expert_ffn
from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS, Layouts
from frameworks import BOTH, with_gradients

pytestmark = BOTH


def run(net, activation="silu", weight_early=False, w_in_layout="dpf", w_out_layout="fd"):
    """(y, gradients by name) of expert_ffn with weights and gradients in these layouts."""
    of = Layouts(w_in_layout, w_out_layout)
    laid_out = ("w_in", "w_out", "b_in")

    def stored(name, array):
        return array.transpose(of.from_ours(name)) if name in laid_out else array

    def ours(name, array):
        return array.transpose(of.order(name)) if name in laid_out else array

    options = {
        "w_in_layout": w_in_layout,
        "w_out_layout": w_out_layout,
        "activation": activation,
        "weight_early": weight_early and net.weights is not None,
    }
    operands = {name: stored(name, np.asarray(array)) for name, array in net.arrays.items()}
    operands["group_sizes"] = np.asarray(net.group_sizes)
    functions = (partial(function, **options) for function in (expert_ffn, torch.expert_ffn))
    y, gradients = with_gradients(*functions, operands, np.asarray(net.d_y))
    return y, {name: ours(name, array) for name, array in gradients.items()}


def check(net, activation="silu", weight_early=False, **layouts):
    assert_matches_oracle(net, activation, *run(net, activation, weight_early, **layouts))


@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize(
    ("activation", "parts"), [(a, P) for a in ACTIVATIONS for P in parts_of(a)], ids=lambda v: getattr(v, "name", v)
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_activations_gating_and_weighting(dtype, activation, parts, weight_early):
    rng = np.random.default_rng(1)
    check(network(rng, [70, 0, 41, 90], 33, parts, 47, dtype=dtype, spare=3), activation, weight_early)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "width", "expert_width"),
    [
        ([1], 8, 8),
        ([5], 3, 7),
        ([1, 0, 1], 17, 9),  # single rows, an expert without rows
        ([300, 0, 1, 513], 40, 530),  # groups longer than a tile, F wider than a tile
        ([257, 16], 530, 20),  # D wider than a tile
        ([31, 2], 1100, 1040),  # more than two blocks of terms per sum
        ([100], 64, 1024),  # weight rows whole pages apart
        ([0, 0, 0], 5, 4),
    ],
)
def test_shapes(sizes, width, expert_width, dtype):
    rng = np.random.default_rng(2)
    check(network(rng, sizes, width, 2, expert_width, dtype=dtype, spare=2), "gelu")


LAYOUTS = [(w_in, w_out) for w_in in IN_LAYOUTS for w_out in OUT_LAYOUTS]


@pytest.mark.parametrize(("w_in_layout", "w_out_layout"), LAYOUTS[1:])
@pytest.mark.parametrize(
    ("sizes", "width", "parts", "expert_width", "weight_early", "dtype"),
    [
        *(
            (*shape, dtype)
            for dtype in ("float32", "bfloat16", "float16")
            for shape in [
                ([70, 0, 41, 90], 33, 2, 47, False),  # odd widths
                ([70, 0, 41, 130], 72, 2, 48, True),
                ([70, 0, 41, 130], 40, 1, 56, False),
                ([5, 2], 3, 2, 1, False),
            ]
        ),
        *(
            (*shape, dtype)
            for dtype in ("float32", "bfloat16")
            for shape in [
                ([300, 0, 1, 513], 40, 2, 530, False),  # F wider than a tile
                ([140, 16], 1032, 2, 256, True),  # D of several blocks, F as wide as a tile
            ]
        ),
        ([5, 2], 1, 2, 3, False, "bfloat16"),
    ],
)
def test_layouts_of_weights(w_in_layout, w_out_layout, sizes, width, parts, expert_width, weight_early, dtype):
    # No value is so near the limit that the last bits of a sum decide its slope.
    net = network(np.random.default_rng(17), sizes, width, parts, expert_width, dtype=dtype, spare=3)
    activation = Activation.swiglu_oai(limit=0.9) if parts == 2 else "gelu"
    check(net, activation, weight_early, w_in_layout=w_in_layout, w_out_layout=w_out_layout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_experts", [1, 3, 64, 130])
def test_uneven_groups(num_experts, dtype):
    rng = np.random.default_rng(3)
    sizes = random_sizes(rng, 800, num_experts)
    assert num_experts < 64 or (sizes == 0).any()
    check(network(rng, sizes, 29, 2, 35, dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("w_in_layout", "w_out_layout"), [("dpf", "fd"), ("pfd", "df"), ("fpd", "df")])
def test_few_rows_of_many_experts(w_in_layout, w_out_layout, dtype):
    sizes = np.zeros(40, np.int32)
    sizes[[3, 17, 38, 39]] = 1, 19, 2, 9
    net = network(np.random.default_rng(18), sizes, 136, 2, 72, dtype=dtype, spare=4)
    check(net, "silu", w_in_layout=w_in_layout, w_out_layout=w_out_layout)


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
    for activation in PLAIN:
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "activation",
    [
        Activation.glu("gelu_erf"),
        Activation.swiglu_clamped(limit=2.0),
        Activation.swiglu_oai(limit=2.0),
        Activation.swiglu_then_clamp(limit=2.0),
        Activation.situ(a=0.5, b=2.0),
    ],
    ids=lambda a: a.name,
)
def test_every_pair_of_gate_and_up_far_from_and_at_the_limits(activation, dtype):
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-10
    edge = [-2 - 4 * step, -2.0, -2 + 4 * step, 2 - 4 * step, 2.0, 2 + 4 * step]
    values = np.array([-60, -12, -6, *edge, -1, -1e-3, 0, 1e-3, 0.5, 6, 12, 60])
    gate, up = (axis.ravel() for axis in np.meshgrid(values, values))
    net = network(np.random.default_rng(11), [len(gate)], 2, 2, 1, dtype=dtype, biases=False, weights=None)
    net.rows = jnp.asarray(np.stack([gate, up], axis=1), dtype)
    net.w_in, net.w_out = jnp.eye(2, dtype=dtype).reshape(1, 2, 2, 1), jnp.ones((1, 1, 2), dtype)
    net.d_y = jnp.asarray(np.tile([1.0, 0.5], (len(gate), 1)), dtype)
    y, gradients = run(net, activation)
    want_y, want = oracle(net, activation)
    scale = {"float32": 4e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    tiny = 1e-37 if dtype != "float16" else 2.0**-24
    np.testing.assert_allclose(np.asarray(y, np.float64), want_y, rtol=scale, atol=tiny)
    # A slope is a sum of terms as large as the other input.
    terms = 2e-6 * (1 + np.abs(np.stack([up, gate], axis=1)))
    got = np.asarray(gradients["rows"], np.float64)
    assert (np.abs(got - want["rows"]) <= scale * np.abs(want["rows"]) + terms).all()


@pytest.mark.parametrize("a", [1.0, 4.0])
def test_slopes_of_situ_are_exact_in_saturation(a):
    # Both slopes tend to 0, where an absolute bound would hide errors. Near g = -a/4 the slope of the gate changes
    # sign.
    activation = Activation.situ(a=a, b=2.0)
    gates = np.concatenate([-np.geomspace(4 * a, 40, 9), np.geomspace(1e-3, min(16 * a, 40), 60)])
    ups = np.geomspace(0.1, 30, 9)
    gate, up = (axis.ravel() for axis in np.meshgrid(gates, np.concatenate([-ups, ups])))
    net = network(np.random.default_rng(14), [len(gate)], 2, 2, 1, biases=False, weights=None)
    net.rows = jnp.asarray(np.stack([gate, up], axis=1), "float32")
    net.w_in, net.w_out = jnp.eye(2).reshape(1, 2, 2, 1), jnp.ones((1, 1, 2))
    net.d_y = jnp.ones((len(gate), 2))
    want = oracle(net, activation)[1]["rows"]
    np.testing.assert_allclose(np.asarray(run(net, activation)[1]["rows"], np.float64), want, rtol=1e-5, atol=1e-36)


@pytest.mark.parametrize(
    "activation", [Activation.swiglu_clamped(2.0), Activation.swiglu_oai(), Activation.situ()], ids=lambda a: a.name
)
def test_two_inputs_need_gated_experts(activation):
    net = network(np.random.default_rng(12), [3], 4, 1, 5)
    with pytest.raises(ValueError, match=f"activation: got {activation.name}, which has two inputs"):
        run(net, activation)


def test_names_stand_for_activations():
    net = network(np.random.default_rng(13), [4, 2], 6, 2, 5)
    for name, activation in {
        "swish": Activation.glu("silu"),
        "swiglu_oai": Activation.swiglu_oai(1.702, 7.0),
        "situ": Activation.situ(4.0, 25.0),
    }.items():
        np.testing.assert_array_equal(np.asarray(run(net, name)[0]), np.asarray(run(net, activation)[0]))


def test_nan_stays_with_its_row_and_its_expert():
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
    expert_width=st.integers(8, 40),
    activation=st.sampled_from([(a, P) for a in ACTIVATIONS for P in parts_of(a)]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    biases=st.booleans(),
    weights=st.sampled_from([None, "float32", "bfloat16"]),
    weight_early=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_network(seed, sizes, spare, width, expert_width, activation, dtype, biases, weights, weight_early, layout):
    activation, parts = activation
    rng = np.random.default_rng(seed)
    net = network(rng, sizes, width, parts, expert_width, dtype=dtype, spare=spare, biases=biases, weights=weights)
    # Single values may cancel, so errors are absolute in units of the tensor's largest value.
    y, gradients = run(net, activation, weight_early, *layout)
    want_y, want = oracle(net, activation)
    units = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    for name, got, expected in [("y", y, want_y), *((name, gradients[name], want[name]) for name in want)]:
        largest = np.abs(weight_gradient_scale(net, activation) if name == "weights" else expected).max(initial=0.0)
        unit = max(units[dtype], units[str(got.dtype)])
        np.testing.assert_allclose(
            np.asarray(got, np.float64), expected, rtol=0, atol=40 * unit * largest + 1e-30, err_msg=name
        )

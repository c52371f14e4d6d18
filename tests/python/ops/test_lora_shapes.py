"""Adapters of expert_ffn in JAX against the oracle, for many shapes: forward and every gradient, per expert.

The adapters are as large as the weights, so that an error in them shows in every result.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import (
    ROUNDINGS,
    UNIT_ROUNDOFF,
    assert_weight_gradient_close,
    network,
    random_array,
    weight_gradient_scale,
)

from anabranch.activation import Activation, as_activation
from anabranch.jax import Lora, expert_ffn
from anabranch.layouts import IN_LAYOUTS, OURS, OUT_LAYOUTS, Layouts
from anabranch.reference import experts as reference
from oracle import assert_close, assert_close_per_expert, assert_rows_close

pytestmark = pytest.mark.usefixtures("platform")

#: Roundings beside those of `expert_cases`: of u and z, and for gradients of v.
MORE_ROUNDINGS = {"y": 2, "rows": 4, "w_in": 4, "b_in": 4, "w_out": 2, "b_out": 0, "weights": 4}
OF_FACTORS = 7
FLOAT32 = 4e-6
SIZES = [70, 0, 41, 90]
OWN, SHARED = (False,) * 4, (True,) * 4


def limit_of(dtype, name):
    if dtype == "float32":
        return FLOAT32
    roundings = OF_FACTORS if name not in MORE_ROUNDINGS else ROUNDINGS[name] + MORE_ROUNDINGS[name]
    return roundings * UNIT_ROUNDOFF[dtype]


def factors(rng, net, ranks, shared, dtype):
    """Factors for the ranks (r, q), 0: none. shared: the factors that all experts share, in the order of Lora."""
    E, D, P, F = net.w_in.shape
    r, q = ranks

    def factor(shares, rank, *shape, scale):
        return random_array(rng, (1 if shares else E, *shape), dtype, scale) if rank else None

    return Lora(
        factor(shared[0], r, D, r, scale=D**-0.5),
        factor(shared[1], r, r, P, F, scale=max(r, 1) ** -0.5),
        factor(shared[2], q, F, q, scale=F**-0.5),
        factor(shared[3], q, q, D, scale=max(q, 1) ** -0.5),
    )


def check(net, lora, lora_scale=(0.8, -1.25), activation="silu", weight_early=False, layouts=OURS):
    """Compares y and every gradient with the oracle."""
    early = weight_early and net.weights is not None
    options = dict(
        activation=activation,
        weight_early=early,
        w_in_layout=layouts.w_in,
        w_out_layout=layouts.w_out,
        lora_scale=lora_scale,
    )
    laid_out = ("w_in", "w_out", "b_in")
    arrays = {n: a.transpose(layouts.from_ours(n)) if n in laid_out else a for n, a in net.arrays.items()}

    @jax.jit
    def both_passes(arrays, lora, d_y):
        def function(arrays, lora):
            return expert_ffn(**arrays, lora=lora, group_sizes=net.group_sizes, **options)

        y, pull = jax.vjp(function, arrays, lora)
        return y, pull(d_y)

    y, (gradients, d_lora) = both_passes(arrays, lora, net.d_y)
    gradients = {n: a.transpose(layouts.order(n)) if n in laid_out else a for n, a in gradients.items()}
    dtype = str(net.rows.dtype)
    given = dict(
        group_sizes=net.group_sizes,
        activation=activation,
        b_in=net.b_in,
        b_out=net.b_out,
        row_weights=net.weights,
        lora=[None if factor is None else np.asarray(factor) for factor in lora],
        lora_scale=lora_scale,
        lora_dtype=None if dtype == "float32" else net.rows.dtype,
    )
    operands = net.rows, net.w_in, net.w_out
    kept = net.rows.dtype if as_activation(activation).limit else None
    want = reference.expert_ffn(*operands, **given, weight_early=early)
    found = reference.expert_ffn_backward(net.d_y, *operands, **given, saved_dtype=kept)
    assert_rows_close(y, want, net.group_sizes, limit_of(dtype, "y"), "y")
    expected = dict(zip(("rows", "w_in", "w_out", "b_in", "b_out", "weights"), found, strict=False))
    for name, got in gradients.items():
        assert got.dtype == net.arrays[name].dtype, name
        limit = limit_of(dtype, name)
        if name == "weights":
            scale = weight_gradient_scale(net, activation) + np.abs(expected[name])
            assert_weight_gradient_close(got, expected[name], scale, net.group_sizes, 4 * limit)
        elif name == "rows":
            assert_rows_close(got, expected[name], net.group_sizes, limit, name)
        else:
            assert_close_per_expert(got, expected[name], limit, name)
    for name, factor, got, exact in zip(Lora._fields, lora, d_lora, found.d_lora, strict=True):
        name = f"lora.{name}"
        if factor is None:
            assert got is None
            continue
        assert got.dtype == factor.dtype and got.shape == factor.shape, name
        if len(factor) == len(SIZES):
            assert_close_per_expert(got, exact, limit_of(dtype, name), name)
            assert not np.asarray(got)[np.asarray(net.group_sizes) == 0].astype(np.float64).any(), name
        else:
            assert_close(got, exact, limit_of(dtype, name), name)
    return y, gradients


@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("activation", "parts"), [("silu", 2), (Activation.swiglu_oai(alpha=1.702, limit=0.9), 2), ("relu2", 1)]
)
def test_activations_dtypes_and_weighting(activation, parts, dtype, weight_early):
    rng = np.random.default_rng(1)
    net = network(rng, SIZES, 33, parts, 47, dtype=dtype, spare=3)
    check(net, factors(rng, net, (5, 16), OWN, dtype), activation=activation, weight_early=weight_early)


@pytest.mark.parametrize("ranks", [(1, 0), (0, 1), (16, 3), (70, 40)])
@pytest.mark.parametrize("shared", [OWN, SHARED, (True, False, False, True), (False, True, True, False)])
def test_ranks_and_shared_factors(ranks, shared):
    rng = np.random.default_rng(2)
    net = network(rng, SIZES, 33, 2, 47)
    check(net, factors(rng, net, ranks, shared, "float32"), lora_scale=0.5)


@pytest.mark.parametrize(
    "layouts", [Layouts(w_in, w_out) for w_in in IN_LAYOUTS for w_out in OUT_LAYOUTS], ids="-".join
)
def test_layouts(layouts):
    rng = np.random.default_rng(3)
    net = network(rng, SIZES, 9, 2, 11)
    check(net, factors(rng, net, (3, 4), OWN, "float32"), layouts=layouts)


def test_float32_factors_of_a_16_bit_layer():
    """Factors are rounded where they multiply; their gradients are not rounded."""
    rng = np.random.default_rng(4)
    net = network(rng, SIZES, 33, 2, 47, dtype="bfloat16")
    check(net, factors(rng, net, (8, 8), OWN, "float32"))


@pytest.mark.parametrize("sizes", [[0, 0, 0, 0], [300, 0, 1, 513], [1, 0, 0, 0]])
def test_sizes_of_groups(sizes):
    rng = np.random.default_rng(5)
    net = network(rng, sizes, 20, 2, 530, biases=False, weights=None)
    check(net, factors(rng, net, (4, 4), OWN, "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_factors_have_no_effect(dtype):
    rng = np.random.default_rng(6)
    net = network(rng, SIZES, 33, 2, 47, dtype=dtype)
    lora = factors(rng, net, (5, 16), OWN, dtype)
    lora = lora._replace(b_in=jnp.zeros_like(lora.b_in), b_out=jnp.zeros_like(lora.b_out))

    @jax.jit
    def both_passes(lora):
        def function(rows, w_in):
            arrays = net.arrays | {"rows": rows, "w_in": w_in}
            return expert_ffn(**arrays, lora=lora, group_sizes=net.group_sizes)

        y, pull = jax.vjp(function, net.rows, net.w_in)
        return y, pull(net.d_y)

    for got, want in zip(jax.tree.leaves(both_passes(lora)), jax.tree.leaves(both_passes(None)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))

"""The NNX layer: moe() on its parameters, with a state that is no parameter; it trains."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from anabranch.jax import moe, quantile_bias, shared_expert
from anabranch.jax.nnx import MoE, RouterState
from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS, Layouts

pytestmark = pytest.mark.usefixtures("platform")


def _layer(**options):
    return MoE(12, 20, num_experts=6, topk=2, rngs=nnx.Rngs(0), **options)


def _x(*shape, seed=0):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(gated=False, activation="relu2", use_bias=True, weight_early=True),
        dict(score_function="sigmoid", use_expert_bias=True, num_groups=3, group_topk=2, scaling_factor=2.0),
        dict(normalize=False, aux_loss_coeff=0.1, z_loss_coeff=0.1, align_size=8),
        dict(w_in_layout="pfd", w_out_layout="df", activation="swiglu_oai", use_bias=True),
        dict(w_in_layout="dfp", use_bias=True),
    ],
)
def test_the_layer_is_moe_on_its_parameters(options):
    layer, x = _layer(**options), _x(2, 5, 12)
    if layer.expert_bias is not None:
        layer.expert_bias[...] = _x(6, seed=9)
    names = dict(options)
    for name in ("gated", "use_bias", "use_expert_bias"):
        names.pop(name, None)
    want = moe(
        x,
        layer.gate[...],
        layer.w_in[...],
        layer.w_out[...],
        topk=2,
        b_in=None if layer.b_in is None else layer.b_in[...],
        b_out=None if layer.b_out is None else layer.b_out[...],
        expert_bias=None if layer.expert_bias is None else layer.expert_bias[...],
        **names,
    )
    jax.tree.map(np.testing.assert_array_equal, layer(x), want)


def test_layouts_store_the_same_parameters():
    ours = _layer(use_bias=True)
    for w_in, w_out in ((w_in, w_out) for w_in in IN_LAYOUTS for w_out in OUT_LAYOUTS):
        layer, layouts = _layer(use_bias=True, w_in_layout=w_in, w_out_layout=w_out), Layouts(w_in, w_out)
        for name in ("w_in", "w_out", "b_in"):
            got = getattr(layer, name)[...].transpose(layouts.order(name))
            np.testing.assert_array_equal(got, getattr(ours, name)[...])


def test_parameters_start_at_the_fan_in_of_one_expert():
    layer = MoE(256, 512, num_experts=16, topk=2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jnp.std(layer.w_in[...]), 256**-0.5, rtol=0.02)
    np.testing.assert_allclose(jnp.std(layer.w_out[...]), 512**-0.5, rtol=0.02)
    np.testing.assert_allclose(jnp.std(layer.gate[...]), 256**-0.5, rtol=0.05)


def test_shared_expert_adds_a_dense_one():
    layer, x = _layer(shared_features=16), _x(7, 12)
    with jax.default_matmul_precision("highest"):  # a GPU may round operands of matmuls to fewer digits
        gate, up = (x @ layer.shared_in[...][:, i] for i in range(2))
        routed = moe(x, layer.gate[...], layer.w_in[...], layer.w_out[...], topk=2).output
        want = routed + (jax.nn.silu(gate) * up) @ layer.shared_out[...]
        np.testing.assert_allclose(layer(x).output, want, rtol=2e-5, atol=2e-5)
    mask = jnp.arange(7) != 2
    np.testing.assert_array_equal(layer(x, token_mask=mask).output[2], 0.0)


def test_the_gate_of_the_shared_expert_and_the_bias_of_the_router():
    layer, x = _layer(shared_features=16, shared_gate=True, use_gate_bias=True), _x(7, 12)
    layer.gate_bias[...] = _x(6, seed=9)
    weights = (layer.gate[...], layer.w_in[...], layer.w_out[...])
    routed = moe(x, *weights, topk=2, gate_bias=layer.gate_bias[...]).output
    shared = shared_expert(x, layer.shared_in[...], layer.shared_out[...], w_gate=layer.shared_gate[...])
    np.testing.assert_array_equal(layer(x).output, routed + shared)
    gradients = nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x).output)))(layer)
    assert gradients["shared_gate"][...].any() and gradients["gate_bias"][...].any()


def test_a_masked_token_may_hold_nan():
    layer, mask = _layer(shared_features=8, shared_gate=True, use_gate_bias=True), jnp.arange(7) != 2

    def gradients(x):
        return nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x, token_mask=mask).output)))(layer)

    x = _x(7, 12)
    jax.tree.map(np.testing.assert_array_equal, gradients(x.at[2].set(jnp.nan)), gradients(x.at[2].set(0)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtype_is_that_of_the_computation(dtype):
    layer = _layer(dtype=dtype, use_bias=True, shared_features=8)
    assert layer(_x(4, 12)).output.dtype == dtype
    assert layer.w_in[...].dtype == jnp.float32


def test_gradients_of_float32_parameters_are_not_rounded():
    layer, x = _layer(dtype=jnp.bfloat16), _x(40, 12)
    gradients = nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x).output.astype(jnp.float32))))(layer)
    for name in ("w_in", "w_out"):
        got = gradients[name][...]
        assert got.dtype == jnp.float32 and (got != got.astype(jnp.bfloat16).astype(jnp.float32)).any(), name


def test_expert_bias_is_state_and_moves_towards_balance():
    layer, x = _layer(use_expert_bias=True, score_function="sigmoid"), _x(64, 12)
    assert not any("expert_bias" in map(str, path) for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param)))
    assert len(nnx.to_flat_state(nnx.state(layer, RouterState))) == 1
    counts = layer(x).tokens_per_expert
    layer.update_expert_bias(counts, rate=0.5)
    mean = np.asarray(counts).mean()
    np.testing.assert_array_equal(layer.expert_bias[...], 0.5 * np.sign(mean - np.asarray(counts)))

    def spread():
        return float(jnp.std(layer(x).tokens_per_expert.astype(jnp.float32)))

    layer.expert_bias[...] = jnp.array([1.0, 0, 0, 0, 0, 0])
    before = spread()
    for _ in range(200):
        layer.update_expert_bias(layer(x).tokens_per_expert, rate=0.01)
    assert spread() < before / 2


def _rounded(state):
    return jax.tree.map(lambda array: array.astype(jnp.bfloat16), state)


def _updated(layer):
    nnx.update(layer, _rounded(nnx.state(layer)))
    return layer


def _merged(layer):
    graph, state = nnx.split(layer)
    return nnx.merge(graph, _rounded(state))


@pytest.mark.parametrize("way", [_updated, _merged], ids=["update", "merge"])
def test_an_update_is_not_lost_where_the_state_was_rounded(way):
    counts, x = jnp.arange(6), _x(64, 12)
    layer = _layer(use_expert_bias=True, balance="quantile", score_function="sigmoid", qb_bins=400)
    histogram = layer(x).qb_histogram
    layer.expert_bias[...] = jnp.full(6, 7.0)
    layer = way(layer)
    update = nnx.jit(lambda layer: layer.update_expert_bias(counts, 1e-3))
    for _ in range(20):
        update(layer)
    np.testing.assert_allclose(layer.expert_bias[...], 7 + 0.02 * np.sign(2.5 - np.arange(6)), rtol=1e-6)
    layer = way(layer)
    layer.update_quantile_bias(histogram)
    np.testing.assert_array_equal(layer.expert_bias[...], quantile_bias(histogram, -1.0, 1.0, 2))
    assert layer.expert_bias[...].dtype == jnp.float32


def test_an_expert_bias_of_another_kind_is_refused():
    layer = _layer(use_expert_bias=True, score_function="sigmoid")
    for value, error in ((jnp.zeros(6, jnp.int32), TypeError), (jnp.zeros(1), ValueError)):
        layer.expert_bias.set_value(value)
        for call in (lambda: layer(_x(3, 12)), lambda: layer.update_expert_bias(jnp.arange(6))):
            with pytest.raises(error, match="expert_bias: got "):
                call()


def test_quantile_balancing_sets_the_bias():
    layer, x = _layer(score_function="sigmoid", balance="quantile", qb_bins=400), _x(400, 12)
    layer.gate[...] = layer.gate[...].at[:, 0].add(2.0 * jnp.abs(layer.gate[...]).sum() / 72)
    x = jnp.abs(x)  # so that most tokens select one expert
    before = layer(x)
    assert before.tokens_per_expert.max() > 2 * 400 * 2 / 6
    layer.update_quantile_bias(before.qb_histogram)
    want = quantile_bias(before.qb_histogram, -1.0, 1.0, 2)
    np.testing.assert_array_equal(layer.expert_bias[...], want)
    after = layer(x)
    assert after.tokens_per_expert.max() < 1.5 * 400 * 2 / 6
    assert isinstance(layer.expert_bias, RouterState)
    with pytest.raises(ValueError, match="update_quantile_bias: got a layer without quantile balancing"):
        _layer(use_expert_bias=True).update_quantile_bias(before.qb_histogram)
    with pytest.raises(ValueError, match=re.escape("qb_histogram: got int32[6, 4], expected int32 [E=6, bins=400]")):
        layer.update_quantile_bias(jnp.zeros((6, 4), jnp.int32))
    with pytest.raises(ValueError, match="balance: got 'loss', expected one of 'quantile'"):
        _layer(balance="loss")


def test_update_expert_bias_refuses_wrong_arguments(platform):
    with pytest.raises(ValueError, match="update_expert_bias: got a layer without"):
        _layer().update_expert_bias(jnp.zeros(6, jnp.int32))
    layer = _layer(use_expert_bias=True, score_function="sigmoid")
    for counts in (jnp.zeros(5, jnp.int32), np.full(6, 2**33, np.int64)):
        with pytest.raises(ValueError, match="tokens_per_expert: got"):
            layer.update_expert_bias(counts)
    wrong = [jnp.int32(1), jnp.ones(2)]
    if platform == "cpu":  # reading a scalar on a GPU would wait for it
        wrong += [jnp.float32(math.nan), jnp.bfloat16(-1), jnp.float16(math.inf)]
    for rate in (math.nan, math.inf, -1.0, True, None, 10**400, *wrong):
        with pytest.raises((ValueError, TypeError), match="rate: got"):
            layer.update_expert_bias(jnp.arange(6), rate)
    assert not layer.expert_bias[...].any()
    layer.update_expert_bias(jnp.arange(6), jnp.float32(0.5))
    assert layer.expert_bias[...].tolist() == [0.5, 0.5, 0.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    "options,match",
    [
        (dict(topk=7), "topk: got 7"),
        (dict(activation="tanh"), "activation: got 'tanh'"),
        (dict(gated=1), "gated: got"),
        (dict(shared_features=-1), "shared_features: got -1"),
        (dict(score_function="nope"), "score_function: got 'nope'"),
        (dict(normalize=1), "normalize: got int 1"),
        (dict(scaling_factor=float("nan")), "scaling_factor: got nan"),
        (dict(num_groups=4), "num_groups: got 4"),
        (dict(align_size=-1), "align_size: got -1"),
        (dict(aux_loss_coeff=1e300), r"aux_loss_coeff: got 1e\+300"),
        (dict(z_loss_coeff=1e-320), "z_loss_coeff: got 1e-320"),
        (dict(parallel="x"), "parallel: got str 'x'"),
        (dict(rngs=0), "rngs: got int 0"),
        (dict(rngs=nnx.Rngs(dropout=0)), "rngs: got the streams"),
        (dict(use_bias="yes"), "use_bias: got str 'yes'"),
        (dict(use_expert_bias=1), "use_expert_bias: got int 1"),
        (dict(dtype="float64"), "dtype: got float64, expected float32 or bfloat16 or float16"),
        (dict(shared_gate=True), "shared_gate: got True without a shared expert"),
        (dict(use_gate_bias=None), "use_gate_bias: got NoneType None"),
        (dict(dtype="nope"), "dtype: got 'nope'"),
        (dict(param_dtype=jnp.int32), "param_dtype: got int32"),
        (dict(kernel_init=3), "kernel_init: got int 3"),
        (dict(kernel_init=lambda *_: None), "kernel_init.*: got NoneType None"),
        (dict(kernel_init=lambda *_: jnp.zeros(3)), r"kernel_init.*: got float32\[3\]"),
    ],
)
def test_bad_options_are_named(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        MoE(12, 20, num_experts=6, **{"topk": 2, "rngs": nnx.Rngs(0)} | options)


def test_a_wrong_width_is_named():
    with pytest.raises(ValueError, match="x: got float32"):
        _layer()(_x(3, 11))


def test_it_trains():
    layer = _layer(aux_loss_coeff=0.01)
    x, target = _x(64, 12), _x(64, 12, seed=1)
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        def loss(layer):
            result = layer(x)
            return jnp.mean((result.output - target) ** 2) + result.aux_loss

        value, gradients = nnx.value_and_grad(loss)(layer)
        optimizer.update(layer, gradients)
        return value

    losses = [float(step(layer, optimizer)) for _ in range(150)]
    assert losses[-1] < 0.3 * losses[0]


def test_the_logits_can_be_captured():
    layer, x = _layer(use_gate_bias=True, dtype=jnp.bfloat16), _x(2, 5, 12)
    layer.gate_bias[...] = _x(6, seed=9)
    before, state = layer(x), nnx.to_flat_state(nnx.state(layer))
    result, captured = nnx.jit(lambda layer, x: nnx.capture(layer, nnx.Intermediate)(x))(layer, x)
    (logits,) = captured["router_logits"].get_value()
    want = x.astype(jnp.bfloat16).astype(jnp.float32) @ layer.gate[...] + layer.gate_bias[...]
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, want, rtol=2e-2, atol=2e-2)
    np.testing.assert_array_equal(jax.lax.top_k(logits, 2)[1], result.experts)
    np.testing.assert_array_equal(layer(x).output, before.output)
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer))] == [path for path, _ in state]


def test_replaced_parameters_are_used():
    layer, x = _layer(shared_features=8), _x(7, 12)
    before = layer(x).output
    for name in ("gate", "w_in", "shared_out"):
        old = getattr(layer, name)
        setattr(layer, name, nnx.Param(1.5 * old[...]))
        assert not np.array_equal(layer(x).output, before), name
        setattr(layer, name, nnx.Param(old[...][..., 1:]))
        with pytest.raises(ValueError, match=": got float32"):
            layer(x)
        setattr(layer, name, old)
    np.testing.assert_array_equal(layer(x).output, before)

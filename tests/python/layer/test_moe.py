"""The whole layer: output, losses, counts and every gradient against the oracle, and JAX's transformations."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.activation import PLAIN
from anabranch.jax import moe, route
from anabranch.jax.ops import matmul
from frameworks import both
from moe_cases import LAYOUTS, TWO_INPUTS, check_layer, operands
from oracle import assert_close

pytestmark = pytest.mark.usefixtures("platform")

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score_function", SCORES)
def test_score_functions(score_function, normalize, dtype):
    arrays = operands(53, 8, 3, 24, 40, dtype=dtype, bias=True)
    check_layer(
        arrays,
        topk=3,
        score_function=score_function,
        normalize=normalize,
        scaling_factor=2.5,
        aux_loss_coeff=0.3,
        z_loss_coeff=0.1,
    )


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("w_in_layout,w_out_layout", LAYOUTS[1:])
def test_layouts_of_weights(w_in_layout, w_out_layout, dtype):
    arrays = operands(61, 8, 3, 24, 40, dtype=dtype, bias=True, skew=3.0, cold=2)
    options = dict(topk=3, w_in_layout=w_in_layout, w_out_layout=w_out_layout)
    check_layer(arrays, **options, aux_loss_coeff=0.3, align_size=8)
    check_layer(operands(61, 8, 3, 24, 40, parts=1, dtype=dtype), **options, activation="gelu_erf", weight_early=True)


@both
def test_gradients_of_float32_weights_in_another_layout_are_not_rounded():
    arrays = operands(61, 8, 3, 24, 40, dtype="bfloat16")

    def put(name, array):
        return jnp.asarray(array, jnp.float32 if name in ("w_in", "w_out") else None)

    _, gradients = check_layer(arrays, topk=3, put=put, w_in_layout="pfd", w_out_layout="df")
    for name in ("w_in", "w_out"):
        got = np.asarray(gradients[name])
        assert got.dtype == np.float32 and (got != got.astype(ml_dtypes.bfloat16).astype(np.float32)).any()


@both
@pytest.mark.parametrize("score_function", SCORES)
def test_scores_of_groups(score_function):
    arrays = operands(53, 12, 4, 24, 40, bias=True)
    bias = (0.1 * np.random.default_rng(3).standard_normal(12)).astype(np.float32)
    for group_score_topk in (1, 3):
        groups = dict(num_groups=4, group_topk=2, group_score_topk=group_score_topk)
        check_layer(arrays, topk=4, score_function=score_function, expert_bias=bias, **groups)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_histograms_of_the_layer_are_the_routers(dtype):
    arrays = {name: jnp.asarray(a) for name, a in operands(331, 8, 2, 24, 40, dtype=dtype).items() if a is not None}
    mask = jnp.asarray(np.random.default_rng(4).random(331) < 0.8)
    options = dict(topk=2, score_function="sigmoid", expert_bias=jnp.linspace(-0.2, 0.2, 8), token_mask=mask)
    balancing = dict(qb_bin_bounds=(-1.0, 1.0), qb_bins=100)
    plain, result = moe(**arrays, **options), moe(**arrays, **options, **balancing)
    assert plain.qb_histogram is None and result.qb_histogram.shape == (8, 100)
    np.testing.assert_array_equal(result.output, plain.output)
    np.testing.assert_array_equal(result.qb_histogram.sum(1), np.full(8, mask.sum()))
    logits = matmul.matmul(arrays["x"], arrays["gate"], (1, 0))
    np.testing.assert_array_equal(result.qb_histogram, route(logits, **options, **balancing).qb_histogram)


@both
@pytest.mark.parametrize("gate_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("normalize,dtype", [(True, "bfloat16"), (False, "bfloat16"), (True, "float16")])
def test_dtypes_of_the_gate(normalize, dtype, gate_dtype):
    arrays = operands(331, 8, 3, 72, 40, dtype=dtype, bias=True)
    for name in ("gate", "gate_bias"):
        arrays[name] = arrays[name].astype(gate_dtype)
    check_layer(arrays, topk=3, normalize=normalize, aux_loss_coeff=0.3, z_loss_coeff=0.1)


def test_a_float16_gate_of_a_float32_layer_multiplies_in_float32():
    arrays = operands(97, 8, 3, 72, 40)
    x = arrays["x"]
    x[5, 7] = 1e5  # more than float16 holds
    gate = arrays["gate"].astype(np.float16)
    result, pull = jax.vjp(lambda x: moe(x, gate, arrays["w_in"], arrays["w_out"], topk=3).output, x)
    want, want_pull = jax.vjp(
        lambda x: moe(x, gate.astype(np.float32), arrays["w_in"], arrays["w_out"], topk=3).output, x
    )
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    d_output = np.float32(1e-7) * np.random.default_rng(2).standard_normal(want.shape).astype(np.float32)
    for row in (slice(0, 5), slice(6, None)):
        assert_close(pull(d_output)[0][row], np.asarray(want_pull(d_output)[0][row]), 1e-5, "d_x")


def test_the_gate_is_never_rounded_to_float16():
    """Large and small logits, their gradients and sums over tokens stay unrounded."""
    arrays = operands(331, 8, 3, 72, 40, dtype="float16", skew=2e4)
    assert np.abs(arrays["x"].astype(np.float32) @ arrays["gate"]).max() > 65504
    arrays["gate"] = arrays["gate"].astype(np.float16)
    arrays["w_out"] = arrays["w_out"] * np.float16(1e-3)
    check_layer(arrays, topk=3, score_function="sqrtsoftplus", normalize=False)
    small = operands(331, 8, 3, 72, 40, dtype="float16")
    small["gate"], small["w_out"] = small["gate"].astype(np.float16), np.zeros_like(small["w_out"])
    main = [jnp.asarray(small[name]) for name in ("gate", "x", "w_in", "w_out")]

    def loss(gate, x, *weights):
        return moe(x, gate, *weights, topk=3, aux_loss_coeff=1e-3).aux_loss  # d_logits of about 1e-8

    got = jax.grad(loss)(main[0].astype(jnp.float32), *main[1:])
    exact = jax.grad(loss)(*(array.astype(jnp.float32) for array in main))
    assert 0 < float(jnp.abs(got).max()) < 6e-4
    assert_close(got, np.asarray(exact), 1e-4, "d_gate")


@both
def test_the_common_part_of_a_float32_gates_columns_cancels():
    """The balance loss's gradients of a token's logits sum to zero, so a common part of the columns cancels in d_x.

    On a GPU the gate is a sum of two bfloat16 operands, so the error of the logits is 2^-17 of the terms' norm, which
    is 25 here.
    """
    arrays = operands(331, 16, 3, 72, 8, dtype="bfloat16")
    arrays["gate"] += 3 * np.random.default_rng(4).standard_normal((72, 1)).astype(np.float32)
    arrays["w_out"] = np.zeros_like(arrays["w_out"])
    check_layer(arrays, topk=3, aux_loss_coeff=1.0, weights_bound=2**-17 * 25)


@both
@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "relu2"])
def test_activations(activation, parts, weight_early):
    arrays = operands(37, 5, 2, 16, 24, parts=parts, bias=True)
    check_layer(arrays, topk=2, activation=activation, weight_early=weight_early)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", TWO_INPUTS, ids=lambda a: a.name)
def test_activations_of_two_inputs(activation, dtype):
    arrays = operands(61, 8, 3, 24, 40, dtype=dtype, bias=True, skew=3.0, cold=2)
    check_layer(arrays, topk=3, activation=activation, w_in_layout="dfp")


@both
@pytest.mark.parametrize("T", [0, 1, 7, 300])
@pytest.mark.parametrize("E,K", [(1, 1), (3, 1), (3, 3), (64, 8), (130, 130)])
def test_sizes(T, E, K):
    arrays = operands(T, E, K, 8, 16, bias=True)
    check_layer(arrays, topk=K, aux_loss_coeff=1.0, z_loss_coeff=1.0)


@both
def test_many_experts_of_few_tokens_each():
    check_layer(operands(64, 512, 10, 16, 8), topk=10, aux_loss_coeff=1.0)


@both
@pytest.mark.slow
def test_more_tokens_than_a_tile():
    check_layer(operands(4097, 8, 2, 32, 48, bias=True, skew=3.0), topk=2, aux_loss_coeff=1.0)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cold_experts_get_exactly_zero_gradients(dtype):
    arrays = operands(97, 12, 2, 16, 24, dtype=dtype, bias=True, skew=4.0, cold=3)
    check_layer(arrays, topk=2)


@both
@pytest.mark.parametrize("align_size", [1, 8, 128])
def test_alignment_does_not_change_the_result(align_size):
    arrays = operands(61, 6, 2, 16, 24, bias=True, skew=2.0, cold=1)
    check_layer(arrays, topk=2, align_size=align_size)


@both
def test_bias_groups_and_mask_together():
    arrays = operands(80, 16, 4, 24, 16)
    rng = np.random.default_rng(5)
    check_layer(
        arrays,
        topk=4,
        score_function="sigmoid",
        expert_bias=rng.standard_normal(16).astype(np.float32),
        num_groups=4,
        group_topk=2,
        token_mask=rng.random(80) < 0.7,
        aux_loss_coeff=0.5,
        z_loss_coeff=0.5,
    )


@both
def test_a_fully_masked_batch_gives_zeros():
    arrays = operands(9, 4, 2, 8, 8, bias=True)
    check_layer(arrays, topk=2, token_mask=np.zeros(9, bool), aux_loss_coeff=1.0, z_loss_coeff=1.0)


@both
def test_a_masked_token_may_hold_nan():
    arrays = operands(9, 4, 2, 8, 8)
    arrays["x"][3] = np.nan
    mask = np.arange(9) != 3
    check_layer(arrays, topk=2, token_mask=mask, aux_loss_coeff=1.0, z_loss_coeff=1.0)


@both
@pytest.mark.parametrize("wide", [("w_in",), ("w_out",), ("w_in", "w_out")])
@pytest.mark.parametrize("weight_early", [False, True])
def test_float32_weights_of_a_bfloat16_layer(wide, weight_early):
    """float32 weights are multiplied as bfloat16; their gradients are the unrounded float32 sums."""
    arrays = operands(64, 6, 2, 24, 32, dtype="bfloat16", bias=True, skew=2.0, cold=1)
    options = {"topk": 2, "aux_loss_coeff": 0.3, "weight_early": weight_early}

    def put(name, array):
        return jnp.asarray(array, jnp.float32 if name in wide else None)

    _, narrow_gradients = check_layer(arrays, **options)
    _, gradients = check_layer(arrays, put=put, **options)
    for name in ("w_in", "w_out"):
        got, narrow = np.asarray(gradients[name], np.float32), np.asarray(narrow_gradients[name], np.float32)
        rounded = got.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (rounded != got).any() == (name in wide)
        np.testing.assert_allclose(rounded, narrow, rtol=2**-7, atol=2**-9 * np.abs(narrow).max(), err_msg=name)

    # Digits beyond bfloat16 are rounded away for the GEMM, and nowhere else.
    nudged = {name: np.asarray(arrays[name], np.float32) * np.float32(1 + 2**-11) for name in wide}
    given = [jnp.asarray(arrays[name]) for name in ("x", "gate")]

    def output(weights):
        return moe(*given, *(jnp.asarray(weights.get(name, arrays[name])) for name in ("w_in", "w_out")), topk=2).output

    np.testing.assert_array_equal(np.asarray(output(nudged)), np.asarray(output({})))


@both
def test_replay_with_repeats_holes_and_wrong_indices():
    arrays = operands(40, 6, 3, 8, 16, bias=True)
    forced = np.random.default_rng(7).integers(-1, 6, (40, 3)).astype(np.int32)
    forced[0], forced[1], forced[2] = (2, 2, 2), (-1, -1, -1), (7, -5, 1)
    check_layer(arrays, topk=3, forced_experts=forced, aux_loss_coeff=1.0)


@both
@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 40),
    groups=st.integers(1, 4),
    per_group=st.integers(1, 5),
    D=st.integers(1, 20),
    F=st.integers(1, 20),
    parts=st.integers(1, 2),
    score_function=st.sampled_from(SCORES),
    normalize=st.booleans(),
    weight_early=st.booleans(),
    bias=st.booleans(),
    align_size=st.sampled_from([0, 1, 3, 8]),
    layouts=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_random_combinations(
    T, groups, per_group, D, F, parts, score_function, normalize, weight_early, bias, align_size, layouts, data
):
    E = groups * per_group
    group_topk = data.draw(st.integers(1, groups), "group_topk")
    K = data.draw(st.integers(1, group_topk * per_group), "K")
    seed = data.draw(st.integers(0, 2**16), "seed")
    chosen = {"activation": data.draw(st.sampled_from(PLAIN if parts == 1 else (*PLAIN, *TWO_INPUTS)), "activation")}
    if groups > 1:
        score_topk = data.draw(st.integers(1, per_group), "group_score_topk")
        chosen |= {"num_groups": groups, "group_topk": group_topk, "group_score_topk": score_topk}
    check_layer(
        operands(T, E, K, D, F, parts=parts, bias=bias, seed=seed),
        seed=seed + 1,
        topk=K,
        score_function=score_function,
        normalize=normalize,
        weight_early=weight_early,
        align_size=align_size,
        w_in_layout=layouts[0],
        w_out_layout=layouts[1],
        aux_loss_coeff=0.1,
        tiny=True,
        **chosen,
    )


def _arguments(T=12, E=4, D=8, F=6, **options):
    arrays = operands(T, E, 2, D, F, **options)
    return [jnp.asarray(arrays[name]) for name in ("x", "gate", "w_in", "w_out")]


def _value_and_gradients(layer, arguments, seed=3):
    """The output and the gradients of a random projection of it."""
    output, pull = jax.vjp(layer, *arguments)
    return output, pull(jnp.asarray(np.random.default_rng(seed).standard_normal(output.shape), output.dtype))


def _assert_same(got, want):
    jax.tree.map(
        lambda g, w: np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32)), got, want
    )


def test_leading_dimensions_are_kept():
    x, *weights = _arguments()
    flat = moe(x, *weights, topk=2)
    shaped = moe(x.reshape(3, 2, 2, 8), *weights, topk=2)
    assert shaped.output.shape == (3, 2, 2, 8)
    _assert_same(shaped.output.reshape(flat.output.shape), flat.output)


@pytest.mark.parametrize("argument", range(4))
@pytest.mark.parametrize("axis", [0, 2])
def test_vmap_over_any_operand_and_axis(argument, axis):
    arguments = _arguments()
    axis = min(axis, arguments[argument].ndim)
    scales = jnp.array([1.0, 0.5, -2.0])
    batched = list(arguments)
    batched[argument] = jnp.stack([s * arguments[argument] for s in scales], axis)
    in_axes = [axis if i == argument else None for i in range(4)]

    def layer(*arguments):
        return _value_and_gradients(lambda *a: moe(*a, topk=2, aux_loss_coeff=0.1).output, arguments)

    got = jax.vmap(layer, in_axes=in_axes)(*batched)
    for i, scale in enumerate(scales):
        single = list(arguments)
        single[argument] = scale * arguments[argument]
        want = layer(*single)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g[i], w, rtol=1e-5, atol=1e-6), got, want)  # noqa: B023


def test_vmap_keeps_statistics_apart():
    arguments = _arguments()
    xs = jnp.stack([arguments[0], -arguments[0]])
    got = jax.vmap(lambda x: moe(x, *arguments[1:], topk=2, aux_loss_coeff=1.0))(xs)
    for i in range(2):
        want = moe(xs[i], *arguments[1:], topk=2, aux_loss_coeff=1.0)
        np.testing.assert_array_equal(got.tokens_per_expert[i], want.tokens_per_expert)
        np.testing.assert_allclose(got.aux_loss[i], want.aux_loss, rtol=1e-6)


def test_remat_and_scan_give_the_same_bits():
    x, *weights = _arguments()
    plain = lambda x, *w: moe(x, *w, topk=2).output  # noqa: E731
    want = jax.jit(lambda *a: _value_and_gradients(plain, a))(x, *weights)
    got = jax.jit(lambda *a: _value_and_gradients(jax.checkpoint(plain), a))(x, *weights)
    _assert_same(got, want)

    def stacked(x, *weights):
        return jax.lax.scan(lambda x, w: (x + moe(x, *w, topk=2).output, None), x, weights)[0]

    def unrolled(x, *weights):
        for i in range(3):
            x = x + moe(x, *(w[i] for w in weights), topk=2).output
        return x

    layers = [jnp.stack([w, 0.5 * w, -w]) for w in weights]
    got = jax.jit(lambda *a: _value_and_gradients(stacked, a))(x, *layers)
    want = jax.jit(lambda *a: _value_and_gradients(unrolled, a))(x, *layers)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "names,calls",
    [
        ((), {"router_forward": 2, "plan": 2, "expert_ffn_forward": 2}),
        (("moe_h",), {"router_forward": 2, "plan": 2, "expert_ffn_forward": 1}),
        (("moe_h", "moe_logits"), {"router_forward": 2, "plan": 2, "expert_ffn_forward": 1}),
        (("moe_routing",), {"router_forward": 1, "plan": 1, "expert_ffn_forward": 2}),
        (("moe_h", "moe_logits", "moe_routing"), {"router_forward": 1, "plan": 1, "expert_ffn_forward": 1}),
    ],
)
def test_remat_policies_find_residuals_by_name(names, calls):
    """Saved results are not recomputed, and the gradients have the same bits."""
    x, *weights = _arguments(T=40)

    def layer(x, *weights):
        return moe(jnp.sin(x), *weights, topk=2, z_loss_coeff=0.1)

    def gradients(layer):
        def loss(x, *weights):
            result = layer(x, *weights)
            return jnp.sum(jnp.sin(result.output)) + result.z_loss + jnp.sum(jnp.cos(result.weights))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))

    policy = jax.checkpoint_policies.save_only_these_names(*names)
    rematted = gradients(jax.checkpoint(layer, policy=policy))
    text = rematted.lower(x, *weights).as_text()  # before XLA, which may merge both on a CPU
    assert {name: text.count(f"@ab_xla_{name}(") for name in calls} == calls
    _assert_same(rematted(x, *weights), gradients(layer)(x, *weights))


@pytest.mark.parametrize("names,calls", [(("moe_h", "moe_routing"), 2), (("moe_h", "moe_routing", "moe_output"), 1)])
def test_a_saved_output_is_not_recomputed_for_a_norm_that_follows(names, calls):
    x, *weights = _arguments(T=40)

    def block(x, *weights):
        output = moe(x, *weights, topk=2).output
        return output / jnp.sqrt(jnp.square(output).mean(-1, keepdims=True) + 1e-6)

    def gradients(block):
        return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(block(*arrays))), (0, 1, 2, 3)))

    rematted = gradients(jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(*names)))
    assert rematted.lower(x, *weights).as_text().count("@ab_xla_expert_ffn_forward(") == calls
    # XLA fuses the recomputed norm in another way, so the last bits may differ.
    pairs = zip(rematted(x, *weights), gradients(block)(x, *weights), strict=True)
    for name, (got, want) in zip(("x", "gate", "w_in", "w_out"), pairs, strict=True):
        assert_close(got, want, 1e-6, name)


def test_donated_buffers():
    x, *weights = _arguments()
    want = moe(x, *weights, topk=2).output
    step = jax.jit(lambda x, *w: moe(x, *w, topk=2).output, donate_argnums=0)
    _assert_same(step(x + 0.0, *weights), want)


def test_export_round_trip(platform):
    arguments = _arguments()

    def layer(*a):
        return _value_and_gradients(lambda *a: moe(*a, topk=2, aux_loss_coeff=0.1).output, a)

    from anabranch.jax import custom_calls

    exported = jax.export.export(
        jax.jit(layer),
        platforms=["cuda" if platform == "gpu" else platform],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(n) for n in custom_calls()],
    )(*arguments)
    loaded = jax.export.deserialize(bytearray(exported.serialize()))
    _assert_same(loaded.call(*arguments), jax.jit(layer)(*arguments))


def test_the_same_bits_on_every_run():
    arguments = _arguments(T=300, E=8, D=64, F=48)
    layer = jax.jit(lambda *a: _value_and_gradients(lambda *a: moe(*a, topk=2).output, a))
    first = layer(*arguments)
    for _ in range(5):
        _assert_same(layer(*arguments), first)


def test_early_and_late_weighting_agree():
    arguments = _arguments(T=50)
    early = _value_and_gradients(lambda *a: moe(*a, topk=2, weight_early=True).output, arguments)
    late = _value_and_gradients(lambda *a: moe(*a, topk=2, weight_early=False).output, arguments)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), early, late)


def test_losses_alone_have_gradients():
    x, gate, w_in, w_out = _arguments(T=50)

    forced = jax.lax.top_k(x @ gate, 2)[1]  # so that a step does not change the selection and the counts

    def loss(gate):
        result = moe(x, gate, w_in, w_out, topk=2, aux_loss_coeff=1.0, z_loss_coeff=1.0, forced_experts=forced)
        return result.aux_loss + 2 * result.z_loss

    gradient = jax.grad(loss)(gate)
    direction = jnp.asarray(np.random.default_rng(0).standard_normal(gate.shape), jnp.float32)
    direction *= 1e-2 / jnp.linalg.norm(direction)
    difference = (loss(gate + direction) - loss(gate - direction)) / 2
    np.testing.assert_allclose(jnp.vdot(gradient, direction), difference, rtol=1e-2)


BAD = [
    ("x", dict(x=np.zeros((12, 8), np.int32)), TypeError),
    ("x", dict(x=np.zeros((12, 8), np.float64)), TypeError),
    ("x", dict(x=[[1.0] * 8]), TypeError),
    ("x", dict(x=np.float32(1.0)), ValueError),
    ("gate", dict(gate=np.zeros((7, 4), np.float32)), ValueError),
    ("gate", dict(gate=np.zeros((8, 4), np.int32)), TypeError),
    ("gate_bias", dict(gate_bias=np.zeros(5, np.float32)), ValueError),
    ("gate_bias", dict(gate_bias=np.zeros(4, np.int32)), TypeError),
    ("w_in", dict(w_in=np.zeros((4, 8, 3, 6), np.float32)), ValueError),
    ("w_in", dict(w_in=np.zeros((4, 8, 12), np.float32)), ValueError),
    ("w_in", dict(w_in=np.zeros((4, 8, 2, 6), np.float16)), TypeError),
    ("w_out", dict(w_out=np.zeros((4, 5, 8), np.float32)), ValueError),
    ("w_out", dict(w_out=np.zeros((3, 6, 8), np.float32)), ValueError),
    ("b_in", dict(b_in=np.zeros((4, 1, 6), np.float32)), ValueError),
    ("b_out", dict(b_out=np.zeros((4, 7), np.float32)), ValueError),
    ("topk", dict(topk=0), ValueError),
    ("topk", dict(topk=5), ValueError),
    ("topk", dict(topk=2.0), TypeError),
    ("score_function", dict(score_function="tanh"), ValueError),
    ("normalize", dict(normalize=1), TypeError),
    ("expert_bias", dict(expert_bias=np.zeros(5, np.float32)), ValueError),
    ("num_groups", dict(num_groups=3, group_topk=1), ValueError),
    ("group_topk", dict(num_groups=2), ValueError),
    ("group_topk", dict(num_groups=2, group_topk=3), ValueError),
    ("scaling_factor", dict(scaling_factor=float("inf")), ValueError),
    ("activation", dict(activation="tanh"), ValueError),
    ("weight_early", dict(weight_early="yes"), TypeError),
    ("aux_loss_coeff", dict(aux_loss_coeff=float("nan")), ValueError),
    ("z_loss_coeff", dict(z_loss_coeff="1"), TypeError),
    ("token_mask", dict(token_mask=np.ones(11, bool)), ValueError),
    ("token_mask", dict(token_mask=np.ones(12, np.int32)), TypeError),
    ("forced_experts", dict(forced_experts=np.zeros((12, 3), np.int32)), ValueError),
    ("forced_experts", dict(forced_experts=np.zeros((12, 2), np.float32)), TypeError),
    (
        "expert_bias",
        dict(forced_experts=np.zeros((12, 2), np.int32), expert_bias=np.zeros(4, np.float32)),
        ValueError,
    ),
    ("align_size", dict(align_size=-1), ValueError),
]


@pytest.mark.parametrize("name,change,error", BAD, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(BAD)])
def test_bad_arguments_are_named(name, change, error):
    arguments = dict(zip(("x", "gate", "w_in", "w_out"), _arguments(), strict=True)) | {"topk": 2}
    with pytest.raises(error, match=rf"\b{name}\b.*got"):
        moe(**(arguments | change))


def test_unread_rows_are_zero_under_jax_debug_nans():
    arrays = operands(16, 4, 2, 8, 8)
    main = [jnp.asarray(arrays[name]) for name in ("x", "gate", "w_in", "w_out")]

    def skips(**options):
        layer = jax.grad(lambda *operands: jnp.sum(moe(*operands, topk=2, **options).output), (0, 1, 2, 3))
        text = jax.jit(layer).lower(*main).as_text()
        return set(re.findall(r"skip_rest = (\d)", text))

    assert skips() == {"0", "1"}  # the gradient of w_in has no rows to skip
    for check in (jax.debug_nans, jax.debug_infs):
        with check(True):
            assert skips() == {"0"}


def test_matmuls_of_halves_use_16_bits_of_both_operands():
    """Tests the GPU's algorithm: a common part of the columns cancels, and the error is at most 2^-16 of the terms."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((60, 40)), rng.standard_normal((30, 40)) + 100.0
    a -= a.mean(1, keepdims=True)
    a, b = a.astype(np.float32), b.astype(np.float32)
    got = np.asarray(matmul._product_of_halves(jnp.asarray(a), jnp.asarray(b), contract=(1, 1)), np.float64)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(got - wide_a @ wide_b.T)
    terms = np.abs(wide_a) @ np.abs(wide_b).T
    assert (error <= 2.0**-15 * terms).all() and (error > 2.0**-24 * terms).any()
    rounded = [np.asarray(factor.astype(ml_dtypes.bfloat16), np.float64) for factor in (a, b)]
    assert (np.abs(rounded[0] @ rounded[1].T - wide_a @ wide_b.T) > 2.0**-10 * terms).any()

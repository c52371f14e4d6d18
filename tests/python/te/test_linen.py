"""The Linen block: TransformerEngine's attributes and further ones, on the same function as the other layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import ScoreFunction, moe, shared_expert
from anabranch.jax.linen import MoEBlock
from anabranch.layouts import Layouts

pytestmark = pytest.mark.usefixtures("platform")

OPTIONS = dict(num_experts=6, num_experts_per_tok=2, intermediate_size=20)


def _x(*shape, seed=0):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def _apply(x, **options):
    block = MoEBlock(**OPTIONS | options)
    variables = nn.meta.unbox(block.init(jax.random.key(0), x))
    return block, variables, block.apply(variables, x)


@pytest.mark.parametrize(
    "options,names",
    [
        ({}, {}),
        (dict(use_pre_softmax=True, activation_type="gelu"), dict(normalize=False, activation="gelu")),
        (dict(score_function="sigmoid", num_groups=3, group_topk=2), dict(num_groups=3, group_topk=2)),
        (dict(score_function=ScoreFunction.SIGMOID, num_groups=-1, group_topk=0, scaling_factor=2.0), {}),
        (dict(activation_type="swish", align_size=8), {}),
        (dict(score_function="sigmoid", use_pre_softmax=True), {}),
    ],
)
def test_the_block_is_moe_on_its_parameters(options, names):
    x = _x(2, 5, 12)
    _, variables, (output, aux_loss) = _apply(x, **options)
    p = variables["params"]
    names = {"score_function": "sigmoid" if "score_function" in options else "softmax"} | names
    want = moe(
        x, p["gate_kernel"], p["wi"], p["wo"], topk=2, scaling_factor=options.get("scaling_factor", 1.0), **names
    )
    np.testing.assert_array_equal(output, want.output)
    assert aux_loss is None


@pytest.mark.parametrize("w_in_layout,w_out_layout", [("pfd", "df"), ("dfp", "fd"), ("fpd", "df")])
def test_layouts(w_in_layout, w_out_layout):
    x, layouts = _x(2, 5, 12), Layouts(w_in_layout, w_out_layout)
    axes = dict(wi_kernel_axes=("exp", "embed", "mlp"), wo_kernel_axes=("exp", "mlp", "embed"))
    block = MoEBlock(**OPTIONS, **axes, use_bias=True, wi_layout=w_in_layout, wo_layout=w_out_layout)
    boxed = block.init(jax.random.key(0), x)["params"]
    assert boxed["wi"].names == layouts.shape("w_in", e="exp", d="embed", p=None, f="mlp")
    assert boxed["wo"].names == layouts.shape("w_out", e="exp", f="mlp", d="embed")
    p = nn.meta.unbox(boxed)
    ours = nn.meta.unbox(MoEBlock(**OPTIONS, use_bias=True).init(jax.random.key(0), x))["params"]
    np.testing.assert_array_equal(p["wi"].transpose(layouts.order("w_in")), ours["wi"])
    np.testing.assert_array_equal(p["wo"].transpose(layouts.order("w_out")), ours["wo"])
    p["wi_bias"] = _x(*layouts.shape("b_in", e=6, p=2, f=20))
    want = moe(
        x,
        p["gate_kernel"],
        p["wi"],
        p["wo"],
        b_in=p["wi_bias"],
        b_out=p["wo_bias"],
        topk=2,
        w_in_layout=w_in_layout,
        w_out_layout=w_out_layout,
    )
    np.testing.assert_array_equal(block.apply({"params": p}, x)[0], want.output)


def test_aux_loss_and_biases():
    x = _x(2, 5, 12)
    block, variables, (_, aux_loss) = _apply(x, aux_loss_coeff=0.5, use_bias=True)
    p = {**variables["params"], "wi_bias": _x(6, 2, 20), "wo_bias": _x(6, 12)}
    output, _ = block.apply({"params": p}, x)
    want = moe(x, p["gate_kernel"], p["wi"], p["wo"], b_in=p["wi_bias"], b_out=p["wo_bias"], topk=2, aux_loss_coeff=0.5)
    np.testing.assert_array_equal(output, want.output)
    np.testing.assert_array_equal(aux_loss, want.aux_loss)


def test_expert_bias_is_no_parameter():
    _, variables, _ = _apply(_x(4, 12), use_expert_bias=True, score_function="sigmoid")
    assert "expert_bias" not in variables["params"]
    assert variables["router_state"]["expert_bias"].shape == (6,)


def test_an_update_of_a_rounded_state_is_not_lost():
    """The documented formula promotes dtypes: the mean of the counts is float32."""
    x = _x(9, 12)
    block, variables, _ = _apply(x, use_expert_bias=True, score_function="sigmoid")
    variables["router_state"]["expert_bias"] = jnp.full(6, 7.0, jnp.bfloat16)
    _, sown = block.apply(variables, x, mutable=["intermediates"])
    (load,) = sown["intermediates"]["tokens_per_expert"]
    bias = variables["router_state"]["expert_bias"]
    for _ in range(20):
        bias = bias + 1e-3 * jnp.sign(load.mean() - load)
    want = 7 + 0.02 * np.sign(float(load.mean()) - np.asarray(load))
    np.testing.assert_allclose(bias, want, rtol=1e-6)
    with pytest.raises(ValueError, match="expert_bias: got"):
        block.apply({**variables, "router_state": {"expert_bias": jnp.zeros(1)}}, x)
    with pytest.raises(TypeError, match="expert_bias: got"):
        block.apply({**variables, "router_state": {"expert_bias": jnp.zeros(6, jnp.int32)}}, x)


def test_sown_counts_update_an_expert_bias_and_show_drops():
    x = _x(64, 12)
    block, variables, _ = _apply(x, use_expert_routing_bias=True, score_function="sigmoid")
    _, sown = block.apply(variables, x, mutable=["intermediates"])
    (counts,), (dropped,) = (sown["intermediates"][name] for name in ("tokens_per_expert", "dropped"))
    assert int(counts.sum()) == 2 * 64 and int(dropped) == 0
    bias = variables["router_state"]["expert_bias"] + 10.0 * jnp.sign(counts.mean() - counts)
    _, sown = block.apply({**variables, "router_state": {"expert_bias": bias}}, x, mutable=["intermediates"])
    (moved,) = sown["intermediates"]["tokens_per_expert"]
    assert (np.asarray(moved - counts) * np.sign(np.asarray(counts.mean() - counts)) >= 0).all() and (
        moved != counts
    ).any()


def test_both_losses_are_returned_together_and_sown_separately():
    x, mask = _x(2, 5, 12), jnp.ones([2, 5], bool).at[1, 3].set(False)
    block, variables, _ = _apply(x, aux_loss_coeff=0.5, z_loss_coeff=0.25)
    (_, loss), sown = block.apply(variables, x, token_mask=mask, mutable=["intermediates"])
    p = variables["params"]
    want = moe(x, p["gate_kernel"], p["wi"], p["wo"], topk=2, aux_loss_coeff=0.5, z_loss_coeff=0.25, token_mask=mask)
    np.testing.assert_array_equal(loss, want.aux_loss + want.z_loss)
    for name in ("aux_loss", "z_loss", "tokens_per_expert", "experts"):
        np.testing.assert_array_equal(sown["intermediates"][name][0], getattr(want, name))
    # Replay of the sown selection.
    experts = sown["intermediates"]["experts"][0]
    again, _ = block.apply(variables, x, forced_experts=experts)
    np.testing.assert_array_equal(again, block.apply(variables, x, token_mask=mask)[0])


def test_the_shared_expert_with_its_gate_and_a_bias_of_the_gate():
    x = _x(2, 5, 12)
    mask = jnp.ones([2, 5], bool).at[1, 3].set(False)
    options = dict(use_gate_bias=True, shared_features=8, shared_gate=True, apply_topk_weights_early=True)
    block, variables, _ = _apply(x, **options)
    p = variables["params"] | {"gate_bias": _x(6, seed=5)}
    output, _ = block.apply({"params": p}, x.at[1, 3].set(jnp.nan), token_mask=mask)
    routed = moe(
        x, p["gate_kernel"], p["wi"], p["wo"], topk=2, gate_bias=p["gate_bias"], token_mask=mask, weight_early=True
    )
    shared = shared_expert(x, p["shared_wi"], p["shared_wo"], w_gate=p["shared_gate_kernel"], token_mask=mask)
    np.testing.assert_array_equal(output, routed.output + shared)
    assert not output[1, 3].any() and p["shared_gate_kernel"].shape == (12, 1)


def test_float16():
    x = _x(2, 5, 12)
    _, variables, (output, _) = _apply(x, dtype=jnp.float16, use_ffn_bias=True)
    assert output.dtype == jnp.float16 and variables["params"]["wi_bias"].dtype == jnp.float16


def test_input_axes_constrain_the_inputs(monkeypatch):
    """The block calls Flax's own function, which has no effect on a CPU."""
    x, seen = _x(2, 5, 12), []

    def constrain(array, axes):
        seen.append((array.shape, axes))
        return 2 * array

    monkeypatch.setattr(nn, "with_logical_constraint", constrain)
    axes = ("batch", None, "embed")
    block, variables, (output, _) = _apply(x, input_axes=axes)
    assert set(seen) == {((2, 5, 12), axes)}
    np.testing.assert_array_equal(output, MoEBlock(**OPTIONS).apply(variables, 2 * x)[0])
    with pytest.raises(ValueError, match=r"input_axes: got tuple .* expected the names of 2 axes"):
        block.apply(variables, _x(4, 12))


def test_logical_axes_of_the_kernels():
    block = MoEBlock(**OPTIONS, gate_kernel_axes=("embed", None), use_bias=True)
    boxed = jax.eval_shape(block.init, jax.random.key(0), _x(4, 12))["params"]
    assert boxed["wi"].names == ("exp", "embed", None, "mlp")
    assert boxed["wo"].names == ("exp", "mlp", "embed")
    assert boxed["gate_kernel"].names == ("embed", None)
    assert boxed["wi_bias"].names == ("exp", None, "mlp")
    assert boxed["wo_bias"].names == ("exp", "embed")


def test_gradients_flow_to_every_parameter():
    x = _x(16, 12)
    block, variables, _ = _apply(x, use_bias=True, aux_loss_coeff=0.1)
    cotangent = _x(16, 12, seed=3)

    def loss(params):
        output, aux_loss = block.apply({"params": params}, x)
        return jnp.vdot(output, cotangent) + aux_loss

    gradients = jax.grad(loss)(variables["params"])
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    "options,match",
    [
        (dict(activation_type="tanh"), "activation_type: got 'tanh'"),
        (dict(use_expert_bias=True), "use_expert_bias: got True with softmax"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok: got 9"),
        (dict(num_experts=0), "num_experts: got 0"),
        (dict(intermediate_size=0), "intermediate_size: got 0"),
        (dict(dtype=jnp.float64), "dtype: got float64, expected float32 or bfloat16 or float16"),
        (dict(use_expert_routing_bias=True), "use_expert_routing_bias: got True with softmax"),
        (dict(input_axes=("batch", 3)), "input_axes: got tuple"),
        (
            dict(data_parallelism_axes=("data",)),
            r"data_parallelism_axes: got \('data',\), expected \(\) or the data_axes",
        ),
        (dict(data_parallelism_axes="data"), "data_parallelism_axes: got str 'data'"),
        (dict(recv_capacity_per_rank=64), "recv_capacity_per_rank: got int 64, expected None; Parallel"),
        (dict(quantization_recipe="fp8"), "quantization_recipe: got str 'fp8', expected None"),
        (dict(apply_topk_weights_early=1), "apply_topk_weights_early: got int 1"),
        (dict(z_loss_coeff=float("nan")), "z_loss_coeff: got nan"),
        (dict(shared_features=-1), "shared_features: got -1"),
        (dict(shared_gate=True), "shared_gate: got True without a shared expert"),
        (dict(gate_kernel_axes=3), "gate_kernel_axes: got int 3"),
        (dict(wi_kernel_axes=("exp",)), "wi_kernel_axes: got tuple"),
        (dict(wo_kernel_axes=("exp", "mlp")), "wo_kernel_axes: got tuple"),
        (dict(use_bias="no"), "use_bias: got str 'no'"),
        (dict(use_pre_softmax=None), "use_pre_softmax: got NoneType None"),
        (dict(num_groups=-5), "num_groups: got -5"),
    ],
)
def test_bad_attributes_are_named_when_the_block_is_made(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        MoEBlock(**OPTIONS | options)


@pytest.mark.parametrize("init", [lambda key, shape, dtype: None, lambda key, shape, dtype: jnp.zeros(3, dtype)])
@pytest.mark.parametrize("name", ["kernel_init", "bias_init", "expert_bias_init"])
def test_results_of_initialisers_are_checked(name, init):
    block = MoEBlock(**OPTIONS, use_bias=True, use_expert_bias=True, score_function="sigmoid", **{name: init})
    with pytest.raises((ValueError, TypeError), match=rf"{name}\(key, shape, dtype\): got"):
        jax.eval_shape(block.init, jax.random.key(0), _x(4, 12))


def test_an_initialiser_may_say_how_its_kernel_is_sharded():
    init = nn.with_partitioning(nn.initializers.normal(), ("data",))
    block = MoEBlock(**OPTIONS, kernel_init=init, wi_kernel_axes=(), wo_kernel_axes=())
    boxed = jax.eval_shape(block.init, jax.random.key(0), _x(4, 12))["params"]
    assert boxed["gate_kernel"].names == ("data",)


def test_the_logits_can_be_captured():
    x = _x(2, 5, 12)
    block, variables, (output, _) = _apply(x, use_gate_bias=True, score_function="sigmoid")
    assert set(variables) == {"params"}
    (tapped, _), sown = block.apply(variables, x, mutable=["router_logits"])
    (logits,) = sown["router_logits"]["logits"]
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(logits, x @ variables["params"]["gate_kernel"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(tapped, output)
    _, sown = block.apply(variables, x, mutable=["intermediates"])
    np.testing.assert_array_equal(jax.lax.top_k(logits, 2)[1], sown["intermediates"]["experts"][0])
    assert "router_logits" not in sown


def test_methods_can_be_intercepted():
    x, seen = _x(2, 5, 12), []
    block, variables, (output, _) = _apply(x)

    def doubled(call, arguments, options, context):
        if context.method_name != "__call__":
            return call(*arguments, **options)
        seen.append(type(context.module))
        found, loss = call(*arguments, **options)
        return 2 * found, loss

    with nn.intercept_methods(doubled):
        got, _ = block.apply(variables, x)
    assert seen == [MoEBlock]
    np.testing.assert_array_equal(got, 2 * output)

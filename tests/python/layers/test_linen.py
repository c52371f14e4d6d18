"""The Linen block: TransformerEngine's attribute names over the same function."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import ScoreFunction, moe
from anabranch.jax.linen import MoEBlock

pytestmark = pytest.mark.usefixtures("platform")

OPTIONS = dict(num_experts=6, num_experts_per_tok=2, intermediate_size=20)


def _x(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


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
        (dict(num_experts_per_tok=9), "topk: got 9"),
    ],
)
def test_bad_attributes_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        _apply(_x(4, 12), **options)

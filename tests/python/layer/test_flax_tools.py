"""Tools that process the Flax layers and grouped_dense: jax.export, tabulate, copies, pickles."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from anabranch.jax import custom_calls, grouped_dense
from anabranch.jax.linen import MoEBlock
from anabranch.jax.nnx import MoE

D, F, E = 8, 6, 4
BLOCK = MoEBlock(num_experts=E, intermediate_size=F)
FULL_BLOCK = MoEBlock(
    num_experts=E, intermediate_size=F, score_function="sigmoid", use_expert_routing_bias=True, use_ffn_bias=True,
    use_gate_bias=True, aux_loss_coeff=0.1, z_loss_coeff=0.01, shared_features=3, shared_gate=True, wi_layout="fpd",
    wo_layout="df",
)  # fmt: skip
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, D)), jnp.float32)


class Model(nn.Module):
    """A block inside another module."""

    block: MoEBlock

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(self.block.copy(name="experts", parent=self)(x)[0])


def nnx_layer():
    options = dict(score_function="sigmoid", use_expert_bias=True, aux_loss_coeff=0.1, shared_features=3)
    return MoE(D, F, num_experts=E, topk=2, shared_gate=True, rngs=nnx.Rngs(0), **options)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def check_export(function, *operands):
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls()]
    exported = jax.export.export(jax.jit(function), disabled_checks=allowed)(*operands)
    loaded = jax.export.deserialize(bytearray(exported.serialize()))
    assert_same(loaded.call(*operands), jax.jit(function)(*operands))


@pytest.mark.parametrize("block", [BLOCK, FULL_BLOCK], ids=["plain", "full"])
def test_a_block_is_tabulated(block):
    """The table lists the block, alone and inside a module, with its parameters and without rows of helpers."""
    table = block.tabulate(jax.random.key(0), X, console_kwargs=dict(width=200))
    shapes = jax.eval_shape(block.init, jax.random.key(0), X)["params"]
    assert all(name in table for name in shapes)
    inside = Model(block).tabulate(jax.random.key(0), X, show_repeated=True, console_kwargs=dict(width=200))
    assert inside.count("│ MoEBlock ") == 1 and inside.count("│ experts ") == 1


def test_a_block_is_exported_and_copied():
    variables = nn.unbox(jax.jit(FULL_BLOCK.init)(jax.random.key(0), X))
    want = FULL_BLOCK.apply(variables, X)
    check_export(FULL_BLOCK.apply, variables, X)
    for other in (copy.deepcopy(FULL_BLOCK), pickle.loads(pickle.dumps(FULL_BLOCK)), FULL_BLOCK.clone()):
        assert other == FULL_BLOCK and repr(other) == repr(FULL_BLOCK)
        assert_same(other.apply(variables, X), want)
    assert_same(copy.deepcopy(FULL_BLOCK.bind(variables))(X), want)


def test_an_nnx_layer_is_tabulated_exported_and_copied():
    layer = nnx_layer()
    table = nnx.tabulate(layer, X, console_kwargs=dict(width=200))
    assert "MoE" in table and "RouterState" in table
    want = layer(X).output
    graph, state = nnx.split(layer)
    leaves, tree = jax.tree.flatten(state)  # JAX cannot serialise Flax's states
    check_export(lambda leaves, x: nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x).output, leaves, X)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), nnx.clone(layer)):
        assert "w_out=Param" in repr(other)
        assert_same(other(X).output, want)
        other.expert_bias[...] += 1.0
    assert not layer.expert_bias[...].any()


def test_grouped_dense_is_exported():
    dense = functools.partial(grouped_dense, group_sizes=jnp.array([3, 2]), preferred_element_type=jnp.float32)
    kernel, bias = jnp.ones((2, D, F), jnp.bfloat16), jnp.ones((2, F))
    check_export(lambda x, w, b: dense(x, w, bias=b), X[0].astype(jnp.bfloat16), kernel, bias)

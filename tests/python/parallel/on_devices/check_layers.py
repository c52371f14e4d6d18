"""The NNX and Linen layers on a mesh have the outputs, losses, gradients and training of one device."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from meshes import P, assert_trees_close, mesh_of, put

from anabranch.jax import Parallel
from anabranch.jax.linen import MoEBlock
from anabranch.jax.nnx import MoE
from anabranch.lora import NAMES as LORA_NAMES

D, F, E, K = 16, 24, 8, 2
X = np.random.default_rng(0).standard_normal((16, 4, D)).astype(np.float32)
OPTIONS = dict(
    use_bias=True,
    use_gate_bias=True,
    shared_features=8,
    shared_gate=True,
    aux_loss_coeff=0.1,
    score_function="sigmoid",
    use_expert_bias=True,
)
PARALLEL = Parallel(expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor")


def trained(x, steps=5, **options):
    """The layer after a few steps of AdamW and of its expert bias, and its losses."""
    layer = MoE(D, F, E, K, **OPTIONS, **options, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        def loss(layer):
            result = layer(x)
            return jnp.mean(jnp.square(result.output - 1)) + result.aux_loss, result.tokens_per_expert

        (value, counts), gradients = nnx.value_and_grad(loss, has_aux=True)(layer)
        optimizer.update(layer, gradients)
        layer.update_expert_bias(counts, 1e-2)
        return value

    losses = [float(step(layer, optimizer, x)) for _ in range(steps)]
    return layer, losses


@functools.cache
def trained_on_one_device():
    """The state and the losses."""
    layer, losses = trained(X)
    return nnx.to_pure_dict(nnx.state(layer)), losses


def check_trained(mesh, layer, losses):
    want, want_losses = trained_on_one_device()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_trees_close(nnx.to_pure_dict(nnx.state(layer)), want, rtol=1e-4, atol=1e-4)
    for name, spec in PARALLEL.specs().items():
        if name not in ("x", "expert_bias", "qb_bin_bounds", *LORA_NAMES, "w_in_block_scales", "w_out_block_scales"):
            array = getattr(layer, name)[...]
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), name


def test_nnx_trains_in_shards_as_on_one_device(axis_type):
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    with jax.set_mesh(mesh):
        got = trained(put(mesh, X, ("data", "expert")), parallel=PARALLEL)
    check_trained(mesh, *got)


def test_nnx_with_the_mesh_in_its_parallel():
    mesh = mesh_of(data=2, expert=2, tensor=2)
    parallel = dataclasses.replace(PARALLEL, mesh=mesh)
    check_trained(mesh, *trained(put(mesh, X, ("data", "expert")), parallel=parallel))


@pytest.mark.parametrize("parallel", [None, Parallel(expert_axis="expert", data_axes="data")], ids=["none", "parallel"])
def test_linen_has_the_same_output_and_gradients(parallel):
    mesh = mesh_of(AxisType.Auto, data=2, expert=4)
    block = MoEBlock(num_experts=E, num_experts_per_tok=K, intermediate_size=F, aux_loss_coeff=0.1, use_bias=True)
    variables = nn.unbox(block.init(jax.random.key(0), X))

    def step(block, variables, x):
        def loss(variables):
            output, aux = block.apply(variables, x)
            return jnp.sum(jnp.sin(output)) + aux, output

        return jax.value_and_grad(loss, has_aux=True)(variables)

    want = jax.jit(lambda v, x: step(block, v, x))(variables, X)
    on_mesh = block.clone(parallel=parallel)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda v, x: step(on_mesh, v, x))(
            jax.device_put(variables, NamedSharding(mesh, P())), put(mesh, X, ("data", "expert"))
        )
    assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


def test_linen_creates_its_parameters_in_their_shards():
    """Created and unboxed in one compiled function by Flax's logical axis rules; gradients have the same sharding."""
    mesh = mesh_of(AxisType.Auto, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", fsdp_axes="data", mesh=mesh)
    block = MoEBlock(
        num_experts=E, num_experts_per_tok=K, intermediate_size=F, gate_kernel_axes=("embed", None), parallel=parallel
    )
    with jax.set_mesh(mesh), nn.logical_axis_rules([("exp", "expert"), ("embed", "data"), ("mlp", None)]):
        x = put(mesh, X, ("data", "expert"))
        variables = jax.jit(lambda key: nn.unbox(block.init(key, x)))(jax.random.key(0))
        gradients = jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(block.apply(v, x)[0]))))(variables)
    for tree in (variables, gradients):
        for name, argument in (("gate_kernel", "gate"), ("wi", "w_in"), ("wo", "w_out")):
            wanted = NamedSharding(mesh, parallel.specs()[argument])
            assert tree["params"][name].sharding.is_equivalent_to(wanted, tree["params"][name].ndim), name

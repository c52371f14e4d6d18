"""Adapters on meshes against the float64 oracle: own and shared factors, transports, mesh axes, frozen weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from meshes import P, around, assert_trees_close, kept_and_dropped, mesh_of, placed, put

from anabranch.jax import Parallel, moe
from anabranch.jax.nnx import MoE
from anabranch.lora import NAMES
from lora_cases import as_lora, lora_factors, with_lora
from moe_cases import check_layer, operands

EVERY_AXIS = dict(expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor")
CASES = {
    "ring": dict(ranks=(4, 4), shared=("a_in", "b_out")),
    "all_to_all": dict(ranks=(5, 3), shared=()),
    "ragged": dict(ranks=(2, 6), shared=("b_in", "a_out")),
}
SCALES = (0.7, -1.2)


def placed_with(mesh, parallel, shared):
    specs = parallel.specs(shared=shared)
    place = placed(mesh, parallel)
    return lambda name, array: put(mesh, array, *specs[name]) if name in NAMES else place(name, array)


@pytest.mark.parametrize("transport", CASES)
def test_every_axis(axis_type, transport):
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    parallel = Parallel(**EVERY_AXIS, transport=transport)
    case = CASES[transport]
    arrays = with_lora(operands(32, 4, 2, 16, 24, bias=True, skew=2.0, cold=1), **case)
    options = dict(parallel=parallel, topk=2, aux_loss_coeff=0.3, lora_scale=SCALES)
    with jax.set_mesh(mesh):
        check_layer(
            arrays, put=placed_with(mesh, parallel, case["shared"]), weight_early=transport == "ragged", **options
        )


@pytest.mark.parametrize("transport", CASES)
def test_drops_of_bounded_buffers(transport):
    mesh = mesh_of(data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, capacity_factor=0.8)
    case = CASES[transport]
    arrays = with_lora(operands(64, 8, 2, 16, 24, bias=True, skew=2.0), **case)
    options = dict(topk=2, lora_scale=SCALES, align_size=8)
    kept, dropped = kept_and_dropped(arrays, options, parallel, 4, 2)
    assert dropped.sum() > 5
    with jax.set_mesh(mesh):
        check_layer(arrays, put=placed_with(mesh, parallel, case["shared"]), parallel=parallel, kept=kept, **options)


@pytest.mark.parametrize("on", ["mesh", "tokens"])
def test_float32_factors_of_a_16_bit_layer(on):
    """The backward pass reads the rounded factors, and gradients are float32."""
    mesh = mesh_of(data=2, expert=2, tensor=2)
    parallel = Parallel(**EVERY_AXIS) if on == "mesh" else None
    shared = ("a_in",)
    factors = lora_factors(4, 16, 2, 24, (5, 3), shared=shared, dtype="float32")
    arrays = operands(32, 4, 2, 16, 24, bias=True, dtype="bfloat16") | factors

    def place(name, array):
        return put(mesh, array, *((("data", "expert"),) if name in ("x", "output") else ()))

    place = place if parallel is None else placed_with(mesh, parallel, shared)
    with jax.set_mesh(mesh):
        check_layer(arrays, put=place, topk=2, lora_scale=SCALES, parallel=parallel)


def test_tokens_in_any_sharding(axis_type):
    mesh = mesh_of(axis_type, a=4, b=2)
    arrays = with_lora(operands(64, 7, 3, 24, 40, bias=True, skew=2.0, cold=2), (4, 3), ("a_out",))
    tokens = ("x", "output", "token_mask")

    def place(name, array):
        return put(mesh, array, *((("b", "a"),) if name in tokens else ()))

    with around(mesh):
        check_layer(arrays, put=place, topk=3, aux_loss_coeff=0.3, lora_scale=SCALES)


@pytest.mark.parametrize("on", ["mesh", "shards", "shard_map"])
def test_gradients_of_frozen_weights_are_not_computed(on):
    mesh = mesh_of(AxisType.Auto, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data") if on == "mesh" else None
    arrays = with_lora(operands(64, 8, 2, 16, 24), (4, 3))
    tokens = P(("data", "expert"))
    specs = parallel.specs() if parallel else dict.fromkeys(arrays, P()) | {"x": tokens}
    arrays = {name: put(mesh, array, *specs[name]) for name, array in arrays.items() if array is not None}
    names = ("x", *NAMES)

    def output(arrays):
        main = (arrays[name] for name in ("x", "gate", "w_in", "w_out"))
        return moe(*main, topk=2, lora=as_lora(arrays), parallel=parallel).output

    def loss(part, frozen):
        function = output
        if on == "shard_map":
            in_specs = ({name: specs[name] for name in (*part, *frozen)},)
            function = jax.shard_map(output, mesh=mesh, in_specs=in_specs, out_specs=tokens)
        return jnp.sum(jnp.sin(function(part | frozen)))

    frozen = {name: array for name, array in arrays.items() if name not in names}
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower({n: arrays[n] for n in names}, frozen).compile().as_text()
    calls = [line for line in text.splitlines() if "ab_xla_expert_ffn_backward" in line]
    assert calls
    requested = {name for line in calls for name in line.split('results = "')[1].split('"')[0].split(",")}
    assert {f"d_{name}" for name in NAMES} <= requested and not {"d_w_in", "d_w_out"} & requested


def test_nnx_creates_factors_in_shards():
    mesh = mesh_of(data=2, expert=2, tensor=2)
    parallel, shared = Parallel(**EVERY_AXIS, mesh=mesh), ("a_in", "b_out")
    options = dict(num_experts=4, topk=2, lora_rank=2, lora_alpha=3.0, lora_shared=shared)
    layer, one = (MoE(16, 24, **options, **given, rngs=nnx.Rngs(0)) for given in ({"parallel": parallel}, {}))
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    for name in NAMES:
        factor = getattr(layer, name)
        spec = parallel.specs(shared=shared)[name]
        assert factor[...].sharding.is_equivalent_to(NamedSharding(mesh, spec), factor[...].ndim), name
        if name.startswith("lora_b"):
            value = np.random.default_rng(1).standard_normal(factor.shape).astype(np.float32)
            factor[...] = put(mesh, value, *spec)
            getattr(one, name)[...] = jnp.asarray(value)
    assert_trees_close(layer(x).output, one(x).output, rtol=1e-4, atol=1e-4)


def test_specs_of_shared_factors():
    specs = Parallel(**EVERY_AXIS).specs(shared=("a_in",))
    assert tuple(specs["lora_a_in"]) == (None, "data", None) and tuple(specs["lora_a_out"]) == (
        "expert",
        "tensor",
        None,
    )
    with pytest.raises(ValueError, match=r"shared: got 'w_in', expected one of 'a_in'"):
        Parallel(**EVERY_AXIS).specs(shared=("w_in",))

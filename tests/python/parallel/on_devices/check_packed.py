"""Packed weights on meshes have the results of the unpacked ones; axes that would cut blocks are errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import AXIS_TYPES, around, mesh_of, put

from anabranch.jax import Parallel, moe, unpack
from anabranch.jax.nnx import MoE
from lora_cases import as_lora, lora_factors
from packed_cases import bits, random_packed
from pairs import pairs

E, K, T = 4, 2, 32
PFD = dict(w_in_layout="pfd", w_out_layout="df")
EVERY_AXIS = dict(expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor")


def arrays_of(kind, D, F):
    rng = np.random.default_rng(2)
    arrays = {"x": rng.standard_normal((T, D)), "gate": rng.standard_normal((D, E))}
    arrays |= {"b_in": rng.standard_normal((E, 2, F)), "b_out": rng.standard_normal((E, D))}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()} | lora_factors(E, D, 2, F, (4, 4))
    return arrays, (random_packed(kind, (E, 2, F, D)), random_packed(kind, (E, D, F), seed=1))


def gradients(arrays, weights, **options):
    """The output and the gradients of all plain arrays."""

    def loss(arrays):
        given = {name: arrays[name] for name in ("b_in", "b_out")}
        output = moe(
            arrays["x"], arrays["gate"], *weights, topk=K, lora=as_lora(arrays), **given, **PFD, **options
        ).output
        return jnp.sum(jnp.sin(output)), output

    (_, output), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return {"output": output, **found}


def assert_same(got, want):
    for name, array in want.items():
        np.testing.assert_array_equal(bits(np.asarray(got[name])), bits(np.asarray(array)), err_msg=name)


def placed(mesh, parallel, weights):
    specs = parallel.specs(**PFD)
    return tuple(
        type(w)(put(mesh, w[0], *specs[name]), put(mesh, w[1], *specs[f"{name}_block_scales"]))
        for name, w in zip(("w_in", "w_out"), weights, strict=True)
    )


@pytest.mark.parametrize(
    *pairs(axis_type=AXIS_TYPES, kind=["mxfp4", "fp8_blocks"], transport=["ring", "all_to_all", "ragged"])
)
def test_every_axis(axis_type, kind, transport):
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    parallel = Parallel(**EVERY_AXIS, transport=transport)
    arrays, weights = arrays_of(kind, 256, 256)
    plain = tuple(np.asarray(unpack(jax.tree.map(jnp.asarray, w), jnp.float32)) for w in weights)
    with jax.set_mesh(mesh):
        specs = parallel.specs(**PFD)
        on_mesh = {name: put(mesh, array, *specs[name]) for name, array in arrays.items()}
        got = gradients(on_mesh, placed(mesh, parallel, weights), parallel=parallel)
        unpacked = tuple(put(mesh, w, *specs[name]) for name, w in zip(("w_in", "w_out"), plain, strict=True))
        assert_same(got, gradients(on_mesh, unpacked, parallel=parallel))


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_blocks"])
def test_tokens_in_any_sharding(axis_type, kind):
    mesh = mesh_of(axis_type, a=4, b=2)
    arrays, weights = arrays_of(kind, 128, 128)
    weights = tuple(jax.tree.map(lambda array: put(mesh, array), w) for w in weights)
    given = {name: put(mesh, array, *((("b", "a"),) if name == "x" else ())) for name, array in arrays.items()}
    with around(mesh):
        got = gradients(given, weights)
        assert_same(got, gradients(given, tuple(unpack(w, jnp.float32) for w in weights)))


def test_fp8_precision_with_every_axis():
    """FP8 blocks are the quantised weights of the layer on a mesh, too."""
    mesh = mesh_of(data=2, expert=2, tensor=2)
    parallel = Parallel(**EVERY_AXIS)
    arrays, weights = arrays_of("fp8_blocks", 256, 256)
    weights = tuple(jax.tree.map(jnp.asarray, w) for w in weights)
    want = gradients(arrays, weights, precision="fp8")
    with jax.set_mesh(mesh):
        got = gradients(arrays, placed(mesh, parallel, weights), precision="fp8", parallel=parallel)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-4, atol=2e-4 * np.abs(array).max(), err_msg=name)


CUT = {
    "w_in": (
        dict(fsdp_axes="data"),
        "mxfp4",
        96,
        128,
        "w_in: .* expected D a multiple of 32 times 4, the devices along 'data'",
    ),
    "w_out": (dict(tensor_axis="tensor"), "mxfp4", 64, 96, "w_out: .* expected F a multiple of 32 times 2"),
    "FP8 blocks along F": (
        dict(tensor_axis="tensor"),
        "fp8_blocks",
        128,
        128,
        "w_in: .* expected F a multiple of 128 times 2",
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_axes_that_cut_blocks(case):
    axes, kind, D, F, message = CUT[case]
    mesh = mesh_of(data=4, tensor=2)
    arrays, weights = arrays_of(kind, D, F)
    weights = tuple(jax.tree.map(jnp.asarray, w) for w in weights)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"^{message}"):
        moe(arrays["x"], arrays["gate"], *weights, topk=K, **PFD, parallel=Parallel(data_axes="data", **axes))


@pytest.mark.parametrize("packed", ["mxfp4", "fp8_blocks"])
def test_nnx_on_a_mesh(packed):
    mesh = mesh_of(data=2, expert=2, tensor=2)
    parallel = Parallel(**EVERY_AXIS, mesh=mesh)
    options = dict(num_experts=E, topk=K, packed=packed, **PFD)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((T, 256)), jnp.float32)
    layer = MoE(256, 256, parallel=parallel, **options, rngs=nnx.Rngs(0))
    name = "w_in_codes" if packed == "mxfp4" else "w_in_q"
    assert tuple(getattr(layer, name)[...].sharding.spec)[:4] == ("expert", None, "tensor", "data")
    want = MoE(256, 256, **options, rngs=nnx.Rngs(0))(x).output
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(layer(x).output, want, rtol=2e-5, atol=2e-5)

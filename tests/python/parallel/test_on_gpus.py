"""One process with several GPUs: the layer on meshes of 2 and of 4 against the float64 oracle, in bfloat16.

The transport "p2p" is also compared with "ring", bit by bit.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import in_processes  # noqa: F401  adds the folders of the modules below
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import kept_and_dropped, placed

from anabranch.jax import Parallel, moe
from fp8_layers import check_routed
from mesh import make_mesh, parse_mesh
from moe_cases import check_layer, operands, run_layer
from routed_cases import routed_operands, run_routed


class Sizes(NamedTuple):
    """Tokens, experts, experts per token, widths."""

    T: int = 256
    E: int = 16
    K: int = 3
    D: int = 64
    F: int = 96


class Case(NamedTuple):
    """A layer on a mesh, as examples/mesh.py reads it.

    one_rank: all assignments go to the last two experts, which are on one rank.
    """

    mesh: str
    transport: str
    sizes: Sizes = Sizes()
    align_size: int = 0
    fsdp: bool = False
    capacity_factor: float | None = None
    one_rank: bool = False


MANY, ONE_EACH = Sizes(E=64, K=8), Sizes(E=4, K=1)
CASES = (
    Case("expert=2", "ring", MANY, align_size=128),
    Case("expert=2", "all_to_all", MANY, align_size=8),
    Case("expert=2", "ragged", MANY),
    Case("expert=2", "ragged", capacity_factor=0.8),
    Case("expert=2", "p2p", MANY, align_size=128),
    Case("data=4", "ring", fsdp=True),
    Case("expert=2,data=2", "ring", fsdp=True, align_size=8),
    Case("expert=2,data=2", "all_to_all", align_size=128),
    Case("expert=2,data=2", "ragged", fsdp=True),
    Case("expert=4", "ring", MANY, align_size=128),
    Case("expert=4", "all_to_all", MANY),
    Case("expert=4", "ragged", MANY, align_size=8),
    Case("expert=4", "ring", ONE_EACH),
    Case("expert=4", "all_to_all", ONE_EACH),
    Case("expert=4", "ring", Sizes(E=8), one_rank=True),
    Case("expert=4", "all_to_all", Sizes(E=8), one_rank=True),
    Case("expert=4", "ragged", Sizes(E=8), one_rank=True, align_size=8),
    Case("expert=2,tensor=2", "ring"),
    Case("expert=2,tensor=2", "all_to_all", capacity_factor=0.8),
    Case("expert=4", "ring", capacity_factor=0.8),
    Case("expert=4", "all_to_all", capacity_factor=0.8, align_size=8),
    Case("expert=4", "ragged", capacity_factor=0.8),
    Case("expert=4", "p2p", MANY),
    Case("expert=2,data=2", "p2p", fsdp=True, capacity_factor=0.8),
)


def name_of(case):
    """The fields without their default values."""
    return "-".join(str(value) for value, usual in zip(case, Case("", ""), strict=True) if value != usual)


def mesh_for(text):
    """The mesh that a text describes; skips the test if there are too few GPUs."""
    shape = parse_mesh(text)
    if len(jax.devices("gpu")) < (ranks := math.prod(shape.values())):
        pytest.skip(f"FEWER THAN {ranks} GPUS FOUND: the layer was not tested on so many")
    return make_mesh(shape)


def given(case):
    """The arrays of a case, the options of `moe`, and its Parallel."""
    T, E, K, D, F = case.sizes
    arrays = operands(T, E, K, D, F, dtype="bfloat16", bias=True, skew=0.0 if K == 1 else 3.0, cold=E // 8)
    rng = np.random.default_rng(3)
    options = {"topk": K, "aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}
    if case.one_rank:
        options["forced_experts"] = rng.integers(E - 2, E, (T, K)).astype(np.int32)
    else:
        options["token_mask"] = rng.random(T) < 0.9
    parallel = Parallel(
        expert_axis="expert",
        data_axes="data",
        fsdp_axes="data" if case.fsdp else (),
        tensor_axis="tensor",
        transport=case.transport,
        capacity_factor=case.capacity_factor,
    )
    return arrays, options, parallel


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_layer_on_a_mesh_of_gpus(gpu, case):
    mesh = mesh_for(case.mesh)
    arrays, options, parallel = given(case)
    kept, dropped = None, 0
    if case.capacity_factor is not None:
        kept, dropped = kept_and_dropped(arrays, options, parallel, mesh.shape["expert"], mesh.shape["data"])
        assert dropped.sum() > 10
    with jax.set_mesh(mesh):
        result, _ = check_layer(
            arrays, put=placed(mesh, parallel), parallel=parallel, kept=kept, align_size=case.align_size, **options
        )
    np.testing.assert_array_equal(result.dropped_by_source, dropped)


def assert_same(got, want):
    """Asserts that two trees of arrays have the same bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def by_p2p(parallel):
    return dataclasses.replace(parallel, transport="p2p")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.transport == "ring" and "expert" in case.mesh], ids=name_of
)
def test_p2p_has_the_bits_of_ring(gpu, case):
    """Outputs, losses, counts, drops and all gradients, for sizes of more than one exchange."""
    mesh = mesh_for(case.mesh)
    for T in (case.sizes.T, 16384, case.sizes.T // 2):
        arrays, options, parallel = given(case._replace(sizes=case.sizes._replace(T=T)))
        with jax.set_mesh(mesh):
            want, got = (
                run_layer(arrays, put=placed(mesh, one), parallel=one, align_size=case.align_size, **options)[:2]
                for one in (parallel, by_p2p(parallel))
            )
        assert_same(got, want)


@jax.jit
def same_bits(got, want):
    """Whether two trees of finite arrays are equal."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return jnp.all(jnp.stack([jnp.array_equal(a, b) for a, b in pairs]))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_early", [False, True], ids=["late weights", "early weights"])
@pytest.mark.parametrize("text", ["expert=2", "expert=4", "expert=2,data=2"])
def test_p2p_of_large_tokens_has_the_bits_of_ring(gpu, text, weight_early):
    """Copy engines send the tokens, GEMMs begin with those that arrive first, and sums return in chunks.

    The program runs often, so that XLA also runs it as a command buffer. No run waits for the previous one.
    """
    mesh = mesh_for(text)
    sizes = Sizes(T=16384 * mesh.shape["expert"] * mesh.shape["data"], E=16, K=4, D=2048, F=256)
    arrays, options, parallel = given(Case(text, "ring", sizes))

    def loss(parallel, arrays):
        main = (arrays[name] for name in ("x", "gate", "w_in", "w_out"))
        rest = {name: arrays[name] for name in ("b_in", "b_out")}
        result = moe(*main, **rest, topk=options["topk"], weight_early=weight_early, parallel=parallel)
        return jnp.mean(jnp.square(result.output.astype(jnp.float32))), result.output

    del arrays["gate_bias"]
    steps = {}
    with jax.set_mesh(mesh):
        placed_arrays = {name: placed(mesh, parallel)(name, array) for name, array in arrays.items()}
        for one in (parallel, by_p2p(parallel)):
            step = jax.jit(jax.value_and_grad(functools.partial(loss, one), has_aux=True))
            steps[one.transport] = functools.partial(step, placed_arrays)
        want = steps["ring"]()
        (_, output), gradients = want
        assert all(jnp.isfinite(array).all() for array in jax.tree.leaves(want))
        assert jnp.any(output) and all(jnp.any(array) for array in gradients.values())
        equal = [same_bits(steps["p2p"](), want) for _ in range(20)]
        assert all(map(bool, equal)), list(map(bool, equal))


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["expert=2", "expert=4", "expert=2,data=2"])
def test_p2p_in_programs_of_several_layers(gpu, text):
    """Rematerialised layers, layers in a scan, two layers that do not depend on one another, and collectives of XLA.

    The program runs often, so that XLA also runs it as a command buffer, and beside programs with one gradient only.
    """
    mesh = mesh_for(text)
    arrays, options, parallel = given(Case(text, "ring", Sizes(T=512, D=128, F=128)))
    names = ("x", "gate", "w_in", "w_out")

    def layer(parallel, x, weights):
        return moe(x, *weights, topk=options["topk"], parallel=parallel).output

    def loss(parallel, x, weights):
        one = functools.partial(layer, parallel)
        x = x + jax.checkpoint(one)(x, weights)
        x, _ = jax.lax.scan(lambda x, _: (x + one(x, weights), None), x, length=2)
        x = one(x, weights) + one(jnp.roll(x, 1, axis=1), weights)
        return jnp.sum(jnp.square(x.astype(jnp.float32))) / x.size

    found = []
    for one in (parallel, by_p2p(parallel)):
        with jax.set_mesh(mesh):
            x, *weights = (placed(mesh, one)(name, arrays[name]) for name in names)
            step = jax.jit(jax.value_and_grad(functools.partial(loss, one), argnums=(0, 1)))
            alone = jax.jit(jax.grad(functools.partial(loss, one)))
            results = [(step(x, weights), alone(x, weights)) for _ in range(20)]
        for result in results[1:]:
            assert_same(result, results[0])
        found.append(results[0])
    assert_same(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["expert=2", "expert=4"])
def test_p2p_outside_of_programs(gpu, text):
    """Eager calls, with the mesh as an argument; the mesh may have its devices in any order."""
    mesh = mesh_for(text)
    arrays, options, _ = given(Case(text, "ring"))
    for one in (mesh, jax.sharding.Mesh(np.flip(mesh.devices), mesh.axis_names, axis_types=mesh.axis_types)):
        results = []
        for transport in ("ring", "p2p"):
            parallel = Parallel(expert_axis="expert", transport=transport, mesh=one)
            given_arrays = [placed(one, parallel)(name, arrays[name]) for name in ("x", "gate", "w_in", "w_out")]
            results.append(moe(*given_arrays, topk=options["topk"], parallel=parallel).output)
        assert_same(results[1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["ring", "p2p", "all_to_all", "ragged"])
def test_tokens_are_sent_between_gpus_as_fp8(gpu, transport):
    """Results agree with the oracle and have the bits of an unquantised exchange, also with a NaN among the tokens."""
    devices = jax.devices("gpu")
    if len(devices) < 2 or devices[0].compute_capability != "9.0":
        pytest.skip("FEWER THAN 2 HOPPER GPUS FOUND: the FP8 exchange between GPUs is not tested")
    arrays = routed_operands(256, 8, 3, 256, 256, dtype="bfloat16", bias=True)
    mesh = make_mesh(parse_mesh("expert=2"))
    options = dict(activation="silu", fp8_scales="float32", weight_early=transport == "all_to_all")
    with jax.set_mesh(mesh):
        found = []
        for fp8_exchange in (False, True):
            parallel = Parallel(expert_axis="expert", transport=transport, fp8_exchange=fp8_exchange)
            how = dict(put=placed(mesh, parallel), parallel=parallel, **options)
            found.append(check_routed(arrays, "gpu", sent=fp8_exchange, **how))
        (want, want_gradients), (got, got_gradients) = found
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_gradients["x"], want_gradients["x"])
        arrays["x"][3, 130] = np.nan
        (output, *_), *_ = run_routed(arrays, precision="fp8", **how)
        assert (arrays["experts"][3] >= 0).any()
        np.testing.assert_array_equal(np.isnan(np.asarray(output, np.float32)).any(axis=1).nonzero()[0], [3])


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["expert=2", "expert=4"])
def test_p2p_sends_fp8_with_the_bits_of_ring(gpu, text):
    mesh = mesh_for(text)
    if jax.devices("gpu")[0].compute_capability != "9.0":
        pytest.skip("NO HOPPER GPU FOUND: the FP8 exchange between GPUs is not tested")
    arrays = routed_operands(256, 8, 3, 256, 256, dtype="bfloat16", bias=True)
    with jax.set_mesh(mesh):
        want, got = (
            run_routed(arrays, precision="fp8", put=placed(mesh, one), parallel=one)[:2]
            for one in (
                Parallel(expert_axis="expert", transport=transport, fp8_exchange=True) for transport in ("ring", "p2p")
            )
        )
    assert_same(got, want)

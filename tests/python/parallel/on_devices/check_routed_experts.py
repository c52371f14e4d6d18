"""routed_experts() on meshes: sharded tokens, every kind of parallelism, drops, and equality with moe()."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import AXIS_TYPES, P, around, assert_trees_close, kept_and_dropped, mesh_of, placed, put

from anabranch.jax import Parallel, moe, routed_experts
from moe_cases import operands
from pairs import pairs
from routed_cases import POSITIONAL, check_routed, routed_operands, run_routed

TOKENS = ("x", "experts", "weights", "output")
EVERY_AXIS = dict(expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor")
TRANSPORTS = ["ring", "all_to_all", "ragged"]
transports = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_in_shards(axis_type, dtype):
    mesh = mesh_of(axis_type, a=4, b=2)
    arrays = routed_operands(64, 7, 3, 24, 40, dtype=dtype, weights_dtype=dtype, bias=True, wrong=True)
    with around(mesh):
        check_routed(arrays, put=lambda name, array: put(mesh, array, *([("b", "a")] if name in TOKENS else [])))


@pytest.mark.parametrize(
    *pairs(axis_type=AXIS_TYPES, transport=TRANSPORTS, rows=[(None, 8, "float16"), (0.8, 0, "float32")])
)
def test_every_kind_of_parallelism_with_and_without_drops(axis_type, transport, rows):
    capacity_factor, align_size, dtype = rows
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    parallel = Parallel(**EVERY_AXIS, transport=transport, capacity_factor=capacity_factor)
    arrays = routed_operands(64, 8, 3, 16, 24, dtype=dtype, bias=True, wrong=True)
    kept = None
    if capacity_factor:
        valid = np.where((arrays["experts"] >= 0) & (arrays["experts"] < 8), arrays["experts"], -1)
        kept, dropped = kept_and_dropped(arrays, {"forced_experts": valid}, parallel, 2, 2)
        assert dropped.sum() > 10
    with jax.set_mesh(mesh):
        check_routed(arrays, put=placed(mesh, parallel), parallel=parallel, kept=kept, align_size=align_size)


@transports
def test_moe_is_the_router_and_this_with_drops(transport):
    """All bits are equal."""
    mesh = mesh_of(data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, capacity_factor=0.7)
    arrays = operands(64, 8, 3, 16, 24, dtype="bfloat16", bias=True, skew=3.0, cold=1)
    given = {name: placed(mesh, parallel)(name, array) for name, array in arrays.items()}
    gate = {name: given.pop(name) for name in ("gate", "gate_bias")}
    with jax.set_mesh(mesh):
        want = jax.jit(lambda gate, given: moe(**gate, **given, topk=3, parallel=parallel))(gate, given)
        chosen = {"experts": want.experts, "weights": want.weights}
        got = jax.jit(lambda given, chosen: routed_experts(**given, **chosen, parallel=parallel))(given, chosen)
    assert int(want.dropped) > 10
    for name in ("output", "tokens_per_expert", "dropped"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_inside_a_shard_map_counts_are_global(axis_type):
    mesh = mesh_of(axis_type, a=4, b=2)
    tokens, whole = P(("a", "b")), P()
    arrays = routed_operands(64, 6, 2, 16, 24, wrong=True)
    arrays = {name: arrays[name] for name in POSITIONAL}
    (want, counts, dropped), _, _ = run_routed(arrays)

    def shards(*arguments):
        result = routed_experts(*arguments, parallel=Parallel(data_axes=("a", "b")))
        return *result[:2], jax.lax.psum(result.dropped, ("a", "b"))

    in_specs = (tokens,) * 3 + (whole,) * 2
    on_shards = jax.shard_map(shards, mesh=mesh, in_specs=in_specs, out_specs=(tokens, whole, whole))

    def step(on_mesh, x, experts, weights, w_in, w_out):
        def loss(x, weights, w_in, w_out):
            output, *_ = on_mesh(x, experts, weights, w_in, w_out)
            return jnp.sum(jnp.sin(output))

        return jax.grad(loss, (0, 1, 2, 3))(x, weights, w_in, w_out)

    given = [put(mesh, a, *(spec and [spec[0]])) for a, spec in zip(arrays.values(), in_specs, strict=True)]
    assert_trees_close(jax.jit(on_shards)(*given), (want, counts, dropped), rtol=1e-5, atol=1e-5)
    want_gradients = jax.jit(lambda *a: step(routed_experts, *a))(*arrays.values())
    assert_trees_close(jax.jit(lambda *a: step(on_shards, *a))(*given), want_gradients, rtol=1e-5, atol=1e-5)

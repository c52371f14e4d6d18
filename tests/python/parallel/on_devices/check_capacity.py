"""Capacity: which assignments are dropped, their counts, and results and gradients of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import kept_and_dropped, mesh_of, placed

from anabranch.jax import Parallel, moe
from moe_cases import check_layer, operands

transports = pytest.mark.parametrize("transport", ["ring", "all_to_all", "ragged"])

T, E, K, D, F = 64, 8, 3, 8, 16


@transports
@pytest.mark.parametrize(
    "expert,data,capacity_factor,align_size,dtype",
    [(4, 2, 0.5, 0, "float32"), (8, 1, 1.0, 8, "bfloat16"), (4, 2, 1.3, 0, "float32")],
)
def test_drops_follow_the_rule_and_gradients_are_those_of_the_other_assignments(
    transport, expert, data, capacity_factor, align_size, dtype
):
    mesh = mesh_of(data=data, expert=expert)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, capacity_factor=capacity_factor)
    arrays = operands(T, E, K, D, F, dtype=dtype, bias=True, skew=3.0, cold=1)
    options = {"topk": K, "aux_loss_coeff": 0.3, "token_mask": np.random.default_rng(0).random(T) < 0.9}
    kept, dropped = kept_and_dropped(arrays, options, parallel, expert, data)
    assert dropped.sum() > 10
    with jax.set_mesh(mesh):
        result, _ = check_layer(
            arrays, put=placed(mesh, parallel), parallel=parallel, kept=kept, align_size=align_size, **options
        )
    np.testing.assert_array_equal(result.dropped_by_source, dropped)


@transports
def test_a_capacity_beyond_all_slots_drops_nothing(transport):
    """3e8 T K exceeds int32."""
    arrays = {name: array for name, array in operands(T, E, K, D, F).items() if array is not None}
    parallel = Parallel(expert_axis="expert", transport=transport, capacity_factor=3e8)
    with jax.set_mesh(mesh_of(expert=4)):
        got = jax.jit(lambda a: moe(**a, topk=K, parallel=parallel))(arrays)
    assert int(got.dropped) == 0
    np.testing.assert_allclose(got.output, moe(**arrays, topk=K).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transport, dtype", [("ring", "float32"), ("all_to_all", "bfloat16"), ("ragged", "float32")])
def test_drops_beside_sharded_weights_and_slices_of_f(transport, dtype):
    """FSDP over data and tensor parallelism over F: neither changes which assignments are dropped."""
    mesh = mesh_of(data=2, expert=2, tensor=2)
    parallel = Parallel(
        expert_axis="expert",
        data_axes="data",
        fsdp_axes="data",
        tensor_axis="tensor",
        transport=transport,
        capacity_factor=0.8,
    )
    arrays = operands(T, E, K, D, F, dtype=dtype, bias=True, skew=3.0, cold=1)
    options = {"topk": K, "aux_loss_coeff": 0.3}
    kept, dropped = kept_and_dropped(arrays, options, parallel, 2, 2)
    assert dropped.sum() > 10
    with jax.set_mesh(mesh):
        result, _ = check_layer(arrays, put=placed(mesh, parallel), parallel=parallel, kept=kept, **options)
    np.testing.assert_array_equal(result.dropped_by_source, dropped)


@pytest.mark.parametrize("transport, dtype", [("ring", "float32"), ("all_to_all", "bfloat16"), ("ragged", "float32")])
def test_the_same_bits_and_the_same_drops_on_every_run(transport, dtype):
    mesh = mesh_of(data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, capacity_factor=0.5)
    arrays = operands(T, E, K, D, F, dtype=dtype, skew=3.0)
    present = {n: placed(mesh, parallel)(n, a) for n, a in arrays.items() if a is not None}

    def loss(present):
        result = moe(**present, topk=K, aux_loss_coeff=0.3, parallel=parallel)
        return jnp.sum(jnp.sin(result.output.astype(jnp.float32))) + result.aux_loss, result

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        first = step(present)
        assert int(first[0][1].dropped) > 10
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, step(present), first)


@transports
def test_a_rank_that_everything_goes_to_takes_the_first_sources(transport):
    forced = np.random.default_rng(5).integers(4, 6, (T, K)).astype(np.int32)
    forced[::4, 1] = -1
    parallel = Parallel(expert_axis="expert", transport=transport, capacity_factor=2.0)
    arrays, options = operands(T, E, K, D, F), {"topk": K, "forced_experts": forced}
    kept, dropped = kept_and_dropped(arrays, options, parallel, 4, 1)
    assert dropped[0] == 0 and dropped[3] == 16 * K - 4 and kept.sum() < forced.size
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        result, gradients = check_layer(arrays, put=placed(mesh, parallel), parallel=parallel, kept=kept, **options)
    np.testing.assert_array_equal(result.dropped_by_source, dropped)
    assert not np.asarray(gradients["w_in"])[[0, 1, 2, 3, 6, 7]].any()


def test_a_wide_bound_drops_nothing_and_changes_no_bit():
    mesh = mesh_of(expert=8)
    arrays = operands(T, E, K, D, F)
    outputs = []
    for factor in (None, 8.0):
        parallel = Parallel(expert_axis="expert", transport="all_to_all", capacity_factor=factor)
        present = {n: placed(mesh, parallel)(n, a) for n, a in arrays.items() if a is not None}
        with jax.set_mesh(mesh):
            result = jax.jit(lambda p, parallel=parallel: moe(**p, topk=K, parallel=parallel))(present)
        assert int(result.dropped) == 0
        outputs.append(result.output)
    np.testing.assert_array_equal(*outputs)

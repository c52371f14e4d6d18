"""Expert, data, FSDP and tensor parallelism against the float64 oracle: output, losses, counts, every gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import assert_trees_close, collectives, mesh_of, put
from moe_cases import check_layer, operands

from anabranch.jax import Parallel, custom_calls, moe
from anabranch.jax.exchange import Bounds, traffic

TRANSPORTS = ("ring", "all_to_all", "ragged")
transports = pytest.mark.parametrize("transport", TRANSPORTS)


def placed(mesh, parallel):
    """Puts an array where `parallel` wants it."""
    specs = parallel.specs()
    tokens = dict.fromkeys(("output", "token_mask", "forced_experts"), "x")
    return lambda name, array: put(mesh, array, *specs[tokens.get(name, name)])


def check(mesh, parallel, arrays, **options):
    with jax.set_mesh(mesh):
        result, _ = check_layer(arrays, put=placed(mesh, parallel), parallel=parallel, **options)
    assert int(result.dropped) == 0 and not result.dropped_by_source.any()
    return result


@transports
@pytest.mark.parametrize("expert,data", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_meshes(transport, expert, data):
    """16 experts: 16 times the ranks to twice; aligned rows; experts without a token, and so ranks without one."""
    mesh = mesh_of(data=data, expert=expert)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    arrays = operands(64, 16, 3, 16, 24, bias=True, skew=3.0, cold=5)
    mask = np.random.default_rng(3).random(64) < 0.8
    result = check(mesh, parallel, arrays, topk=3, aux_loss_coeff=0.3, z_loss_coeff=0.1, token_mask=mask, align_size=8)
    assert result.dropped_by_source.shape == (8,)


@transports
@pytest.mark.parametrize("align_size", [0, 128])
def test_explicit_axes_and_bfloat16(transport, align_size):
    mesh = mesh_of(AxisType.Explicit, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    arrays = operands(64, 8, 2, 24, 32, dtype="bfloat16", bias=True, skew=2.0, cold=1)
    check(mesh, parallel, arrays, topk=2, aux_loss_coeff=0.3, align_size=align_size)


@transports
@pytest.mark.parametrize("experts,topk", [(8, 1), (8, 8), (128, 8)])
def test_few_and_many_experts_a_rank(transport, experts, topk):
    """E = ranks and E = 16 times the ranks, K = 1 and K = 8."""
    parallel = Parallel(expert_axis="expert", transport=transport)
    arrays = operands(48, experts, topk, 8, 16, bias=True)
    check(mesh_of(expert=8), parallel, arrays, topk=topk, aux_loss_coeff=0.1)


@transports
@pytest.mark.parametrize("weight_early", [False, True])
def test_one_rank_gets_everything_and_one_nothing(transport, weight_early):
    """Every token of the first ranks goes to rank 2 with all its slots, some experts twice; rank 0 gets none."""
    forced = np.random.default_rng(1).integers(2, 8, (32, 3)).astype(np.int32)
    forced[:16] = np.random.default_rng(2).integers(4, 6, (16, 3))
    forced[20:24] = -1
    parallel = Parallel(expert_axis="expert", transport=transport)
    arrays = operands(32, 8, 3, 8, 16, bias=True)
    check(mesh_of(expert=4), parallel, arrays, topk=3, forced_experts=forced, weight_early=weight_early, align_size=8)


@transports
def test_sharded_weights_and_slices_of_f(axis_type, transport):
    """FSDP over data, tensor parallelism over F, and experts, all at once."""
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    parallel = Parallel(
        expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor", transport=transport
    )
    arrays = operands(32, 4, 2, 16, 24, bias=True, skew=2.0)
    check(mesh, parallel, arrays, topk=2, aux_loss_coeff=0.3, z_loss_coeff=0.1)
    arrays = operands(32, 4, 2, 16, 24, dtype="bfloat16", bias=True, parts=1)
    check(mesh, parallel, arrays, topk=2, weight_early=True, activation="relu2", align_size=8)


@transports
def test_bias_and_groups_steer_the_selection(transport):
    """Groups of experts of two ranks each; expert_bias is on every device."""
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    bias = np.random.default_rng(5).standard_normal(16).astype(np.float32)
    options = dict(score_function="sigmoid", expert_bias=bias, num_groups=2, group_topk=1, scaling_factor=2.5)
    arrays = operands(64, 16, 4, 8, 16, bias=True)
    check(mesh_of(data=2, expert=4), parallel, arrays, topk=4, aux_loss_coeff=0.2, normalize=False, **options)


def test_calls_that_are_not_compiled(axis_type):
    mesh, arguments = mesh_of(axis_type, data=2, expert=4), _arguments()
    want = moe(**arguments, topk=2)
    for transport in TRANSPORTS:
        parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
        with jax.set_mesh(mesh):
            on_mesh = {name: put(mesh, array, *parallel.specs()[name]) for name, array in arguments.items()}
            got = moe(**on_mesh, topk=2, parallel=parallel)
        assert_trees_close(tuple(got[:5]), tuple(want[:5]), rtol=1e-5, atol=1e-5)


KINDS = {
    "ring": {"all-gather", "reduce-scatter", "all-reduce"},
    "all_to_all": {"all-to-all", "all-reduce"},
}


@pytest.mark.parametrize("transport", KINDS)
def test_tokens_travel_by_the_transport_alone(transport):
    """Its collectives, and sums of statistics and of the gate's gradient."""
    parallel = Parallel(expert_axis="expert", transport=transport, mesh=mesh_of(expert=8))
    on_mesh = {name: put(parallel.mesh, array, *parallel.specs()[name]) for name, array in _arguments().items()}
    found = collectives(lambda a: _step(a, parallel=parallel), on_mesh)
    assert {name for name, _ in found} == KINDS[transport]
    assert max(size for name, size in found if name == "all-reduce") <= on_mesh["gate"].size


@pytest.mark.parametrize(
    "options",
    [
        {"data_axes": ("a", "b"), "fsdp_axes": ("b", "a")},
        {"data_axes": "a", "tensor_axis": "b"},
        {"tensor_axis": "a"},
        {"expert_axis": "a", "tensor_axis": "b"},
    ],
    ids=str,
)
def test_any_subset_of_axes(options):
    """Axes that are not named have the same on all their devices."""
    arrays = operands(32, 4, 2, 16, 16, bias=True)
    check(mesh_of(a=4, b=2), Parallel(**options), arrays, topk=2, aux_loss_coeff=0.2)


def _arguments():
    arrays = operands(64, 8, 2, 16, 24)
    return {name: arrays[name] for name in ("x", "gate", "w_in", "w_out")}


def _step(arguments, **options):
    def loss(arguments):
        result = moe(**arguments, topk=2, aux_loss_coeff=0.2, **options)
        return jnp.sum(jnp.sin(result.output)) + result.aux_loss, result.output

    return jax.value_and_grad(loss, has_aux=True)(arguments)


@transports
def test_two_token_dimensions_over_two_axes(transport):
    """Sequences over data, positions over experts, as the explicit type of x says."""
    arguments = _arguments()
    arguments["x"] = arguments["x"].reshape(8, 8, 16)
    mesh = mesh_of(AxisType.Explicit, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    on_mesh = {name: put(mesh, array, *parallel.specs()[name]) for name, array in arguments.items()}
    on_mesh["x"] = put(mesh, arguments["x"], "data", "expert")
    got = jax.jit(lambda a: _step(a, parallel=parallel))(on_mesh)
    assert_trees_close(got, jax.jit(_step)(arguments), rtol=1e-5, atol=1e-5)


def test_fsdp_gathers_just_in_time_and_scatters_gradients():
    """Either matrix is gathered in both passes, behind a barrier the second time; its gradient is never whole.

    The gathers are counted before XLA compiles: on the CPU it drops barriers first, and then sees that both are one.
    """
    mesh, arguments = mesh_of(AxisType.Explicit, data=2, expert=4), _arguments()
    parallel = Parallel(expert_axis="expert", data_axes="data", fsdp_axes="data", transport="all_to_all")
    on_mesh = {name: put(mesh, array, *parallel.specs()[name]) for name, array in arguments.items()}

    def step(arguments):
        return _step(arguments, parallel=parallel)

    program = jax.jit(step).lower(on_mesh).as_text()
    found = collectives(step, on_mesh)
    for name, shape in {"w_in": "2x16x2x24", "w_out": "2x24x16"}.items():
        gathers = re.findall(rf'"stablehlo.all_gather".*-> tensor<{shape}xf32>', program)
        assert len(gathers) == 2
        assert found.count(("reduce-scatter", arguments[name].size // 8)) == 1, found
    assert program.count("stablehlo.optimization_barrier") == 1
    assert max(size for name, size in found if name == "all-reduce") <= arguments["gate"].size


def test_the_same_bits_on_every_run(axis_type):
    mesh, arguments = mesh_of(axis_type, data=2, expert=4), _arguments()
    for transport in TRANSPORTS:
        parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
        on_mesh = {name: put(mesh, array, *parallel.specs()[name]) for name, array in arguments.items()}
        step = jax.jit(lambda a, p=parallel: _step(a, parallel=p))
        with jax.set_mesh(mesh):
            first = step(on_mesh)
            for _ in range(3):
                jax.tree.map(np.testing.assert_array_equal, step(on_mesh), first)


@transports
def test_remat_scan_and_export(transport):
    mesh, arguments = mesh_of(data=2, expert=4), _arguments()
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, mesh=mesh)
    x, weights = arguments["x"], {n: np.stack([a, -a]) for n, a in arguments.items() if n != "x"}

    def step(x, weights, **options):
        layer = jax.checkpoint(lambda x, w: (x + moe(x, **w, topk=2, **options).output, None))
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(jax.lax.scan(layer, x, w)[0])), argnums=(0, 1))(x, weights)

    on_mesh = (
        put(mesh, x, ("data", "expert")),
        {name: put(mesh, array, None, *parallel.specs()[name]) for name, array in weights.items()},
    )
    on_devices = jax.jit(lambda *a: step(*a, parallel=parallel))
    got = on_devices(*on_mesh)
    assert_trees_close(got, jax.jit(step)(x, weights), rtol=2e-5, atol=2e-5)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls()]
    exported = jax.export.export(on_devices, disabled_checks=allowed)(*on_mesh)
    loaded = jax.export.deserialize(bytearray(exported.serialize()))
    assert_trees_close(loaded.call(*on_mesh), got, rtol=0, atol=0)


@transports
def test_no_tokens(transport):
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, mesh=mesh_of(data=2, expert=4))
    arguments = _arguments()
    arguments["x"] = arguments["x"][:0]
    (loss, output), gradients = jax.jit(lambda a: _step(a, parallel=parallel))(arguments)
    assert loss == 0 and output.shape == (0, 16)
    assert not any(np.any(gradient) for gradient in gradients.values())


@transports
def test_vmap(transport):
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, mesh=mesh_of(data=2, expert=4))
    stacked = {name: np.stack([array, -0.5 * array]) for name, array in _arguments().items()}
    got = jax.jit(jax.vmap(lambda a: _step(a, parallel=parallel)))(stacked)
    assert_trees_close(got, jax.jit(jax.vmap(_step))(stacked), rtol=1e-5, atol=1e-5)


def test_ragged_is_the_native_collective_but_on_the_cpu():
    """The program for GPUs: rows go by ragged_all_to_all, and nothing but sizes and weights is gathered."""
    parallel = Parallel(expert_axis="expert", transport="ragged", mesh=mesh_of(expert=8))
    traced = jax.jit(lambda a: _step(a, parallel=parallel)).trace(_arguments())
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("@ragged_all_to_all") == 7  # x, y; x, d_out, weights; d_x, d_weights
    assert re.findall(r'"stablehlo.all_gather".*-> tensor<(\S+)>', program) == ["8x8xi32"]
    assert "@ragged_all_to_all" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_inside_a_shard_map_over_another_axis():
    """A stage of a pipeline, say: moe() makes its own axes manual inside."""
    mesh, arguments = mesh_of(AxisType.Explicit, stage=2, expert=4), _arguments()
    parallel = Parallel(expert_axis="expert", transport="all_to_all")
    stages = {name: np.stack([array, 0.5 * array]) for name, array in arguments.items()}
    specs = {name: jax.sharding.PartitionSpec("stage") for name in stages}

    def stage(arguments):
        output = moe(**{n: a[0] for n, a in arguments.items()}, topk=2, parallel=parallel).output
        return output[None]

    staged = jax.shard_map(stage, mesh=mesh, in_specs=(specs,), out_specs=specs["x"], axis_names={"stage"})
    on_mesh = {name: put(mesh, array, "stage", *parallel.specs()[name]) for name, array in stages.items()}

    def step(layer, arguments):
        output, pull = jax.vjp(layer, arguments)
        return output, pull(jnp.cos(output))

    def one_by_one(arguments):
        return jnp.stack([moe(**{n: a[i] for n, a in arguments.items()}, topk=2).output for i in range(2)])

    got = jax.jit(lambda a: step(staged, a))(on_mesh)
    assert_trees_close(got, jax.jit(lambda a: step(one_by_one, a))(stages), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_traffic_is_what_the_program_sends(capacity_factor):
    """The formulas of docs/scaling.md against the collectives of a compiled forward pass, for arrays of width D."""
    T, D, E, K, P = 8, 16, 16, 2, 8
    arrays = operands(P * T, E, K, D, 24)
    arguments = {name: arrays[name] for name in ("x", "gate", "w_in", "w_out")}
    capacity = None if capacity_factor is None else int(capacity_factor * T * K)
    expected = traffic(Bounds("expert", P, E, 0, T, K, min(K, E // P), capacity), itemsize=4)
    for transport in KINDS:
        parallel = Parallel(
            expert_axis="expert", transport=transport, capacity_factor=capacity_factor, mesh=mesh_of(expert=P)
        )
        on_mesh = {name: put(parallel.mesh, a, *parallel.specs()[name]) for name, a in arguments.items()}
        found = collectives(lambda a, p=parallel: moe(**a, topk=K, parallel=p).output, on_mesh)
        # Of what is gathered a rank has one part; a reduce-scatter's and an all_to_all's result is one part.
        parts = {"all-gather": 1 / P, "reduce-scatter": 1, "all-to-all": 1}
        wide = [size * parts[name] for name, size in found if name in parts and size * parts[name] >= T * D]
        assert 4 * (P - 1) * sum(wide) == expected[transport] * D, found

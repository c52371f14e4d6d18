"""The programs of a layer on a mesh: their traffic, their transforms, and equal bits on every run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import assert_trees_close, collectives, mesh_of, put

from anabranch.exchange_sizes import traffic
from anabranch.jax import Parallel, custom_calls, moe
from anabranch.jax.parallel.exchange import Bounds
from moe_cases import operands

TRANSPORTS = ("ring", "all_to_all", "ragged")
transports = pytest.mark.parametrize("transport", TRANSPORTS)


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
    """Sequences are sharded over data and positions over experts, as in the explicit type of x."""
    arguments = _arguments()
    arguments["x"] = arguments["x"].reshape(8, 8, 16)
    mesh = mesh_of(AxisType.Explicit, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    on_mesh = {name: put(mesh, array, *parallel.specs()[name]) for name, array in arguments.items()}
    on_mesh["x"] = put(mesh, arguments["x"], "data", "expert")
    got = jax.jit(lambda a: _step(a, parallel=parallel))(on_mesh)
    assert_trees_close(got, jax.jit(_step)(arguments), rtol=1e-5, atol=1e-5)


def test_fsdp_gathers_just_in_time_and_scatters_gradients():
    """Each matrix is gathered in both passes, the second time after a barrier; its gradient is never whole.

    The gathers are counted before XLA compiles, because on the CPU it drops the barriers and then merges both gathers.
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


def test_calls_that_are_not_compiled(axis_type):
    mesh, arguments = mesh_of(axis_type, data=2, expert=4), _arguments()
    want = moe(**arguments, topk=2)
    for transport in TRANSPORTS:
        parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
        with jax.set_mesh(mesh):
            on_mesh = {name: put(mesh, array, *parallel.specs()[name]) for name, array in arguments.items()}
            got = moe(**on_mesh, topk=2, parallel=parallel)
        assert_trees_close(tuple(got[:5]), tuple(want[:5]), rtol=1e-5, atol=1e-5)


def test_inside_a_shard_map_over_another_axis():
    """A pipeline stage, for instance: moe() makes its own axes manual inside."""
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


KINDS = {
    "ring": {"all-gather", "all-to-all", "reduce-scatter", "all-reduce"},
    "all_to_all": {"all-to-all", "all-reduce"},
}


@pytest.mark.parametrize("transport", KINDS)
def test_only_the_transport_sends_tokens(transport):
    """Other collectives are sums of statistics and the gate's gradient, and the ring's gather of weights [P T, K]."""
    parallel = Parallel(expert_axis="expert", transport=transport, mesh=mesh_of(expert=8))
    on_mesh = {name: put(parallel.mesh, array, *parallel.specs()[name]) for name, array in _arguments().items()}
    found = collectives(lambda a: _step(a, parallel=parallel), on_mesh)
    assert {name for name, _ in found} == KINDS[transport]
    assert max(size for name, size in found if name == "all-reduce") <= on_mesh["gate"].size
    assert all(size <= on_mesh["x"].shape[0] * 2 for name, size in found if name == "reduce-scatter")


def test_ragged_is_the_native_collective_except_on_the_cpu():
    """The program for GPUs sends rows by ragged_all_to_all, and gathers only sizes and weights."""
    parallel = Parallel(expert_axis="expert", transport="ragged", mesh=mesh_of(expert=8))
    traced = jax.jit(lambda a: _step(a, parallel=parallel)).trace(_arguments())
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("@ragged_all_to_all") == 7  # x, y; x, d_out, weights; d_x, d_weights
    assert re.findall(r'"stablehlo.all_gather".*-> tensor<(\S+)>', program) == ["8x8xi32"]
    assert "@ragged_all_to_all" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@transports
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_nothing_is_sorted(transport, capacity_factor):
    """Row positions are computed by counting before and after the exchange; neither rows nor indices are sorted."""
    mesh = mesh_of(data=2, expert=4)
    parallel = Parallel(
        expert_axis="expert", data_axes="data", transport=transport, capacity_factor=capacity_factor, mesh=mesh
    )
    on_mesh = {name: put(mesh, array, *parallel.specs()[name]) for name, array in _arguments().items()}

    def sorts(function, *arrays):
        """Collectives of the compiled program, and of the GPU program before compilation."""
        traced = jax.jit(function).trace(*arrays)
        here = re.findall(r" sort\(|TopK", traced.lower().compile().as_text())
        return here, re.findall(r"stablehlo\.sort|top_k", traced.lower(lowering_platforms=("cuda",)).as_text())

    assert all(sorts(jnp.argsort, on_mesh["x"])) and all(sorts(lambda x: jax.lax.top_k(x, 2), on_mesh["x"]))
    assert sorts(lambda a: _step(a, parallel=parallel), on_mesh) == ([], [])


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_traffic_is_what_the_program_sends(capacity_factor):
    """The formulas of docs/scaling.md match the collectives of a compiled forward pass for arrays of width D."""
    T, D, E, K, P = 8, 16, 16, 2, 8
    arrays = operands(P * T, E, K, D, 24)
    arguments = {name: arrays[name] for name in ("x", "gate", "w_in", "w_out")}
    capacity = None if capacity_factor is None else int(capacity_factor * T * K)
    expected = traffic(Bounds(P, E, 0, T, K, min(K, E // P), capacity, "expert"), itemsize=4)
    for transport in KINDS:
        parallel = Parallel(
            expert_axis="expert", transport=transport, capacity_factor=capacity_factor, mesh=mesh_of(expert=P)
        )
        on_mesh = {name: put(parallel.mesh, a, *parallel.specs()[name]) for name, a in arguments.items()}
        found = collectives(lambda a, p=parallel: moe(**a, topk=K, parallel=p).output, on_mesh)
        # A rank contributes one part to a gather; the result of an all_to_all is one part.
        parts = {"all-gather": 1 / P, "all-to-all": 1}
        wide = [size * parts[name] for name, size in found if name in parts and size * parts[name] >= T * D]
        assert 4 * (P - 1) * sum(wide) == expected[transport] * D, found


@pytest.mark.parametrize("parallel", [None, Parallel(expert_axis="expert", data_axes="data")], ids=["shards", "mesh"])
def test_remat_policies_find_residuals_by_name(parallel, capsys):
    """With sharded x on a mesh; gradients are equal."""
    mesh, arguments = mesh_of(data=2, expert=4), _arguments()
    tokens = {"x": [("data", "expert")]}
    on_mesh = {name: put(mesh, array, *tokens.get(name, [])) for name, array in arguments.items()}

    def loss(arguments):
        return jnp.sum(jnp.sin(moe(**arguments, topk=2, parallel=parallel).output))

    def with_policy(*names):
        return jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(*names))

    def passes(*names):
        """How often a step runs the experts' forward pass."""
        return jax.jit(jax.grad(with_policy(*names))).lower(on_mesh).as_text().count("@ab_xla_expert_ffn_forward(")

    def saved(*names):
        """The types of the residuals other than arguments, and the gradients."""
        rematted = with_policy(*names)
        jax.ad_checkpoint.print_saved_residuals(rematted, on_mesh)
        lines = capsys.readouterr().out.splitlines()
        assert_trees_close(jax.jit(jax.grad(rematted))(on_mesh), want, rtol=1e-6, atol=1e-6)
        return [line.split()[0] for line in lines if "from the argument" not in line]

    with jax.set_mesh(mesh):
        want = jax.jit(jax.grad(loss))(on_mesh)
        (h,) = saved("moe_h")
        assert h.endswith(",2,24]")
        assert saved("moe_logits") == ["f32[64,8]"]
        every = saved("moe_h", "moe_logits", "moe_routing")
        assert {h, "f32[64,8]"} < set(every) and len(every) > 3
        assert saved("moe_output") == saved("moe_x") == ["f32[64,16]"]
        assert saved() == []
        if parallel is not None:  # without it, the experts' calls are lowered when XLA partitions the program
            assert (passes("moe_h"), passes("moe_h", "moe_output")) == (2, 1)  # the gradient of sin reads the output

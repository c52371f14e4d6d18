"""The programs that `benchmarks mesh` times: the distributed layer equals the layer, and collectives match their names."""

import jax
import numpy as np
import pytest

from anabranch.jax import Parallel
from benchmarks import layer_jax, mesh_jax
from benchmarks.__main__ import main
from benchmarks.shapes import LayerShape
from oracle import assert_close

SHAPE = LayerShape(T=24, D=16, F=8, E=16, K=2)
NAMES = ("output", "d_x", "d_gate", "d_w_in", "d_w_out")


@pytest.mark.parametrize("transport, routing", [("ring", "uniform"), ("all_to_all", "uniform"), ("ragged", "zipf")])
def test_the_layer_on_all_ranks_is_the_layer(transport, routing):
    mesh = mesh_jax.ranks()
    parallel = Parallel(expert_axis=mesh_jax.AXIS, transport=transport)
    with jax.set_mesh(mesh):
        given = mesh_jax.operands(mesh, parallel, SHAPE, "float32", routing)
        assert given.x.shape == (SHAPE.T * mesh.size, SHAPE.D)
        assert given.w_in.addressable_shards[0].data.shape[0] == SHAPE.E // mesh.size
        got = jax.jit(layer_jax.passes(mesh_jax.layer(parallel), SHAPE.K)["both"])(*given)
    alone = layer_jax.Operands(*(None if a is None else jax.numpy.asarray(np.asarray(a)) for a in given))
    want = layer_jax.passes(layer_jax.LAYERS["jax"], SHAPE.K)["both"](*alone)
    for name, mine, theirs in zip(NAMES, got, want, strict=True):
        assert_close(mine, theirs, 2e-6 if name == "output" else 1e-5, name)


def test_times_and_drops():
    forward, both, dropped = mesh_jax.measure_layer(SHAPE, "float32", "jax", "uniform", "ring", None, 2)
    assert 0 < forward.seconds and 0 < both.seconds and dropped == 0
    assert mesh_jax.measure_layer(SHAPE, "float32", "jax", "zipf", "ring", 0.5, 2)[2] > 0


def test_the_program_runs(capsys):
    assert main(["mesh", "--quick", "--shape", str(SHAPE), "--by", "jax", "--transport", "all_to_all"]) == 0
    assert capsys.readouterr().out.count("| all_to_all |") == 2


@pytest.mark.parametrize("by", ["fp8", "fp8-exchange"])
def test_what_is_timed_with_fp8(by, monkeypatch):
    given = []

    def moe(*operands, parallel, **options):
        given.append((options["precision"], parallel.fp8_exchange))
        return layer(*operands, parallel=parallel, **options)

    layer = mesh_jax.moe
    for module in (mesh_jax, layer_jax):
        monkeypatch.setattr(module, "moe", moe)
    wide = SHAPE._replace(D=128, F=128)
    assert 0 < mesh_jax.measure_layer(wide, "float32", by, "uniform", "ring", None, 2)[1].seconds
    assert set(given) == {("fp8", by == "fp8-exchange")}


def test_collectives_match_their_names():
    mesh = mesh_jax.ranks()
    P, T, D, rows = mesh.size, SHAPE.T, SHAPE.D, SHAPE.T * SHAPE.K // mesh.size
    with jax.set_mesh(mesh):
        found = mesh_jax.collectives(mesh, SHAPE, "float32")
        got, given = {}, {}
        for name, (function, operand, _) in found.items():
            given[name] = np.random.default_rng(1).standard_normal(operand.shape).astype(np.float32)
            got[name] = np.asarray(jax.jit(function)(jax.device_put(given[name], operand.sharding)))
    for name, size in (("all_to_all", rows), ("all_to_all_sums", T)):
        exchanged = given[name].reshape(P, P, size, D).swapaxes(0, 1)
        np.testing.assert_array_equal(got[name].reshape(exchanged.shape), exchanged)
    np.testing.assert_array_equal(got["all_gather"].reshape(P, P * T, D), np.stack([given["all_gather"]] * P))
    sent = {name: sent for name, (_, _, sent) in found.items()}
    exchange = (P - 1) * rows * D * 4
    assert sent == {"all_to_all": exchange, "all_gather": (P - 1) * T * D * 4, "all_to_all_sums": (P - 1) * T * D * 4}


def test_every_collective_is_timed():
    times = mesh_jax.measure_collectives(SHAPE, "float32", 2)
    assert set(times) == {"all_to_all", "all_gather", "all_to_all_sums"}
    assert all(timing.seconds > 0 and sent > 0 for timing, sent in times.values())

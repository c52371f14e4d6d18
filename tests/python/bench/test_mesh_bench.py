"""The benchmark of the layer on many GPUs: figures become rows, processes report. No figure is tested."""

import json
import types

import jax
import pytest

from anabranch.__main__ import main
from anabranch.bench import cuda_mesh, mesh_in_jax
from anabranch.bench.errors import BenchError
from anabranch.bench.gpu import Timing
from anabranch.bench.layer_result import LayerTimes
from anabranch.bench.layer_shape import LayerShape

SHAPE = LayerShape(T=1024, D=32, F=48, E=8, K=2)
COMMAND = ["bench", "mesh", "--device", "cuda"]


def test_figures_become_rows_and_tables():
    times = LayerTimes(Timing(1e-3, 9e-4, 2e-3), Timing(4e-3, 3e-3, 5e-3), 7)
    row = cuda_mesh.layer_row(SHAPE, "fp8", "jit", 4, "ring", 1.25, times, "portable")
    assert (row["forward ms"], row["dropped"], row["ranks"], row["path"]) == (1.0, 7, 4, "portable")
    assert row["backward ms"] == pytest.approx(3.0)
    flops = 6 * SHAPE.T * SHAPE.K * SHAPE.D * SHAPE.F
    assert row["forward TFLOP/s"] == pytest.approx(flops / 1e-3 / 1e12)
    assert row["backward TFLOP/s"] == pytest.approx(2 * flops / 3e-3 / 1e12)
    exchange = cuda_mesh.collective_row(SHAPE, "xla", "all_to_all", Timing(2e-3, 1e-3, 3e-3), 3 << 20)
    assert exchange["GB/s"] == pytest.approx((3 << 20) / 2e-3 / 1e9)
    assert exchange["spread"]["ms"] == [1.0, 3.0]
    tables = cuda_mesh.tables([row, exchange])
    assert [(one["transport"], one["path"]) for one in tables["layer"]] == [("ring", "portable")]
    assert [one["collective"] for one in tables["collectives"]] == ["all_to_all"]


def test_a_bound_that_fails_does_not_hide_the_other(monkeypatch):
    def measure_layer(shape, dtype, by, transport, capacity, *, repeats):
        if capacity is None:
            raise RuntimeError("\n\n-- Process 1 --\nTraceback (most recent call last):\n  here\nMemoryError: full\n")
        return LayerTimes(Timing(1e-3, 1e-3, 1e-3), Timing(3e-3, 3e-3, 3e-3), 0)

    monkeypatch.setattr(cuda_mesh.gpu, "jax_with_gpu", lambda: types.SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setattr(mesh_in_jax, "measure_layer", measure_layer)
    monkeypatch.setattr(cuda_mesh, "experts_path", lambda shape, dtype: f"{shape.D} in {dtype}")
    which = {"shape": [SHAPE], "by": ["jax"], "transport": ["ring"]}
    failed, bounded = cuda_mesh.rows(dtypes=["bfloat16"], quick=True, **which)
    assert failed["error"] == "jax: RuntimeError: MemoryError: full" and failed["capacity"] is None
    assert bounded["capacity"] == 1.25 and "error" not in bounded and bounded["path"] == "32 in bfloat16"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--tokens", str(2**30)], f"--tokens: got {2**30} with K = 8, expected T * K < 2^31"),
        (["--by", "c"], "--by: got c with mesh, expected jax, fp8, fp8-exchange, moe, xla, torch"),
        (["--dtype", "float32"], "--dtype: got float32 with mesh, expected bfloat16"),
        (["--by", "moe", "--transport", "ragged"], "--transport: got ragged with moe, expected ring or all_to_all"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert main([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_transport_belongs_to_the_mesh(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "layer", "--device", "cuda", "--transport", "ring"])
    assert "--transport: got it with layer, expected it with mesh" in capsys.readouterr().err


def test_every_case_is_measured_by_a_process_of_its_own(monkeypatch, tmp_path, capsys):
    started = []

    def rows_of_a_process(operation, flags, *, quiet):
        assert operation == "mesh" and quiet
        started.append(flags)
        if "torch" in flags:
            raise BenchError("no second GPU")
        return [{"T,D,F,E,K": str(SHAPE), "by": flags[flags.index("--by") + 1], "spread": {}}]

    monkeypatch.setattr(cuda_mesh, "rows_of_a_process", rows_of_a_process)
    file = tmp_path / "rows.json"
    by = [flag for name in ("jax", "fp8-exchange", "moe", "xla", "torch") for flag in ("--by", name)]
    which = ["--shape", str(SHAPE), *by]
    assert main([*COMMAND, *which, "--json", str(file)]) == 1
    rows = json.loads(file.read_text())["rows"]["mesh"]
    assert [row["by"] for row in rows] == [*["jax"] * 3, *["fp8-exchange"] * 3, "moe", "moe", "xla", "torch"]
    assert rows[-1]["error"] == "no second GPU"
    assert [flags[flags.index("--transport") + 1] for flags in started[:8]] == [
        *["ring", "all_to_all", "ragged"] * 2,
        *["ring", "all_to_all"],
    ]
    assert "no second GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_mesh_is_measured_on_gpus(tmp_path):
    try:
        gpus = len(jax.devices("gpu"))
    except RuntimeError:
        gpus = 0
    if gpus < 2:
        pytest.skip("FEWER THAN TWO GPUs FOUND: the benchmark of many is not tested")
    file = tmp_path / "rows.json"
    hopper = jax.devices("gpu")[0].compute_capability == "9.0"
    timed = ["jax", "xla", "moe", *(["fp8", "fp8-exchange"] if hopper else [])]
    by = [flag for name in timed for flag in ("--by", name)]
    assert (
        main([*COMMAND, "--quick", "--shape", "512,128,128,8,2", "--transport", "ring", *by, "--json", str(file)]) == 0
    )
    rows = json.loads(file.read_text())["rows"]["mesh"]
    assert {row["by"] for row in rows} == set(timed) and not any("error" in row for row in rows)
    assert {row["mode"] for row in rows if row["by"] == "moe"} == {"eager", "graph"}

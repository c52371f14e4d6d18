"""What `bench torch` compares is the same layer, and its rows say what was measured. Figures are never tested."""

import functools
import json
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from anabranch.__main__ import main  # noqa: E402
from anabranch.bench import cuda_torch, gpu, torch_layers, torch_rows  # noqa: E402
from anabranch.bench import torch as torch_bench  # noqa: E402
from anabranch.bench.cuda_layer_graphs import operands  # noqa: E402
from anabranch.bench.errors import BenchError  # noqa: E402
from anabranch.bench.experts_path import experts_path  # noqa: E402
from anabranch.bench.gpu import Timing  # noqa: E402
from anabranch.bench.layer_shape import LayerShape  # noqa: E402
from anabranch.bench.measure import format_table  # noqa: E402

SHAPE = LayerShape(64, 32, 48, 8, 2)


@pytest.mark.parametrize("by", torch_layers.BY)
def test_every_layer_is_moe(by):
    if by not in torch_layers.installed([by]):
        pytest.skip("NO TRANSFORMERS FOUND: its layer is not compared with ours")
    given = operands(SHAPE, "float32", "uniform", device="cpu")
    layer = torch_layers.make(by, SHAPE, given)
    output, d_x, d_gate, d_w_in, d_w_out = layer.both()
    torch.testing.assert_close(layer.forward(), output)
    if by not in ("moe", "grouped_mm"):  # as checkpoints have them
        d_gate, d_w_out = d_gate.T, d_w_out.mT
        d_w_in = d_w_in.unflatten(1, (2, -1)).permute(0, 3, 1, 2)
    want = torch_layers.make("moe", SHAPE, given).both()
    torch.testing.assert_close((output, d_x, d_gate, d_w_in, d_w_out), want, rtol=1e-4, atol=1e-4)


def test_quantised_experts_are_quantised_within_or_before():
    shape = SHAPE._replace(D=128, F=128)
    given = operands(shape, "float32", "uniform", device="cpu")
    within, kept = (torch_layers.make(by, shape, given).both() for by in torch_layers.FP8_BY)
    torch.testing.assert_close(within, kept, rtol=0, atol=0)
    exact = torch_layers.make("moe", shape, given).forward()
    assert 0.01 < (within[0] - exact).norm() / exact.norm() < 0.2


def test_the_implementation_is_the_one_that_is_named(monkeypatch):
    moe = pytest.importorskip("transformers.integrations.moe")
    called = []
    for name in ("grouped_mm", "batched_mm"):
        function = moe.ALL_EXPERTS_FUNCTIONS[name]
        monkeypatch.setitem(
            moe.ALL_EXPERTS_FUNCTIONS._global_mapping,
            name,
            lambda *a, name=name, function=function: called.append(name) or function(*a),
        )
    for by in ("hf-grouped_mm", "hf-batched_mm", "hf-eager"):
        torch_layers.make(by, SHAPE, operands(SHAPE, "float32", "uniform", device="cpu")).forward()
    assert called == ["grouped_mm", "batched_mm"]


def report(capsys, *arguments):
    assert main(["bench", "torch", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]["torch"]


def test_rows_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch_bench, "_MOST_BATCHED_BYTES", torch_layers.batched_bytes(SHAPE, 4) - 1)
    chosen = ["moe", "MoE", "grouped_mm", *torch_layers.installed(["hf-batched_mm"])]
    arguments = [argument for by in chosen for argument in ("--by", by)]
    threads = torch.get_num_threads()
    rows = report(capsys, "--quick", "--shape", str(SHAPE), "--dtype", "float32", *arguments)
    assert torch.get_num_threads() == threads
    assert [(row["by"], row["mode"]) for row in rows] == [(by, "eager") for by in chosen]
    for row in rows:
        if row["by"] == "hf-batched_mm":
            assert row["forward ms"] is None and row["note"].startswith("not run: it would copy 0.0 GiB")
            continue
        assert row["both ms"] > 0 and row["host both us"] > 0 and row["host forward us"] > 0
        assert row["x both"] == pytest.approx(row["both ms"] / rows[0]["both ms"])
        assert row["forward GFLOP/s"] == pytest.approx(SHAPE.forward_flops() / row["forward ms"] / 1e6)
    (table,) = torch_rows.tables(rows).values()
    assert "host both us" in format_table(table) and "TFLOP/s" not in format_table(table)
    assert "path" not in format_table(table) and "auto" not in format_table(table)
    assert {(row["path"], row["auto"]) for row in rows} == {(None, None)}


def test_what_is_compiled_is_timed_too(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    rows = list(torch_bench._rows([SHAPE], ["float32"], ["MoE"], ("eager", "compiled"), 0.01))
    assert [row["mode"] for row in rows] == ["eager", "compiled"] and rows[1]["both ms"] > 0


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """Implementations in torch are measured by a process each, as if; returns their flags."""
    seen = []

    def process(operation, flags, *, quiet):
        seen.append((operation, flags))
        by = flags[flags.index("--by") + 1]
        if by == "hf-batched_mm":
            raise BenchError("out of luck")
        if operation == "layer":
            spread = {"forward ms": [1.9, 2.1], "both ms": [5.9, 6.1]}
            return [{"forward ms": 2.0, "both ms": 6.0, "path": "hopper", "auto": "fp8", "note": "", "spread": spread}]
        shape = LayerShape(*map(int, flags[flags.index("--shape") + 1].split(",")))
        seconds = {"forward": 1e-3, "both": 4e-3} if by == "moe" else {"forward": 2e-3}
        return [torch_rows.row(shape, "bfloat16", by, mode, seconds=seconds) for mode in torch_layers.MODES[by]]

    monkeypatch.setattr(cuda_torch, "rows_of_a_process", process)
    monkeypatch.setattr(gpu, "torch_with_gpu", lambda: torch)
    return seen


def test_every_implementation_has_a_process_of_its_own(no_gpu_needed, capsys):
    arguments = ["--device", "cuda", "--shape", "qwen3-30b", "--tokens", "8192", "--tokens", "64", "--quick"]
    arguments += ["--by", "moe", "--by", "grouped_mm", "--by", "jax"]
    rows = report(capsys, *arguments)
    flags = ["--device", "cuda", "--shape", "8192,2048,768,128,8", "--by"]
    assert no_gpu_needed == [
        (operation, [*flags, by, "--quick"])
        for operation, by in (("torch", "moe"), ("torch", "grouped_mm"), ("layer", "jax"))
    ]
    found = {(row["by"], row["mode"]): (row["x forward"], row["x both"]) for row in rows}
    assert found["moe", "graph"] == (1, 1) and found["grouped_mm", "graph"] == (2, None)
    assert found["jax", "jit"] == pytest.approx((2, 1.5))
    assert {row["by"]: row["path"] for row in rows} == {"moe": None, "grouped_mm": None, "jax": "hopper"}
    (table,) = torch_rows.tables(rows).values()
    assert "| hopper | fp8  |" in format_table(table)


@pytest.mark.parametrize("by", cuda_torch.BY[:-1])
def test_rows_of_a_gpu_name_path_and_choice_of_our_experts(by, monkeypatch):
    monkeypatch.setattr(cuda_torch, "experts_path", lambda shape, dtype: f"{shape.D} in {dtype}")
    monkeypatch.setattr(cuda_torch, "auto_choice", lambda shape, dtype: f"fp8 for {shape.F} in {dtype}")
    monkeypatch.setattr(cuda_torch, "_times", lambda *_: (Timing(1e-3, 1e-3, 1e-3), None))
    monkeypatch.setattr(gpu, "torch_with_gpu", lambda: torch)
    peers = ("grouped_mm", *(name for name in torch_layers.BY if name.startswith("hf-")))
    found = {(row["path"], row["auto"]) for row in cuda_torch._measure(SHAPE, by, 1)}
    assert found == {(None, None) if by in peers else ("32 in bfloat16", "fp8 for 48 in bfloat16")}


def test_what_fails_has_a_row_that_says_so(no_gpu_needed, capsys):
    if not torch_layers.installed(["hf-batched_mm"]):
        pytest.skip("NO TRANSFORMERS FOUND: what fails of it is not tried")
    arguments = ["--device", "cuda", "--shape", str(SHAPE), "--by", "moe", "--by", "hf-batched_mm"]
    assert main(["bench", "torch", *arguments]) == 1
    assert "out of luck" in capsys.readouterr().out


class Device:
    """Of torch.cuda: busy for as many calls as it is told to sleep, a million cycles each."""

    def __init__(self):
        self.busy = 0

    def synchronize(self):
        self.busy = 0

    def _sleep(self, cycles):
        self.busy = cycles / 1e6

    def Event(self):
        return types.SimpleNamespace(record=lambda: None, query=lambda: self.busy <= 0)


def test_the_time_of_the_host_is_that_of_calls_which_the_device_outlasts(monkeypatch):
    device, calls = Device(), []
    monkeypatch.setattr(gpu, "torch_with_gpu", lambda: types.SimpleNamespace(cuda=device))

    def call():
        device.busy -= 15
        calls.append(device.busy)

    assert gpu.host_seconds(call, calls=10, repeats=3) > 0
    assert len(calls) == 1 + 10 * (2 + 3)  # to begin with, two repeats in which the device slept too short, and three

    def waits():
        device.busy = 0

    assert gpu.host_seconds(waits, calls=10, repeats=3) is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["torch", "--by", "xla"], "--by: got xla with torch, expected moe, MoE, grouped_mm, hf-"),
        (["torch", "--rows", "8,2"], "--rows: got it with --device cpu, expected --device cuda"),
        (["torch", "--device", "cuda", "--rows", "8,2"], "--rows: got it with torch, expected it with router or plan"),
        (["layer", "--shape", "olmoe"], "--shape: got it with --device cpu, expected --device cuda"),
        (
            ["torch", "--device", "cuda", "--dtype", "float32"],
            "--dtype: got float32 with torch on cuda, expected bfloat16",
        ),
        (["torch", "--tokens", "0"], "argument --tokens: got '0'"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    try:
        status = main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status != 0 and message in capsys.readouterr().err


def test_what_is_not_installed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch_layers.importlib.util, "find_spec", lambda name: None)
    assert torch_bench.implementations(None, ("moe", "hf-eager")) == ["moe"]
    assert "torch: without hf-eager: transformers is not installed" in capsys.readouterr().err
    with pytest.raises(BenchError, match="--by: got hf-eager, expected transformers"):
        torch_bench.implementations(["hf-eager"], ("moe", "hf-eager"))


@pytest.mark.gpu
def test_the_layer_in_torch_is_measured_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: the benchmark is not tried")
    file = tmp_path / "rows.json"
    shape = LayerShape(2048, 256, 128, 16, 2)
    arguments = ["--device", "cuda", "--quick", "--shape", str(shape), "--json", str(file)]
    result = subprocess.run(
        [sys.executable, "-m", "anabranch", "bench", "torch", *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]["torch"]
    chosen = torch_layers.installed(torch_layers.BY)
    want = [(by, mode) for by in chosen for mode in torch_layers.MODES[by]]
    assert [(row["by"], row["mode"]) for row in rows] == [*want, ("jax", "jit")]
    for row in rows:
        assert row["both ms"] > 0 and row["forward ms"] > 0, row
        waits = row["mode"] in ("graph", "jit") or row["by"] == "hf-eager"
        assert (row["host both us"] is None) == waits, row
        assert row["path"] == (experts_path(shape, "bfloat16") if row["by"] in ("moe", "MoE", "jax") else None)

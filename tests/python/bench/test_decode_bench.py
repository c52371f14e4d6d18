"""What `bench decode` says of the layers that it times. Figures are never tested."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from anabranch.__main__ import main  # noqa: E402
from anabranch.bench import cuda_decode, gpu  # noqa: E402
from anabranch.bench.measure import format_table  # noqa: E402

COMMAND = ["bench", "decode", "--device", "cuda"]
COLUMNS = ["T,D,F,E,K", "layer", "experts", "floor", "x floor", "copy TB/s"]


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """Layers are computed on the CPU and take a millisecond; returns the results of the calls."""
    results = []

    def timed(calls, *, repeats, least_calls):
        assert repeats == 5 and least_calls == len(calls)
        results.append([call() for call in calls])
        return gpu.Timing(1e-3, 1e-3, 1e-3)

    monkeypatch.setattr(cuda_decode, "_DEVICE", "cpu")
    monkeypatch.setattr(gpu, "torch_with_gpu", lambda: torch)
    monkeypatch.setattr(gpu, "copy_rate", lambda: 1e12)
    monkeypatch.setattr(gpu, "seconds_of_each", timed)
    return results


def test_the_floor_is_that_of_the_experts_that_have_tokens(no_gpu_needed, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_decode, "_copies", lambda cases: 2)
    file = tmp_path / "rows.json"
    assert main([*COMMAND, "--quick", "--shape", "9,8,16,32,2", "--tokens", "3", "--json", str(file)]) == 0
    (row,), (calls,) = json.loads(file.read_text())["rows"]["decode"], no_gpu_needed
    used = [set(of.experts.flatten().tolist()) for of in calls]
    assert len({tuple(sorted(experts)) for experts in used}) > 1  # every call has tokens of its own
    experts = sum(map(len, used)) / len(used)
    assert row["experts"] == pytest.approx(experts)
    assert row["floor"] == pytest.approx(experts * 3 * 8 * 16 * 2 / 1e12 * 1e6)
    assert row["layer"] == pytest.approx(1000) and row["x floor"] == pytest.approx(1000 / row["floor"])
    (table,) = cuda_decode.tables([row]).values()
    assert list(table[0]) == COLUMNS and "3,8,16,32,2" in format_table(table)


def test_every_layer_has_every_number_of_tokens(no_gpu_needed, monkeypatch):
    monkeypatch.setattr(gpu, "REPEATS", 5)
    monkeypatch.setattr(cuda_decode, "_copies", lambda cases: 1)
    shapes = [cuda_decode.LayerShape(9, 8, 16, 4, 2), cuda_decode.LayerShape(9, 16, 8, 4, 1)]
    rows = cuda_decode.rows(dtypes=["bfloat16"], quick=False, shape=shapes, tokens=[1, 5])
    want = ["1,8,16,4,2", "5,8,16,4,2", "1,16,8,4,1", "5,16,8,4,1"]
    assert [row["T,D,F,E,K"] for row in rows] == want
    assert {of.output.shape for of in no_gpu_needed[1]} == {(5, 8)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["decode"], "operation: got decode on cpu, expected one of router"),
        (["decode", "--device", "cuda", "--by", "moe"], "--by: got it with decode, expected it with router"),
        (["decode", "--device", "cuda", "--dtype", "float32"], "--dtype: got float32 with decode, expected bfloat16"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    try:
        status = main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status != 0 and message in capsys.readouterr().err


@pytest.mark.gpu
def test_few_tokens_are_measured_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: the benchmark is not tried")
    file = tmp_path / "rows.json"
    arguments = ["--quick", "--shape", "1,256,128,16,2", "--tokens", "4", "--json", str(file)]
    command = [sys.executable, "-m", "anabranch", *COMMAND, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(file.read_text())["rows"]["decode"]
    assert row["layer"] > 0 and 2 <= row["experts"] <= 8 and row["x floor"] > 0

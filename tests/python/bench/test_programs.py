"""Every benchmark runs at a tiny shape on the CPU, and reports wrong arguments. The measured times are not tested."""

import json
import re
import subprocess
import sys

import jax
import pytest

torch = pytest.importorskip("torch")

from anabranch.bench import BenchError  # noqa: E402
from benchmarks import __main__ as command  # noqa: E402
from benchmarks import figures, layer, layer_torch, mesh, mesh_torch, processes, timing, torch_modes  # noqa: E402
from benchmarks.__main__ import OPERATIONS, main  # noqa: E402
from benchmarks.figures import Measured, Memory  # noqa: E402
from benchmarks.peers import transformers  # noqa: E402
from benchmarks.shapes import LayerShape  # noqa: E402
from benchmarks.timing import Timing  # noqa: E402

TINY = "16,128,128,4,2"
FLOAT32 = ["--dtype", "float32"]
#: For each operation: the options of a tiny run, and the columns that must have values.
RUNS = {
    "router": (["--tokens", "32", *FLOAT32], ["dense", "jax dense", "torch d", "xla d", "d with loss", "dense floor"]),
    "plan": (["--tokens", "32", "--rows", "8,2"], ["plan", "jax plan", "torch", "xla"]),
    "dispatch": (FLOAT32, ["c", "GB/s", "share"]),
    "experts": (
        ["--shape", TINY, "--dtype", "bfloat16", "--precision", "fp8", "--by", "c", "--by", "jax"],
        ["forward ms", "both share"],
    ),
    "layer": (["--shape", TINY, *FLOAT32, "--by", "c", "--by", "jax"], ["both ms", "both GFLOP/s"]),
    "torch": (
        ["--shape", TINY, *FLOAT32, "--by", "moe", "--by", "grouped_mm"],
        ["both ms", "x both", "host both us"],
    ),
    "decode": (["--shape", TINY, "--tokens", "3", *FLOAT32], ["layer", "x floor", "experts"]),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Reduces sizes that no option sets, and shortens the measurements."""
    interleaved = timing.interleaved
    monkeypatch.setattr(
        timing, "interleaved", lambda functions, seconds, repeats=1: interleaved(functions, seconds=0, repeats=1)
    )
    monkeypatch.setattr(timing, "_cpu_copy_rate", lambda: 1e9)
    monkeypatch.setattr("benchmarks.product._cpu_rate", lambda dtype: 1e9)
    monkeypatch.setattr("benchmarks.dispatch.SHAPES", {"cpu": [(16, 4, 2, 8)]})


def report(capsys, operation, *arguments):
    assert main([operation, *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["rows"][operation]


@pytest.mark.parametrize("operation", RUNS)
def test_a_program_runs_on_the_cpu(operation, tmp_path, capsys):
    arguments, columns = RUNS[operation]
    file = tmp_path / "rows.json"
    assert main([operation, "--quick", *arguments, "--json", str(file)]) == 0
    assert re.search(r"^\| .* \|$", capsys.readouterr().out, re.MULTILINE)
    written = json.loads(file.read_text())
    assert written["machine"]["cpu backend"] == "available"
    for row in written["rows"][operation]:
        assert all(row[name] > 0 for name in columns), row


def test_every_implementation_on_the_cpu_is_a_column_or_a_row(capsys):
    by = [*layer.BY, *layer.VARIANTS]
    rows = report(capsys, "layer", "--quick", "--shape", TINY, *FLOAT32, *flags("--by", by), "--routing", "zipf")
    assert [row["by"] for row in rows] == by and all(row["both ms"] > 0 for row in rows)
    rows = report(capsys, "experts", "--quick", "--shape", TINY, *FLOAT32)
    assert [row["by"] for row in rows] == ["c", "jax", "ragged-dot", "xla", "torch"]


def flags(name, values):
    return [argument for value in values for argument in (name, value)]


def test_compiled_layers_are_timed_unless_they_would_copy_too_much(monkeypatch):
    monkeypatch.setattr(torch_modes, "_MOST_BATCHED_BYTES", 0)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    chosen = ["MoE", *["hf-batched_mm"] * transformers.installed()]
    rows = list(
        torch_modes._rows_on_cpu([LayerShape(8, 16, 16, 4, 2)], ["float32"], chosen, ("eager", "compiled"), 0.0)
    )
    assert [row["mode"] for row in rows[:2]] == ["eager", "compiled"] and rows[1]["both ms"] > 0
    assert compiled and all(options == {"fullgraph": True} for options in compiled)
    assert all(row["note"].startswith("not run: it would copy") for row in rows[2:])


def test_torchs_ranks_on_the_cpu():
    shape = LayerShape(8, 16, 16, 4, 2)
    (eager,) = mesh_torch.measure_layer(shape, "float32", "cpu", "all_to_all", 0.5, 2).values()
    assert eager[0].seconds > 0 and eager[2] > 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_help_lists_only_the_operations_own_options(operation, capsys):
    with pytest.raises(SystemExit) as stop:
        main([operation, "--help"])
    assert stop.value.code == 0
    said = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE))
    own = {
        "router": {"--rows", "--tokens", "--by"},
        "plan": {"--rows", "--tokens", "--by"},
        "dispatch": {"--by"},
        "experts": {"--shape", "--tokens", "--by", "--precision", "--activation"},
        "layer": {"--shape", "--tokens", "--routing", "--by", "--trace"},
        "torch": {"--shape", "--tokens", "--by"},
        "decode": {"--shape", "--tokens"},
        "mesh": {"--shape", "--tokens", "--by", "--transport"},
    }[operation]
    assert said - {"--device", "--dtype", "--quick", "--json", "--busy"} == own


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["router", "--rows", "8"], "argument --rows: got '8', expected E,K such as 128,8"),
        (["router", "--tokens", "0"], "argument --tokens: got '0', expected an integer of at least 1"),
        (["router", "--rows", "7,3"], "--rows: got 7,3, expected one of 8,2 64,8"),
        (["plan", "--rows", "2,3"], "--rows: got 2,3, expected E,K with K <= E"),
        (["layer", "--rows", "8,2"], "unrecognized arguments: --rows 8,2"),
        (["layer", "--shape", "8,8"], "argument --shape: got '8,8', expected T,D,F,E,K such as"),
        (["layer", "--device", "cuda", "--dtype", "float32"], "--dtype: got float32 with layer on cuda, expected bfloat16"),
        (["layer", "--by", "sonicmoe"], "--by: got sonicmoe on cpu, expected it on cuda"),
        (["layer", "--by", "xla", "--trace", "x"], "--trace: got it with --by xla on cpu, expected jax on cuda"),
        (["decode", "--shape", "mixtral", "--tokens", "1073741824"], "got 1073741824 with K = 2, expected T * K < 2^31"),
        (["experts", "--precision", "fp8", "--shape", "8,16,16,4,2"], "expected D and F to be multiples of 128"),
        (["torch", "--by", "fp8"], "--by: got fp8 with torch on cpu, expected moe, MoE"),
        (["mesh", "--by", "moe", "--transport", "ragged"], "--transport: got ragged with moe, expected ring or all_to_all"),
        (["--device", "cuda", "layer"], "OPERATION: got layer after options, expected it before its options"),
        (["router", "--json", "/nowhere/rows.json"], "--json: got /nowhere/rows.json, expected a file that can be"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, message, capsys):
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err


def test_without_an_operation_each_runs_in_a_process(monkeypatch, capsys):
    started, busy = [], []

    class Process(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            busy.append(self)

    def rows(operation, flags):
        started.append((operation, flags))
        assert [process.poll() for process in busy] == [None, None]
        return []

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(command, "rows_of_a_process", rows)
    assert main(["--quick", *FLOAT32, "--busy", "2"]) == 0
    common = ["--device", "cpu", "--quick"]
    assert started == [
        (name, common + (FLOAT32 if name != "plan" else []))
        for name in ("router", "plan", "dispatch", "experts", "layer")
    ]
    assert None not in [process.returncode for process in busy]


def test_a_missing_gpu_is_an_error_of_the_process(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BenchError, match=r"benchmarks of CUDA kernels need .*\(exit status 1\)$"):
        processes.rows_of_a_process("layer", ["--device", "cuda", "--by", "xla", "--quick"], quiet=True)
    (row,) = processes.rows_or_error("decode", ["--device", "cuda"], {"by": "ours"})
    assert row["by"] == "ours" and "need a GPU, and torch finds none" in row["error"]


@pytest.mark.parametrize(
    "operation, cases", [("layer", ["jax", "torch"]), ("torch", ["moe", "jax"]), ("mesh", ["jax", "moe"])]
)
def test_on_a_gpu_every_case_runs_in_a_process_and_an_error_is_a_row(operation, cases, monkeypatch, capsys):
    started = []

    def process(name, flags, *, quiet):
        started.append((name, flags[flags.index("--by") + 1]))
        if len(started) == 2:
            raise BenchError("out of luck")
        if operation == "torch":
            times = {one: Timing(1e-3, 1e-3, 1e-3) for one in torch_modes.PASSES}
            return [torch_modes.row(LayerShape(8, 8, 8, 4, 2), "bfloat16", "moe", "eager", "cuda", times)]
        if operation == "mesh":
            return [{"by": "jax", "collective": None}]
        return [figures.row(LayerShape(8, 8, 8, 4, 2), "uniform", "bfloat16", "jax", "cuda", Measured())]

    monkeypatch.setattr(processes, "rows_of_a_process", process)
    monkeypatch.setattr(layer, "_require_gpu", lambda: None)
    monkeypatch.setattr(timing, "torch_on", lambda device: torch)
    transport = ["--transport", "ring"] * (operation == "mesh")
    assert main([operation, "--device", "cuda", "--shape", "8,8,8,4,2", *flags("--by", cases), *transport]) == 1
    assert started == [("layer" if operation == "torch" and by == "jax" else operation, by) for by in cases]
    assert "out of luck" in capsys.readouterr().out


def test_a_bound_that_fails_does_not_hide_the_other(monkeypatch):
    def measured(case, capacity, repeats):
        if capacity is None:
            raise RuntimeError("\n\n-- Process 1 --\nTraceback (most recent call last):\n  here\nMemoryError: full\n")
        return {"jit": (Timing(1e-3, 1e-3, 1e-3), Timing(3e-3, 3e-3, 3e-3), 7)}

    monkeypatch.setattr(mesh, "_layer", measured)
    monkeypatch.setattr(mesh.timing, "jax_on", lambda device: type("jax", (), {"device_count": lambda: 2}))
    failed, bounded = mesh._measure(mesh.Case(LayerShape(8, 8, 8, 4, 2), "jax", "ring", "cpu"), 1)
    assert failed["error"] == "jax: RuntimeError: MemoryError: full" and failed["capacity"] is None
    assert bounded["capacity"] == 1.25 and bounded["backward ms"] == pytest.approx(2) and bounded["dropped"] == 7


def test_figures_of_a_layer_become_a_row_and_tables():
    shape = LayerShape(T=1 << 15, D=1 << 12, F=1 << 10, E=128, K=8)
    measured = Measured(
        forward=Timing(2e-3, 1.9e-3, 2.2e-3),
        both=Timing(5e-3, 4.5e-3, 6e-3, host_bound=True),
        product=(600e12, 800e12),
        memory=Memory(arguments=3 << 30, outputs=2 << 30, aliased=1 << 30, temporaries=4 << 30),
        peak=9 << 30,
        path="hopper",
    )
    row = figures.row(shape, "zipf", "bfloat16", "jax", "cuda", measured)
    flops = 6 * shape.T * shape.K * shape.D * shape.F
    assert (row["forward ms"], row["backward ms"], row["both ms"]) == pytest.approx((2, 3, 5))
    rates = row["forward TFLOP/s"], row["backward TFLOP/s"], row["both TFLOP/s"]
    assert rates == pytest.approx((flops / 2e-3 / 1e12, 2 * flops / 3e-3 / 1e12, 3 * flops / 5e-3 / 1e12))
    assert row["forward share"] == pytest.approx(rates[0] / 700) and row["product TFLOP/s"] == pytest.approx(700)
    assert row["spread"]["both ms"] == pytest.approx([4.5, 6]) and row["host bound"] == ["both"]
    assert (row["total GiB"], row["peak GiB"], row["path"]) == (8, 9, "hopper")
    nothing = figures.row(shape, "zipf", "bfloat16", "xla", "cuda", Measured(note="out of memory"))
    speed, memory = layer.tables([row, nothing]).values()
    assert (speed[0]["backward ms"], speed[1]["forward ms"], speed[1]["note"]) == ("3*", None, "out of memory")
    assert [one["peak"] for one in memory] == [9]


def has_gpu():
    try:
        return bool(jax.devices("gpu")) and torch.cuda.is_available()
    except RuntimeError:
        return False


@pytest.mark.gpu
def test_the_layer_through_c_is_torchs_on_a_gpu():
    if not has_gpu():
        pytest.skip("NO GPU FOUND: the layer through C is not tested")
    shape = LayerShape(512, 256, 128, 16, 2)
    given = layer_torch.operands(shape, "bfloat16", "zipf", "cuda")
    ours, peers = (layer_torch.calls_of(by, given, shape.K)["both"]() for by in ("c", "torch"))
    for name, mine, theirs in zip(("output", "d_x", "d_gate", "d_w_in", "d_w_out"), ours, peers, strict=True):
        error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 0.02, f"{name}: {error}"


ON_GPU = {
    "router": ["--tokens", "256", "--dtype", "bfloat16"],
    "plan": ["--tokens", "256"],
    "experts": ["--shape", "2048,256,128,16,2"],
    "layer": ["--shape", "2048,256,128,16,2", "--routing", "uniform", "--routing", "zipf"],
    "torch": ["--shape", "2048,256,128,16,2"],
    "decode": ["--shape", "1,256,128,16,2", "--tokens", "4"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ON_GPU)
def test_a_program_runs_on_a_gpu(operation, tmp_path):
    if not has_gpu():
        pytest.skip("NO GPU FOUND: the benchmarks are not tested")
    file = tmp_path / "rows.json"
    arguments = [operation, "--device", "cuda", "--quick", *ON_GPU[operation], "--json", str(file)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=processes.ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"][operation]
    assert rows and (operation != "layer" or all(row["note"] == "" for row in rows)), rows
    ours = [row["path"] for row in rows if row.get("by") in ("moe", "MoE", "c", "jax", "ragged-dot")]
    assert all(path in ("hopper", "portable") for path in ours), rows

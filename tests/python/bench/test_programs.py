"""Every benchmark runs at a tiny shape on the CPU, and says what is wrong with its arguments. No figure is tested."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import pytest

torch = pytest.importorskip("torch")

from anabranch import _library, _versions  # noqa: E402
from anabranch.bench import BenchError  # noqa: E402
from benchmarks import __main__ as command  # noqa: E402
from benchmarks import (  # noqa: E402
    beside,
    c_call,
    decode,
    layer,
    layer_torch,
    mesh,
    mesh_torch,
    processes,
    timing,
    train_jax,
    train_transformers,
)
from benchmarks.__main__ import OPERATIONS, main  # noqa: E402
from benchmarks.processes import Case  # noqa: E402
from benchmarks.shapes import LayerShape  # noqa: E402
from benchmarks.timing import Timing  # noqa: E402

TINY = "16,128,128,4,2"
FLOAT32 = ["--dtype", "float32"]
#: The options of a tiny run, and columns whose figures it must have.
RUNS = {
    "router": (
        ["--tokens", "32", *FLOAT32],
        ["dense", "jax dense", "plain", "torch d", "xla", "d with loss", "dense floor"],
    ),
    "plan": (["--tokens", "32", "--rows", "8,2"], ["plan", "torch", "xla"]),
    "dispatch": (FLOAT32, ["c", "GB/s", "share"]),
    "experts": (
        ["--shape", TINY, "--dtype", "bfloat16", "--precision", "fp8", "--by", "c"],
        ["forward ms", "both share"],
    ),
    "layer": (["--shape", TINY, *FLOAT32, "--by", "c", "--by", "jax"], ["both ms", "both GFLOP/s"]),
    "host": (["--shape", TINY, *FLOAT32], ["forward", "no_grad", "both", "median both, one thread"]),
    "lora": (["--shape", TINY, *FLOAT32, "--rank", "2"], ["forward ms", "both ms", "x frozen"]),
    "train_jax": (
        ["--shape", TINY, *FLOAT32, "--layers", "1", "--seq", "8", "--by", "anabranch"],
        ["step ms", "tokens/s", "planned GiB", "bits"],
    ),
    "decode": (["--shape", TINY, "--tokens", "3", "--rank", "2", *FLOAT32], ["layer", "x floor", "experts", "r = 2"]),
    "generate": (
        ["--by", "hf", "--by", "ours", "--cache", "static", *FLOAT32],
        ["tokens/s", "prompt ms", "weights GiB"],
    ),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Sizes that no option gives, and short repeats."""
    interleaved = timing.interleaved
    monkeypatch.setattr(
        timing, "interleaved", lambda functions, seconds, repeats=1: interleaved(functions, seconds=0, repeats=1)
    )
    monkeypatch.setattr("benchmarks.ceilings._cpu_copy_rate", lambda: 1e9)
    monkeypatch.setattr("benchmarks.ceilings._cpu_rate", lambda dtype: 1e9)
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


def test_packed_models_generate_the_same_tokens_however_they_are_made():
    """A release of Transformers that packed_config does not support packs in the model."""
    generate = pytest.importorskip("benchmarks.generate")
    pytest.importorskip("transformers", minversion=".".join(map(str, _versions.OLDEST_PACKED)))
    plain, other = (generate.plain_model(generate._TINY, "bfloat16", "cpu") for _ in range(2))
    size, count = generate._weight_bytes(plain), (2, 4, 3)
    loaded, packed = generate.packed_from_checkpoint(plain), generate.packed_in_place(other)
    tokens = [generate.generated(model, *count) for model in (loaded, packed)]
    assert tokens[0].shape == (2, 7) and torch.equal(*tokens)
    assert generate._weight_bytes(loaded) == generate._weight_bytes(packed) < 0.6 * size


def test_a_profile_has_the_phases_of_both_front_ends_and_a_file(tmp_path, capsys):
    options = ["--shape", TINY, *FLOAT32, *flags("--by", ["torch", "jax"]), "--out", str(tmp_path)]
    rows = report(capsys, "profile", "--quick", *options)
    for by, time in (("torch", "host"), ("jax", "device")):
        found = {row["phase"]: row for row in rows if row["by"] == by}
        assert {"gate", "route", "plan", "up", "down", "hidden_gradient", "weight_gradients", "d_x"} <= set(found)
        assert all(row[time] > 0 and pathlib.Path(row["timeline"]).stat().st_size > 0 for row in found.values())
        assert sum(row["share"] for row in found.values()) == pytest.approx(1)


def test_every_implementation_on_the_cpu_is_a_column_or_a_row(capsys):
    by = [*layer.BY, *layer.VARIANTS]
    rows = report(capsys, "layer", "--quick", "--shape", TINY, *FLOAT32, *flags("--by", by), "--routing", "zipf")
    assert [row["by"] for row in rows] == by and all(row["both ms"] > 0 for row in rows)
    rows = report(capsys, "experts", "--quick", "--shape", TINY, *FLOAT32)
    assert [row["by"] for row in rows] == ["c", "torch"]


def test_a_step_with_tokamax_and_without_it(capsys, monkeypatch):
    arguments = ["train_jax", "--quick", "--shape", TINY, *FLOAT32, "--layers", "1", "--seq", "8", "--by", "tokamax"]
    monkeypatch.setattr(train_jax, "_missing", lambda by: f"{by}: tokamax is not installed: pip install tokamax")
    assert main(arguments) == 1
    assert "bench: tokamax: tokamax is not installed: pip install tokamax" in capsys.readouterr().err
    monkeypatch.setattr(train_jax, "_missing", lambda by: "")
    calls = []

    def ragged_dot(lhs, rhs, group_sizes):
        calls.append(rhs.shape)
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(ragged_dot=ragged_dot))
    (row,) = report(capsys, *arguments)
    assert row["bits"] > 0 and calls[:3] == [(4, 128, 128)] * 3


def flags(name, values):
    return [argument for value in values for argument in (name, value)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["router", "--rows", "64,6", "--tokens", "32", *FLOAT32],
        ["dispatch", *FLOAT32],
        ["experts", "--shape", TINY, *FLOAT32],
        ["layer", "--shape", TINY, *FLOAT32],
    ],
    ids=lambda arguments: arguments[0],
)
def test_another_build_is_timed_beside_this_one(arguments, tmp_path, capsys, monkeypatch):
    other = shutil.copy(_library.load()._name, tmp_path / "other.so")
    rows = report(capsys, *arguments, "--quick", "--beside", str(other))
    assert all(row["this"] > 0 and row[f"x {other}"] > 0 and row["bits differ"] == "" for row in rows), rows


def test_a_build_that_does_not_support_a_case_is_an_error_of_its_row(tmp_path):
    def make(operands):
        if c_call._library_of_calls:
            raise RuntimeError("qb_histogram: unknown")
        return {}

    other = str(shutil.copy(_library.load()._name, tmp_path / "other.so"))
    assert list(beside.rows([({"T": 1}, [0], make)], [other], "cpu", True)) == [
        {"T": 1, "error": f"{other}: qb_histogram: unknown"}
    ]


def test_results_are_compared_bit_by_bit():
    zero, nan = torch.zeros(2), torch.full((), float("nan"))
    assert beside._same_bits({"a": nan, "b": zero}, {"a": nan.clone(), "b": zero.clone()})
    assert not beside._same_bits((nan, zero), (nan, -zero))


def test_torchs_ranks_on_the_cpu():
    shape = LayerShape(8, 16, 16, 4, 2)
    (eager,) = mesh_torch.measure_layer(shape, "float32", "cpu", "zipf", "all_to_all", 0.5, 2).values()
    assert eager[0].seconds > 0 and eager[2] > 0


def test_training_steps_have_the_losses_of_their_peers(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        shape = LayerShape(16, 32, 16, 4, 2)
        found = {
            by: train_transformers._rank("cpu", shape, "float32", by, "ring", 1)
            for by in ("parallelize", "fsdp-grouped_mm")
        }
    finally:
        dist.destroy_process_group()
    (losses, others) = (result["losses"] for result in found.values())
    assert losses == pytest.approx(others, rel=1e-5) and losses[-1] < losses[0]
    monkeypatch.setattr(mesh_torch, "in_ranks", lambda *_: {"seconds": [2.0, 1.0, 4.0], "losses": losses, "peak": 0})
    (row,) = train_transformers._measure(
        Case("train_transformers", "cpu", shape, "float32", "parallelize", transport="ring"), 3
    )
    assert row["tokens/s"] == pytest.approx(16 * 2 / 2.0) and row["last loss"] == losses[-1]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_help_has_the_operations_own_options_alone(operation, capsys):
    with pytest.raises(SystemExit) as stop:
        main([operation, "--help"])
    assert stop.value.code == 0
    said = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE))
    own = {
        "router": {"--rows", "--tokens", "--by", "--beside"},
        "plan": {"--rows", "--tokens", "--by", "--beside"},
        "dispatch": {"--by", "--beside"},
        "experts": {"--shape", "--tokens", "--by", "--precision", "--activation", "--beside"},
        "layer": {"--shape", "--tokens", "--routing", "--by", "--beside"},
        "torch": {"--shape", "--tokens", "--by"},
        "decode": {"--shape", "--tokens", "--rank", "--weights", "--packed"},
        "host": {"--shape", "--tokens"},
        "lora": {"--shape", "--tokens", "--rank", "--shared"},
        "train_jax": {"--shape", "--tokens", "--by", "--layers", "--seq", "--remat", "--mesh"},
        "mesh": {"--shape", "--tokens", "--routing", "--by", "--transport"},
        "train_transformers": {"--shape", "--tokens", "--by", "--transport"},
        "profile": {"--shape", "--tokens", "--by", "--out"},
        "generate": {"--by", "--batch", "--prompt", "--cache", "--new"},
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
        (["plan", "--beside", "/nowhere.so"], "--beside: got /nowhere.so, expected a build of the library: "),
        (["decode", "--shape", "mixtral", "--tokens", "1073741824"], "got 1073741824 with K = 2, expected T * K < 2^31"),
        (["experts", "--precision", "fp8", "--shape", "8,16,16,4,2"], "expected D and F to be multiples of 128"),
        (["torch", "--device", "cpu"], "argument --device: invalid choice: 'cpu' (choose from "),
        (["mesh", "--by", "moe", "--transport", "ragged"], "--transport: got ragged with moe, expected ring or all_to_all"),
        (["generate", "--new", "1"], "--new: got 1, expected at least 2"),
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


def test_without_an_operation_each_has_a_process(monkeypatch, capsys):
    started, busy = [], []

    class Process(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            busy.append(self)

    def rows(arguments):
        started.append(arguments)
        assert [process.poll() for process in busy] == [None, None]
        return []

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(command, "rows_of_a_process", rows)
    assert main(["--quick", *FLOAT32, "--busy", "2"]) == 0
    assert started == [
        [name, "--device", "cpu", "--quick"] + (FLOAT32 if name != "plan" else [])
        for name in ("router", "plan", "dispatch", "experts", "layer")
    ]
    assert None not in [process.returncode for process in busy]


def test_each_value_of_packed_has_a_process(monkeypatch, capsys):
    started = []

    def rows(arguments, variables):
        started.append((arguments, variables))
        return [{"layer": 1.0}]

    monkeypatch.setattr(decode, "rows_of_a_process", rows)
    own = ["--device", "cpu", "--quick", "--shape", TINY, "--weights", "mxfp4", "--rank", "2", *FLOAT32]
    assert main(["decode", *own, "--packed", "never", "--packed", "by-rows", "--json", "-"]) == 0
    assert [(set(arguments), variables) for arguments, variables in started] == [
        ({"decode", *own}, {"ANABRANCH_CUDA_PACKED": value}) for value in ("never", "")
    ]
    found = json.loads(capsys.readouterr().out)["rows"]["decode"]
    assert [row["packed"] for row in found] == ["never", "by-rows"]


def test_a_missing_gpu_is_an_error_of_the_process(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BenchError, match=r"benchmarks of CUDA kernels need .*\(exit status 1\)$"):
        processes.rows_of_a_process(["layer", "--device", "cuda", "--by", "xla", "--quick"], quiet=True)


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize(
    "operation, cases", [("layer", ["jax", "torch"]), ("torch", ["moe", "jax"]), ("mesh", ["jax", "moe"])]
)
def test_on_a_gpu_every_case_has_a_process_and_its_error_a_row(operation, cases, failing, monkeypatch, capsys):
    started = []

    def process(arguments, *, quiet):
        started.append((arguments[0], arguments[arguments.index("--by") + 1]))
        if len(started) == failing:
            raise BenchError("out of luck")
        if operation == "mesh":
            return [{"by": "jax", "collective": None}]
        return [layer.row(Case("layer", "cuda", LayerShape(8, 8, 8, 4, 2), "bfloat16", "moe"), {})]

    monkeypatch.setattr(processes, "rows_of_a_process", process)
    monkeypatch.setattr(layer, "_require_gpu", lambda: None)
    monkeypatch.setattr(timing, "torch_on", lambda device: torch)
    transport = ["--transport", "ring"] * (operation == "mesh")
    assert main([operation, "--device", "cuda", "--shape", "8,8,8,4,2", *flags("--by", cases), *transport]) == 1
    assert started == [("layer" if operation == "torch" and by == "jax" else operation, by) for by in cases]
    assert "out of luck" in capsys.readouterr().out


def test_a_bound_that_fails_does_not_hide_the_other(monkeypatch):
    def measured(case, capacity, repeats):
        if case.transport is None:  # one device
            return {"jit": (Timing(5e-4, 5e-4, 5e-4), Timing(2e-3, 2e-3, 2e-3), 0)}
        if capacity is None:
            raise RuntimeError("\n\n-- Process 1 --\nTraceback (most recent call last):\n  here\nMemoryError: full\n")
        return {"jit": (Timing(1e-3, 1e-3, 1e-3), Timing(3e-3, 3e-3, 3e-3), 7)}

    monkeypatch.setattr(mesh, "_layer", measured)
    monkeypatch.setattr(mesh.timing, "jax_on", lambda device: type("jax", (), {"device_count": lambda: 2}))
    failed, bounded = mesh._measure(
        Case("mesh", "cpu", LayerShape(8, 8, 8, 4, 2), "float32", "jax", transport="ring"), 1
    )
    assert failed["error"] == "jax: RuntimeError: MemoryError: full" and failed["capacity"] is None
    assert bounded["capacity"] == 1.25 and bounded["backward ms"] == pytest.approx(2) and bounded["dropped"] == 7
    assert bounded["forward / one"] == pytest.approx(0.5) and bounded["backward / one"] == pytest.approx(0.75)


def test_figures_of_a_layer_become_a_row_and_a_table():
    case = Case("layer", "cuda", LayerShape(1 << 15, 1 << 12, 1 << 10, 128, 8), "bfloat16", "jax", "zipf")
    times = {"forward": Timing(2e-3, 1.9e-3, 2.2e-3), "both": Timing(5e-3, 4.5e-3, 6e-3, host_bound=True)}
    row = layer.row(
        case, times, product=(600e12, 800e12), planned=8 << 30, peak=9 << 30, host={"both": 1e-4}, path="hopper"
    )
    flops = case.shape.forward_flops()
    assert (row["forward ms"], row["backward ms"], row["both ms"]) == pytest.approx((2, 3, 5))
    rates = row["forward TFLOP/s"], row["backward TFLOP/s"], row["both TFLOP/s"]
    assert rates == pytest.approx((flops / 2e-3 / 1e12, 2 * flops / 3e-3 / 1e12, 3 * flops / 5e-3 / 1e12))
    assert row["forward share"] == pytest.approx(rates[0] / 700) and row["product TFLOP/s"] == pytest.approx(700)
    assert row["spread"]["both ms"] == pytest.approx([4.5, 6]) and row["host bound"] == ["both"]
    assert row["spread"]["product TFLOP/s"] == pytest.approx([600, 800])
    assert (row["planned GiB"], row["peak GiB"], row["path"], row["routing"]) == (8, 9, "hopper", "zipf")
    assert (row["host forward us"], row["host both us"]) == (None, pytest.approx(100))
    nothing = layer.row(case, {}, note="out of memory")
    (table,) = layer.tables([row, nothing]).values()
    assert (table[0]["backward ms"], table[1]["forward ms"], table[1]["note"]) == ("3*", None, "out of memory")
    assert [one["peak GiB"] for one in table] == [9, None]


def has_gpu():
    try:
        return bool(jax.devices("gpu")) and torch.cuda.is_available()
    except RuntimeError:
        return False


@pytest.mark.gpu
def test_the_layer_through_c_is_torchs_on_a_gpu():
    if not has_gpu():
        pytest.skip("NO GPU FOUND: the layer through C is not tried")
    shape = LayerShape(512, 256, 128, 16, 2)
    given = layer_torch.operands(shape, "bfloat16", "zipf", "cuda")
    ours, peers = (layer_torch.calls_of(by, given, shape.K)["both"]() for by in ("c", "torch"))
    for name, mine, theirs in zip(("output", "d_x", "d_gate", "d_w_in", "d_w_out"), ours, peers, strict=True):
        error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 0.02, f"{name}: {error}"


ON_GPU = {
    "router": ["--tokens", "256", "--dtype", "bfloat16"],
    "plan": ["--tokens", "256"],
    "beside": ["--tokens", "256", "--rows", "64,6", "--dtype", "bfloat16", "--beside", "LIBRARY"],
    "experts": ["--shape", "2048,256,128,16,2"],
    "layer": ["--shape", "2048,256,128,16,2", "--routing", "uniform", "--routing", "zipf"],
    "torch": ["--shape", "2048,256,128,16,2"],
    "decode": ["--shape", "1,256,128,16,2", "--tokens", "4"],
    "host": [],
    "lora": ["--rank", "16"],
    "profile": ["--shape", "2048,256,128,16,2", "--by", "torch", "--by", "jax"],
    "generate": [],
}


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ON_GPU)
def test_a_program_runs_on_a_gpu(operation, tmp_path):
    if not has_gpu():
        pytest.skip("NO GPU FOUND: the benchmarks are not tried")
    file = tmp_path / "rows.json"
    other = shutil.copy(_library.load_cuda()._name, tmp_path / "other.so")
    options = [str(other) if word == "LIBRARY" else word for word in ON_GPU[operation]]
    operation = "router" if operation == "beside" else operation
    arguments = [operation, "--device", "cuda", "--quick", *options, "--json", str(file)]
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
    assert not any(row.get("bits differ") for row in rows), rows

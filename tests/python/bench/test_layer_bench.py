"""The whole layer's GPU benchmark: peers compute our layer, figures become rows, processes report. No figure is tested."""

import contextlib
import io
import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from anabranch.__main__ import main
from anabranch.bench import (
    cuda_layer,
    cuda_layer_c,
    cuda_layer_graphs,
    cuda_layer_jax,
    cuda_layer_sonicmoe,
    cuda_layer_torch,
    gpu,
    layer_in_jax,
    layer_in_torch,
    layer_result,
)
from anabranch.bench.errors import BenchError
from anabranch.bench.experts_path import experts_path
from anabranch.bench.gpu import Timing
from anabranch.bench.layer_result import Measured, Memory
from anabranch.bench.layer_shape import LayerShape
from anabranch.bench.measure import format_table
from anabranch.bench.processes import rows_of_a_process
from oracle import assert_close, assert_close_per_expert

SHAPE = LayerShape(T=70, D=32, F=48, E=9, K=3)
GRADIENTS = ("d_x", "d_gate", "d_w_in", "d_w_out")
ROUTINGS = pytest.mark.parametrize("routing", cuda_layer.ROUTINGS)


def assert_same_layer(got, want):
    assert_close(got[0], want[0], 2e-6, "output")
    for name, mine, theirs in zip(GRADIENTS, want[1:], got[1:], strict=True):
        compare = assert_close_per_expert if name.startswith("d_w_") else assert_close
        compare(theirs, mine, 1e-5, name)


@pytest.fixture(params=cuda_layer.ROUTINGS)
def layer(request):
    """Operands and what our layer makes of them: the output and four gradients."""
    given = layer_in_jax.operands(SHAPE, "float32", request.param)
    return given, layer_in_jax.forward_and_backward(layer_in_jax.LAYERS["jax"], SHAPE.K)(*given)


def test_plain_jax_computes_our_layer(layer):
    given, want = layer
    assert_same_layer(layer_in_jax.forward_and_backward(layer_in_jax.LAYERS["xla"], SHAPE.K)(*given), want)
    for by in peers_of_jax():
        assert_close(layer_in_jax.forward(layer_in_jax.LAYERS[by], SHAPE.K)(*given), want[0], 2e-6, "output")


def peers_of_jax():
    return [by for by in layer_in_jax.LAYERS if by not in cuda_layer.VARIANTS]


@pytest.mark.parametrize("by", ["jax-transposed", "jax-interleaved"])
def test_weights_in_other_layouts_make_the_same_layer(layer, by):
    given, want = layer
    variant = layer_in_jax.LAYERS[by]
    drawn = layer_in_jax.operands(SHAPE, "float32", "uniform", layouts=variant.layouts)
    arrays = {name: getattr(given, name).transpose(variant.layouts.from_ours(name)) for name in ("w_in", "w_out")}
    assert {name: getattr(drawn, name).shape for name in arrays} == {name: a.shape for name, a in arrays.items()}
    output, d_x, d_gate, *d_weights = layer_in_jax.forward_and_backward(variant, SHAPE.K)(*given._replace(**arrays))
    back = [a.transpose(variant.layouts.order(name)) for name, a in zip(arrays, d_weights, strict=True)]
    assert_same_layer((output, d_x, d_gate, *back), want)


@pytest.mark.parametrize("by", ["jax-biases", "jax-swiglu-oai"])
def test_layers_with_biases_have_their_gradients(by):
    variant = layer_in_jax.LAYERS[by]
    given = layer_in_jax.operands(SHAPE, "float32", "uniform", biases=True)
    results = layer_in_jax.forward_and_backward(variant, SHAPE.K)(*given)
    assert [r.shape for r in results[5:]] == [given.b_in.shape, given.b_out.shape]
    assert all(np.any(np.asarray(result)) for result in results)


def test_torch_computes_our_layer(layer):
    torch = pytest.importorskip("torch")
    given, want = layer

    def tensor(array):
        return torch.from_numpy(np.array(array))

    operands = cuda_layer_graphs.Operands(
        leaves=tuple(tensor(array).requires_grad_() for array in given[:4]),
        d_out=tensor(given.d_out),
        experts=None if given.experts is None else tensor(given.experts).to(torch.int64),
    )
    calls = cuda_layer_torch.calls(operands, SHAPE.K)
    assert_same_layer([result.detach().numpy() for result in calls["forward and backward"]()], want)
    assert_close(calls["forward"]().numpy(), want[0], 2e-6, "output")
    load = layer_in_jax.largest_load(given, SHAPE.K)
    assert cuda_layer_graphs.largest_load(operands, SHAPE.K) == pytest.approx(load)


def sonicmoe_by_torch(monkeypatch):
    """Stands in for the package: its layer's contract, computed by torch's operations."""
    pytest.importorskip("torch")
    inference = []

    def layer(x, router_w, w1, b1, w2, b2, K, stream_id, is_inference_mode_enabled=False):
        """router_w [E, D]; w1 [2 F, D, E], a column's gate and up next to each other; w2 [D, F, E]; no biases."""
        assert b1 is b2 is None and w1.stride()[1] == w2.stride()[1] == 1
        inference.append(is_inference_mode_enabled)
        logits, (columns, D, E) = x @ router_w.T, w1.shape
        w_in = w1.permute(2, 1, 0).reshape(E, D, columns // 2, 2).transpose(2, 3)
        output = layer_in_torch.grouped_mm_layer(x, router_w.T, w_in.contiguous(), w2.permute(2, 1, 0), topk=K)
        return output, logits, None

    monkeypatch.setitem(sys.modules, "sonicmoe", types.SimpleNamespace(moe_TC_softmax_topk_layer=layer))
    return inference


def test_sonicmoe_is_given_our_layer(monkeypatch):
    inference = sonicmoe_by_torch(monkeypatch)
    given = cuda_layer_graphs.operands(SHAPE, "float32", "uniform", device="cpu")
    calls = cuda_layer_sonicmoe.calls(given, SHAPE.K)
    assert inference == [True, False]
    want = [result.detach().numpy() for result in cuda_layer_torch.calls(given, SHAPE.K)["forward and backward"]()]
    output, d_x, d_router, d_up, d_down = calls["forward and backward"]()
    E, D, F = SHAPE.E, SHAPE.D, SHAPE.F
    d_w_in = d_up.reshape(E, F, 2, D).permute(0, 3, 2, 1)
    got = (output, d_x, d_router.T, d_w_in, d_down.transpose(1, 2))
    assert_same_layer([result.detach().numpy() for result in got], want)
    assert_close(calls["forward"]().numpy(), want[0], 2e-6, "output")
    assert inference == [True, False, False, True]
    zipf = cuda_layer_graphs.operands(SHAPE, "float32", "zipf", device="cpu")
    with pytest.raises(BenchError, match="--routing: got zipf with --by sonicmoe, expected uniform"):
        cuda_layer_sonicmoe.calls(zipf, SHAPE.K)
    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    with pytest.raises(BenchError, match="--by: got sonicmoe, which needs the package sonic-moe"):
        cuda_layer_sonicmoe.calls(given, SHAPE.K)


@ROUTINGS
def test_operands_are_alike_in_both_frameworks(routing, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(cuda_layer_graphs, "DEVICE", "cpu")
    shape = SHAPE._replace(T=2000)
    ours = layer_in_jax.operands(shape, "float32", routing)
    theirs = cuda_layer_graphs.operands(shape, "float32", routing)
    for mine, other in zip(ours[:5], (*theirs.leaves, theirs.d_out), strict=True):
        assert mine.shape == other.shape
        assert np.std(mine) == pytest.approx(np.std(other.detach().numpy()), rel=0.1)
    if routing == "zipf":
        np.testing.assert_array_equal(ours.experts, theirs.experts.numpy())
        assert layer_in_jax.largest_load(ours, shape.K) > 2
    else:
        assert ours.experts is None and theirs.experts is None
        assert layer_in_jax.largest_load(ours, shape.K) < 1.5


def test_every_expert_has_numbers_of_its_own():
    w_in = np.asarray(layer_in_jax.normal(jax.random.key(0), 3.0, (6, 40, 2, 50), "float32"))
    assert len(np.unique(w_in[:, 0, 0, 0])) == 6
    assert w_in.shape == (6, 40, 2, 50) and w_in.std(axis=(1, 2, 3)) == pytest.approx(3, rel=0.1)


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets the measurement through JAX run on the CPU."""
    monkeypatch.setattr(gpu, "jax_with_gpu", lambda: jax)
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "as it is")  # what is set already stays


def measured_on_cpu(by="jax", **options):
    return cuda_layer_jax.measure(by, SHAPE, "float32", "zipf", repeats=2, product_size=64, **options)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("by", ["jax", "ragged-dot"])
def test_a_layer_is_measured_through_jax(by, tmp_path):
    measured = measured_on_cpu(by, trace=str(tmp_path / "trace"))
    for timing in (measured.forward, measured.both):
        assert 0 < timing.low <= timing.median <= timing.high
    assert min(measured.product) > 0 and measured.note == "product: by XLA, not cuBLAS"
    assert measured.memory.arguments >= SHAPE.operand_bytes(4)
    assert measured.memory.outputs >= SHAPE.operand_bytes(4)  # the same arrays, as gradients and output
    assert measured.memory.total > measured.memory.arguments + measured.memory.outputs
    assert measured.peak is None  # the CPU does not say
    assert 1 < measured.largest_load <= SHAPE.E / SHAPE.K
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def out_of_memory():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")


@pytest.mark.usefixtures("on_cpu")
def test_out_of_memory_is_a_note(monkeypatch):
    def forward_alone(*given, topk):
        @jax.custom_vjp
        def identity(y):
            return y

        identity.defvjp(lambda y: (y, None), lambda _, d_y: out_of_memory())
        return identity(layer_in_jax.ours(*given, topk=topk))

    monkeypatch.setitem(layer_in_jax.LAYERS, "xla", layer_in_jax.Layer(forward_alone))
    measured = measured_on_cpu("xla")
    assert measured.both is None and measured.forward is not None
    assert measured.note.startswith("forward and backward: out of memory")
    monkeypatch.setitem(layer_in_jax.LAYERS, "xla", layer_in_jax.Layer(lambda *_, topk: out_of_memory()))
    assert measured_on_cpu("xla") == Measured(note="out of memory")
    monkeypatch.setattr(layer_in_jax, "operands", lambda *_, **__: out_of_memory())
    assert measured_on_cpu("jax") == Measured(note="out of memory")


@pytest.mark.usefixtures("on_cpu")
def test_other_failures_are_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(*_, topk):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such kernel")

    monkeypatch.setitem(layer_in_jax.LAYERS, "xla", layer_in_jax.Layer(broken))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such kernel"):
        measured_on_cpu("xla")


def test_a_layer_is_measured_in_torch(monkeypatch):
    """What is timed is called, on as many sets as there must be; one direction may lack memory."""
    torch = pytest.importorskip("torch")
    seen = []

    def seconds_of_each(calls, **_):
        seen.append((len(calls), isinstance(calls[0](), tuple)))
        if seen[-1][1] and len(seen) > 3:
            raise torch.cuda.OutOfMemoryError
        return Timing(1e-3, 1e-3, 1e-3)

    monkeypatch.setattr(cuda_layer_graphs, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "torch_with_gpu", lambda: torch)
    monkeypatch.setattr(gpu, "seconds_of_each", seconds_of_each)
    monkeypatch.setattr(gpu, "copies_past_cache", lambda *_, **__: 3)
    sizes = {"repeats": 2, "product_size": 64}
    measured = cuda_layer_graphs.measure(SHAPE, "float32", "uniform", **sizes, calls_of=cuda_layer_torch.calls)
    assert seen == [(1, False), (3, False), (3, True), (1, False)]
    assert measured.product == pytest.approx((2 * 64**3 / 1e-3,) * 2)
    assert measured.forward and measured.both and 1 <= measured.largest_load < SHAPE.E and measured.note == ""
    measured = cuda_layer_graphs.measure(SHAPE, "float32", "zipf", **sizes, calls_of=cuda_layer_torch.calls)
    assert measured.forward and measured.both is None and measured.note == "forward and backward: out of memory"


def test_a_large_layer_comes_back_to_nothing_in_the_cache():
    assert gpu.copies_past_cache(LayerShape(1, 1, 1, 1, 1).operand_bytes(2), least=1) == gpu.MOST_SETS
    assert gpu.copies_past_cache(LayerShape(32768, 4096, 1024, 128, 8).operand_bytes(2), least=1) == 1


FIGURES = Measured(
    forward=Timing(2e-3, 1.9e-3, 2.2e-3),
    both=Timing(5e-3, 4.5e-3, 6e-3, host_bound=True),
    product=(600e12, 800e12),
    product_by="cuBLAS",
    largest_load=1.25,
    memory=Memory(arguments=3 << 30, outputs=2 << 30, aliased=1 << 30, temporaries=4 << 30),
    peak=9 << 30,
    path="hopper",
)


def test_figures_become_a_row_and_tables():
    shape = LayerShape(T=1 << 15, D=1 << 12, F=1 << 10, E=128, K=8)
    row = layer_result.row(shape, "zipf", "bfloat16", "jax", FIGURES)
    flops = 6 * shape.T * shape.K * shape.D * shape.F
    assert (row["forward ms"], row["backward ms"], row["both ms"]) == pytest.approx((2, 3, 5))
    rates = row["forward TFLOP/s"], row["backward TFLOP/s"], row["both TFLOP/s"]
    assert rates == pytest.approx((flops / 2e-3 / 1e12, 2 * flops / 3e-3 / 1e12, 3 * flops / 5e-3 / 1e12))
    assert row["product TFLOP/s"] == pytest.approx(700)
    assert row["forward share"] == pytest.approx(rates[0] / 700)
    assert row["spread"]["both ms"] == pytest.approx([4.5, 6]) and row["host bound"] == ["both"]
    assert (row["total GiB"], row["peak GiB"], row["path"]) == (8, 9, "hopper")
    assert row["total / needed"] == pytest.approx(8 * 2**30 / shape.step_bytes(2))
    tables = layer_result.tables([row])
    speed, memory = (table[0] for table in tables.values())
    assert (speed["forward ms"], speed["backward ms"], speed["largest load"]) == (pytest.approx(2), "3*", 1.25)
    assert (memory["temporaries"], memory["aliased"], memory["peak"]) == (4, 1, 9)
    assert "| zipf " in format_table(tables["rates"]) and "| hopper |" in format_table(tables["rates"])
    json.dumps(row)


def test_what_was_not_measured_is_said():
    rows = [layer_result.row(SHAPE, "uniform", "bfloat16", "xla", Measured(note="out of memory"))]
    rows.append(
        layer_result.row(SHAPE, "uniform", "bfloat16", "xla", FIGURES._replace(both=None, memory=None, peak=None))
    )
    assert rows[0]["forward ms"] is None and rows[0]["backward share"] is None and rows[0]["path"] is None
    assert rows[1]["forward ms"] is not None and rows[1]["backward ms"] is None and rows[1]["both TFLOP/s"] is None
    tables = layer_result.tables(rows)
    assert tables["rates"][0]["note"] == "out of memory" and tables["memory of forward and backward, GiB"] == []


@pytest.mark.parametrize("by", [*cuda_layer.BY, *cuda_layer.VARIANTS, cuda_layer.SONICMOE])
def test_what_was_measured_of_ours_names_path_and_choice_of_its_experts(by, monkeypatch):
    monkeypatch.setattr(cuda_layer, "experts_path", lambda shape, dtype: f"{shape.D} in {dtype}")
    monkeypatch.setattr(cuda_layer, "auto_choice", lambda shape, dtype: f"fp8 for {shape.D} in {dtype}")
    of_ours = dict(path="32 in bfloat16", auto="fp8 for 32 in bfloat16")
    ours = dict(path=None, auto=None) if by in ("xla", "torch", "sonicmoe") else of_ours
    for measured, wanted in (
        (FIGURES._replace(path=None), ours),
        (FIGURES._replace(path=None, both=None), ours),
        (Measured(note="out of memory"), {}),
    ):
        monkeypatch.setattr(cuda_layer, "_times", lambda *_, measured=measured: measured)
        assert cuda_layer._measure((SHAPE, "uniform", by), True, None) == measured._replace(**wanted)


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """Cases are measured by `measure`, each called as by a process of its own; returns what was measured."""
    seen = []

    def measure(case, quick, trace):
        seen.append((case, quick, trace))
        if case[2] == "torch":
            raise NotImplementedError("torch 1.0 has no grouped_mm\nmore")
        return FIGURES

    def process(operation, flags, *, quiet):
        assert quiet
        result = main_json(operation, *flags)
        return result["rows"][operation]

    monkeypatch.setattr(cuda_layer, "_require_gpu", lambda: None)
    monkeypatch.setattr(cuda_layer, "_measure", measure)
    monkeypatch.setattr(cuda_layer, "rows_of_a_process", process)
    return seen


def main_json(*arguments):
    """The report of `bench`; its failure as rows_of_a_process reports it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["bench", *arguments, "--json", "-"])
    if status != 0:
        raise BenchError(err.getvalue().strip().splitlines()[-1].removeprefix("bench: "))
    return json.loads(out.getvalue())


def test_every_case_is_measured_by_a_process_of_its_own(no_gpu_needed, tmp_path, capsys):
    file = tmp_path / "rows.json"
    arguments = ["--shape", "olmoe", "--shape", "64,32,48,8,2", "--tokens", "4096", "--routing", "zipf"]
    arguments += ["--routing", "uniform", "--by", "jax", "--by", "torch", "--trace", "folder", "--json", str(file)]
    assert main(["bench", "layer", "--device", "cuda", *arguments]) == 1  # torch failed
    shapes = LayerShape(4096, 2048, 1024, 64, 8), LayerShape(4096, 32, 48, 8, 2)
    want = [(shape, kind, by) for shape in shapes for kind in ("zipf", "uniform") for by in ("jax", "torch")]
    assert no_gpu_needed == [(case, False, "folder" if case[2] == "jax" else None) for case in want]
    rows = json.loads(file.read_text())["rows"]["layer"]
    assert [(row["T,D,F,E,K"], row["routing"], row["by"]) for row in rows] == [(str(s), k, b) for s, k, b in want]
    assert [row.get("error") for row in rows] == [None, "torch: NotImplementedError: torch 1.0 has no grouped_mm"] * 4
    out = capsys.readouterr().out
    assert out.count("torch: NotImplementedError: torch 1.0 has no grouped_mm") == 4


def test_quick_takes_one_shape(no_gpu_needed):
    main_json("layer", "--device", "cuda", "--quick", "--by", "jax", "--tokens", "128", "--tokens", "256")
    assert no_gpu_needed == [((LayerShape(128, 768, 256, 128, 8), "uniform", "jax"), True, None)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["layer", "--shape", "8,8"], "argument --shape: got '8,8', expected T,D,F,E,K such as"),
        (["layer", "--rows", "8,2"], "--rows: got it with layer, expected it with router or plan"),
        (["dispatch", "--tokens", "8"], "--tokens: got it with dispatch, expected it with router or plan or layer"),
        (["--shape", "olmoe"], "operation: got all with --shape, expected one that takes this"),
        (["layer", "--dtype", "float32"], "--dtype: got float32 with layer on cuda, expected bfloat16"),
        (["layer", "--by", "xla", "--trace", "x"], "--trace: got it with --by xla, expected jax among them"),
        (
            ["layer", "--shape", "mixtral", "--tokens", "1073741824"],
            "--tokens: got 1073741824 with K = 2, expected T * K < 2^31",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    try:
        status = main(["bench", "--device", "cuda", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status != 0 and message in capsys.readouterr().err


def has_gpu():
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def test_the_error_of_a_process_is_its_last_word(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU that JAX was told to leave alone is a GPU for the library
    flags = ["--device", "cuda", "--by", "xla", "--quick"]
    with pytest.raises(BenchError, match=r"need a GPU: .*\(exit status 1\)$|need libanabranch_cuda.so"):
        rows_of_a_process("layer", flags, quiet=True)
    assert "bench: benchmarks of CUDA kernels need" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_layer_through_c_is_torchs():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: the layer through C is not tried")
    shape = LayerShape(512, 256, 128, 16, 2)
    given = cuda_layer_graphs.operands(shape, "bfloat16", "zipf")
    both = "forward and backward"
    results = (calls(given, shape.K)[both]() for calls in (cuda_layer_c.calls, cuda_layer_torch.calls))
    names = ("output", "d_x", "d_gate", "d_w_in", "d_w_out")
    for name, ours, peer in zip(names, *results, strict=True):
        error = (ours.float() - peer.float()).norm() / peer.float().norm()
        assert error < 0.02, f"{name}: {error}"


@pytest.mark.gpu
def test_the_layer_is_measured_on_a_gpu(tmp_path):
    if not has_gpu():
        pytest.skip("NO GPU FOUND: the benchmark is not tried")
    torch = pytest.importorskip("torch")
    file = tmp_path / "rows.json"
    shape = LayerShape(2048, 256, 128, 16, 2)
    arguments = ["--device", "cuda", "--quick", "--shape", str(shape), "--json", str(file)]
    arguments += ["--routing", "uniform", "--routing", "zipf"]
    result = subprocess.run(
        [sys.executable, "-m", "anabranch", "bench", "layer", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]["layer"]
    by = [row["by"] for row in rows]
    with_torch = torch.cuda.is_available()
    assert by == ["jax", *["c"] * with_torch, "ragged-dot", "xla", *["torch"] * with_torch] * 2
    for row in rows:
        assert row["note"] == "" and row["forward ms"] > 0 and row["both ms"] > 0, row
        assert row["by"] in ("c", "torch") or row["peak GiB"] > 0
        assert row["path"] == (None if row["by"] in cuda_layer.PEERS else experts_path(shape, "bfloat16"))

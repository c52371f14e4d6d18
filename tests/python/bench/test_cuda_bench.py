"""What the GPU benchmarks compare is the same computation; their programs and tables. Figures are never tested."""

import json
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.__main__ import main
from anabranch.bench import cuda_plan, cuda_router, gpu, in_jax, in_torch
from anabranch.jax import plan
from oracle import assert_close

CASES = pytest.mark.parametrize("case", cuda_router.CASES, ids=lambda case: f"{case.E},{case.K}")
T = 40
#: One of each kind, for what XLA compiles.
KINDS = [case for case in cuda_router.CASES if (case.E, case.K) in ((64, 8), (128, 4), (256, 8), (384, 8))]


def operands(case, seed=0):
    rng = np.random.default_rng(seed)
    shapes = cuda_router.Operands((T, case.E), (case.E,), (T, case.E), (T, case.K))
    arrays = cuda_router.Operands(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))
    return arrays._replace(bias=arrays.bias * np.float32(0.01))


def assert_same_routing(ours, peer, case):
    assert_close(peer[0], ours[0], 2e-6, "probs")
    np.testing.assert_array_equal(peer[1], ours[1], err_msg=f"routing map of {case}")


@pytest.mark.parametrize("case", KINDS, ids=lambda case: f"{case.E},{case.K}")
def test_xla_computes_our_routing(case):
    given = operands(case)
    arrays = given.logits, given.bias
    ours, pull = jax.vjp(lambda z: in_jax.ours_dense(case, z, given.bias)[0], given.logits)
    probs, pull_peer = jax.vjp(lambda z: in_jax.xla_dense(case, z, given.bias)[0], given.logits)
    assert_same_routing(in_jax.ours_dense(case, *arrays), in_jax.xla_dense(case, *arrays), case)
    assert_close(probs, ours, 2e-6, "probs")
    assert_close(pull_peer(given.d_probs)[0], pull(given.d_probs)[0], 1e-5, "d_logits")


@CASES
def test_torch_computes_our_routing(case):
    torch = pytest.importorskip("torch")
    given = operands(case)
    logits, bias, d_probs = (torch.from_numpy(array) for array in given[:3])
    leaf = logits.detach().requires_grad_()
    peer = in_torch.torch_dense(case, leaf, bias)
    (d_logits,) = torch.autograd.grad(peer[0], leaf, d_probs)
    _, pull = jax.vjp(lambda z: in_jax.ours_dense(case, z, given.bias)[0], given.logits)
    ours = in_jax.ours_dense(case, given.logits, given.bias)
    assert_same_routing(ours, (peer[0].detach().numpy(), peer[1].numpy()), case)
    assert_close(d_logits.numpy(), pull(given.d_probs)[0], 1e-5, "d_logits")


@CASES
def test_dense_and_compact_are_one_routing(case):
    given = operands(case)
    probs, _ = in_jax.ours_dense(case, given.logits, given.bias)
    routing = in_jax.ours_compact(case, given.logits, given.bias)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(probs), routing.experts, -1), routing.weights)


def test_the_peers_plans_are_ours():
    E = 20
    experts = np.random.default_rng(0).integers(0, E, (50, 4)).astype(np.int32)
    ours = plan(experts, E)
    want = [ours.tokens_per_expert, ours.offsets, ours.row_of_slot, ours.slot_of_row]
    for got, expected in zip(in_jax.xla_plan(jnp.asarray(experts), E), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    torch = pytest.importorskip("torch")
    for got, expected in zip(in_torch.torch_plan(torch.from_numpy(experts), E), want, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets what needs no kernel of CUDA run on the CPU."""
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    monkeypatch.setattr(gpu, "jax_with_gpu", lambda: jax)
    monkeypatch.setattr(gpu, "struct", lambda *shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=cpu))
    no_wait = types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(gpu, "torch_with_gpu", lambda: no_wait)


@pytest.mark.usefixtures("on_cpu")
def test_the_jitted_programs_make_every_call():
    case, sets = cuda_router.CASES[4], 3
    given = [operands(case, seed) for seed in range(sets)]
    programs = cuda_router.JaxPrograms([case], T, "float32", {case: sets}, gpu.BY)
    times = programs.times(case, given)
    assert set(times) == {"jax dense", "jax compact", "jax d dense", "jax d compact", "xla", "xla d"}
    assert all(0 < time.low <= time.median <= time.high for time in times.values())

    got = programs._programs[case, "xla"]([one[:2] for one in given])
    for one, (probs, routing_map) in zip(given, got, strict=True):
        assert_same_routing(in_jax.ours_dense(case, one.logits, one.bias), (probs, routing_map), case)
    for name in ("jax d dense", "xla d"):
        residuals = programs._programs[case, name, "residuals"]
        got = programs._programs[case, name]([(one.d_probs, *residuals(one[:2])) for one in given])
        for one, d_logits in zip(given, got, strict=True):
            _, pull = jax.vjp(lambda z, bias=one.bias: in_jax.xla_dense(case, z, bias)[0], one.logits)
            assert_close(d_logits, pull(one.d_probs)[0], 1e-5, name)


@pytest.mark.usefixtures("on_cpu")
def test_calls_of_a_program_stay_apart():
    """There is a barrier between them, and none is left out."""
    functions = cuda_plan.jax_functions(16, ["jax"])
    shapes = [(gpu.struct(T, 2, dtype="int32"),)] * 4
    lowered = jax.jit(gpu.chained(functions["jax plan"])).lower(shapes)
    assert lowered.as_text().count("optimization_barrier") == 3
    slots = jnp.zeros((T, 2), jnp.int32)
    assert len(lowered.compile()([(slots,)] * 4)) == 4
    assert lowered.compile().as_text().count('custom_call_target="ab_xla_plan"') == 4


def test_tables_name_what_was_slower():
    times = {name: gpu.Timing(2e-6, 1e-6, 3e-6, name == "jax dense") for name in ("dense", "jax dense", "torch")}
    row = {"T": 1, "E": 8, "K": 2, "score": "softmax", "dtype": "float32", **gpu.columns(times), "dense floor": 1.0}
    forward = cuda_router.tables([row])["forward"][0]
    assert (forward["dense"], forward["jax dense"], forward["x torch"], forward["xla"]) == ("2", "2*", "1", None)
    assert row["spread"]["dense"] == pytest.approx([1.0, 3.0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "cuda", "--rows", "8"], "argument --rows: got '8', expected E,K such as 128,8"),
        (["--device", "cuda", "--tokens", "0"], "argument --tokens: got '0', expected a whole number of at least 1"),
        (["--device", "cuda", "--rows", "7,3"], "rows: got 7,3, expected out of 8,2 64,8"),
        (["plan", "--device", "cuda", "--rows", "2,3"], "rows: got 2,3, expected E,K with K <= E"),
        (["experts", "--device", "cuda"], "operation: got experts on cuda, expected one of router, plan"),
        (["plan"], "operation: got plan on cpu, expected one of router, dispatch, experts, layer"),
        (["--by", "c"], "--by: got it with --device cpu, expected --device cuda"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    try:
        status = main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status != 0 and message in capsys.readouterr().err


def test_a_missing_gpu_is_an_error(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["bench", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == "bench: benchmarks of CUDA kernels need a GPU, and torch finds none\n"


@pytest.mark.gpu
def test_the_cuda_benchmarks_run(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: the benchmarks are not tried")
    file = tmp_path / "rows.json"
    arguments = ["--device", "cuda", "--quick", "--tokens", "256", "--dtype", "bfloat16", "--json", str(file)]
    result = subprocess.run(
        [sys.executable, "-m", "anabranch", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"^\| T +\| E +\| K +\|", result.stdout, re.MULTILINE)
    rows = json.loads(file.read_text())["rows"]
    for operation, columns in (("router", ("dense", "jax dense", "torch", "xla", "xla d")), ("plan", ("plan", "xla"))):
        for row in rows[operation]:
            assert all(row[name] > 0 and len(row["spread"][name]) == 2 for name in columns)

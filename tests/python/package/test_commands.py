"""The commands, the library's search path, and the names of the handlers."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import anabranch
from anabranch import _library, bench, info
from anabranch.__main__ import main
from anabranch.jax import custom_calls
from anabranch.selftest import compare


def _run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "anabranch", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def facts():
    """What the command prints with its self-test."""
    result = _run("info", "--json", "--selftest")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_info_names_what_it_found(facts):
    assert facts["cpu backend"] == "available"
    assert facts["library isa"] in ("baseline", "avx2", "avx512")
    assert int(facts["library threads"]) >= 1
    assert facts["cuda backend"] == "available" or facts["cuda backend"].startswith(("missing: ", "unusable: "))
    assert re.fullmatch(r"\d+\.\d+\.\d+|none", facts["library onednn"])
    assert "cpu:0" in facts["jax devices"]
    assert facts["torch"] == facts["torch"].strip() and facts["torch devices"].startswith("cpu")
    assert re.fullmatch(r"CUDA [\d.]+|the CPU alone", facts["torch built for"])


def test_info_explains_missing_torch(monkeypatch):
    monkeypatch.setattr(info._versions, "installed", {"torch": "2.8.1+cpu"}.get)
    facts = info.collect()
    assert facts["torch devices"] == ("none: torch 2.8.1+cpu is too old for anabranch.torch, which needs 2.9 or newer")
    monkeypatch.setattr(info._versions, "installed", lambda package: None)
    assert info.collect()["torch devices"] == "none: torch is not installed"
    assert "torch built for" not in info.collect()


def test_neither_framework_is_imported_with_the_package():
    program = "import sys, anabranch; print(sorted({'jax', 'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "[]\n", result.stderr


def test_info_warns_of_versions_that_were_never_tested(monkeypatch):
    monkeypatch.setattr(info._versions, "installed", {"python": "3.11.7", "jax": "0.9.2", "numpy": "3.0.0rc1"}.get)
    assert re.fullmatch(
        r"jax 0\.9\.2 was never tested, 0\.10, .* were; numpy 3\.0\.0rc1 was never tested, .* were",
        info.collect()["warning"],
    )
    monkeypatch.setattr(
        info._versions, "installed", lambda package: {p: s[-1] for p, s in info._versions.TESTED.items()}.get(package)
    )
    assert "warning" not in info.collect()


def test_the_selftest_compares_every_transport_with_the_ring_and_torch_with_the_oracle(facts):
    outcomes = {name: value for name, value in facts.items() if name.startswith("selftest")}
    assert all(value.startswith("ok: ") for value in outcomes.values())
    in_torch = {name for name in outcomes if name.startswith("selftest torch")}
    assert {"selftest torch cpu float32", "selftest torch cpu bfloat16"} <= in_torch
    assert len(outcomes) - len(in_torch) == 8
    for name in set(outcomes) - in_torch:
        value = outcomes[name]
        assert (int(re.search(r"(\d+) dropped", value)[1]) > 0) == name.endswith(", bounded")


def test_the_selftest_names_differences():
    wanted = {"drops": np.array([1, 0]), "output": np.array([3.0, 4.0])}
    assert compare(wanted, wanted, 1e-5)[1]
    assert compare(wanted | {"output": np.array([3.0, 4.1])}, wanted, 1e-5) == (
        "FAILED: output differs by 2.0e-02, bound 1.0e-05; 1 dropped",
        False,
    )
    assert compare(wanted | {"drops": np.array([0, 1])}, wanted, 1e-5)[0] == "FAILED: dropped [0, 1], expected [1, 0]"
    assert not compare(wanted | {"output": np.array([3.0, np.nan])}, wanted, 1e-5)[1]


def _program(source, **environment):
    return subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_library_breaks_no_import_and_is_explained():
    program = """
import anabranch.jax, jax.numpy as jnp
from anabranch import info
try:
    anabranch.jax.route(jnp.ones((2, 3)), 1)
finally:
    print(info.run(as_json=False))
"""
    result = _program(program, ANABRANCH_LIBRARY="/nowhere/libanabranch.so")
    why = "libanabranch.so: not found in /nowhere/libanabranch.so"
    assert f"LibraryError: {why}" in result.stderr
    assert f"missing: {why}" in result.stdout and result.stdout.endswith("\n1\n")


@pytest.mark.parametrize(
    "library,why",
    [
        ("/nowhere/libanabranch_cuda.so", "not found in /nowhere/libanabranch_cuda.so"),
        (__file__, "invalid ELF header"),
        (
            None,
            "got a library without ab_cuda_describe and 2 more, expected one of anabranch " + anabranch.__version__,
        ),
    ],
)
def test_a_broken_cuda_library_is_explained_and_harmless(library, why):
    library = library or _library.load()._name  # one without functions for CUDA
    program = (
        "import anabranch.jax, numpy; print(anabranch.jax.route(numpy.ones((2, 3), 'float32'), 1).experts[0]); "
        "from anabranch import info; print(info._cuda()['cuda backend'])"
    )
    result = _program(program, ANABRANCH_CUDA_LIBRARY=library)
    assert re.fullmatch(rf"\[0\]\nmissing: .*{why}.*\n", result.stdout), result.stdout + result.stderr


def test_a_library_without_handlers_for_xla_serves_torch():
    """One that is built with ANABRANCH_XLA=OFF."""
    program = """
import anabranch._library as library, numpy, sys, torch
library.HANDLERS = (*library.HANDLERS, "ab_xla_missing")
import anabranch.torch
print(sorted({"jax", "torch._dynamo", "sympy"} & set(sys.modules)))  # these take as long to import as torch
import anabranch.jax
print(anabranch.torch.route(torch.ones(2, 3), 1).experts[0].tolist())
try:
    anabranch.jax.route(numpy.ones((2, 3), "float32"), 1)
except library.LibraryError as error:
    print(error)
"""
    imported, *lines = _program(program).stdout.splitlines()
    assert imported == "[]"
    assert lines[0] == "[0]" and "got a library without ab_xla_missing, expected one of anabranch" in lines[1]


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_a_lower_instruction_set_can_be_requested(isa):
    program = "from anabranch import _library; print(_library.describe()['isa'])"
    assert _program(program, ANABRANCH_ISA=isa).stdout.strip() in (isa, "baseline")


def test_an_unknown_instruction_set_is_an_error():
    why = "ANABRANCH_ISA: got avx3, expected baseline, avx2, avx512 or nothing"
    program = """
import json
import anabranch.jax, numpy
from anabranch import info
print(json.dumps(info.collect()))
anabranch.jax.route(numpy.ones((2, 3), "float32"), 1)
"""
    result = _program(program, ANABRANCH_ISA="avx3", ANABRANCH_BF16="convert")
    facts = json.loads(result.stdout)
    assert facts["library isa"] == f"refused, {why}"
    assert {"ANABRANCH_ISA=avx3", "ANABRANCH_BF16=convert"} <= set(facts["environment"].split(", "))
    assert result.returncode == 1
    assert why in result.stderr


@pytest.mark.parametrize("through", ["jax", "torch"])
@pytest.mark.parametrize("operation", ["layer", "router"])
def test_bench_prints_times_and_rates(operation, through, tmp_path, monkeypatch, capsys):
    pytest.importorskip(through)
    monkeypatch.setattr(bench, "_MATRIX_SIZE", {"cpu": 64})
    monkeypatch.setattr(bench, "_BATCH_SECONDS", 1e-6)
    file = tmp_path / "rows.json"
    options = ["--through", through, "--shape", "16,8,8,4,2", "--json", str(file)]
    assert main(["bench", operation, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = f"{operation} 16,8,8,4,2 float32 through {through} on cpu, forward"
    assert len(lines) == 2 and all(re.match(rf"{start}.*: [\d.e-]+ ms, [\d.e-]+ G", line) for line in lines)
    report = json.loads(file.read_text())
    assert [row["pass"] for row in report["rows"][operation]] == ["forward", "forward and backward"]
    assert report["machine"]["cpu backend"] == "available"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["layer", "--json", "/nowhere/rows.json"], "--json: got /nowhere/rows.json, expected a file that can be written"),
        (["layer", "--shape", "8,8"], "argument --shape: got '8,8', expected T,D,F,E,K such as"),
        (["layer", "--shape", "8,8,8,2,3"], "argument --shape: got '8,8,8,2,3', expected T,D,F,E,K with K <= E"),
        (["mesh"], "argument operation: invalid choice: 'mesh'"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_bench_are_refused_before_anything_is_timed(arguments, message, capsys):
    try:
        status = main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err


def test_ctrl_c_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(info, "collect", lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["info"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "anabranch: interrupted\n"


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "anabranch", "--version"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_every_exported_handler_is_registered():
    def exported(library, prefix):
        return set(re.findall(rf"\0({prefix}_\w+)(?=\0)".encode(), pathlib.Path(library._name).read_bytes()))

    assert exported(_library.load(), "ab_xla") == {name.encode() for name in _library.HANDLERS}
    try:
        cuda = _library.load_cuda()
    except _library.LibraryError:
        return
    assert exported(cuda, "ab_cuda_xla") == {_library.on_cuda(name).encode() for name in custom_calls()}

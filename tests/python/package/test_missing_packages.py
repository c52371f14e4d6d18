"""Without optional packages, every command prints its help; otherwise it prints one line that says what to install."""

import builtins
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from anabranch import _packages

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
#: Runs a program in a Python that has none of these packages.
WITHOUT_THEM = """
import importlib.machinery, runpy, sys

class Finder(importlib.machinery.PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = "jax jaxlib flax torch transformers optax orbax matplotlib tqdm safetensors".split()
        return None if name.partition(".")[0] in hidden else finder.find_spec(name, path, target)

finder = importlib.machinery.PathFinder
sys.meta_path = [Finder if one is finder else one for one in sys.meta_path]
kind, program, *arguments = sys.argv[1:]
sys.argv = [program, *arguments]
if kind == "-c":
    exec(program)
elif kind == "-m":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(program, run_name="__main__")
"""


def without_packages(kind, *program):
    paths = [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_THEM, kind, *program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


COMMANDS = {
    "anabranch": ("-m", "anabranch"),
    "info": ("-m", "anabranch", "info"),
    "bench": ("-m", "anabranch", "bench"),
    "benchmarks": ("-m", "benchmarks"),
    "byte_lm": ("-m", "byte_lm"),
    "compare": ("-m", "byte_lm.compare"),
    "generate": ("-m", "byte_lm.generate"),
    "jax_train": ("-m", "jax_train"),
} | {
    path.stem: ("file", str(path))
    for path in sorted(EXAMPLES.glob("*.py"))
    if all(part in path.read_text() for part in ("argparse", '__name__ == "__main__"'))
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    result = without_packages(*COMMANDS[command], "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: ")


@pytest.mark.parametrize(
    "command, arguments, missing",
    [
        (
            "bench",
            ("layer", "--through", "jax"),
            "bench needs jax, which is not installed: pip install 'jax>=0.10' (extra: jax)",
        ),
        ("bench", ("router",), "needs torch, which is not installed: pip install 'torch>=2.9' (extra: torch)"),
        ("byte_lm", (), "No module named 'jax'. In the folder of the repository: pip install '.[demo]'"),
        ("compare", ("a=b",), "No module named 'matplotlib'. In the folder of the repository: pip install '.[demo]'"),
        ("generate", (), "No module named 'jax'. In the folder of the repository: pip install '.[demo]'"),
        ("expert_parallel", (), "No module named 'jax'. In the folder of the repository: pip install '.[demo]'"),
        ("jax_train", (), "No module named 'jax'. In the folder of the repository: pip install '.[demo]'"),
        ("port_checkpoint", (), "'jax'. In the folder of the repository: pip install '.[jax,checkpoints]'"),
        ("lora_finetune", (), "'transformers'. In the folder of the repository: pip install '.[peft]'"),
        ("transformers_finetune", (), "'torch'. In the folder of the repository: pip install '.[transformers]'"),
    ],
)
def test_one_line_says_what_is_missing(command, arguments, missing):
    result = without_packages(*COMMANDS[command], *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = [line for line in result.stderr.splitlines() if line != "byte_lm: loading JAX and the corpus"]
    assert line.endswith(missing)


def test_a_selftest_that_tests_nothing_fails():
    result = without_packages("-m", "anabranch", "info", "--selftest", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["selftest"].startswith("FAILED: nothing was tested")


@pytest.mark.parametrize("module, package", [("anabranch.jax", "jax"), ("anabranch.torch", "torch")])
def test_an_import_says_how_to_install_what_it_needs(module, package):
    result = without_packages("-c", f"import {module}")
    assert result.stderr.splitlines()[-1].startswith(
        f"ModuleNotFoundError: {module} needs {package}, which is not installed: pip install '{package}>="
    )


@pytest.mark.parametrize(
    "module, package, defined_in",
    [
        ("anabranch.jax.nnx", "flax", "anabranch.jax.layer.nnx"),
        ("anabranch.jax.linen", "flax", "anabranch.jax.te.linen"),
        ("anabranch.torch.transformers", "transformers", "anabranch.torch.transformers.adapter"),
    ],
)
def test_an_import_of_a_layer_or_the_adapter_says_how_to_install_what_it_needs(
    module, package, defined_in, monkeypatch
):
    def import_any_other(name, *arguments):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return import_(name, *arguments)

    import_ = builtins.__import__
    for name in (module, defined_in):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", import_any_other)
    program = f"import {module}" + "; anabranch.torch.transformers.register()" * (package == "transformers")
    with pytest.raises(ModuleNotFoundError, match=f"^{module} needs {package}, .*: pip install '{package}>=") as error:
        exec(program)
    assert error.value.name == package


def test_the_remedies_are_those_of_the_project_file():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement, extra in _packages.OPTIONAL.values():
        assert requirement in extras[extra]


def test_every_extra_that_a_page_or_an_example_names_exists_and_nothing_is_installed_from_an_index():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *EXAMPLES.rglob("*.py")]
    named = [
        found for page in pages for found in re.findall(r"pip install '?([^'\s\[]*)\[([\w,]+)\]", page.read_text())
    ]
    assert len(named) > 4
    for source, chosen in named:
        assert source == "." or source.endswith(".whl")
        assert set(chosen.split(",")) <= extras.keys()

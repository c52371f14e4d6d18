"""Every example in a docstring and every Python block of the guides runs and prints what it says."""

import doctest
import importlib
import inspect
import itertools
import pathlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import pytest

import anabranch.jax
import anabranch.torch
import packed_checkpoints

ROOT = pathlib.Path(__file__).parents[3]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(anabranch.__path__, "anabranch.")
    if not module.name.endswith("__main__")
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = {
    guide.name: FENCE.findall(guide.read_text())
    for guide in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"jax": jax, "jnp": jnp}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


#: These run on several devices: tests/python/parallel/on_devices/check_guides.py.
ON_DEVICES = ("jax.md", "scaling.md")


def packed_folders(path):
    """The folders of checkpoints that models.md names."""
    for name in packed_checkpoints.CONFIGS:
        (path / name).mkdir()
        packed_checkpoints.write(name, path / name)
    return {name: path / name / ("plain" if name == "qwen3_moe" else "") for name in packed_checkpoints.CONFIGS}


@pytest.mark.parametrize(
    "guide",
    [name for name, blocks in BLOCKS.items() if any(b[0] == "python" for b in blocks) and name not in ON_DEVICES],
)
def test_python_blocks_of_a_guide(guide, capsys, tmp_path):
    """The blocks of one page run in order in one namespace; a block fenced as `text` right after one is its output."""
    namespace: dict[str, object] = packed_folders(tmp_path) if guide == "models.md" else {}
    for (language, source), (next_language, expected) in itertools.pairwise([*BLOCKS[guide], ("", "")]):
        if language != "python":
            continue
        exec(compile(source, guide, "exec"), namespace)
        printed = capsys.readouterr().out
        if next_language == "text":
            assert printed.split() == expected.split()


PUBLIC = [
    getattr(package, name)
    for package in (anabranch.jax, anabranch.torch)
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
]
#: Its docstring refers to compute_ragged_all_to_all_params.
REFERS = anabranch.jax.compute_reverse_ragged_all_to_all_params


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_docstrings_describe_the_parameters_of_the_signature(function):
    """Every parameter is named, and every entry of "Args:" is a parameter."""
    text, parameters = inspect.getdoc(function) or "", inspect.signature(function).parameters
    missing = [name for name in parameters if not re.search(rf"\b{name}\b", text)]
    assert not missing or function is REFERS
    entries = re.findall(r"^  (\w+(?:, \w+)*)(?: to \w+)?:", text.partition("Args:\n")[2].partition("\n\n")[0], re.M)
    assert {name for entry in entries for name in entry.split(", ")} <= parameters.keys()


def test_the_site_has_every_page_and_every_public_name():
    menu = (ROOT / "docs/site/index.md").read_text()
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")]
    assert pages and not [page for page in pages if page not in menu]
    for package in (anabranch.jax, anabranch.torch):
        reference = (ROOT / f"docs/site/reference/{package.__name__.split('.')[1]}.rst").read_text()
        listed = re.findall(r"^\.\. auto(?:class|function|exception):: (\w+)$", reference, re.MULTILINE)
        assert not set(package.__all__) - set(listed)


def test_every_path_that_a_page_names_exists():
    """Paths are relative to the root, or end a path below src/ or python/anabranch/."""
    folders = ("benchmarks", "cmake", "docs", "examples", "include", "python", "scripts", "src", "tests")
    tree = [file.relative_to(ROOT).as_posix() for folder in folders for file in (ROOT / folder).rglob("*.*")]
    path = re.compile(r"(?<![\w/.*{}<>-])((?:[\w-]+/)+[\w.-]+\.(?:py|cc|cuh|cu|h|md|png|json|toml|cmake))\b")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, name) for page in pages for name in path.findall(page.read_text())}
    assert len(named) > 100
    ends = {"/".join(parts[i:]) for parts in (file.split("/") for file in tree) for i in range(len(parts))}
    assert not {(page, name) for page, name in named if name not in ends}

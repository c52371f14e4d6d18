"""Each file of a front end belongs to a level and imports from its own level or from lower ones, without circles."""

import ast
import graphlib
from pathlib import Path

import pytest

import anabranch

ROOT = Path(anabranch.__file__).parent
#: From the bottom up. Folders of one row do not import each other.
LEVELS = (("binding",), ("ops",), ("parallel",), ("layer",), ("te", "transformers"))
LEVEL_OF = {folder: number for number, folders in enumerate(LEVELS) for folder in folders}


def modules(front):
    """The files of a front end by module name, without the public entry points at the top."""
    return {
        ".".join(("anabranch", *file.relative_to(ROOT).with_suffix("").parts)): file
        for file in sorted((ROOT / front).glob("*/*.py"))
        if file.stem != "__init__"
    }


def imports(file, known):
    """The modules in `known` that a file imports, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & known


@pytest.mark.parametrize("front", ["jax", "torch"])
def test_no_file_imports_from_a_level_above_its_own(front):
    files = modules(front)
    assert {name.split(".")[2] for name in files} <= set(LEVEL_OF), "a folder without a level"
    arrows = {name: imports(file, set(files)) for name, file in files.items()}
    assert sum(map(len, arrows.values())) > 50
    for name, targets in arrows.items():
        folder = name.split(".")[2]
        for target in targets:
            other = target.split(".")[2]
            assert other == folder or LEVEL_OF[other] < LEVEL_OF[folder], f"{name} imports {target}"
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError


@pytest.mark.parametrize("front", ["jax", "torch"])
def test_no_file_imports_from_the_public_names_or_the_other_front_end(front):
    other = {"jax": "torch", "torch": "jax"}[front]
    for file in modules(front).values():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name != f"anabranch.{front}", f"{file}: imports from {name}"
                assert f"anabranch.{other}" not in name, f"{file}: imports from {name}"


def test_files_on_top_of_a_front_end_only_pass_names_on():
    for file in [*ROOT.glob("jax/*.py"), *ROOT.glob("torch/*.py")]:
        tree = ast.parse(file.read_text())
        defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert not defined, f"{file}: defines {defined[0].name}"

"""The folders of src/ have levels: a file includes headers of its own folder or of folders further down."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "src"
#: From the bottom up. Folders of one row don't include one another.
LEVELS = (
    ("core", "torch"),
    ("core/cuda",),
    ("balance", "dispatch", "exchange"),
    ("router", "experts"),
    ("exchange/cuda", "router/cpu", "router/cuda", "experts/cpu", "experts/cuda/ops"),
    ("experts/cuda/ops/tiles",),
    ("experts/hopper", "experts/portable", "experts/few_rows"),
    ("experts/cuda",),
    ("api",),
)
LEVEL_OF = {folder: level for level, folders in enumerate(LEVELS) for folder in folders}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def folder_of(file: Path) -> str:
    return file.parent.relative_to(SOURCES).as_posix()


def test_no_file_includes_a_header_of_a_level_above_its_own():
    files = [file for file in SOURCES.rglob("*") if file.is_file()]
    assert {folder_of(file) for file in files} == set(LEVEL_OF)
    arrows = 0
    for file in files:
        for name in INCLUDE.findall(file.read_text()):
            if not (SOURCES / name).is_file():
                assert name.startswith(("anabranch/", "xla/ffi/")), f"{file}: {name} is neither in src/ nor public"
                continue
            here, there = folder_of(file), folder_of(SOURCES / name)
            arrows += here != there
            assert here == there or LEVEL_OF[there] < LEVEL_OF[here], f"{here}/{file.name} includes {name}"
    assert arrows > 300


def test_no_headers_include_one_another_in_a_circle():
    """Visits headers depth first; a header that is still open when it is included again closes a circle."""
    state: dict[str, str] = {}

    def visit(name: str) -> None:
        assert state.get(name) != "open", f"a circle of includes goes through {name}"
        if name in state or not (SOURCES / name).is_file():
            return
        state[name] = "open"
        for other in INCLUDE.findall((SOURCES / name).read_text()):
            visit(other)
        state[name] = "done"

    for file in SOURCES.rglob("*"):
        if file.is_file():
            visit(file.relative_to(SOURCES).as_posix())


def test_cmake_compiles_every_cuda_folder_for_the_cuda_library():
    """A host file of these folders, such as experts/portable/x.cc, must not land in the CPU library."""
    rules = (SOURCES.parent / "CMakeLists.txt").read_text()
    folders = re.search(r'set\(ANABRANCH_CUDA_FOLDERS "([^"]+)"\)', rules)
    assert folders
    found = {folder for folder in LEVEL_OF if re.search(folders[1], f"src/{folder}/x.cc")}
    names = ("cuda", "hopper", "portable", "few_rows")
    assert found == {folder for folder in LEVEL_OF if set(folder.split("/")) & set(names)}
    assert len(found) == 9

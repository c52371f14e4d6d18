"""Tag, metadata and contents of the installed wheel, or of the one that ANABRANCH_WHEEL names."""

import email
import os
import pathlib
import sys
import zipfile

import pytest

import anabranch

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel():
    named = os.environ.get("ANABRANCH_WHEEL")
    # scripts/setup saves the wheel that it builds.
    found = [pathlib.Path(named)] if named else sorted(pathlib.Path(sys.prefix, "wheels").glob("anabranch-*.whl"))
    if not found:
        pytest.skip("NO WHEEL: the package was not set up by scripts/setup")
    with zipfile.ZipFile(found[0]) as file:
        yield found[0], file


def metadata(file, name):
    (path,) = [path for path in file.namelist() if path.endswith(f".dist-info/{name}")]
    return email.message_from_bytes(file.read(path))


def test_one_wheel_is_for_every_python_of_its_platform(wheel):
    path, file = wheel
    name, version, python, abi, platform = path.name.removesuffix(".whl").split("-")
    assert (name, version, python, abi) == ("anabranch", anabranch.__version__, "py3", "none")
    assert platform.startswith(("linux_", "manylinux_"))
    assert metadata(file, "WHEEL")["Root-Is-Purelib"] == "false"


def test_metadata(wheel):
    said = metadata(wheel[1], "METADATA")
    assert (said["Version"], said["License-Expression"]) == (anabranch.__version__, "Apache-2.0")
    assert said["Requires-Python"] == ">=3.11"
    assert {"jax", "cuda"} <= set(said.get_all("Provides-Extra"))
    needed = [requirement for requirement in said.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert sorted(requirement.split("==")[0].split(">=")[0] for requirement in needed) == [
        "ml_dtypes",
        "numpy",
        "onednn-cpu-gomp",
    ]


def test_contents(wheel):
    """The wheel has the typed Python package, the headers and the libraries alone, within an index's size limit."""
    path, file = wheel
    names = [name for name in file.namelist() if ".dist-info/" not in name and not name.endswith("/")]
    sources = {
        f"anabranch/{source.relative_to(ROOT / 'python/anabranch')}" for source in ROOT.glob("python/anabranch/**/*.py")
    }
    headers = {f"anabranch/include/anabranch/{header.name}" for header in ROOT.glob("include/anabranch/*.h")}
    required = {"anabranch/lib/libanabranch.so", "anabranch/lib/libanabranch_torch.so"}
    libraries = {*required, "anabranch/lib/libanabranch_cuda.so"}
    assert set(names) - libraries == sources | headers | {"anabranch/py.typed"}
    assert required <= set(names)
    assert all(file.read(name) == (ROOT / "python" / name).read_bytes() for name in sources)
    assert all(file.read(name) == (ROOT / name.removeprefix("anabranch/")).read_bytes() for name in headers)
    assert path.stat().st_size < 100e6


def test_licences(wheel):
    _, file = wheel
    for name in ("LICENSE", "NOTICE"):
        (path,) = [path for path in file.namelist() if path.endswith(f".dist-info/licenses/{name}")]
        assert file.read(path) == (ROOT / name).read_bytes()


def test_libraries_look_for_onednn_in_the_environment_they_are_installed_in(wheel):
    """No library has a search path on the build machine."""
    library = wheel[1].read("anabranch/lib/libanabranch.so")
    assert b"\0$ORIGIN:$ORIGIN/../../../..\0" in library

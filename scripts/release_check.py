"""Checks a release: versions, sdist, wheel, licences, site, and clean installations of the wheel.

Runs all checks, then prints what was skipped and what failed. Environment: VENV (.venv), CUDA as for scripts/wheel.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
BIN = ROOT / os.environ.get("VENV", ".venv") / "bin"
#: Files of the repository that the sdist omits, and files that it adds.
NOT_IN_SDIST, ADDED = (".ci/",), {"PKG-INFO"}

skipped: list[str] = []
failed: list[str] = []


def output(*command: str) -> str:
    """The standard output of a command; "" if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def step(name: str, *command: object, **environment: str) -> None:
    """Runs a command, whose failure is one of the release."""
    print(f"release-check: {name}", flush=True)
    if subprocess.run([str(part) for part in command], cwd=ROOT, env={**os.environ, **environment}).returncode:
        failed.append(name)


def check_versions() -> str:
    """Checks all places that name the version, and returns it."""
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "python/anabranch/__init__.py").read_text(), re.M)
    for file, pattern in (
        ("CHANGELOG.md", rf"\A# Changes\n\n[^#]*## {re.escape(version)}, \d{{4}}-\d\d-\d\d\n"),
        ("include/anabranch/types.h", rf'/\* "{re.escape(version)}" \*/\nAB_API const char\* ab_version'),
    ):
        if not re.search(pattern, (ROOT / file).read_text()):
            failed.append(f"{file}: expected the version {version}, in the changelog on top and with a date")
    return version


def interpreters() -> list[str]:
    """The interpreters of the supported versions, from PATH or pyenv."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    found = []
    for minor in re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers)):
        pyenv = sorted(pathlib.Path(output("pyenv", "root").strip() or "/none").glob(f"versions/{minor}.*/bin/python"))
        candidates = [shutil.which(f"python{minor}"), *map(str, pyenv)]
        works = [path for path in candidates if path and output(path, "-c", "import ensurepip, venv; print(1)")]
        found += works[:1]
        if not works:
            skipped.append(f"Python {minor}: no such interpreter on PATH or in pyenv")
    return found


def check_sdist(path: pathlib.Path) -> None:
    """Compares the sdist with the files of the repository. The wheel is built from the sdist."""
    with tarfile.open(path) as archive:
        members = {m.name.partition("/")[2]: archive.extractfile(m) for m in archive.getmembers() if m.isfile()}
        packed = {name: file.read() for name, file in members.items() if file and name not in ADDED}
    tracked = [name for name in output("git", "ls-files").splitlines() if not name.startswith(NOT_IN_SDIST)]
    differing = [name for name in tracked if packed.pop(name, None) != (ROOT / name).read_bytes()]
    if not tracked or differing or packed:
        failed.append(f"sdist: missing or other content {differing}, not in the repository {sorted(packed)}")


def main() -> None:
    """Runs all checks."""
    if output("git", "status", "--porcelain"):
        failed.append("the working tree has changes that are not committed")
    version = check_versions()
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    step("wheel, and its installation", ROOT / "scripts/wheel", PYTHONS=" ".join(interpreters()), EXTRAS="jax torch")
    for sdist in (ROOT / "dist").glob("*.tar.gz"):
        check_sdist(sdist)
    for wheel in (ROOT / "dist").glob("*.whl"):
        if wheel.name not in (ROOT / "README.md").read_text():
            failed.append(f"README.md: expected the wheel's name, {wheel.name}")
        pytest = (BIN / "python", "-m", "pytest", "-q", "--noconftest", "tests/python/package/test_wheel.py")
        step("contents of the wheel", *pytest, ANABRANCH_WHEEL=str(wheel))
        if "anabranch/lib/libanabranch_cuda.so" not in zipfile.ZipFile(wheel).namelist():
            asked = os.environ.get("CUDA") == "OFF"
            (skipped if asked else failed).append(f"CUDA: {wheel.name} is for CPUs alone")
    step("site", ROOT / "scripts/docs")
    for line in skipped:
        print(f"release-check: SKIPPED {line}")
    for line in failed:
        print(f"release-check: FAILED {line}")
    sys.exit(f"release-check: {version} has {len(failed)} problems" if failed else None)


if __name__ == "__main__":
    main()

"""Runs the checks of `on_devices/` with 8 CPU devices in processes of their own; all other tests have one device."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

HERE = pathlib.Path(__file__).parent
FILES = sorted((HERE / "on_devices").glob("check_*.py"))
#: Every process needs seconds to import JAX, but two run in parallel.
PROCESSES = 2


@pytest.mark.parametrize("files", [FILES[first::PROCESSES] for first in range(PROCESSES)], ids=lambda f: f[0].stem)
def test_checks_pass_on_8_devices(files):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *map(str, files)]
    # On a machine with few cores, 8 devices with several OpenMP threads each would be slower. JAX must not use a GPU.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def test_this_process_has_one():
    """The checks' conftest.py sets 8 devices neither in this process nor for other tests' subprocesses."""
    assert len(jax.devices("cpu")) == 1

"""Runs the checks of `on_devices/` with 8 CPU devices, each file in a process of its own: all other tests have one."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

HERE = pathlib.Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "on_devices").glob("check_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_checks_pass_on_8_devices(file):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", str(HERE / "on_devices" / file)]
    # On a machine of few cores the devices' threads do better without many of ours for each. A JAX for GPUs is to
    # leave them alone.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def test_this_process_has_one():
    """The checks' conftest.py, which asks for 8, is never read here, nor inherited by what other tests start."""
    assert len(jax.devices("cpu")) == 1

"""Runs the checks of `on_devices/` with 8 CPU devices, in processes of their own: all other tests have one device."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

HERE = pathlib.Path(__file__).parent
FILES = sorted((HERE / "on_devices").glob("check_*.py"))
#: A process imports JAX, for seconds of its own; several can run at once.
PROCESSES = 3


@pytest.mark.parametrize("files", [FILES[first::PROCESSES] for first in range(PROCESSES)], ids=lambda f: f[0].stem)
def test_checks_pass_on_8_devices(files):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *map(str, files)]
    # On a machine of few cores the devices' threads do better without many of ours for each. A JAX for GPUs is to
    # leave them alone.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def test_this_process_has_one():
    """The checks' conftest.py, which asks for 8, is never read here, nor inherited by what other tests start."""
    assert len(jax.devices("cpu")) == 1

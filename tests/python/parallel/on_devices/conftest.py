"""8 CPU devices on any machine. To run one check: `pytest tests/python/parallel/on_devices/FILE`."""

import os
import pathlib
import sys

# Most of the time is compilation. These options skip LLVM's optimisation of XLA's own loops; fusions and collectives
# are unchanged.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import pytest
from jax.sharding import AxisType


def pytest_sessionstart(session):
    if len(jax.devices("cpu")) != 8:
        pytest.exit(f"got {len(jax.devices('cpu'))} CPU devices, expected 8: run this file in a process of its own", 3)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def axis_type(request):
    return request.param

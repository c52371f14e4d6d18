"""8 CPU devices on any machine. To run one check: `pytest tests/python/parallel/on_devices/FILE`."""

import os
import pathlib
import sys

# The options of ../../conftest.py, also where there is a GPU.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[4] / "examples"))

import jax
import pytest
from meshes import AXIS_TYPES


def pytest_sessionstart(session):
    if len(jax.devices("cpu")) != 8:
        pytest.exit(f"got {len(jax.devices('cpu'))} CPU devices, expected 8: run this file in a process of its own", 3)


@pytest.fixture(params=AXIS_TYPES, ids=["auto", "explicit"])
def axis_type(request):
    return request.param

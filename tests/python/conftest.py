"""Fixtures that run tests of operations with CUDA kernels on the CPU and on a GPU."""

import gc
import importlib.metadata
import os

# Tests run in parallel, so there are more threads than cores. Waiting OpenMP threads spin by default, which takes
# several times the CPU time of the computation; passive ones sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On the CPU most of the time is compilation of programs that run once. These options skip LLVM's optimisation of XLA's
# own loops and emit them in the simpler way, by one thread; XLA's passes, our kernels and their results are unchanged.
# Subprocesses inherit the options. Programs for a GPU are compiled with the defaults. XLA aborts with the name of an
# option that it does not know.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")

import jax
import pytest

import frameworks

#: Libraries whose versions the test report prints.
LIBRARIES = ("jax", "flax", "torch", "transformers", "peft", "accelerate", "trl", "megatron-core", "torchtitan")


def pytest_collection_finish(session):
    """Lets the garbage collector skip the libraries' objects, of which there are millions, and run less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_terminal_summary(terminalreporter):
    """Prints the versions of the libraries."""
    terminalreporter.write_line(", ".join(f"{name} {_version(name)}" for name in LIBRARIES))


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _on_gpu():
    """Returns a context with the first GPU as default device; skips the test without a GPU."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("NO GPU FOUND: the CUDA kernels are not tested")
    return jax.default_device(device)


@pytest.fixture(scope="module")
def gpu():
    """Puts arrays on a GPU. For tests marked `gpu` that have no CPU variant."""
    with _on_gpu():
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """The platform of the module's arrays: "cpu" or "gpu". Modules request it with `usefixtures`."""
    if request.param == "cpu":
        with jax.default_device(jax.devices("cpu")[0]):
            yield "cpu"
        return
    with _on_gpu():
        yield "gpu"


@pytest.fixture
def framework(request, platform):
    """The framework whose operations the test calls, on the platform; see `frameworks.both`."""
    if request.param == "torch":
        import in_torch

        in_torch.on("cuda" if platform == "gpu" else "cpu")
    frameworks.choose(request.param)
    yield request.param
    frameworks.choose("jax")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The default device of torch's new tensors, for tests of torch alone: "cpu" or "cuda"."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: the CUDA kernels are not tested")
    with torch.device(request.param):
        yield request.param

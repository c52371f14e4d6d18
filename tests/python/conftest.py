"""Runs tests of operations that have CUDA kernels on a GPU too."""

import importlib.metadata
import os

# Tests run beside each other, so there are more threads than cores. OpenMP's spin while they wait, for several times as
# long as they compute; as many threads that sleep instead leave the cores to those that have something to do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On the CPU much of the time goes into compiling programs that run once. This spares LLVM's effort on XLA's own loops;
# XLA's passes, our kernels and what they return are the same. A GPU's programs are compiled as users' are.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

import frameworks

#: Whose modules, models and interfaces the tests use.
LIBRARIES = ("jax", "flax", "torch", "transformers", "peft", "accelerate", "megatron-core", "torchtitan")


def pytest_terminal_summary(terminalreporter):
    """Prints which versions were tested."""
    terminalreporter.write_line(", ".join(f"{name} {_version(name)}" for name in LIBRARIES))


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _on_gpu():
    """Makes the first GPU the default device; skips where there is none."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("NO GPU FOUND: the CUDA kernels are not tested")
    return jax.default_device(device)


@pytest.fixture(scope="module")
def gpu():
    """Arrays live on a GPU. For tests marked `gpu`, which have nothing to look at on the CPU."""
    with _on_gpu():
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """The platform that the module's arrays live on: "cpu" or "gpu". Modules ask for it with `usefixtures`."""
    if request.param == "cpu":
        with jax.default_device(jax.devices("cpu")[0]):
            yield "cpu"
        return
    with _on_gpu():
        yield "gpu"


@pytest.fixture
def framework(request, platform):
    """The framework that the test's operations are called in, on the platform; see `frameworks.both`."""
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

"""Runs tests of operations that have CUDA kernels on a GPU too."""

import jax
import pytest


def _gpu():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """The platform that the module's arrays live on: "cpu" or "gpu". Modules ask for it with `usefixtures`."""
    if request.param == "cpu":
        with jax.default_device(jax.devices("cpu")[0]):
            yield "cpu"
        return
    gpu = _gpu()
    if gpu is None:
        pytest.skip("NO GPU FOUND: the CUDA kernels are not tested")
    with jax.default_device(gpu):
        yield "gpu"

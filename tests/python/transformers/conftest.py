"""Devices of the models in these tests."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: the CUDA kernels are not tested")
    return request.param

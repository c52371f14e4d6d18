"""The bounds that the Python rules give XLA for CUDA workspaces hold what the C functions ask for. Needs no GPU."""

import numpy as np
import pytest

from anabranch import _library
from anabranch.bench import c_call
from anabranch.bench.cuda_call import options_of, tensors_of
from anabranch.jax import _ffi


@pytest.fixture(scope="module")
def library():
    try:
        return _library.load_cuda()
    except _library.LibraryError as error:
        pytest.skip(f"NO CUDA LIBRARY: its workspaces are not checked: {error}")


def needed(library, function, values):
    """Bytes that the function's query asks for."""
    asked = []

    def allocate(size):
        asked.append(size - 64)
        return np.zeros(64, np.uint8)

    c_call.call(library, function, options_of(function), tensors_of(function), values, allocate=allocate)
    return asked[0]


@pytest.mark.parametrize("E", [1, 8, 64, 130, 512, 1024, 1025, 2304, 4096, 8192])
@pytest.mark.parametrize("T, B", [(0, 1), (1, 1), (7, 1), (100, 1), (700, 1), (700, 700), (3000, 3), (6000, 1)])
def test_statistics(library, T, B, E):
    shape = (E,) if B == 1 else (B, E)
    statistics = {"tokens_per_expert": np.empty(shape, np.int32), "score_sum": np.empty(shape, np.float32)}
    scores = np.empty((T, E), np.float32)
    values = {"topk": 1, "normalize": 1, "scaling_factor": 1.0, "logits": scores, **statistics}
    bound = _ffi.statistics_workspace(T, B, E)
    assert needed(library, "ab_cuda_router_forward", values) <= bound
    values = {"scores": scores, "score_sum": statistics["score_sum"]}
    assert needed(library, "ab_cuda_score_sum", values) <= bound


@pytest.mark.parametrize("E", [1, 8, 128, 2048, 2049, 8192])
@pytest.mark.parametrize("T", [0, 1, 100, 5000, 200000])
def test_plan(library, T, E):
    experts = np.empty((T, 4), np.int32)
    values = {"num_experts": E, "experts": experts, "slot_of_row": np.empty(4 * T, np.int32)}
    assert needed(library, "ab_cuda_plan", values) <= _ffi.plan_workspace(4 * T, E)


@pytest.mark.parametrize("S", [0, 1, 100, 5000])
def test_sort_chunks(library, S):
    x, integers = np.empty((7, 3), np.float32), np.empty(S, np.int32)
    values = {"x": x, "split_sizes": integers, "sorted_indices": integers, "out": x}
    assert needed(library, "ab_cuda_sort_chunks", values) <= _ffi.sort_chunks_workspace(S)

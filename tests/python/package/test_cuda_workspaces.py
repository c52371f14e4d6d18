"""The CUDA workspace sizes that the Python rules pass to XLA are at least those of the C queries. Needs no GPU."""

import ctypes
import functools
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest

from anabranch import _library, _structs
from anabranch.jax.binding import workspaces


@pytest.fixture(scope="module")
def library():
    try:
        return _library.load_cuda()
    except _library.LibraryError as error:
        pytest.skip(f"NO CUDA LIBRARY: its workspaces are not checked: {error}")


def tensor(array):
    """ab_tensor of an array."""
    result = _structs.Tensor(array.ctypes.data, _library.DTYPES[str(array.dtype)], array.ndim)
    result.shape[: array.ndim] = array.shape
    return ctypes.pointer(result)


def needed(library, function, values):
    """The number of bytes that the function's query returns."""
    struct = _structs.ARGS[function.removeprefix("ab_cuda_")]
    fields = {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}
    args, size = struct(size=ctypes.sizeof(struct), **fields), ctypes.c_size_t()
    query = getattr(library, function + "_workspace")
    query.restype = _library.Status
    status = query(ctypes.byref(args), None, ctypes.byref(size))
    assert status.code == 0, status.message.decode()
    return size.value


@pytest.mark.parametrize("E", [1, 8, 64, 130, 512, 1024, 1025, 2304, 4096, 8192])
@pytest.mark.parametrize("T, B", [(0, 1), (1, 1), (7, 1), (100, 1), (700, 1), (700, 700), (3000, 3), (6000, 1)])
def test_statistics(library, T, B, E):
    shape = (E,) if B == 1 else (B, E)
    statistics = {"tokens_per_expert": np.empty(shape, np.int32), "score_sum": np.empty(shape, np.float32)}
    scores = np.empty((T, E), np.float32)
    values = {"topk": 1, "normalize": 1, "scaling_factor": 1.0, "logits": scores, **statistics}
    bound = workspaces.statistics(T, B, E)
    assert needed(library, "ab_cuda_router_forward", values) <= bound
    values = {"scores": scores, "score_sum": statistics["score_sum"]}
    assert needed(library, "ab_cuda_score_sum", values) <= bound


@pytest.mark.parametrize("E", [2, 64, 512, 1025, 8192])
@pytest.mark.parametrize("T", [0, 1, 100, 6000])
def test_quantile_balancing(library, T, E):
    values = {"topk": 1, "scaling_factor": 1.0, "logits": np.empty((T, E), np.float32)}
    values |= {"tokens_per_expert": np.empty(E, np.int32), "score_sum": np.empty(E, np.float32)}
    values |= {"expert_bias": np.empty(E, np.float32), "qb_bin_bounds": np.empty(2, np.float32)}
    values["qb_histogram"] = np.empty((E, 7), np.int32)
    bound = workspaces.statistics(T, 1, E) + workspaces.quantile(T)
    assert needed(library, "ab_cuda_router_forward", values) <= bound


@pytest.mark.parametrize("E", [1, 8, 128, 2048, 2049, 8192])
@pytest.mark.parametrize("T", [0, 1, 100, 5000, 200000])
def test_plan(library, T, E):
    experts = np.empty((T, 4), np.int32)
    values = {"num_experts": E, "experts": experts, "slot_of_row": np.empty(4 * T, np.int32)}
    assert needed(library, "ab_cuda_plan", values) == workspaces.plan(4 * T, E)


@pytest.mark.parametrize("S", [0, 1, 100, 5000])
def test_sort_chunks(library, S):
    x, integers = np.empty((7, 3), np.float32), np.empty(S, np.int32)
    values = {"x": x, "split_sizes": integers, "sorted_indices": integers, "out": x}
    assert needed(library, "ab_cuda_sort_chunks", values) == workspaces.sort_chunks(S)


DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
expert_shapes = pytest.mark.parametrize(
    "R, E, D, F",
    [
        (0, 3, 8, 8),
        (1, 1, 1, 1),
        (700, 0, 8, 8),
        (700, 5, 13, 7),
        (513, 8, 64, 72),
        (4097, 3, 768, 256),
        (32768, 8, 1024, 1024),
        (65536, 128, 768, 256),
        (10000, 130, 4096, 512),
        (20000, 2, 4096, 300),
        (9000, 3, 2880, 1000),
        (262144, 8, 136, 8),
    ],
)


@expert_shapes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_grouped_matmul_dw(library, R, E, D, F, dtype, other):
    values = {
        "x": np.empty((R, D), DTYPES[dtype]),
        "d_y": np.empty((R, F), DTYPES[other]),
        "group_sizes": np.empty(E, np.int32),
        "d_w": np.empty((E, D, F), DTYPES[dtype]),
    }
    bound = workspaces.grouped_matmul_dw(R, E, D, F, DTYPES[dtype], DTYPES[other])
    assert needed(library, "ab_cuda_grouped_matmul_dw", values) <= bound
    values["d_w"] = np.empty((1, D, F), DTYPES[dtype])
    assert needed(library, "ab_cuda_grouped_matmul_dw", values) <= bound, "shared"


def ffn_values(R, E, D, F, P, dtype):
    """Operands shared by forward and backward, for rows without assignments."""
    dtype = DTYPES[dtype]
    return {
        "x": np.empty((R, D), dtype),
        "group_sizes": np.empty(E, np.int32),
        "w_in": np.empty((E, D, P, F), dtype),
        "w_out": np.empty((E, F, D), dtype),
        "h": np.empty((R, P, F), dtype),
    }


@expert_shapes
@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_ffn_forward(library, R, E, D, F, dtype):
    values = ffn_values(R, E, D, F, 2, dtype)
    values["y"] = values["x"]
    assert needed(library, "ab_cuda_expert_ffn_forward", values) <= workspaces.ffn_forward(R, F, DTYPES[dtype])


@expert_shapes
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_up_projection_alone_needs_no_workspace(library, R, E, D, F, dtype):
    values = ffn_values(R, E, D, F, 2, dtype) | {"a": np.empty((R, F), DTYPES[dtype])}
    del values["w_out"]
    assert needed(library, "ab_cuda_expert_ffn_forward", values) == 0


@expert_shapes
@pytest.mark.parametrize("transpose_w", [0, 1])
@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_matmul_combine(library, R, E, D, F, backward, transpose_w, dtype):
    dtype = DTYPES[dtype]
    for terms, N in ((F, D), (D, F)):
        values = {
            "transpose_w": transpose_w,
            "backward": backward,
            "x": np.empty((R, terms), dtype),
            "w": np.empty((E, N, terms) if transpose_w else (E, terms, N), dtype),
            "group_sizes": np.empty(E, np.int32),
            "slot_of_row": np.empty(R, np.int32),
            "row_of_slot": np.empty((R, 1), np.int32),
            "out": np.empty((R, N), dtype),
        }
        bound = workspaces.grouped_matmul_combine(R, E, terms, N, dtype, backward=bool(backward))
        assert needed(library, "ab_cuda_grouped_matmul_combine", values) == bound


class Exchange(ctypes.Structure):
    """The beginning of an exchange (src/exchange/check.h, Shape). A query of a workspace reads nothing else."""

    _fields_ = (("rank", ctypes.c_int32), ("ranks", ctypes.c_int32))


def exchange(ranks):
    return ctypes.cast(ctypes.pointer(Exchange(0, ranks)), ctypes.c_void_p)


@pytest.mark.parametrize("T", [3, 1000, 8192])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("D", [64, 2048, 4104])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_return(library, T, ranks, D, dtype):
    dtype, R, E, F = DTYPES[dtype], 1000, 4, 72
    values = {
        "x": np.empty((R, F), dtype),
        "w": np.empty((E, F, D), dtype),
        "group_sizes": np.empty(E, np.int32),
        "slot_of_row": np.empty(R, np.int32),
        "row_of_slot": np.empty((ranks * T, 1), np.int32),
        "out": np.empty((ranks * T, D), dtype),
        "returning": exchange(ranks),
    }
    assert needed(library, "ab_cuda_grouped_matmul_combine", values) == workspaces.returning(R, ranks, T, D, dtype)


@expert_shapes
def test_tokens_that_arrive(library, R, E, D, F):
    values = ffn_values(R, E, D, F, 2, "bfloat16") | {"slot_of_row": np.empty(R, np.int32), "topk": 1}
    of_network = values | {"arriving": exchange(2)}
    del of_network["w_out"]
    of_network["a"] = np.empty((R, F), DTYPES["bfloat16"])
    assert needed(library, "ab_cuda_expert_ffn_forward", of_network) == workspaces.arriving(E)
    hidden = values | {"d_out": values["x"], "dh": values["h"], "arriving": exchange(2)}
    assert needed(library, "ab_cuda_expert_ffn_backward", hidden) <= workspaces.arriving(E)


def test_summed_rows_of_2048_columns_or_more_come_in_chunks():
    workspace = functools.partial(workspaces.grouped_matmul_combine, dtype="bfloat16")
    for terms, backward in ((256, False), (512, True)):
        assert workspace(524288, 256, terms, 4096, backward=backward) == 524288 * 960 * 2
        assert workspace(524288, 256, terms, 1536, backward=backward) == 524288 * 1536 * 2
    assert workspace(262144, 128, 1024, 4096) == 262144 * 4096 * 2
    assert workspace(131072, 32, 2880, 2880) == 131072 * 1536 * 2, (
        "a chunk is larger than w_out, because the memory of w_in is free"
    )
    assert workspace(131072, 32, 5760, 2880, backward=True) == 131072 * 2880 * 2


@expert_shapes
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_dtype", DTYPES)
def test_expert_ffn_backward(library, R, E, D, F, P, dtype, d_dtype):
    values = ffn_values(R, E, D, F, P, dtype)
    values |= {
        "d_out": np.empty((R, D), DTYPES[d_dtype]),
        "dh": values["h"],
        "dx_rows": values["x"],
        "d_w_in": values["w_in"],
        "d_b_in": np.empty((E, P, F), DTYPES[dtype]),
        "d_w_out": values["w_out"],
        "d_b_out": np.empty((E, D), DTYPES[dtype]),
        "d_weights": np.empty(R, np.float32),
    }
    steps = ("h", "weighted_a", *(name for name in values if name.startswith("d")))
    bound_of = functools.partial(workspaces.ffn_backward, R, (E, D, P, F), DTYPES[dtype], DTYPES[d_dtype])
    bound = bound_of(weighted_a=True, d_weights=True, d_w_out=True, d_w_in=True)
    assert needed(library, "ab_cuda_expert_ffn_backward", values) <= bound
    for output in (
        "d_w_in",
        "d_w_out",
        "d_b_in",
        "d_b_out",
        "d_weights",
    ):  # each of them may need the largest workspace
        some = {name: value for name, value in values.items() if not name.startswith("d_") or name in (output, "d_out")}
        assert needed(library, "ab_cuda_expert_ffn_backward", some) <= bound, output
    values |= {"weighted_a": np.empty((R, F), DTYPES[dtype])}
    hidden = ("h", "dh", "d_out", "weighted_a", "d_weights")
    for results, bound in (
        (hidden, bound_of(d_weights=True)),
        ((*hidden, "d_w_out", "d_b_out"), bound_of(d_weights=True, d_w_out=True)),
        (("weighted_a", "d_out", "d_w_out", "d_b_out"), bound_of(d_w_out=True)),
        (("dh", "d_w_in", "d_b_in"), bound_of(d_w_in=True)),
    ):
        some = {name: value for name, value in values.items() if name not in steps or name in results}
        assert needed(library, "ab_cuda_expert_ffn_backward", some) <= bound, results


def test_a_library_must_have_every_bound_of_the_headers():
    headers = (pathlib.Path(__file__).parents[3] / "include" / "anabranch").glob("*.h")
    declared = {name for header in headers for name in re.findall(r"\bab_cuda_\w+_bound\b", header.read_text())}
    assert set(_library.WORKSPACE_BOUNDS) == declared

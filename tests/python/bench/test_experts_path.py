"""The path that rows of benchmarks name is the library's answer for the layer's sizes; what it refuses is said."""

import types

import pytest

from anabranch import _library
from anabranch.bench.errors import BenchError
from anabranch.bench.experts_path import experts_path
from anabranch.bench.layer_shape import LayerShape

SHAPE = LayerShape(T=64, D=32, F=48, E=8, K=2)


def test_the_library_is_asked_in_the_order_of_its_header(monkeypatch):
    asked = []

    def ab_cuda_experts_path(*given):
        *sizes, path, why_not = given
        asked.append(([size.value for size in sizes], why_not))
        path._obj.value = b"portable"
        return _library.Status(0, b"")

    monkeypatch.setattr(_library, "load_cuda", lambda: types.SimpleNamespace(ab_cuda_experts_path=ab_cuda_experts_path))
    assert experts_path(SHAPE, "bfloat16") == "portable"
    T, D, F, E, K = SHAPE
    experts_path(SHAPE, "bfloat16", "pfd", "fd")
    sizes = [_library.DTYPES["bfloat16"], T, K, E, D, 2, F]
    assert asked == [([*sizes, 0, 0, 1], None), ([*sizes, 1, 0, 1], None)]


def cuda_library():
    try:
        return _library.load_cuda()
    except _library.LibraryError as error:
        pytest.skip(f"NO CUDA LIBRARY: it is not asked for paths: {error}")


def test_what_the_library_refuses_is_said():
    cuda_library()
    with pytest.raises(BenchError, match=r"path: T: got 1073741824 with K = 2, expected T K < 2\^31"):
        experts_path(SHAPE._replace(T=2**30), "float32")
    if "error" in _library.describe_cuda():
        with pytest.raises(BenchError, match="path: experts_path: no usable GPU"):
            experts_path(SHAPE, "bfloat16")


@pytest.mark.gpu
def test_the_path_begins_with_what_info_names():
    cuda_library()
    facts = _library.describe_cuda()
    if "error" in facts:
        pytest.skip("NO GPU FOUND: no path is taken")
    first = facts["experts on device 0"].split()[0]
    assert experts_path(SHAPE, "bfloat16") == first
    assert experts_path(SHAPE, "float32") == ("portable" if first == "hopper" else first)
    assert experts_path(SHAPE._replace(D=31), "bfloat16") == ("portable" if first == "hopper" else first)

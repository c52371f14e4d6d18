"""How the benchmarks time calls, and the layers and routings that they draw. No figure is tested."""

import argparse
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.bench import BenchError
from anabranch.jax import plan
from benchmarks import layer_jax, timing
from benchmarks.flags import parse_shape
from benchmarks.shapes import NAMED, SHAPES, LayerShape, draw_experts
from benchmarks.tables import experts_path

SHAPE = LayerShape(T=70, D=32, F=48, E=9, K=3)


def test_calls_of_a_program_stay_apart():
    """There is a barrier between them, and none is left out."""

    def ours(experts):
        return plan(experts, 16).row_of_slot

    shapes = [(jax.ShapeDtypeStruct((40, 2), "int32"),)] * 4
    lowered = jax.jit(timing.chained(ours)).lower(shapes)
    assert lowered.as_text().count("optimization_barrier") == 3
    assert lowered.compile().as_text().count('custom_call_target="ab_xla_plan"') == 4
    program = timing.program(ours, [(jnp.full((40, 2), e, jnp.int32),) for e in range(6)], 4)
    timed = timing.seconds_of_program(*program, repeats=2, seconds=0.0)
    assert 0 < timed.low <= timed.seconds <= timed.high


class Device:
    """torch.cuda of a device that is busy for as many calls as it is told to sleep, a million cycles each."""

    def __init__(self):
        self.busy = 0

    def synchronize(self):
        self.busy = 0

    def _sleep(self, cycles):
        self.busy = cycles / 1e6

    def Event(self):
        return types.SimpleNamespace(record=lambda: None, query=lambda: self.busy <= 0)


def test_the_time_of_the_host_is_that_of_calls_which_the_device_outlasts(monkeypatch):
    device, calls = Device(), []
    monkeypatch.setattr(timing, "torch_on", lambda name: types.SimpleNamespace(cuda=device))

    def call():
        device.busy -= 15
        calls.append(device.busy)

    assert timing.host_seconds(call, calls=10, repeats=3) > 0
    assert len(calls) == 1 + 10 * (2 + 3)  # a warm-up, two repeats in which the device slept too short, and three

    def waits():
        device.busy = 0

    assert timing.host_seconds(waits, calls=10, repeats=3) is None


def out_of_memory():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")


def measured(by):
    return layer_jax.measure(by, SHAPE, "float32", "zipf", repeats=2, product_size=64)


def test_a_layer_is_measured_through_jax(monkeypatch):
    monkeypatch.setattr(timing, "MOST_SETS", 2)
    found = measured("jax")
    assert found["times"]["forward"].seconds > 0 and found["times"]["both"].seconds > 0 and min(found["product"]) > 0
    assert found["note"] == "product: by XLA, not cuBLAS" and found["peak"] is None  # the CPU does not say
    assert found["planned"] >= 2 * SHAPE.operand_bytes(4)


def test_out_of_memory_is_a_note_and_other_failures_are_not(monkeypatch):
    def forward_alone(*given, topk):
        @jax.custom_vjp
        def identity(y):
            return y

        identity.defvjp(lambda y: (y, None), lambda _, d_y: out_of_memory())
        return identity(layer_jax.ours(*given, topk=topk))

    def broken(*_, topk):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such kernel")

    monkeypatch.setattr(timing, "MOST_SETS", 1)
    monkeypatch.setitem(layer_jax.LAYERS, "xla", layer_jax.Layer(forward_alone))
    found = measured("xla")
    assert list(found["times"]) == ["forward"] and found["note"].startswith("both: out of memory")
    monkeypatch.setitem(layer_jax.LAYERS, "xla", layer_jax.Layer(broken))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such kernel"):
        measured("xla")
    monkeypatch.setattr(layer_jax, "operands", lambda *_, **__: out_of_memory())
    assert measured("jax") == {"times": {}, "note": "out of memory"}


def test_the_library_is_asked_for_the_path_in_the_order_of_its_header(monkeypatch):
    from anabranch import _library

    asked = []

    def ab_cuda_experts_path(*given):
        *sizes, path, _ = given
        asked.append([size.value for size in sizes])
        path._obj.value = b"portable"
        return _library.Status(len(asked) - 1, b"T: got 0")

    monkeypatch.setattr(_library, "load_cuda", lambda: types.SimpleNamespace(ab_cuda_experts_path=ab_cuda_experts_path))
    assert experts_path(SHAPE, "bfloat16", w_in_layout="pfd") == "portable"
    T, D, F, E, K = SHAPE
    assert asked == [[_library.DTYPES["bfloat16"], T, K, E, D, 2, F, 1, 0, 1]]
    with pytest.raises(BenchError, match="path: T: got 0"):
        experts_path(SHAPE, "bfloat16")


def test_names_and_sizes_are_shapes():
    for shape in (*SHAPES, *NAMED.values()):
        assert parse_shape(str(shape)) == shape
    assert parse_shape("mixtral") == NAMED["mixtral"]
    for text, message in (
        ("qwen", "got 'qwen', expected T,D,F,E,K such as"),
        ("1,2,3,4", "got '1,2,3,4', expected T,D,F,E,K such as"),
        ("1,2,0,4,1", "got '1,2,0,4,1', expected T,D,F,E,K such as"),
        *(
            (text, "expected T,D,F,E,K with K <= E and T \\* K < 2\\^31")
            for text in ("8,8,8,2,3", "1073741824,8,8,2,2")
        ),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse_shape(text)


def test_a_step_needs_its_operands_its_results_and_h():
    """As counted from what is traced; x and the experts' weights are saved as operands."""
    shape = LayerShape(T=96, D=32, F=48, E=4, K=2)
    given = layer_jax.operands(shape, "bfloat16", "uniform")
    results = jax.tree.leaves(jax.eval_shape(layer_jax.passes(layer_jax.LAYERS["jax"], shape.K)["both"], *given))
    h = jax.ShapeDtypeStruct((shape.T * shape.K, 2, shape.F), given.x.dtype)
    operands = jax.tree.leaves(given)

    def size(arrays):
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

    assert shape.operand_bytes(2) == size(operands)
    assert shape.step_bytes(2) == size([*operands, *results, h])


def test_zipf_experts_are_distinct_and_have_their_shares():
    T, E, K = 40000, 12, 3
    experts = draw_experts(T, E, K, zipf=True)
    assert experts.shape == (T, K) and experts.dtype == np.int32
    assert all(len(set(row)) == K for row in experts[:2000].tolist())
    # The first is drawn with shares 1 / (1 + e); the second, given the first, with those of the others.
    weights = 1 / np.arange(1, E + 1)
    shares = weights / weights.sum()
    second = sum(
        shares[first] * np.where(np.arange(12) == first, 0, shares / (1 - shares[first])) for first in range(12)
    )
    for k, want in enumerate((shares, second)):
        got = np.bincount(experts[:, k], minlength=E) / T
        assert np.abs(got - want).max() < 5 * np.sqrt(want * (1 - want) / T).max()
    assert (draw_experts(T, E, K, seed=1, zipf=True) != experts).any()
    uniform = np.bincount(draw_experts(T, E, K).ravel(), minlength=E) / T
    assert np.abs(uniform - K / E).max() < 5 * np.sqrt(K / E / T)

"""How the benchmarks time calls, and the layers and routings that they draw. The measured times are not tested."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.bench import BenchError
from benchmarks import layer_jax, plan, timing
from benchmarks.figures import Measured, experts_path
from benchmarks.shapes import NAMED, SHAPES, LayerShape, parse_shape, zipf_experts

SHAPE = LayerShape(T=70, D=32, F=48, E=9, K=3)


def test_calls_of_a_program_are_separated_by_barriers():
    """XLA removes no call of a timed program."""
    functions = plan.jax_functions(16, ["jax"])
    shapes = [(timing.struct("cpu", 40, 2, dtype="int32"),)] * 4
    lowered = jax.jit(timing.chained(functions["jax plan"])).lower(shapes)
    assert lowered.as_text().count("optimization_barrier") == 3
    assert lowered.compile().as_text().count('custom_call_target="ab_xla_plan"') == 4
    program = timing.compile_all({"plan": (timing.chained(functions["jax plan"]), shapes)})["plan"]
    groups = timing.groups_of([(jnp.full((40, 2), e, jnp.int32),) for e in range(6)], 4)
    timed = timing.seconds_of_program(program, groups, repeats=2, seconds=0.0)
    assert 0 < timed.low <= timed.seconds <= timed.high


class Device:
    """Stands for torch.cuda, with a device that is busy for one call per million cycles of `_sleep`."""

    def __init__(self):
        self.busy = 0

    def synchronize(self):
        self.busy = 0

    def _sleep(self, cycles):
        self.busy = cycles / 1e6

    def Event(self):
        return types.SimpleNamespace(record=lambda: None, query=lambda: self.busy <= 0)


def test_host_time_is_measured_while_the_device_is_busy(monkeypatch):
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


def test_a_layer_is_measured_through_jax(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MOST_SETS", 2)
    found = layer_jax.measure(
        "jax", SHAPE, "float32", "zipf", repeats=2, product_size=64, trace=str(tmp_path / "trace")
    )
    assert found.forward.seconds > 0 and found.both.seconds > 0 and min(found.product) > 0
    assert found.note == "product: by XLA, not cuBLAS" and found.peak is None  # the CPU reports no peak
    assert found.memory.arguments >= SHAPE.operand_bytes(4) <= found.memory.outputs
    assert 1 < found.largest_load <= SHAPE.E / SHAPE.K
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


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
    assert found.both is None and found.forward is not None and found.note.startswith("both: out of memory")
    monkeypatch.setitem(layer_jax.LAYERS, "xla", layer_jax.Layer(broken))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such kernel"):
        measured("xla")
    monkeypatch.setattr(layer_jax, "operands", lambda *_, **__: out_of_memory())
    assert measured("jax") == Measured(note="out of memory")


def test_the_experts_path_function_gets_arguments_in_the_headers_order(monkeypatch):
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
        ("8,8,8,2,3", "expected T,D,F,E,K with K <= E"),
        ("1073741824,8,8,2,2", "expected T,D,F,E,K with T \\* K < 2\\^31"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_shape(text)


def test_a_step_needs_its_operands_its_results_and_h():
    """The bytes are counted in the traced program; x and the experts' weights are saved as operands."""
    shape = LayerShape(T=96, D=32, F=48, E=4, K=2)
    given = layer_jax.operands(shape, "bfloat16", "uniform")
    results = jax.tree.leaves(jax.eval_shape(layer_jax.both(layer_jax.LAYERS["jax"], shape.K), *given))
    h = jax.ShapeDtypeStruct((shape.T * shape.K, 2, shape.F), given.x.dtype)
    operands = jax.tree.leaves(given)

    def size(arrays):
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

    assert shape.operand_bytes(2) == size(operands)
    assert shape.step_bytes(2) == size([*operands, *results, h])


def test_zipf_experts_are_distinct_and_have_their_shares():
    shape = LayerShape(T=40000, D=1, F=1, E=12, K=3)
    experts = zipf_experts(shape)
    assert experts.shape == (shape.T, shape.K) and experts.dtype == np.int32
    assert all(len(set(row)) == shape.K for row in experts[:2000].tolist())
    # The first expert is drawn with shares 1 / (1 + e), the second with the shares of the remaining experts.
    weights = 1 / np.arange(1, shape.E + 1)
    shares = weights / weights.sum()
    second = sum(
        shares[first] * np.where(np.arange(12) == first, 0, shares / (1 - shares[first])) for first in range(12)
    )
    for k, want in enumerate((shares, second)):
        got = np.bincount(experts[:, k], minlength=shape.E) / shape.T
        assert np.abs(got - want).max() < 5 * np.sqrt(want * (1 - want) / shape.T).max()
    np.testing.assert_array_equal(zipf_experts(shape), experts)
    assert (zipf_experts(shape, seed=1) != experts).any()

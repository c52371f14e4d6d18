"""All implementations that a benchmark compares compute the same function."""

import sys
import types

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from anabranch.bench import BenchError  # noqa: E402
from anabranch.jax import plan as plan_in_jax  # noqa: E402
from benchmarks import (  # noqa: E402
    dispatch,
    experts,
    layer,
    layer_jax,
    layer_torch,
    plan,
    router,
    timing,
    torch_modes,
)
from benchmarks.peers import sonicmoe, transformers, xla  # noqa: E402
from benchmarks.peers import torch as eager  # noqa: E402
from benchmarks.shapes import LayerShape  # noqa: E402
from oracle import assert_close, assert_close_per_expert  # noqa: E402

SHAPE = LayerShape(T=70, D=32, F=48, E=9, K=3)
WIDE = LayerShape(T=40, D=128, F=128, E=4, K=2)
#: One of each kind of routing.
CASES = [case for case in router.CASES if case[:2] in ((64, 8), (128, 4), (256, 8), (384, 8))]


def arrays(results):
    return [np.asarray(result.detach() if isinstance(result, torch.Tensor) else result) for result in results]


def assert_same(got, want, names, bound=1e-5):
    for name, mine, theirs in zip(names, arrays(got), arrays(want), strict=True):
        compare = assert_close_per_expert if name.startswith("d_w_") else assert_close
        compare(mine, theirs, bound, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peers_compute_our_routing(case):
    given = router.operands(case, 40, "float32", "cpu")
    logits, bias, d_probs = (timing.as_jax(tensor) for tensor in given[:3])
    (probs, routing_map), pull = jax.vjp(lambda z: router.ours_dense(case, z, bias), logits)
    zeros = np.zeros(routing_map.shape, jax.dtypes.float0)
    d_logits = pull((d_probs, zeros))[0]
    xla_results, pull = jax.vjp(lambda z: xla.dense(case, z, bias), logits)
    leaf = given.logits.detach().requires_grad_()
    torch_results = eager.dense(case, leaf, given.bias)
    d_torch = torch.autograd.grad(torch_results[0], leaf, given.d_probs)[0]
    for got, d_got in ((xla_results, pull((d_probs, zeros))[0]), (torch_results, d_torch)):
        assert_same((got[0], d_got), (probs, d_logits), ("probs", "d_logits"))
        np.testing.assert_array_equal(arrays(got)[1], routing_map)
    compact = router.ours_compact(case, logits, bias)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(probs), compact.experts, -1), compact.weights)


def test_peers_compute_our_plan():
    E, slots = 20, torch.randint(20, (50, 4), dtype=torch.int32)
    ours = plan_in_jax(timing.as_jax(slots), E)
    want = [ours.tokens_per_expert, ours.offsets, ours.row_of_slot, ours.slot_of_row]
    for got in (xla.plan(timing.as_jax(slots), E), eager.plan(slots, E)):
        for mine, theirs in zip(arrays(got), want, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    drawn = plan.experts(30, 6, 3, "cpu", skewed=True)
    assert all(len(set(row)) == 3 for row in drawn.tolist())


def test_peers_compute_our_dispatch():
    given = dispatch.Operands((30, 5, 2, 16), "float32", "cpu")
    calls, written = dispatch.c_calls(given)
    programs = {by: dispatch.jax_programs([given], by) for by in ("jax", "xla")}
    results = {"dispatch": ["rows"], "combine backward": ["rows", "d_weights"]}
    for operation, call in dispatch.torch_calls(given).items():
        calls[operation]()
        want = [written[name].clone() for name in results.get(operation, ["out"])]
        got = {by: of[operation].run(of[operation].groups[0])[0] for by, of in programs.items()}
        for peer in (call(), *got.values()):
            peer = peer if isinstance(peer, tuple) else (peer,)
            assert_same(peer, want, results.get(operation, ["out"]))


def test_peers_compute_our_experts():
    given = experts.Operands(SHAPE, "float32", "cpu")
    calls, written = experts.c_calls(given)
    calls["both"]()
    y = written["y"]
    for by in ("jax", "xla", "ragged-dot"):
        programs = experts.jax_programs([given], by)
        (forward,), (both,) = (programs[name].run(programs[name].groups[0]) for name in ("forward", "both"))
        assert_same((forward, both[0]), (y, y), ("y", "y"))
        if by == "jax":
            gradients = both[1]
            got = (gradients.rows, gradients.up.w, gradients.down.w, gradients.weights)
            want = (written[name] for name in ("dx_rows", "d_w_in", "d_w_out", "d_weights"))
            assert_same(got, want, ("dx_rows", "d_w_in", "d_w_out", "d_weights"))
    d_x, d_w_in, d_w_out = experts.torch_calls(given)["both"]()
    assert_same([experts.torch_calls(given)["forward"]()], [y], ["y"])
    want, pull = jax.vjp(
        lambda *a: xla.network(*a, timing.as_jax(given.token), timing.as_jax(given.group_sizes)),
        *(timing.as_jax(tensor) for tensor in (given.x, given.w_in, given.w_out)),
    )
    d_y = timing.as_jax(given.d_out)[timing.as_jax(given.token)]
    assert_same((want, d_x, d_w_in, d_w_out), (y, *pull(d_y)), ("y", "d_x", "d_w_in", "d_w_out"))


def test_the_experts_options_reach_the_c_function():
    given = experts.Operands(WIDE, "float32", "cpu")
    found = {}
    for options in ({}, {"precision": "fp8"}, {"activation": "swiglu_oai"}):
        calls, written = experts.c_calls(given, **options)
        calls["both"]()
        program = experts.jax_programs([given], "jax", **options)["forward"]
        (want,) = program.run(program.groups[0])
        assert_same([written["y"]], [want], ["y"])
        found[str(options)] = written["y"]
    assert len({float(y.sum()) for y in found.values()}) == 3


@pytest.fixture(params=layer.ROUTINGS)
def whole_layer(request):
    """Operands in torch and JAX, and our layer's results for them: the output and four gradients."""
    given = layer_torch.operands(SHAPE, "float32", request.param, "cpu")
    chosen = None if given.experts is None else timing.as_jax(given.experts.int())
    jax_operands = layer_jax.Operands(*map(timing.as_jax, (*given.leaves, given.d_out)), experts=chosen)
    return given, jax_operands, layer_jax.both(layer_jax.LAYERS["jax"], SHAPE.K)(*jax_operands)


NAMES = ("output", "d_x", "d_gate", "d_w_in", "d_w_out")


@pytest.mark.parametrize("by", ["c", "torch", "torch-loop"])
def test_c_and_torch_compute_our_layer(by, whole_layer):
    given, jax_operands, want = whole_layer
    calls = layer_torch.calls_of(by, given, SHAPE.K)
    assert_same(calls["both"](), want, NAMES)
    assert_same([calls["forward"]()], want[:1], NAMES[:1])
    assert layer_torch.largest_load(given, SHAPE.K) == pytest.approx(layer_jax.largest_load(jax_operands, SHAPE.K))


def test_plain_jax_computes_our_layer(whole_layer):
    _, given, want = whole_layer
    assert_same(layer_jax.both(layer_jax.LAYERS["xla"], SHAPE.K)(*given), want, NAMES)
    assert_same([layer_jax.forward(layer_jax.LAYERS["ragged-dot"], SHAPE.K)(*given)], want[:1], NAMES[:1])


@pytest.mark.parametrize("by", layer.VARIANTS)
def test_variants_are_our_layer(by):
    variant, given = layer_jax.LAYERS[by], layer_jax.operands(SHAPE, "float32", "uniform")
    want = layer_jax.both(layer_jax.LAYERS["jax"], SHAPE.K)(*given)
    drawn = layer_jax.operands(SHAPE, "float32", "uniform", layouts=variant.layouts, biases=variant.biases)
    moved = {name: getattr(given, name).transpose(variant.layouts.from_ours(name)) for name in ("w_in", "w_out")}
    assert {name: getattr(drawn, name).shape for name in moved} == {name: a.shape for name, a in moved.items()}
    biases = {name: 0 * bias for name, bias in drawn.biases().items()}
    output, d_x, d_gate, d_w_in, d_w_out, *d_biases = layer_jax.both(variant, SHAPE.K)(
        *given._replace(**moved, **biases)
    )
    assert [d.shape for d in d_biases] == [bias.shape for bias in biases.values()]
    back = [d.transpose(variant.layouts.order(name)) for name, d in (("w_in", d_w_in), ("w_out", d_w_out))]
    if by == "jax-swiglu-oai":
        assert np.any(np.abs(output - want[0]) > 1e-2)
    else:
        assert_same((output, d_x, d_gate, *back), want, NAMES)


def test_sonicmoe_is_given_our_layer(monkeypatch):
    inference = []

    def stand_in(x, router_w, w1, b1, w2, b2, K, stream_id, is_inference_mode_enabled=False):
        """router_w [E, D]; w1 [2 F, D, E], a column's gate and up side by side; w2 [D, F, E]; no biases."""
        assert b1 is b2 is None and w1.stride()[1] == w2.stride()[1] == 1
        inference.append(is_inference_mode_enabled)
        logits, (columns, D, E) = x @ router_w.T, w1.shape
        w_in = w1.permute(2, 1, 0).reshape(E, D, columns // 2, 2).transpose(2, 3)
        output = eager.layer(x, router_w.T, w_in.contiguous(), w2.permute(2, 1, 0), topk=K)
        return output, logits, None

    monkeypatch.setitem(sys.modules, "sonicmoe", types.SimpleNamespace(moe_TC_softmax_topk_layer=stand_in))
    given = layer_torch.operands(SHAPE, "float32", "uniform", "cpu")
    calls = sonicmoe.calls(given, SHAPE.K)
    output, d_x, d_router, d_up, d_down = calls["both"]()
    d_w_in = d_up.reshape(SHAPE.E, SHAPE.F, 2, SHAPE.D).permute(0, 3, 2, 1)
    want = layer_torch.calls_of("torch", given, SHAPE.K)["both"]()
    assert_same((output, d_x, d_router.T, d_w_in, d_down.transpose(1, 2)), want, NAMES)
    assert_same([calls["forward"]()], want[:1], NAMES[:1])
    assert inference == [True, False, False, True]
    zipf = layer_torch.operands(SHAPE, "float32", "zipf", "cpu")
    with pytest.raises(BenchError, match="--routing: got zipf with --by sonicmoe, expected uniform"):
        sonicmoe.calls(zipf, SHAPE.K)
    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    with pytest.raises(BenchError, match="--by: got sonicmoe, which needs the package sonic-moe"):
        sonicmoe.calls(given, SHAPE.K)


@pytest.mark.parametrize("by", torch_modes.BY["cpu"])
def test_every_layer_in_torch_is_moe(by):
    if by.startswith("hf-") and not transformers.installed():
        pytest.skip("NO TRANSFORMERS FOUND: its layer is not compared with ours")
    given = layer_torch.operands(SHAPE, "float32", "uniform", "cpu")
    made = torch_modes.make(by, SHAPE, given)
    output, d_x, d_gate, d_w_in, d_w_out = made.both()
    if by not in ("moe", "grouped_mm"):  # weights in the layouts of checkpoints
        d_gate, d_w_out = d_gate.T, d_w_out.mT
        d_w_in = d_w_in.unflatten(1, (2, -1)).permute(0, 3, 1, 2)
    want = layer_torch.calls_of("torch", given, SHAPE.K)["both"]()
    assert_same((output, d_x, d_gate, d_w_in, d_w_out), want, NAMES)
    assert_same([made.forward()], want[:1], NAMES[:1])


def test_weights_quantised_in_or_before_a_pass_give_the_same_bits():
    given = layer_torch.operands(WIDE, "float32", "uniform", "cpu")
    within, kept = (torch_modes.make(by, WIDE, given).both() for by in torch_modes.FP8)
    torch.testing.assert_close(within, kept, rtol=0, atol=0)
    exact = torch_modes.make("moe", WIDE, given).forward()
    assert 0.01 < (within[0] - exact).norm() / exact.norm() < 0.2


def test_operands_are_equal_in_both_frameworks():
    shape = SHAPE._replace(T=2000)
    for routing in layer.ROUTINGS:
        ours = layer_jax.operands(shape, "float32", routing)
        theirs = layer_torch.operands(shape, "float32", routing, "cpu")
        for mine, other in zip(ours[:5], (*theirs.leaves, theirs.d_out), strict=True):
            assert mine.shape == other.shape
            assert np.std(mine) == pytest.approx(np.std(other.detach().numpy()), rel=0.1)
        assert (layer_jax.largest_load(ours, shape.K) > 2) == (routing == "zipf")
    np.testing.assert_array_equal(ours.experts, theirs.experts.numpy())  # zipf's
    w_in = np.asarray(ours.w_in)
    assert len(np.unique(w_in[:, 0, 0, 0])) == SHAPE.E, "every expert has numbers of its own"

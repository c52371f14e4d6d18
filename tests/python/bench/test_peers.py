"""What the benchmarks compare is the same computation."""

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
    d_logits = pull((d_probs, np.zeros(routing_map.shape, jax.dtypes.float0)))[0]
    leaf = given.logits.detach().requires_grad_()
    of_torch = eager.dense(case, leaf, given.bias)
    d_of_torch = torch.autograd.grad(of_torch[0], leaf, given.d_probs)[0]
    of_c = router.c_calls(case, given)
    got_c = of_c["dense"]()
    for got in (xla.dense(case, logits, bias), of_torch, (got_c["probs"], got_c["routing_map"])):
        assert_same(got[:1], (probs,), ("probs",))
        np.testing.assert_array_equal(arrays(got)[1], routing_map)
    assert_same((d_of_torch, of_c["d dense"]()["d_logits"]), (d_logits, d_logits), ("d_logits", "d_logits"))
    compact = router.ours(case, logits, bias)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(probs), compact.experts, -1), compact.weights)
    for name in ("compact", "plain"):
        np.testing.assert_array_equal(of_c[name]()["weights"], compact.weights)


def test_peers_compute_our_plan():
    E, slots = 20, torch.randint(20, (50, 4), dtype=torch.int32)
    ours = plan_in_jax(timing.as_jax(slots), E)
    want = [ours.tokens_per_expert, ours.offsets, ours.row_of_slot, ours.slot_of_row]
    names = ("tokens_per_expert", "offsets", "row_of_slot", "slot_of_row")
    of_c = plan.c_calls(slots, E)["plan"]()
    for got in (xla.plan(timing.as_jax(slots), E), eager.plan(slots, E), [of_c[name] for name in names]):
        for mine, theirs in zip(arrays(got), want, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_peers_compute_our_dispatch():
    given = dispatch.Operands((30, 5, 2, 16), "float32", "cpu")
    calls, peers = dispatch.c_calls(given), dispatch.torch_calls(given)
    assert calls.keys() - peers.keys() == {"sort chunks"}
    results = {"dispatch": ["rows"], "combine backward": ["d_rows", "d_weights"]}
    for operation, call in peers.items():
        names, written, got = results.get(operation, ["out"]), calls[operation](), call()
        assert_same(got if isinstance(got, tuple) else (got,), [written[name] for name in names], names)


def test_peers_compute_our_experts():
    given = experts.Operands(SHAPE, "float32", "cpu")
    calls, peers = experts.c_calls(given), experts.torch_calls(given)
    want = calls["both"]()
    assert_same((calls["forward"]()["y"], peers["forward"]()), (want["y"], want["y"]), ("y", "y"))
    d_x = torch.zeros_like(given.x).index_add(0, given.token, unweighted(given, want["dx_rows"]))
    assert_same(peers["both"]()[:1], [d_x], ["d_x"])


def unweighted(given, rows):
    """Rows of a gradient that is linear in the weights, without them. torch's experts have no weights."""
    return rows / given.weights.flatten()[given.slot_of_row][:, None]


def test_the_experts_options_reach_the_c_function():
    given = experts.Operands(WIDE, "float32", "cpu")
    found = [
        experts.c_calls(given, **options)["forward"]()["y"]
        for options in ({}, {"precision": "fp8"}, {"activation": "swiglu_oai"})
    ]
    assert 0.01 < (found[1] - found[0]).norm() / found[0].norm() < 0.2
    assert 0.2 < (found[2] - found[0]).norm() / found[0].norm()


@pytest.fixture(params=layer.ROUTINGS)
def whole_layer(request):
    """Operands in torch and JAX, and what our layer makes of them: the output and four gradients."""
    given = layer_torch.operands(SHAPE, "float32", request.param, "cpu")
    chosen = None if given.experts is None else timing.as_jax(given.experts.int())
    of_jax = layer_jax.Operands(*map(timing.as_jax, (*given.leaves, given.d_out)), experts=chosen)
    return given, of_jax, layer_jax.passes(layer_jax.LAYERS["jax"], SHAPE.K)["both"](*of_jax)


NAMES = ("output", "d_x", "d_gate", "d_w_in", "d_w_out")


@pytest.mark.parametrize("by", ["c", "torch", "torch-loop"])
def test_c_and_torch_compute_our_layer(by, whole_layer):
    given, _, want = whole_layer
    calls = layer_torch.calls_of(by, given, SHAPE.K)
    assert_same(calls["both"](), want, NAMES)
    assert_same([calls["forward"]()], want[:1], NAMES[:1])


def test_plain_jax_computes_our_layer(whole_layer):
    _, given, want = whole_layer
    assert_same(layer_jax.passes(layer_jax.LAYERS["xla"], SHAPE.K)["both"](*given), want, NAMES)
    assert_same([layer_jax.passes(layer_jax.LAYERS["ragged-dot"], SHAPE.K)["forward"](*given)], want[:1], NAMES[:1])


@pytest.mark.parametrize("by", layer.VARIANTS)
def test_variants_are_our_layer(by):
    variant, given = layer_jax.LAYERS[by], layer_jax.operands(SHAPE, "float32", "uniform")
    want = layer_jax.passes(layer_jax.LAYERS["jax"], SHAPE.K)["both"](*given)
    drawn = layer_jax.operands(SHAPE, "float32", "uniform", by=by)
    moved = {name: getattr(given, name).transpose(variant.layouts.from_ours(name)) for name in ("w_in", "w_out")}
    assert {name: getattr(drawn, name).shape for name in moved} == {name: a.shape for name, a in moved.items()}
    biases = {name: 0 * bias for name, bias in drawn.biases().items()}
    both = layer_jax.passes(variant, SHAPE.K)["both"]
    output, d_x, d_gate, d_w_in, d_w_out, *d_biases = both(*given._replace(**moved, **biases))
    assert [d.shape for d in d_biases] == [bias.shape for bias in biases.values()]
    back = [d.transpose(variant.layouts.order(name)) for name, d in (("w_in", d_w_in), ("w_out", d_w_out))]
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
    calls = layer_torch.calls_of("sonicmoe", given, SHAPE.K)
    output, d_x, d_router, d_up, d_down = calls["both"]()
    d_w_in = d_up.reshape(SHAPE.E, SHAPE.F, 2, SHAPE.D).permute(0, 3, 2, 1)
    want = layer_torch.calls_of("torch", given, SHAPE.K)["both"]()
    assert_same((output, d_x, d_router.T, d_w_in, d_down.transpose(1, 2)), want, NAMES)
    assert_same([calls["forward"]()], want[:1], NAMES[:1])
    assert inference == [False, True]
    zipf = layer_torch.operands(SHAPE, "float32", "zipf", "cpu")
    with pytest.raises(BenchError, match="--routing: got zipf with --by sonicmoe, expected uniform"):
        sonicmoe.layer(zipf, SHAPE.K)
    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    with pytest.raises(BenchError, match="--by: got sonicmoe, which needs the package sonic-moe"):
        sonicmoe.layer(given, SHAPE.K)


@pytest.mark.parametrize("by", [by for by in torch_modes.MODES if by not in (*layer_torch.FP8, "jax")])
def test_every_layer_in_torch_is_moe(by):
    if by.startswith("hf-") and not transformers.installed():
        pytest.skip("NO TRANSFORMERS FOUND: its layer is not compared with ours")
    given = layer_torch.operands(SHAPE, "float32", "uniform", "cpu")
    made = layer_torch.make(by, given, SHAPE.K)
    output, d_x, d_gate, d_w_in, d_w_out = made.both()
    if by not in ("moe", "grouped_mm"):  # as checkpoints have them
        d_gate, d_w_out = d_gate.T, d_w_out.mT
        d_w_in = d_w_in.unflatten(1, (2, -1)).permute(0, 3, 1, 2)
    want = layer_torch.calls_of("torch", given, SHAPE.K)["both"]()
    assert_same((output, d_x, d_gate, d_w_in, d_w_out), want, NAMES)
    assert_same([made.forward()], want[:1], NAMES[:1])


def test_layers_are_compiled_in_these_modes_alone(monkeypatch):
    given, compiled = layer_torch.operands(SHAPE, "float32", "uniform", "cpu"), []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    for mode in ("eager", "graph", "compiled", "reduce-overhead"):
        layer_torch.calls_of("moe", given, SHAPE.K, mode)
    assert compiled == [{"fullgraph": True}, {"fullgraph": True, "mode": "reduce-overhead"}]


def test_quantised_experts_are_quantised_within_or_before():
    given = layer_torch.operands(WIDE, "float32", "uniform", "cpu")
    within, kept = (layer_torch.make(by, given, WIDE.K).both() for by in layer_torch.FP8)
    torch.testing.assert_close(within, kept, rtol=0, atol=0)
    exact = layer_torch.make("moe", given, WIDE.K).forward()
    assert 0.01 < (within[0] - exact).norm() / exact.norm() < 0.2


def test_operands_are_alike_in_both_frameworks():
    shape = SHAPE._replace(T=2000)
    for routing in layer.ROUTINGS:
        ours = layer_jax.operands(shape, "float32", routing)
        theirs = layer_torch.operands(shape, "float32", routing, "cpu")
        for mine, other in zip(ours[:5], (*theirs.leaves, theirs.d_out), strict=True):
            assert mine.shape == other.shape
            assert np.std(mine) == pytest.approx(np.std(other.detach().numpy()), rel=0.1)
        assert (ours.experts is None) == (theirs.experts is None) == (routing == "uniform")
    np.testing.assert_array_equal(ours.experts, theirs.experts.numpy())  # zipf's
    w_in = np.asarray(ours.w_in)
    assert len(np.unique(w_in[:, 0, 0, 0])) == SHAPE.E, "every expert has numbers of its own"

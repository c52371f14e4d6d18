"""precision="auto": every front end computes what the precision that is chosen computes, bit by bit."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from moe_cases import operands, run_layer
from routed_cases import routed_operands, run_routed

import anabranch.jax as ab
import anabranch.torch as abt
from anabranch import precision_choice
from anabranch.jax.linen import MoEBlock
from anabranch.jax.nnx import MoE
from anabranch.jax.ops import precision_choice as in_jax
from anabranch.torch.ops import precision_choice as in_torch
from frameworks import both

of_moe, of_routed_experts = (importlib.import_module(f"anabranch.torch.{name}") for name in ("moe", "routed_experts"))
T, E, K, D, F = 24, 3, 2, 128, 256
NAMES = "'highest', 'tf32', 'fp8', 'auto'"


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the model; it answers as on a GPU, where FP8 can be had "fp8", unless `answer` is another."""

    class Asked(list):
        answer = "fp8"

        def forget(self, answer="fp8"):
            """Also what torch's layers have looked up."""
            self.answer = answer
            self.clear()
            for module in (of_moe, of_routed_experts):
                module._right_before.found.clear()

    calls = Asked()

    def choose(size, **facts):
        calls.append((size, facts))
        choice = precision_choice.choose_precision(size, **facts | {"capability": "9.0"})
        return choice if choice.why else choice._replace(precision=calls.answer)

    for module in (in_jax, in_torch):
        monkeypatch.setattr(module, "choose_precision", choose)
    calls.forget()
    yield calls
    calls.forget()


def same(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32), equal_nan=True)


@both
@pytest.mark.parametrize("answer", ["fp8", "highest"])
def test_the_layer_and_its_gradients_are_those_of_what_is_chosen(asked, answer):
    asked.forget(answer)
    arrays = operands(T, E, K, D, F, dtype="bfloat16")
    got = run_layer(arrays, topk=K, precision="auto")
    assert asked and asked[0][0] == (T, D, F, E, K, 2) and asked[0][1]["dtype"] == "bfloat16"
    same(got[1], run_layer(arrays, topk=K, precision=answer)[1])
    arrays = routed_operands(T, E, K, D, F, dtype="bfloat16")
    scales = dict(fp8_scales="power_of_two") if answer == "fp8" else {}
    got = run_routed(arrays, activation="silu", precision="auto", fp8_scales="power_of_two")
    same(got[:2], run_routed(arrays, activation="silu", precision=answer, **scales)[:2])


@both
def test_widths_without_whole_blocks_and_float32_are_highest(asked):
    for dtype, width in (("bfloat16", 72), ("float32", D)):
        arrays = operands(T, E, K, width, F, dtype=dtype)
        same(run_layer(arrays, topk=K, precision="auto")[:2], run_layer(arrays, topk=K)[:2])


@both
def test_a_cpu_has_nothing_from_it():
    arrays = operands(T, E, K, D, F, dtype="bfloat16")
    same(run_layer(arrays, topk=K, precision="auto")[:2], run_layer(arrays, topk=K)[:2])


def of_jax(**options):
    rng = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(rng[0], (T, D), jnp.bfloat16)
    w_in = jax.random.normal(rng[1], (E, D, 2, F), jnp.bfloat16) / 11
    w_out = jax.random.normal(rng[2], (E, F, D), jnp.bfloat16) / 16
    return rows, w_in, w_out


def test_quantised_experts_are_used_with_fp8_and_checked_and_left_alone_else(asked):
    rows, w_in, w_out = of_jax()
    gate, sizes = jnp.ones((D, E), jnp.bfloat16), jnp.array([8, 10, 6])
    other = 2 * w_in, w_out  # which of both a product takes can be seen
    of_torch = [torch.from_numpy(np.asarray(a, np.float32)).bfloat16() for a in (rows, gate, w_in, w_out)]
    for gradients in (True, False):
        kept = ab.quantize_experts(*other, gradients=gradients)
        kept_torch = abt.quantize_experts(2 * of_torch[2], of_torch[3], gradients=gradients)
        for answer in ("fp8", "highest"):
            asked.forget(answer)
            has = kept if answer == "fp8" else None
            options = dict(precision=answer, quantized=has)
            got = ab.moe(rows, gate, w_in, w_out, topk=K, precision="auto", quantized=kept)
            same(got, ab.moe(rows, gate, w_in, w_out, topk=K, **options))
            got = ab.expert_ffn(rows, w_in, w_out, sizes, precision="auto", quantized=kept)
            same(got, ab.expert_ffn(rows, w_in, w_out, sizes, **options))
            assert len(asked) == 2
            for _, facts in asked:  # without what gradients take, no backward pass is expected
                passes = ("forward", "backward") if gradients else ("forward",)
                assert facts["kept"] == facts["passes"] == passes
            options["quantized"] = kept_torch if answer == "fp8" else None
            got = abt.moe(*of_torch, topk=K, precision="auto", quantized=kept_torch).output
            assert torch.equal(got, abt.moe(*of_torch, topk=K, **options).output)
            x, _, *weights = of_torch
            got = abt.expert_ffn(x, *weights, torch.tensor([8, 10, 6]), precision="auto", quantized=kept_torch)
            assert torch.equal(got, abt.expert_ffn(x, *weights, torch.tensor([8, 10, 6]), **options))
    with pytest.raises(TypeError, match="quantized: got a int, expected a QuantizedExperts"):
        ab.moe(rows, gate, w_in, w_out, topk=K, precision="auto", quantized=3)
    with pytest.raises(TypeError, match="quantized: got a int, expected a QuantizedExperts"):
        abt.moe(*of_torch, topk=K, precision="auto", quantized=3)
    with pytest.raises(ValueError, match=r"quantized\.w_in"):
        narrow = ab.quantize_experts(w_in[:, :, :, :128], w_out[:, :128])
        ab.moe(rows, gate, w_in, w_out, topk=K, precision="auto", quantized=narrow)


def test_layers_pass_it_on(asked):
    x = jax.random.normal(jax.random.key(5), (T, D), jnp.bfloat16)
    named = {}
    for precision in ("auto", "fp8"):
        layer = MoE(D, F, num_experts=E, topk=K, precision=precision, shared_features=64, rngs=nnx.Rngs(0))
        block = MoEBlock(
            num_experts=E, num_experts_per_tok=K, intermediate_size=F, precision=precision, dtype=jnp.bfloat16
        )
        variables = block.init(jax.random.key(1), x)
        torch.manual_seed(0)
        module = abt.MoE(D, F, num_experts=E, topk=K, precision=precision)
        tokens = torch.ones(T, D).bfloat16()
        quantized = module.quantized()
        of_module = module(tokens).output, module(tokens, quantized=quantized).output
        named[precision] = layer(x).output, block.apply(variables, x), *(o.detach().float().numpy() for o in of_module)
    same(named["auto"], named["fp8"])
    assert len(asked) >= 4
    MoE(100, 72, num_experts=E, topk=K, precision="auto", rngs=nnx.Rngs(0))(jnp.ones((2, 100)))
    abt.MoE(100, 72, num_experts=E, topk=K, precision="auto")(torch.ones(2, 100))


def test_torch_knows_whether_there_will_be_a_backward_pass(asked):
    x, gate, w_in, w_out = (torch.randn(*s).bfloat16() for s in ((T, D), (D, E), (E, D, 2, F), (E, F, D)))

    def passes(**options):
        asked.clear()
        abt.moe(x, gate, w_in, w_out, topk=K, precision="auto", **options)
        return asked[-1][1]["passes"] if asked else None

    assert passes() == ("forward",)
    assert passes() is None  # it was looked up
    w_in.requires_grad_()
    assert passes() == ("forward", "backward")
    with torch.no_grad():  # as a checkpoint runs, which has to be the step's
        assert passes() is None
    w_in.requires_grad_(False)
    b_out = torch.zeros(E * D + 1).bfloat16()[1:].view(E, D)
    assert passes(b_out=b_out) == ("forward",)
    assert asked[-1][1]["capability"] is None and not in_torch.facts_of("auto", (x,), (b_out,)).aligned


def test_a_compiled_step_of_torch_has_one_answer(asked):
    layer = abt.MoE(D, F, num_experts=E, topk=K, precision="auto")
    x = torch.randn(T, D)
    want = layer(x).output
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x).output
    assert torch.equal(got, want)


def test_on_a_mesh_sizes_are_those_of_a_device(asked):
    spread = in_jax.Spread(tokens=2, experts=4, hidden=2, widths=2)
    from anabranch.jax.layer.fused_layer import network_config
    from anabranch.jax.ops.ffn import FfnConfig
    from anabranch.layouts import Layouts

    config = network_config("silu", 2, K, False, Layouts(), "auto", "float32")
    assert isinstance(config, FfnConfig)
    x, w_in = jnp.ones((2, 8, 512), jnp.bfloat16), jnp.ones((8, 512, 2, 512), jnp.bfloat16)
    found = in_jax.decided(config, x, w_in, None, spread)
    assert asked == [(precision_choice.LayerSize(8, 512, 256, 2, K, 2), asked[0][1])]
    assert asked[0][1]["width_shards"] == 2 and found == dataclasses.replace(config, precision=2)


def test_errors_name_every_precision():
    rows, w_in, w_out = of_jax()
    sizes = jnp.array([8, 10, 6])
    of_torch = [torch.ones(*shape) for shape in ((T, D), (D, E), (E, D, 2, F), (E, F, D))]
    with pytest.raises(TypeError, match=r"b_out: got .*sparse"):
        abt.moe(*of_torch, topk=K, precision="auto", b_out=torch.ones(E, D).to_sparse())
    with pytest.raises(ValueError, match=f"precision: got 'fp16', expected one of {NAMES}"):
        ab.expert_ffn(rows, w_in, w_out, sizes, precision="fp16")
    with pytest.raises(ValueError, match=f"precision: got 'fp16', expected one of {NAMES}"):
        abt.MoE(D, F, num_experts=E, topk=K, precision="fp16")
    for call in (
        lambda: ab.grouped_matmul(rows, w_out.transpose(0, 2, 1), sizes, precision="auto"),
        lambda: abt.grouped_matmul(torch.ones(2, D), torch.ones(1, D, F), torch.tensor([2]), precision="auto"),
    ):
        with pytest.raises(ValueError, match=r"precision: got 'auto', expected one of 'highest', 'tf32', 'fp8'$"):
            call()

"""precision="fp8" in JAX's layers and transforms, and the C library calls of a training step."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import anabranch.jax as ab
from anabranch.jax.linen import MoEBlock
from anabranch.jax.nnx import MoE
from moe_cases import operands

T, E, K, D, F = 24, 3, 2, 128, 128
FP8 = dict(precision="fp8", fp8_scales="power_of_two")
ARRAYS = operands(T, E, K, D, F)
OPERANDS = tuple(ARRAYS[name] for name in ("x", "gate", "w_in", "w_out"))


def layer(*operands, **options):
    return ab.moe(*operands, topk=K, **FP8, **options).output


def calls(function, *arrays):
    """[(function, precision, fp8_scales)] of a program's calls; None: no such attribute."""

    def number(name, text):
        found = re.search(rf"\b{name} = (\d+) : i32", text)
        return found and int(found[1])

    text = jax.jit(function).lower(*arrays).as_text()
    found = re.findall(r"@ab_xla_(grouped_\w+|expert_\w+|quantize_\w+)\((.*)", text)
    return [(name, number("precision", rest), number("fp8_scales", rest)) for name, rest in found]


def loss(*arrays, **options):
    return jnp.sum(jnp.sin(layer(*arrays, **options)))


def test_every_gemm_of_a_step_has_the_options_and_weights_are_quantised_once_per_pass():
    step = calls(jax.value_and_grad(loss, (0, 1, 2, 3)), *OPERANDS)
    assert {(precision, scales) for name, precision, scales in step if name.startswith("q")} == {(None, 1)}
    products = [call for call in step if not call[0].startswith("q")]
    assert {call[1:] for call in products if call[0] != "grouped_matmul_combine"} == {(2, 1)}
    # The sum of rows has no operand to quantise.
    assert {call[1:] for call in products if call[0] == "grouped_matmul_combine"} == {(2, None)}
    assert [name for name, *_ in step].count("quantize_weights") == 4


def test_quantised_experts_are_not_quantised_again():
    quantized = ab.quantize_experts(*OPERANDS[2:], fp8_scales="power_of_two")

    def with_them(quantized, *arrays):
        return loss(*arrays, quantized=quantized)

    step = calls(jax.value_and_grad(with_them, (1, 2, 3, 4)), quantized, *OPERANDS)
    assert step and not [name for name, *_ in step if name.startswith("quantize")]


def test_no_gradient_runs_through_quantised_experts():
    """Weights that are quantised inside the differentiated function get their gradient exactly once."""

    def made_inside(*arrays):
        return loss(*arrays, quantized=ab.quantize_experts(*arrays[2:], fp8_scales="power_of_two"))

    want = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*OPERANDS)
    for function in (made_inside, jax.checkpoint(made_inside)):
        got = jax.jit(jax.grad(function, (0, 1, 2, 3)))(*OPERANDS)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_vmap_runs_slice_by_slice():
    x = np.stack([OPERANDS[0], OPERANDS[0][::-1]])
    got = jax.vmap(layer, (0, None, None, None))(x, *OPERANDS[1:])
    for slices, want in zip(got, x, strict=True):
        np.testing.assert_array_equal(slices, layer(want, *OPERANDS[1:]))
    both = jax.vmap(ab.quantize_experts)(*(np.stack([w, 2 * w]) for w in OPERANDS[2:]))
    twice = ab.quantize_experts(*(2 * w for w in OPERANDS[2:]))
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(np.asarray(got)[1], np.asarray(want)), both, twice)


def test_the_layer_of_nnx_and_its_shared_expert():
    made = MoE(D, F, num_experts=E, topk=K, shared_features=40, rngs=nnx.Rngs(0), **FP8)
    x, w_in, w_out = OPERANDS[0], made.w_in[...], made.w_out[...]
    want = layer(x, made.gate[...], w_in, w_out) + ab.shared_expert(x, made.shared_in[...], made.shared_out[...])
    np.testing.assert_array_equal(made(x).output, want)
    quantized = ab.quantize_experts(w_in, w_out, fp8_scales="power_of_two")
    np.testing.assert_array_equal(made(x, quantized=quantized).output, want)
    with pytest.raises(
        ValueError, match="hidden_features: got 100 beside in_features 128, expected hidden_features a m"
    ):
        MoE(D, 100, num_experts=E, topk=K, rngs=nnx.Rngs(0), precision="fp8")


def test_the_block_of_linen_and_its_shared_expert():
    block = MoEBlock(num_experts=E, num_experts_per_tok=K, intermediate_size=F, shared_features=40, **FP8)
    x = OPERANDS[0]
    variables = nn.unbox(block.init(jax.random.key(0), x))
    of = variables["params"]
    want = layer(x, of["gate_kernel"], of["wi"], of["wo"]) + ab.shared_expert(x, of["shared_wi"], of["shared_wo"])
    np.testing.assert_array_equal(block.apply(variables, x)[0], want)
    quantized = ab.quantize_experts(of["wi"], of["wo"], fp8_scales="power_of_two")
    np.testing.assert_array_equal(block.apply(variables, x, quantized=quantized)[0], want)


def test_gemms_without_experts_weights_refuse_fp8():
    x, w_in, w_out = jnp.ones([2, 128]), jnp.ones([128, 2, 128]), jnp.ones([128, 128])
    with pytest.raises(ValueError, match="precision: got 'fp8', expected one of 'highest', 'tf32'"):
        ab.shared_expert(x, w_in, w_out, precision="fp8")
    with pytest.raises(ValueError, match="precision: got 'fp8', expected None, a"):
        ab.ragged_dot(x, w_out[None], jnp.array([2]), precision="fp8")

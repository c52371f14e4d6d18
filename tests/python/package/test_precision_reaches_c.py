"""The option `precision` in JAX: which calls of the C library get it, forward and backward."""

import functools
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
from anabranch.jax.ops.experts import grouped_gemm, grouped_weight_gradient
from anabranch.jax.ops.ffn import FfnConfig, FfnOperands, Saved, SlotGemm, ffn_backward, ffn_forward

T, E, K, D, F, R = 6, 3, 2, 4, 5, 9
SIZES, EXPERTS = np.array([4, 0, 3], np.int32), np.arange(T * K, dtype=np.int32).reshape(T, K) % E
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
FORWARD, BACKWARD, COMBINE = "expert_ffn_forward", "expert_ffn_backward", "grouped_matmul_combine"
PRODUCTS = {"grouped_matmul", "grouped_matmul_dw"}


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


MATRICES = ones(E, D, 2, F), ones(E, F, D)


def layer(x, gate, w_in, w_out, **options):
    return ab.moe(x, gate, w_in, w_out, topk=K, **options).output


def after_router(x, weights, w_in, w_out, **options):
    return ab.routed_experts(x, EXPERTS, weights, w_in, w_out, **options).output


def ffn_of_rows(x, w_in, w_out, **options):
    return ab.expert_ffn(x, w_in, w_out, SIZES, **options)


def product(x, w, **options):
    return ab.grouped_matmul(x, w, SIZES, **options)


def mapped(x, w, **options):
    return jax.vmap(lambda x: product(x, w, **options))(jnp.stack([x, x]))


def nnx_layer(x, **options):
    made = MoE(D, F, num_experts=E, topk=K, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(made)
    return lambda x, state: nnx.merge(graph, state)(x).output, (x, state)


def linen_layer(x, **options):
    block = MoEBlock(num_experts=E, num_experts_per_tok=K, intermediate_size=F, **options)
    return lambda x, variables: block.apply(variables, x)[0], (x, nn.unbox(block.init(jax.random.key(0), x)))


on_mesh = functools.partial(layer, parallel=ab.Parallel(data_axes="data", mesh=MESH))

OF_LAYER = {FORWARD, COMBINE, BACKWARD}
#: A function of the options, its operands, and the library calls of its value and gradient.
CASES = {
    "moe": (layer, (ones(T, D), ones(D, E), *MATRICES), OF_LAYER),
    "moe_on_a_mesh": (on_mesh, (ones(T, D), ones(D, E), *MATRICES), OF_LAYER),
    "routed_experts": (after_router, (ones(T, D), ones(T, K), *MATRICES), OF_LAYER),
    "expert_ffn": (ffn_of_rows, (ones(R, D), *MATRICES), {FORWARD, BACKWARD}),
    "grouped_matmul": (product, (ones(R, D), ones(E, D, F)), PRODUCTS),
    "vmap": (mapped, (ones(R, D), ones(E, D, F)), PRODUCTS),
}
LAYERS = {"nnx": nnx_layer, "linen": linen_layer}


def program(function, *operands):
    """The program text of a step: the value and the gradient of every operand."""

    def loss(*operands):
        return jnp.sum(jnp.sin(function(*operands)))

    return jax.jit(jax.value_and_grad(loss, tuple(range(len(operands))))).lower(*operands).as_text()


def precisions(text):
    """{(function, precision)} of the GEMM calls; None: no such attribute."""
    found = set()
    for name, rest in re.findall(r"@ab_xla_(grouped_\w+|expert_\w+)\((.*)", text):
        number = re.search(r"\bprecision = (\d+) : i32", rest)
        found.add((name, number and int(number[1])))
    return found


def each(calls, number):
    return {(name, number) for name in calls}


@pytest.mark.parametrize("name", CASES)
def test_every_call_of_a_step_has_the_precision(name):
    function, operands, calls = CASES[name]
    rounded = precisions(program(functools.partial(function, precision="tf32"), *operands))
    assert rounded == each(calls, 1)
    usual = program(function, *operands)
    assert precisions(usual) == each(calls, 0)
    assert usual == program(functools.partial(function, precision="highest"), *operands)


@pytest.mark.parametrize("name", LAYERS)
def test_every_call_of_a_layer_has_the_precision(name):
    """The shared expert, whose matmuls are XLA's, has the precision too; the gate's matmuls are unchanged."""
    for options, number, shared_precision in ((dict(precision="tf32"), 1, "HIGH"), ({}, 0, "HIGHEST")):
        text = program_of_layer(name, **options)
        assert precisions(text) == each(OF_LAYER, number)
        shared = [
            line
            for line in text.splitlines()
            if "dot_general" in line and f"[{shared_precision}, {shared_precision}]" in line
        ]
        gate = program_of_layer(name, **options, shared_features=0).count("dot_general")
        assert text.count("dot_general") - gate == 6  # two matmuls with two gradients each
        assert len(shared) == (6 if shared_precision == "HIGH" else text.count("dot_general"))


def program_of_layer(name, shared_features=7, **options):
    function, operands = LAYERS[name](ones(T, D), shared_features=shared_features, **options)
    return program(function, *operands)


JAXS = [
    (None, 0),
    ("default", 0),
    (jax.lax.Precision.DEFAULT, 0),
    ("highest", 0),
    (jax.lax.Precision.HIGHEST, 0),
    ("high", 1),
    ("tensorfloat32", 1),
    (jax.lax.Precision.HIGH, 1),
    ((jax.lax.Precision.HIGH, "high"), 1),
    ((jax.lax.Precision.HIGH, None), 0),
    (("highest", "high"), 0),
]


@pytest.mark.parametrize(("precision", "number"), JAXS, ids=str)
def test_jaxs_own_argument_is_used(precision, number):
    """`ragged_dot` and `grouped_dense` have the precision argument of jax.lax.ragged_dot."""
    x, w, bias = ones(R, D), ones(E, D, F), ones(E, F)
    ragged_program = program(lambda x, w: ab.ragged_dot(x, w, SIZES, precision=precision), x, w)
    assert precisions(ragged_program) == each(PRODUCTS, number)
    dense_program = program(lambda x, w: ab.grouped_dense(x, w, SIZES, precision=precision), x, w)
    assert precisions(dense_program) == each(PRODUCTS, number)
    biased = program(lambda x, w, b: ab.grouped_dense(x, w, SIZES, bias=b, precision=precision), x, w, bias)
    bias_call = ("grouped_matmul_dw", 0)  # a sum, no GEMM
    assert precisions(biased) == {*each({COMBINE, *PRODUCTS}, number), bias_call}


def test_copies_of_16_bits_multiply_as_tf32():
    """TF32 represents bfloat16 operands exactly, so the GEMM uses it; a gradient has a float32 operand and does not."""
    x, w = (a.astype(jnp.bfloat16) for a in (ones(R, D), ones(E, D, F)))
    wide = program(lambda x, w: ab.ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32), x, w)
    assert precisions(wide) == {("grouped_matmul", 1), *each(PRODUCTS, 0)}


@pytest.mark.parametrize(
    "precision", [("high",), ("high", "high", "high"), (), "tf32", 1, True, ["high", "sharp"], [[]]]
)
def test_jaxs_own_argument_is_one_or_two(precision):
    with pytest.raises(ValueError, match=r"^precision: got .*, expected None, a jax.lax.Precision or its name, or two"):
        ab.ragged_dot(ones(R, D), ones(E, D, F), SIZES, precision=precision)


@pytest.mark.parametrize("value", ["high", "TF32", "", None, 1, True, jax.lax.Precision.HIGH], ids=repr)
def test_invalid_values_are_refused(value):
    functions = [functools.partial(function, *operands) for function, operands, _ in CASES.values()]
    functions += [functools.partial(made, ones(T, D)) for made in LAYERS.values()]
    functions.append(functools.partial(ab.shared_expert, ones(T, D), ones(D, 2, F), ones(F, D)))
    for function in functions:
        with pytest.raises(ValueError, match=r"^precision: got .*, expected one of 'highest', 'tf32'"):
            function(precision=value)


# ---------------------------------------------------------------- in the C library


def wrong_product():
    return grouped_gemm(ones(R, D), ones(E, D, F), SIZES, transpose_w=False, precision=7)


def wrong_weight_gradient():
    return grouped_weight_gradient(ones(R, D), ones(R, F), SIZES, jnp.float32, precision=7)


def wrong_sum():
    rows = jnp.arange(R, dtype=jnp.int32)
    return SlotGemm(ones(R, D), ones(E, D, F), SIZES, rows, 7).sum(rows[:, None], None, jnp.float32)


OPERANDS = FfnOperands(ones(R, D), None, jnp.asarray(SIZES), *MATRICES, None, None, None)


def wrong_forward():
    return ffn_forward(FfnConfig(precision=7), OPERANDS, save=False)[0]


def wrong_backward():
    return ffn_backward(FfnConfig(precision=7), OPERANDS, Saved(ones(R, 2, F)), ones(R, D), ["x"])["x"]


@pytest.mark.parametrize(
    "call", [wrong_product, wrong_weight_gradient, wrong_sum, wrong_forward, wrong_backward], ids=lambda f: f.__name__
)
def test_the_library_checks_the_precision(call):
    """The library refuses a number that no option has."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"precision: got 7, expected 0 (to 2|or 1), an ab_precision"):
        jax.block_until_ready(call())

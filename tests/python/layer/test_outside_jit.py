"""Calls outside of jax.jit: one program per function, options and shapes, with the bits of a jitted call."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from anabranch.jax import (
    combine,
    dispatch,
    expert_ffn,
    grouped_matmul,
    load_balance_loss,
    moe,
    plan,
    quantile_bias,
    route,
    routed_experts,
    shared_expert,
    z_loss,
)
from anabranch.jax.nnx import MoE

E, K, D, F = 4, 2, 6, 10


@pytest.fixture(autouse=True)
def on_the_cpu():
    """On a GPU, XLA may choose another kernel for a GEMM in another program."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@contextlib.contextmanager
def programs():
    """Yields a list of the compilations in this context, one element each."""
    events = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def numbers(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def layer_arrays(tokens, dtype=jnp.float32):
    return tuple(
        numbers(i, *shape, dtype=dtype) for i, shape in enumerate(((tokens, D), (D, E), (E, D, 2, F), (E, F, D)))
    )


def of_moe(**options):
    return lambda *arrays: moe(*arrays, topk=K, **options)


def operations(tokens):
    """(name, function, differentiated operands) for this number of tokens."""
    x, gate, w_in, w_out = layer_arrays(tokens)
    experts = jnp.asarray(np.random.default_rng(9).integers(0, E, (tokens, K)), jnp.int32)
    weights, rows, logits = numbers(5, tokens, K), numbers(6, tokens * K, D), numbers(7, tokens, E)
    planned = plan(experts, E)
    sizes = planned.group_sizes
    mask = jnp.arange(tokens) > 1
    return [
        ("moe", of_moe(aux_loss_coeff=0.1, z_loss_coeff=0.1, token_mask=mask), (x, gate, w_in, w_out)),
        ("routed_experts", lambda x, *w: routed_experts(x, experts, *w), (x, weights, w_in, w_out)),
        ("expert_ffn", lambda *a: expert_ffn(*a, sizes), (rows, w_in, w_out)),
        ("grouped_matmul", lambda *a: grouped_matmul(*a, sizes), (rows, w_in[:, :, 0])),
        ("route", lambda a: route(a, K), (logits,)),
        ("plan", lambda a: (plan(experts, E), 0 * a), (x,)),
        ("dispatch", lambda a: dispatch(a, planned), (x,)),
        ("combine", lambda *a: combine(a[0], planned, a[1]), (rows, weights)),
        ("shared_expert", lambda *a: shared_expert(*a, token_mask=mask), (x, w_in[0], w_out[0])),
        ("load_balance_loss", lambda a: load_balance_loss(a, sizes, K, 0.1, tokens), (numbers(8, E),)),
        ("z_loss", lambda a: z_loss(a, 0.1, mask), (x[:, 0],)),
    ]


def same_bits(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.weak_type == b.weak_type
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def derivative(function):
    """(arrays, cotangents) -> (results, gradients), where cotangents are those of the float results."""

    def run(arrays, cotangents):
        def floats(*arrays):
            results = function(*arrays)
            return [a for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)], results

        _, pull, results = jax.vjp(floats, *arrays, has_aux=True)
        return results, pull(cotangents)

    return run


def cotangents_of(results):
    floats = [a for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)]
    return [numbers(i, *a.shape, dtype=a.dtype) for i, a in enumerate(floats)]


@pytest.mark.parametrize("i", range(11), ids=[name for name, *_ in operations(3)])
def test_a_call_is_one_program_with_the_bits_of_a_jitted_one(i):
    name, function, arrays = operations(17 + i)[i]
    if name != "plan":  # which has an operation of its own, for something to differentiate
        with programs() as compiled:
            results = function(*arrays)
            jax.block_until_ready(results)
        assert len(compiled) == 1
    results = function(*arrays)
    same_bits(results, jax.jit(function)(*arrays))
    cotangents, run = cotangents_of(results), derivative(function)
    with programs() as compiled:
        got = run(arrays, cotangents)
    assert len(compiled) <= (4 if name == "plan" else 2), "one forward, one backward"
    expected = jax.jit(run)(arrays, cotangents)
    same_bits(got[0], results)
    same_bits(got, expected)
    with programs() as compiled:
        function(*(array + 1 for array in arrays))  # array + 1 may be a new program
        count = len(compiled)
        function(*arrays)
        run(arrays, cotangents)
        run(arrays, cotangents)
    assert len(compiled) == count


def test_other_options_and_shapes_are_other_programs():
    x, *weights = layer_arrays(31)
    of_moe()(x, *weights)
    narrow = x[:30]
    for arrays, options in (((narrow, *weights), {}), ((x, *weights), {"normalize": False})):
        for count in (1, 0):
            with programs() as compiled:
                of_moe(**options)(*arrays)
            assert len(compiled) == count


def test_the_nnx_layer_has_the_bits_of_a_jitted_one():
    dtype = "bfloat16"
    layer = MoE(D, F, num_experts=E, topk=K, use_bias=True, param_dtype=dtype, aux_loss_coeff=0.1, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = numbers(1, 29, D, dtype=dtype)

    def function(x, state):
        return nnx.merge(graph, state)(x)

    results = function(x, state)
    run, cotangents = derivative(function), cotangents_of(results)
    same_bits(results, jax.jit(function)(x, state))
    same_bits(run((x, state), cotangents), jax.jit(run)((x, state), cotangents))
    x = x[1:]
    with programs() as compiled:
        layer(x)
        nnx.grad(lambda layer, x: layer(x).aux_loss)(layer, x)
        count = len(compiled)
        layer(x)
        nnx.grad(lambda layer, x: layer(x).aux_loss)(layer, x)
    assert len(compiled) == count <= 3  # the forward pass alone, and one program per pass


def test_the_gradient_keeps_the_weights_and_no_copies():
    arrays = layer_arrays(19)
    _, pull = jax.vjp(of_moe(), *arrays)
    kept = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pull) if isinstance(leaf, jax.Array)}
    assert {array.unsafe_buffer_pointer() for array in arrays[1:]} <= kept


def test_traced_programs_contain_no_calls_of_ours():
    arrays = layer_arrays(23)
    constant = arrays[0]

    def loss(*arrays):
        result = of_moe(aux_loss_coeff=0.1)(*arrays)
        shared = shared_expert(constant, arrays[2][0], arrays[3][0])
        return (
            jnp.sum(result.output * shared) + result.aux_loss + jnp.sum(of_moe()(constant, *layer_arrays(3)[1:]).output)
        )

    def calls(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.params.get("name", ""), equation.params
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "jaxpr")):
                if hasattr(inner, "jaxpr"):
                    yield from calls(inner.jaxpr)

    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*arrays)
    jitted = {name for name, params in calls(program.jaxpr) if "donated_invars" in params}
    assert not jitted & {"moe", "_moe", "_shared_expert", "route", "plan", "_plan", "_mean_balance"}


def test_disable_jit_and_debug_nans_compute_the_same():
    arrays = layer_arrays(11)
    run, results = derivative(of_moe()), of_moe()(*arrays)
    cotangents = cotangents_of(results)
    expected = run(arrays, cotangents)
    for context in (jax.disable_jit(), jax.debug_nans(True)):
        with context:
            same_bits(of_moe()(*arrays), results)
            same_bits(run(arrays, cotangents), expected)


def test_quantile_bias_is_one_program():
    counts = jnp.asarray(np.random.default_rng(1).integers(0, 9, (E, 37)), jnp.int32)
    quantile_bias(counts[:, 1:], -1.0, 1.0, K)  # the bounds are also put on the device by a program
    with programs() as compiled:
        bias = quantile_bias(counts, -1.0, 1.0, K)
    assert len(compiled) == 1
    same_bits(bias, jax.jit(lambda counts: quantile_bias(counts, -1.0, 1.0, K))(counts))

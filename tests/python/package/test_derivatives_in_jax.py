"""Unsupported derivatives of each public function raise our own errors under every transform.

Only the creation of arguments is compiled, because the errors are raised before an operation runs.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch.jax as ab

T, E, K, D, F = 6, 4, 2, 8, 6
EXPERTS = np.arange(T * K, dtype=np.int32).reshape(T, K) % E
SIZES, ORDER = np.array([1, 0, 3, 2], np.int32), np.array([2, 0, 3, 1], np.int32)
MAP = np.zeros((T, E), bool)
np.put_along_axis(MAP, EXPERTS, True, 1)
COUNTS = np.array([[1, 0, 2, 1], [2, 1, 0, 0]], np.int32)
ROWS_CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def row_id_map():
    return ab.token_dispatch(jnp.zeros((T, D)), MAP, T * K).row_id_map


def unpermuted(rows):
    return ab.local_unpermute_before_a2a(rows, ab.local_permute_after_a2a(rows, COUNTS, 0, 2)[2])


#: For each function: a call, and the shapes of the differentiated operands.
CASES = {
    "moe": (lambda *a: ab.moe(*a, topk=K, aux_loss_coeff=0.1).output, [(T, D), (D, E), (E, D, 2, F), (E, F, D)]),
    "routed_experts": (
        lambda x, *a: ab.routed_experts(x, EXPERTS, *a).output,
        [(T, D), (T, K), (E, D, 2, F), (E, F, D)],
    ),
    "expert_ffn": (lambda *a: ab.expert_ffn(*a, SIZES), [(T, D), (E, D, 2, F), (E, F, D)]),
    "grouped_matmul": (lambda *a: ab.grouped_matmul(*a, SIZES), [(T, D), (E, D, F)]),
    "ragged_dot": (lambda *a: ab.ragged_dot(*a, SIZES), [(T, D), (E, D, F)]),
    "ragged_dot_general": (
        lambda x, d_y: ab.ragged_dot_general(x, d_y, SIZES, ROWS_CONTRACTED),
        [(T, D), (T, F)],
    ),
    "gmm": (lambda *a: ab.gmm(*a, SIZES), [(T, D), (E, D, F)]),
    "grouped_dense": (lambda *a: ab.grouped_dense(*a, SIZES), [(T, D), (E, D, F)]),
    "route": (lambda logits: ab.route(logits, K).weights, [(T, E)]),
    "dispatch": (lambda x: ab.dispatch(x, ab.plan(EXPERTS, E)), [(T, D)]),
    "combine": (lambda rows, w: ab.combine(rows, ab.plan(EXPERTS, E), w), [(T * K, D), (T, K)]),
    "fused_topk_with_score_function": (lambda logits: ab.fused_topk_with_score_function(logits, K)[0], [(T, E)]),
    "fused_compute_score_for_moe_aux_loss": (
        lambda logits: ab.fused_compute_score_for_moe_aux_loss(logits, K, "softmax")[1],
        [(T, E)],
    ),
    "fused_moe_aux_loss": (lambda probs: ab.fused_moe_aux_loss(probs, SIZES, K, 0.1), [(T, E)]),
    "token_dispatch": (lambda x, p: ab.token_dispatch(x, MAP, T * K, p)[:2], [(T, D), (T, E)]),
    "token_combine": (lambda rows, p: ab.token_combine(rows, row_id_map(), p), [(T * K, D), (T, E)]),
    "pure_jax_token_dispatch": (lambda x: ab.pure_jax_token_dispatch(x, EXPERTS, E, K)[0], [(T, D)]),
    "sort_chunks_by_index": (lambda x: ab.sort_chunks_by_index(x, SIZES, ORDER)[0], [(T, D)]),
    "local_permute_after_a2a": (lambda x: ab.local_permute_after_a2a(x, COUNTS, 0, 2)[0], [(T, D)]),
    "local_unpermute_before_a2a": (unpermuted, [(T, D)]),
}
#: Functions with integer results, or in plain JAX, which has all their derivatives.
OTHERS = {
    *("compute_ragged_all_to_all_params", "compute_reverse_ragged_all_to_all_params", "custom_calls", "plan"),
    *("quantile_bias", "quantize_experts", "load_balance_loss", "z_loss", "shared_expert"),
    *("routing_map_to_selected_experts", "pure_jax_token_combine", "init_lora", "join_lora", "merge_lora"),
    *("pack_fp8", "pack_mxfp4", "unpack"),
}


def test_every_public_function_is_here():
    assert {name for name in ab.__all__ if inspect.isfunction(getattr(ab, name))} == CASES.keys() | OTHERS


def arguments_of(name):
    rng = np.random.default_rng(0)
    return tuple(jax.device_put(rng.standard_normal(shape).astype(np.float32)) for shape in CASES[name][1])


def curved(name):
    """A loss that is linear in no result."""
    return lambda *arguments: sum(jnp.sin(o).sum() for o in jax.tree.leaves(CASES[name][0](*arguments)))


FORWARD = r"^\w+: got a forward-mode derivative, expected jax\.grad or jax\.vjp"


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_raises_our_error(name):
    loss, arguments = curved(name), arguments_of(name)
    for forward in (
        lambda *a: jax.jvp(loss, a, a),
        lambda *a: jax.jvp(jax.jit(loss), a, a),
        lambda *a: jax.jacfwd(loss)(*a),
        lambda *a: jax.jit(lambda *a: jax.jvp(loss, a, a)).lower(*a),
        lambda *a: jax.jit(lambda *a: jax.linearize(loss, *a)[1](*a)).lower(*a),
        jax.jit(jax.jacfwd(loss)).lower,
    ):
        with pytest.raises(TypeError, match=FORWARD):
            forward(*arguments)


@pytest.mark.parametrize("name", CASES)
def test_double_backward_raises_our_error(name):
    loss, arguments = curved(name), arguments_of(name)
    every = tuple(range(len(arguments)))

    def square(*a):
        return sum((d**2).sum() for d in jax.grad(loss, argnums=every)(*a))

    expected = rf"got a gradient of a gradient, expected a first derivative|{FORWARD}"
    for second in (jax.grad(square), jax.grad(jax.jit(square)), jax.hessian(loss)):
        with pytest.raises(TypeError, match=expected):
            second(*arguments)


def test_eager_calls_raise_the_same_error():
    loss, arguments = curved("route"), arguments_of("route")
    for forward in (
        lambda: jax.linearize(loss, *arguments)[1](*arguments),
        lambda: jax.vmap(lambda d: jax.jvp(loss, arguments, (d,)))(jnp.ones((2, T, E))),
    ):
        with pytest.raises(TypeError, match=FORWARD):
            forward()


def test_mapped_tangents_raise_when_compiled():
    """jax.jacfwd maps over tangents. JAX refuses that while it traces the program, before it compiles it."""
    loss, (logits,) = curved("route"), arguments_of("route")
    pairs = jnp.stack([logits, logits])
    for forward in (
        jax.jacfwd(jax.jit(loss)),
        jax.jacfwd(jax.checkpoint(loss)),
        lambda z: jax.jacfwd(lambda rows: jax.vmap(loss)(rows))(jnp.stack([z, z])),
        lambda z: jax.vmap(lambda p, d: jax.jvp(loss, (p,), (d,)))(pairs, pairs),
        lambda z: jax.vmap(jax.linearize(loss, z)[1])(pairs),
    ):
        with pytest.raises(TypeError, match=FORWARD):
            jax.jit(forward).lower(logits)


def test_reverse_mode_works_under_every_transformation():
    """A gradient under vmap, scan, checkpoint and jit, which all handle the operation on tangents."""
    loss, (logits,) = curved("route"), arguments_of("route")
    want = jax.grad(loss)(logits)

    def scanned(z):
        return jax.lax.scan(lambda total, row: (total + loss(row), None), jnp.float32(0), jnp.stack([z, z]))[0]

    np.testing.assert_allclose(jax.grad(jax.checkpoint(jax.jit(loss)))(logits), want, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(scanned)(logits), 2 * want, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(logits[None])[0], want, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda z: jax.vmap(loss)(z[None]).sum())(logits), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacrev(jax.vmap(loss)))(logits[None])[0, 0], want, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(jax.checkpoint(jax.jit(scanned))))(logits[None])[0], 2 * want, rtol=1e-6
    )

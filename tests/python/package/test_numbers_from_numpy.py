"""Numbers on the host are never wrapped or rounded: their value counts, or an error names the argument.

JAX truncates numpy's int64 and uint64 by default.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch.jax as ab

WIDE = 2**32 + 1  # wraps around to 1
ONES = np.ones((2, 1), np.float32)
SCORES = jnp.ones(2)


def int64(*values):
    return np.array(values, np.int64)


def test_sizes_past_the_rows_are_clipped():
    w = jnp.array([[[1.0]], [[2.0]]])
    assert ab.grouped_matmul(ONES, w, int64(WIDE, 1)).ravel().tolist() == [1, 1]
    assert ab.grouped_matmul(ONES, w, int64(-WIDE, 1)).ravel().tolist() == [2, 0]
    w_in, w_out = jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1))
    assert ab.expert_ffn(ONES, w_in, w_out, int64(WIDE), activation="relu").ravel().tolist() == [1, 1]
    rows = jnp.arange(3.0)[:, None]
    assert ab.sort_chunks_by_index(rows, int64(WIDE, 2), int64(1, 0))[1].tolist() == [0, 1, 2]


def test_indices_out_of_range_stay_so():
    rows = jnp.arange(3.0)[:, None]
    assert ab.sort_chunks_by_index(rows, int64(1, 2), int64(WIDE, WIDE - 1))[1].tolist() == [0, 1, 2]
    routing = ab.route(jnp.ones((1, 2)), 1, forced_experts=int64(WIDE)[None])
    assert routing.experts.tolist() == [[-1]] and routing.weights.tolist() == [[0]]


def test_every_bit_of_a_map_counts():
    assert ab.token_dispatch(ONES[:1], int64(2**32)[None], 1).tokens_per_expert.tolist() == [1]
    experts, _ = ab.routing_map_to_selected_experts(ONES[:1], int64(-(2**32))[None], 1)
    assert experts.tolist() == [[0]]


RAGGED = dict(all_shards_tokens_per_expert=np.array([[1, 2], [3, 4]]), shard_id=0, num_expert_shards=2)
LOSS = dict(score_sum=SCORES, tokens_per_expert=SCORES, topk=1, coeff=1.0, num_tokens=4)
AUX = dict(probs=jnp.ones((4, 2)), tokens_per_expert=SCORES, topk=1, coeff=1.0)
ROUTE = dict(logits=jnp.ones((1, 2)), topk=1)
REFUSED = [
    (ab.compute_ragged_all_to_all_params, RAGGED, dict(all_shards_tokens_per_expert=int64(WIDE, 2, 3, 4).reshape(2, 2))),
    (ab.compute_ragged_all_to_all_params, RAGGED, dict(shard_id=np.int64(WIDE))),
    (ab.compute_ragged_all_to_all_params, RAGGED, dict(shard_id=int64(WIDE).reshape(()))),
    (ab.load_balance_loss, LOSS, dict(tokens_per_expert=int64(2**32, 2**32))),
    (ab.load_balance_loss, LOSS, dict(tokens_per_expert=np.array([2**63, 1], np.uint64))),
    (ab.load_balance_loss, LOSS, dict(num_tokens=np.int64(2**32))),
    (ab.load_balance_loss, LOSS, dict(num_tokens=2**32)),
    (ab.load_balance_loss, LOSS, dict(num_tokens=10**20)),
    (ab.load_balance_loss, LOSS, dict(num_tokens=np.float32(np.nan))),
    (ab.load_balance_loss, LOSS, dict(num_tokens=np.float32(1e20))),
    (ab.load_balance_loss, LOSS, dict(num_tokens=np.int32(-3))),
    (ab.load_balance_loss, LOSS, dict(coeff=1e300)),
    (ab.load_balance_loss, LOSS, dict(coeff=1e-320)),
    (ab.load_balance_loss, LOSS, dict(coeff=10**400)),
    (ab.load_balance_loss, LOSS, dict(topk=3)),
    (ab.z_loss, dict(lse=SCORES, coeff=1.0), dict(num_tokens=np.int64(2**32))),
    (ab.z_loss, dict(lse=SCORES, coeff=1.0), dict(coeff=1e300)),
    (ab.fused_moe_aux_loss, AUX, dict(total_num_tokens=np.int64(2**32))),
    (ab.fused_moe_aux_loss, AUX, dict(topk=7)),
    (ab.route, ROUTE, dict(scaling_factor=1e-320)),
    (ab.route, ROUTE, dict(scaling_factor=10**400)),
    (ab.route, ROUTE, dict(forced_experts=np.ma.masked_array([[1]], [[True]]))),
    (ab.dispatch, dict(plan=ab.plan(np.array([[0]]), 1)), dict(x=int64(2**40 + 1)[None])),
]  # fmt: skip


@pytest.mark.parametrize(
    "function, good, bad", REFUSED, ids=[f"{f.__name__}-{next(iter(bad))}" for f, _, bad in REFUSED]
)
def test_numbers_that_cannot_be_represented_are_refused(function, good, bad):
    ((name, _),) = bad.items()
    with pytest.raises((ValueError, TypeError), match=f"^{name}: got "):
        function(**good | bad)


def test_a_number_of_tokens_on_a_device_is_data():
    """The value is not checked: 0 and negative numbers count as no tokens, and NaN reaches the loss."""
    for tokens, want in ((-3, 0), (0, 0), (jnp.nan, jnp.nan), (4.0, 0.25)):
        loss = jax.jit(lambda n: ab.load_balance_loss(SCORES, SCORES, 1, 1.0, n))(jnp.float32(tokens))
        np.testing.assert_array_equal(loss, np.float32(want))
        z = jax.jit(lambda n: ab.z_loss(SCORES, 1.0, num_tokens=n))(jnp.float32(tokens))
        np.testing.assert_array_equal(z, np.float32(2 * want))


def test_a_bitmap_is_not_mistaken_for_a_bytemap():
    _, bits = ab.fused_topk_with_score_function(jnp.ones((2, 8)), 2, routing_map_format="bitmap_u8")
    with pytest.raises(TypeError, match=r"routing_map: got uint8\[2, 1\], expected bool"):
        ab.token_dispatch(ONES, bits, 4)


def test_too_many_rows_of_padding_are_an_error_of_the_alignment():
    with pytest.raises(ValueError, match=r"^align_size: got 2147483647"):
        ab.token_dispatch(ONES, np.ones((2, 2), bool), 4, align_size=2**31 - 1)
    with pytest.raises(ValueError, match=r"^align_size: got 1073741824, which requires"):
        ab.plan(np.zeros((2, 2), np.int32), 2, align_size=2**30)


def test_symbolic_sizes_are_refused_by_name():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(
        ValueError, match=re.escape("logits: got float32[n, 6] with symbolic sizes, expected static ones")
    ):
        jax.export.export(jax.jit(lambda z: ab.route(z, 2).weights))(jax.ShapeDtypeStruct((n, 6), jnp.float32))


SECOND = {
    "route": (lambda x: (ab.route(x, 1).weights ** 2).sum(), "router"),
    "moe": (
        lambda x: (ab.moe(x, jnp.ones((2, 2)), jnp.ones((2, 2, 1, 1)), jnp.ones((2, 1, 2)), topk=1).output ** 2).sum(),
        "",
    ),
    "grouped_matmul": (
        lambda x: (ab.grouped_matmul(x, jnp.ones((1, 2, 2)), jnp.array([2])) ** 2).sum(),
        "grouped_matmul",
    ),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_is_refused_by_name(name, jitted):
    function, operation = SECOND[name]
    first = jax.grad(function)
    first = jax.jit(first) if jitted else first
    with pytest.raises(TypeError, match=rf"{operation}.*: got a gradient of a gradient, expected a first derivative"):
        jax.grad(lambda x: first(x).sum())(jnp.ones((2, 2)))


def test_forced_experts_with_logits_of_minus_infinity():
    """Normalised softmax weights are then 0 / 0 = NaN; all others are 0, and so are their gradients."""
    logits, forced = jnp.array([[1.0, 2.0, -jnp.inf]]), jnp.array([[2]])

    def weight(z, score_function, normalize):
        return ab.route(z, 1, forced_experts=forced, score_function=score_function, normalize=normalize).weights.sum()

    for options in itertools.product(("softmax", "sigmoid", "sqrtsoftplus"), (True, False)):
        got, gradient = jax.value_and_grad(weight)(logits, *options)
        if options == ("softmax", True):
            assert jnp.isnan(got) and jnp.isnan(gradient[0, 2])
        else:
            assert got == 0 and not gradient.any()

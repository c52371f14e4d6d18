"""Load-balance and z losses: section 3, values and gradients."""

import numpy as np
import pytest
from differences import check_gradient

from anabranch.reference.balance import (
    fused_moe_aux_loss,
    fused_moe_aux_loss_backward,
    load_balance_loss,
    load_balance_loss_backward,
    z_loss,
    z_loss_backward,
)
from anabranch.reference.router import aux_scores, route

E, K, N = 6, 2, 9


def test_balanced_routing_costs_the_coefficient():
    # score_sum = N / E, tokens_per_expert = N K / E
    loss = load_balance_loss(np.full(E, N / E), np.full(E, N * K / E), K, 0.01, N)
    np.testing.assert_allclose(loss, 0.01)


def test_formula():
    rng = np.random.default_rng(0)
    scores, counts = rng.random(E), rng.integers(0, 5, E)
    want = 0.3 * E / (K * N**2) * sum(scores[e] * counts[e] for e in range(E))
    np.testing.assert_allclose(load_balance_loss(scores, counts, K, 0.3, N), want)


def test_sequence_loss_is_the_mean_and_a_masked_sequence_adds_nothing():
    rng = np.random.default_rng(1)
    scores, counts, tokens = rng.random((3, E)), rng.integers(0, 5, (3, E)), np.array([4, 0, 7])
    scores[1], counts[1] = 0, 0
    each = [load_balance_loss(scores[b], counts[b], K, 0.3, tokens[b]) for b in range(3)]
    assert each[1] == 0
    np.testing.assert_allclose(load_balance_loss(scores, counts, K, 0.3, tokens), sum(each) / 3)


def test_no_tokens_give_zero_and_zero_gradients():
    zero = np.zeros(E)
    assert load_balance_loss(zero, zero, K, 1.0, 0) == 0 and z_loss(np.zeros(3), 1.0, 0) == 0
    np.testing.assert_array_equal(load_balance_loss_backward(zero, zero, K, 1.0, 0), zero)
    np.testing.assert_array_equal(z_loss_backward(np.zeros(3), 1.0, 0), np.zeros(3))
    assert fused_moe_aux_loss(np.ones((0, E)), zero, K, 1.0) == 0
    assert fused_moe_aux_loss_backward(np.ones((0, E)), zero, K, 1.0).shape == (0, E)


def test_gradients():
    rng = np.random.default_rng(2)
    counts, tokens = rng.integers(0, 5, (2, E)), np.array([4, 7])
    scores = rng.random((2, E))
    for s, c, n in ((scores, counts, tokens), (scores[0], counts[0], 4)):
        d = load_balance_loss_backward(s, c, K, 0.3, n, 1.7)
        check_gradient(lambda v, c=c, n=n: 1.7 * load_balance_loss(v, c, K, 0.3, n), s, d, "d_score_sum")
    lse = rng.normal(size=(2, 3))
    d = z_loss_backward(lse, 0.2, 5, 1.7)
    check_gradient(lambda v: 1.7 * z_loss(v, 0.2, 5), lse, d, "d_lse")


def test_z_loss_formula_leaves_masked_tokens_out():
    z = np.random.default_rng(3).normal(size=(4, E))
    mask = np.array([True, True, False, True])
    lse = route(z, K, token_mask=mask).lse
    want = 0.1 / 3 * sum(np.log(np.exp(row).sum()) ** 2 for row in z[mask])
    np.testing.assert_allclose(z_loss(lse, 0.1, 3), want)


@pytest.mark.parametrize("counts_dtype", [np.int32, np.int64, np.uint8, np.float32])
def test_fused_form_is_the_load_balance_loss(counts_dtype):
    z = np.random.default_rng(4).normal(size=(N, E))
    routing, a = route(z, K), aux_scores(z, "softmax")
    counts = routing.tokens_per_expert.astype(counts_dtype)
    want = load_balance_loss(routing.score_sum, routing.tokens_per_expert, K, 0.3, N)
    np.testing.assert_allclose(fused_moe_aux_loss(a, counts, K, 0.3), want)
    np.testing.assert_allclose(fused_moe_aux_loss(a, counts, K, 0.3, total_num_tokens=2 * N), want / 4)


def test_fused_form_over_sequences_side_by_side():
    rng = np.random.default_rng(5)
    a, counts = rng.random((4, 2, E)), rng.integers(0, 5, (2, E))
    want = sum(load_balance_loss(a[:, b].sum(0), counts[b], K, 0.3, 4) for b in range(2))
    got = fused_moe_aux_loss(a.reshape(4, 2 * E), counts.ravel(), K, 0.3, num_experts=E)
    np.testing.assert_allclose(got, want)
    with pytest.raises(ValueError, match="num_experts: got 5"):
        fused_moe_aux_loss(a.reshape(4, 2 * E), counts.ravel(), K, 0.3, num_experts=5)


def test_fused_gradient():
    rng = np.random.default_rng(6)
    probs, counts = rng.random((4, 2 * E)), rng.integers(0, 5, 2 * E)
    d = fused_moe_aux_loss_backward(probs, counts, K, 0.3, 7, E, d_loss=-2.0)
    check_gradient(lambda v: -2.0 * fused_moe_aux_loss(v, counts, K, 0.3, 7, E), probs, d, "d_probs")

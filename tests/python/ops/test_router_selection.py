"""The order of selected experts is exact for all logits."""

import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import route
from anabranch.reference import router as reference

pytestmark = pytest.mark.usefixtures("platform")

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize(
    "row, best_first",
    [
        ([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, -0.0, 0.0], [4, 0, 1, 2, 3, 6, 7, 5]),
        ([NAN, INF, -INF, 3.0, NAN, -NAN, -INF, INF], [0, 4, 5, 1, 7, 3, 2, 6]),
        ([-INF] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([1e-45, 0.0, -1e-45, 1e-38, -1e-38, 3e38, -3e38, INF], [7, 5, 3, 0, 1, 2, 4, 6]),
        (
            [88.0, 89.0, 87.0, 200.0, 201.0, 199.0, 1e30, 1e31],
            [7, 6, 4, 3, 5, 1, 0, 2],
        ),  # sigmoid saturates, the logits do not
    ],
)
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_order(row, best_first, K, score_function):
    row = np.array(row, np.float32)
    row[np.isnan(row)] = np.array([0x7FC00000, 0xFFC00001, 0x7F800002], np.uint32).view(np.float32)[
        : np.isnan(row).sum()
    ]
    experts = route(jnp.asarray(row[None]), K, score_function=score_function).experts[0]
    assert experts.tolist() == best_first[:K]


@pytest.mark.parametrize("E, K", [(8, 2), (64, 8), (130, 33), (512, 10), (512, 32), (2304, 36), (2304, 300)])
def test_ties_go_to_the_lower_expert(E, K):
    # Few different values: most of the top k are ties, and whole vectors are equal.
    z = np.random.default_rng(0).integers(0, 4, (67, E)).astype(np.float32)
    np.testing.assert_array_equal(route(z, K).experts, reference.select(z, K))
    np.testing.assert_array_equal(route(np.zeros_like(z), K).experts, np.broadcast_to(np.arange(K), (67, K)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("E, K, groups", [(64, 8, (8, 4)), (96, 6, (3, 2)), (256, 8, (8, 4)), (512, 32, (16, 8))])
def test_ties_between_groups_go_to_the_lower_expert(E, K, groups, dtype):
    # The last groups are best by one expert each; their other experts tie with those of earlier groups.
    z = np.random.default_rng(4).integers(0, 3, (67, E))
    z[:, :: E // groups[0]] = 3 + np.arange(groups[0])
    z = jnp.asarray(z, dtype)
    grouping = {"num_groups": groups[0], "group_topk": groups[1]}
    np.testing.assert_array_equal(route(z, K, **grouping).experts, reference.select(np.asarray(z), K, **grouping))
    grouping["group_score_topk"] = 1
    np.testing.assert_array_equal(route(z, K, **grouping).experts, reference.select(np.asarray(z), K, **grouping))


@pytest.mark.parametrize("stride", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("E, K", [(512, 10), (512, 32), (2304, 36), (2304, 64)])
def test_the_best_experts_may_be_in_one_part_of_a_row(E, K, stride):
    # A threshold from the maxima of parts is then far too low, so most of the row passes it.
    z = np.random.default_rng(1).standard_normal((40, E)).astype(np.float32)
    z[::2, 3::stride] += 10
    np.testing.assert_array_equal(route(z, K).experts, reference.select(z, K))


@pytest.mark.parametrize("E, K", [(17, 3), (33, 8), (64, 8), (65, 8), (130, 33), (200, 12), (512, 32), (1000, 70)])
def test_selection_is_exact_for_every_threshold(E, K):
    rng = np.random.default_rng(3)
    z = rng.standard_normal((12, E)).astype(np.float32)
    z[0] = np.sort(z[0])
    z[1] = np.sort(z[1])[::-1]
    z[2, rng.permutation(E)[: K // 2]] = NAN  # fewer than K NaN, and at least K
    z[3, rng.permutation(E)[: K + 1]] = NAN
    z[4, rng.permutation(E)[: E - K + 1]] = -INF  # fewer than K finite, and K
    z[5, rng.permutation(E)[: E - K]] = -INF
    z[6, rng.permutation(E)[:K]] = INF
    z[7] = NAN
    z[8, :-1] = z[8, 0]
    z[9, rng.permutation(E)[:2]] = [NAN, -INF]
    z[10, E - K :] += 100
    np.testing.assert_array_equal(route(z, K).experts, reference.select(z, K))
    bias = rng.standard_normal(E).astype(np.float32)
    sigmoid = route(np.where(np.isfinite(z), np.round(z), z), K, score_function="sigmoid", expert_bias=np.sign(bias))
    keys = 1 / (1 + np.exp(-np.round(z).astype(np.float64))) + np.sign(bias)
    finite = np.isfinite(z).all(axis=1)
    np.testing.assert_array_equal(
        sigmoid.experts[finite], reference.select(keys.astype(np.float32), K)[finite], err_msg="sigmoid with a bias"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_is_compared_exactly(dtype):
    z = jnp.asarray(np.random.default_rng(2).standard_normal((200, 96)), dtype)
    np.testing.assert_array_equal(route(z, 12).experts, reference.select(np.asarray(z), 12))


def test_the_bias_never_selects_an_impossible_expert_and_never_enters_a_weight():
    z = np.array([[-np.inf, 0.0, 1.0, 2.0]], np.float32)
    bias = np.array([1e9, 100.0, 0.0, 0.0], np.float32)
    routing = route(z, 2, score_function="sigmoid", normalize=False, expert_bias=bias)
    assert routing.experts.tolist() == [[1, 3]]
    np.testing.assert_allclose(routing.weights, 1 / (1 + np.exp(-z[:, [1, 3]].astype(np.float64))), rtol=1e-6)
    four = route(z, 4, score_function="sigmoid", expert_bias=bias)
    assert four.experts.tolist() == [[1, 3, 2, 0]]
    assert four.weights[0, 3] == 0


def test_experts_of_unselected_groups_are_never_selected():
    z = np.full((1, 8), -np.inf, np.float32)
    routing = route(z, 4, score_function="sigmoid", num_groups=4, group_topk=2)
    assert routing.experts.tolist() == [[0, 1, 2, 3]]
    z[0, [6, 7]] = [1.0, 2.0]
    routing = route(z, 4, score_function="sigmoid", num_groups=4, group_topk=2)
    assert routing.experts.tolist() == [[7, 6, 0, 1]]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_group_scores_of_n_experts_add_up_scores_and_biases(score_function, normalize):
    z = np.array([[3.0, -9.0, -9.0, 2.0, 2.0, 2.0]], np.float32)
    options = {"score_function": score_function, "normalize": normalize, "num_groups": 2, "group_topk": 1}
    assert route(z, 2, group_score_topk=1, **options).experts[0, 0] == 0
    # group_score_topk sums scores also where normalised softmax sums logits: 3 - 9 < 2 + 2, but 0.47 > 2 * 0.17.
    two = int(route(z, 2, group_score_topk=2, **options).experts[0, 0])
    assert two == reference.select(z, 2, group_score_topk=2, **options)[0, 0]
    assert two == (0 if score_function == "softmax" else 3)
    bias = np.array([-1.0, -1.0, -1.0, 0.0, 0.0, 0.0], np.float32)
    assert route(z, 2, group_score_topk=1, expert_bias=bias, **options).experts[0, 0] == 3


@pytest.mark.parametrize(("n", "finite"), [(None, 2), (1, 2), (2, 2), (3, 3)])
def test_enough_finite_logits_in_enough_groups_select_finite_ones(n, finite):
    """Semantics, section 1: groups with n (or K/g) finite logits precede those with fewer."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((64, 4, 4)).astype(np.float32)
    for row in z:
        for place, group in enumerate(rng.permutation(4)):
            row[group, rng.permutation(4)[finite if place < 2 else finite - 1 if n != 1 else 0 :]] = -INF
    bias = rng.standard_normal(16).astype(np.float32)
    for options in ({}, dict(score_function="sigmoid"), dict(score_function="sigmoid", expert_bias=bias)):
        routing = route(z.reshape(64, 16), 4, num_groups=4, group_topk=2, group_score_topk=n, **options)
        assert np.isfinite(np.take_along_axis(z.reshape(64, 16), np.asarray(routing.experts), 1)).all()
        assert np.isfinite(routing.weights).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_group_scores_of_ties_infinities_and_nan(n):
    grouping = {"num_groups": 4, "group_topk": 2, "group_score_topk": n}
    tied = np.zeros((1, 16), np.float32)
    for function in ("softmax", "sigmoid", "sqrtsoftplus"):
        routing = route(tied, 5, score_function=function, **grouping)
        assert routing.experts.tolist() == [[0, 1, 2, 3, 4]]
        impossible = np.full((1, 16), -INF, np.float32)
        impossible[0, [9, 14, 15]] = [1.0, 2.0, 2.0]
        got = route(impossible, 3, score_function=function, **grouping).experts
        np.testing.assert_array_equal(got, reference.select(impossible, 3, score_function=function, **grouping))
    broken = np.zeros((1, 16), np.float32)
    broken[0, 10] = NAN
    for function in ("sigmoid", "sqrtsoftplus"):
        got = route(broken, 5, score_function=function, **grouping).experts
        np.testing.assert_array_equal(got, reference.select(broken, 5, score_function=function, **grouping))
        assert got[0, 0] == 10


def test_masked_tokens_select_no_expert_and_are_not_counted():
    z = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    z[3] = np.nan
    routing = route(z, 2, token_mask=np.array([True, True, False, False, True]), num_groups=3, group_topk=1)
    assert (np.asarray(routing.experts)[[2, 3]] == -1).all()
    assert (np.asarray(routing.weights)[[2, 3]] == 0).all()
    assert (np.asarray(routing.lse)[[2, 3]] == 0).all()
    assert routing.tokens_per_expert.sum() == 6
    assert np.isfinite(routing.score_sum).all()

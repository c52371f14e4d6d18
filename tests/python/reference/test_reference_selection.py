"""Selection: the order, keys, groups, masks, and which selections of a rounding backend agree."""

import itertools

import numpy as np
import pytest

from anabranch.reference.router import score_gradient, select, selection_agrees, selection_keys

inf, nan = np.inf, np.nan
FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def by_python_sort(keys, k):
    """The order in words: NaN, then larger, then smaller index; -0.0 is +0.0."""
    return sorted(range(len(keys)), key=lambda e: (not np.isnan(keys[e]), -np.nan_to_num(keys[e]), e))[:k]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_larger_logit_first_then_smaller_index(function):
    z = np.array([[1.0, 3.0, 1.0, 3.0, 2.0]])
    np.testing.assert_array_equal(select(z, 5, score_function=function), [[1, 3, 4, 0, 2]])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_above_infinity_and_minus_infinity_lowest(function):
    z = np.array([[-inf, 5.0, nan, inf, -1e300, nan, -inf]])
    np.testing.assert_array_equal(select(z, 7, score_function=function), [[2, 5, 3, 1, 4, 0, 6]])


def test_negative_zero_equals_zero():
    z = np.array([[-0.0, 0.0, -0.0, 0.0]])
    np.testing.assert_array_equal(select(z, 4), [[0, 1, 2, 3]])
    np.testing.assert_array_equal(select(-z, 4), [[0, 1, 2, 3]])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_bias_saturated_scores_are_still_ordered(function):
    z = np.array([[100.0, 300.0, 200.0, -300.0, -200.0]])
    np.testing.assert_array_equal(select(z, 5, score_function=function), [[1, 2, 0, 4, 3]])


def test_random_rows_with_ties_agree_with_a_plain_sort():
    rng = np.random.default_rng(0)
    z = rng.integers(-3, 4, size=(200, 9)).astype(float)
    z[rng.random(z.shape) < 0.1] = nan
    z[rng.random(z.shape) < 0.1] = -inf
    for k in (1, 4, 9):
        np.testing.assert_array_equal(select(z, k), [by_python_sort(row, k) for row in z])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bias_is_added_to_the_score_and_never_lifts_minus_infinity(function):
    z = np.array([[0.0, -inf, 0.0, -inf]])
    bias = np.array([0.0, 100.0, 1.0, inf])
    keys = selection_keys(z, function, bias)
    assert keys[0, 1] == -inf and keys[0, 3] == -inf
    np.testing.assert_allclose(keys[0, 2] - keys[0, 0], 1.0)
    np.testing.assert_array_equal(select(z, 4, score_function=function, expert_bias=bias), [[2, 0, 1, 3]])


def test_group_score_is_the_sum_of_its_largest_members():
    # K/g = 2 largest of each group of 3: the third member doesn't count
    z = np.array([[3.0, 3.0, -9.0, 5.0, 0.0, 0.0, 2.0, 2.0, 2.0]])
    options = {"num_groups": 3, "group_topk": 1}
    np.testing.assert_array_equal(select(z, 2, **options), [[0, 1]])
    np.testing.assert_array_equal(select(z, 2, score_function="sigmoid", **options), [[0, 1]])
    # by sums of softmax scores instead of logits, the group with the one large logit wins
    np.testing.assert_array_equal(select(z, 2, normalize=False, **options), [[3, 4]])


def test_group_score_of_n_members_is_of_scores_and_biases():
    z = np.array([[3.0, -9.0, -9.0, 2.0, 2.0, 2.0]])
    options = {"num_groups": 2, "group_topk": 1}
    np.testing.assert_array_equal(select(z, 2, group_score_topk=1, **options), [[0, 1]])
    np.testing.assert_array_equal(select(z, 2, score_function="sigmoid", group_score_topk=2, **options), [[3, 4]])
    # logits 3 - 9 < 2 + 2, softmax scores 0.47 + 0 > 2 * 0.17; by the rule without n, normalised softmax adds logits
    np.testing.assert_array_equal(select(z, 2, group_score_topk=2, **options), [[0, 1]])
    np.testing.assert_array_equal(select(z, 2, **options), [[3, 4]])
    bias = np.array([-1.0, -1.0, -1.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(select(z, 2, group_score_topk=1, expert_bias=bias, **options), [[3, 4]])
    # K need not be a multiple of the groups
    np.testing.assert_array_equal(select(z, 3, num_groups=2, group_topk=2, group_score_topk=1), [[0, 3, 4]])


def test_tied_groups_go_to_the_lower_and_others_are_out_of_reach():
    z = np.zeros((1, 8))
    np.testing.assert_array_equal(select(z, 4, num_groups=4, group_topk=2), [[0, 1, 2, 3]])
    z = np.array([[-inf, -inf, -inf, -inf, 1.0, 1.0, 5.0, -inf]])
    # group 3 lacks K/g = 2 finite logits: its score is -inf, group 2 is the best
    np.testing.assert_array_equal(select(z, 2, num_groups=4, group_topk=1), [[4, 5]])
    np.testing.assert_array_equal(select(z, 2, score_function="sigmoid", num_groups=4, group_topk=1), [[4, 5]])
    # two groups of nothing but -inf: still no expert of another group
    z = np.full((1, 8), -inf)
    np.testing.assert_array_equal(select(z, 4, num_groups=4, group_topk=2), [[0, 1, 2, 3]])


def test_a_bias_never_lifts_a_group_without_finite_logits():
    z = np.array([[-inf, -inf, 0.0, 0.0]])
    bias = np.array([50.0, 50.0, 0.0, 0.0])
    for function in FUNCTIONS:
        options = {"score_function": function, "expert_bias": bias, "num_groups": 2, "group_topk": 1}
        np.testing.assert_array_equal(select(z, 2, **options), [[2, 3]])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score_topk", [None, 1, 2, 3])
def test_groups_agree_with_loops(function, biased, score_topk):
    rng = np.random.default_rng(1)
    z, bias = rng.normal(size=(50, 12)), rng.normal(size=12)
    grouping = {"num_groups": 4, "group_topk": 2, "group_score_topk": score_topk}
    experts = select(z, 4, score_function=function, expert_bias=bias if biased else None, **grouping)
    for row, got in zip(z, experts, strict=True):
        s = {
            "softmax": np.exp(row) / np.exp(row).sum(),
            "sigmoid": sigmoid(row),
            "sqrtsoftplus": np.sqrt(np.log1p(np.exp(row))),
        }[function]
        q = s + bias if biased else row
        in_groups = q if biased or (function == "softmax" and score_topk is None) else s
        group_scores = [sum(sorted(in_groups[3 * i : 3 * i + 3])[-(score_topk or 2) :]) for i in range(4)]
        kept = by_python_sort(group_scores, 2)
        allowed = [e for e in range(12) if e // 3 in kept]
        assert list(got) == sorted(allowed, key=lambda e, q=q: (-q[e], e))[:4]


def test_masked_tokens_get_no_expert():
    z = np.array([[1.0, 2.0], [nan, inf], [2.0, 1.0]])
    experts = select(z, 2, token_mask=np.array([True, False, True]))
    np.testing.assert_array_equal(experts, [[1, 0], [-1, -1], [0, 1]])
    assert experts.dtype == np.int32


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topk": 0}, "topk: got 0"),
        ({"topk": 9}, "topk: got 9, expected 1 to 8"),
        ({"num_groups": 4}, "expected both or neither"),
        ({"num_groups": 3, "group_topk": 1}, "num_groups: got 3"),
        ({"num_groups": 2, "group_topk": 3}, "group_topk: got 3"),
        ({"topk": 3, "num_groups": 4, "group_topk": 2}, "group_topk: got 2"),
        ({"topk": 4, "num_groups": 8, "group_topk": 2}, "group_topk: got 2"),
        ({"group_score_topk": 1}, "group_score_topk: got 1 without groups"),
        ({"num_groups": 4, "group_topk": 2, "group_score_topk": 0}, "group_score_topk: got 0"),
        ({"num_groups": 4, "group_topk": 2, "group_score_topk": 3}, "group_score_topk: got 3, expected 1 to 2"),
        ({"topk": 5, "num_groups": 4, "group_topk": 2, "group_score_topk": 1}, "group_topk: got 2"),
    ],
)
def test_impossible_selections_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        select(np.zeros((1, 8)), **{"topk": 2, **options})


@pytest.mark.parametrize("unused", [None, 0, -1])
def test_groups_of_none_zero_or_minus_one_are_not_used(unused):
    z = np.random.default_rng(2).normal(size=(5, 8))
    np.testing.assert_array_equal(select(z, 3, num_groups=unused, group_topk=unused), select(z, 3))


# ---------------------------------------------------------------- agreement


def float32_selection(z, k, function, bias, groups, score_topk=None):
    """A backend in float32, normalised."""
    z = z.astype(np.float32)
    if function == "softmax":
        s = np.exp(z - z.max(-1, keepdims=True))
        s /= s.sum(-1, keepdims=True)
    elif function == "sigmoid":
        s = np.float32(1) / (np.float32(1) + np.exp(-z))
    else:
        s = np.sqrt(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
    b = np.float32(0) if bias is None else bias.astype(np.float32)
    q = z if bias is None else s + b
    if groups is not None:
        in_groups = z if bias is None and function == "softmax" and score_topk is None else s + b
        members = score_topk or k // groups[1]
        largest = np.sort(in_groups.reshape(len(z), groups[0], -1), axis=-1)[..., -members:]
        best = np.argsort(-largest.sum(-1, dtype=np.float32), axis=-1, kind="stable")[:, : groups[1]]
        kept = np.zeros((len(z), groups[0]), bool)
        np.put_along_axis(kept, best, True, axis=-1)
        q = np.where(np.repeat(kept, z.shape[1] // groups[0], axis=1), q, -inf)
    return np.argsort(-q, axis=-1, kind="stable")[:, :k]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups, score_topk", [(None, None), *itertools.product([(8, 4), (8, 2)], [None, 1, 3])])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 8.0])
def test_a_float32_backend_agrees_and_its_mistakes_do_not(function, biased, groups, score_topk, scale):
    rng = np.random.default_rng(3)
    z = (rng.normal(size=(60, 32)) * scale).astype(np.float32)
    z[:20] = np.round(z[:20])  # ties
    bias = rng.normal(size=32).astype(np.float32) if biased else None
    options = {"score_function": function, "expert_bias": bias}
    if groups is not None:
        options |= {"num_groups": groups[0], "group_topk": groups[1], "group_score_topk": score_topk}
    experts = float32_selection(z, 8, function, bias, groups, score_topk)
    assert selection_agrees(experts, z, **options).all()
    spread = slice(20, None)
    wrong_order = experts.copy()
    wrong_order[:, [0, 7]] = wrong_order[:, [7, 0]]
    assert not selection_agrees(wrong_order, z, **options)[spread].any()
    repeated = experts.copy()
    repeated[:, 7] = repeated[:, 0]
    assert not selection_agrees(repeated, z, **options).any()
    worst = experts.copy()
    ranking = select(z, 32, score_function=function, expert_bias=bias)
    for row, ranked in zip(worst, ranking, strict=True):
        row[7] = ranked[~np.isin(ranked, row)][-1]
    assert not selection_agrees(worst, z, **options)[spread].any()


def test_without_bias_and_groups_only_the_exact_selection_agrees():
    z = np.array([[1.0, np.nextafter(1.0, 2.0), 0.0]])
    assert selection_agrees(np.array([[1, 0]]), z).all()
    assert not selection_agrees(np.array([[0, 1]]), z).any()


def test_swaps_within_the_stated_ulps_agree_and_beyond_do_not():
    bias = np.array([1.0, 1.0, 0.0])
    ulp = np.spacing(np.float32(1.0))
    base = 0.5
    for function, ulps in (("sigmoid", 4), ("sqrtsoftplus", 4)):
        slope = score_gradient(np.array([base]), function)[0]
        for factor, agrees in ((0.9, True), (1.2, False)):
            z = np.array([[base + factor * ulps * ulp / slope, base, -5.0]])
            assert selection_agrees(np.array([[0, 1]]), z, score_function=function, expert_bias=bias).all()
            swapped = selection_agrees(np.array([[1, 0]]), z, score_function=function, expert_bias=bias)
            assert swapped.all() == agrees, (function, factor)


def test_equal_inputs_keep_their_order_also_where_keys_are_computed():
    z, bias = np.zeros((1, 6)), np.zeros(6)
    options = {"score_function": "sigmoid", "expert_bias": bias}
    assert selection_agrees(np.array([[0, 1, 2]]), z, **options).all()
    assert not selection_agrees(np.array([[1, 0, 2]]), z, **options).any()
    assert not selection_agrees(np.array([[0, 1, 3]]), z, **options).any()
    options |= {"num_groups": 3, "group_topk": 1}
    assert selection_agrees(np.array([[0, 1]]), z, **options).all()
    assert not selection_agrees(np.array([[2, 3]]), z, **options).any()


def test_tied_groups_of_unequal_members_may_both_be_kept():
    """K = 4 of g = 2 groups: the first is kept, the second and third have the sum 6."""
    options = {"num_groups": 3, "group_topk": 2}
    z = np.array([[4.3, 4.2, 4.1, 4.0, 5.0, 1.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0]])
    from_second, from_third = np.array([[4, 0, 1, 2]]), np.array([[0, 1, 2, 3]])
    np.testing.assert_array_equal(select(z, 4, **options), from_second)
    assert selection_agrees(from_second, z, **options).all()
    assert selection_agrees(from_third, z, **options).all()
    z[0, 8] -= 1e-3  # no longer tied
    assert selection_agrees(from_second, z, **options).all()
    assert not selection_agrees(from_third, z, **options).any()


def test_masked_rows_and_strange_indices():
    z, mask = np.zeros((2, 4)), np.array([True, False])
    options = {"score_function": "sigmoid", "expert_bias": np.zeros(4), "token_mask": mask}
    assert selection_agrees(np.array([[0, 1], [-1, -1]]), z, **options).all()
    agrees = selection_agrees(np.array([[0, 4], [0, 1]]), z, **options)
    np.testing.assert_array_equal(agrees, [False, False])
    assert not selection_agrees(np.array([[-1, 0]]), z[:1], score_function="sigmoid", expert_bias=np.zeros(4))


def test_nan_keys_keep_their_exact_order():
    z = np.array([[0.0, nan, 1.0, -inf]])
    options = {"expert_bias": np.zeros(4)}  # softmax: every key NaN but the last
    assert selection_agrees(np.array([[0, 1, 2]]), z, **options).all()
    assert not selection_agrees(np.array([[1, 0, 2]]), z, **options).any()
    assert not selection_agrees(np.array([[0, 1, 3]]), z, **options).any()

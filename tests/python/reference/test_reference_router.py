"""The oracle's router: scores, selection, weights, statistics, masks, replay, dense outputs, agreement of selections."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from anabranch.reference.router import (
    aux_scores,
    dense,
    dense_backward,
    logsumexp,
    route,
    route_backward,
    score_gradient,
    scores,
    select,
    selection_agrees,
    selection_keys,
    unpack_bitmap,
)

inf, nan = np.inf, np.nan
FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]
every_function = pytest.mark.parametrize("function", FUNCTIONS)


def plain_scores(z, function):
    return {
        "softmax": lambda: np.exp(z) / np.exp(z).sum(-1, keepdims=True),
        "sigmoid": lambda: 1 / (1 + np.exp(-z)),
        "sqrtsoftplus": lambda: np.sqrt(np.log1p(np.exp(z))),
    }[function]()


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def by_python_sort(keys, k):
    """NaN first, then the larger key, then the smaller index; -0.0 equals +0.0."""
    return sorted(range(len(keys)), key=lambda e: (not np.isnan(keys[e]), -np.nan_to_num(keys[e]), e))[:k]


# ---------------------------------------------------------------- scores


@every_function
def test_scores_are_the_formulas_and_stay_finite_where_they_saturate(function):
    z = np.array([-15.0, -1.0, 0.0, 0.5, 3.0, 15.0])
    np.testing.assert_allclose(scores(z, function), plain_scores(z, function), rtol=1e-12)
    np.testing.assert_allclose(logsumexp(z), math.log(np.exp(z).sum()), rtol=1e-15)
    with np.errstate(all="raise", under="ignore"):
        limits = [0, math.sqrt(1000) if function == "sqrtsoftplus" else 1]
        np.testing.assert_allclose(scores(np.array([-1000.0, 1000.0]), function), limits, atol=1e-200)
    np.testing.assert_array_equal(scores(np.array([-inf, 0.0]), "softmax"), [0, 1])
    if function != "softmax":
        np.testing.assert_array_equal(scores(np.array([-inf, inf]), function), [0, inf if "q" in function else 1])
        np.testing.assert_array_equal(score_gradient(np.array([-inf, inf]), function), [0, 0])
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        narrow = z.astype(dtype)
        np.testing.assert_array_equal(scores(narrow, function), scores(narrow.astype(np.float64), function))


def test_sqrtsoftplus_is_half_exponential_below_minus_twenty():
    z = np.array([-20.5, -80.0, -300.0])
    np.testing.assert_array_equal(scores(z, "sqrtsoftplus"), np.exp(z / 2))
    np.testing.assert_array_equal(score_gradient(z, "sqrtsoftplus"), np.exp(z / 2) / 2)


# ---------------------------------------------------------------- selection


@every_function
def test_selection_order(function):
    for z, want in [
        ([1.0, 3.0, 1.0, 3.0, 2.0], [1, 3, 4, 0, 2]),
        ([-inf, 5.0, nan, inf, -1e300, nan, -inf], [2, 5, 3, 1, 4, 0, 6]),
        ([-0.0, 0.0, -0.0, 0.0], [0, 1, 2, 3]),
        ([0.0, -0.0, 0.0, -0.0], [0, 1, 2, 3]),
        ([100.0, 300.0, 200.0, -300.0, -200.0], [1, 2, 0, 4, 3]),  # saturated scores
    ]:
        np.testing.assert_array_equal(select(np.array([z]), len(z), score_function=function), [want])


def test_random_rows_with_ties_agree_with_a_plain_sort():
    rng = np.random.default_rng(0)
    z = rng.integers(-3, 4, size=(200, 9)).astype(float)
    z[rng.random(z.shape) < 0.1], z[rng.random(z.shape) < 0.1] = nan, -inf
    for k in (1, 4, 9):
        np.testing.assert_array_equal(select(z, k), [by_python_sort(row, k) for row in z])


@every_function
def test_a_bias_never_lifts_minus_infinity(function):
    z, bias = np.array([[0.0, -inf, 0.0, -inf]]), np.array([0.0, 100.0, 1.0, inf])
    keys = selection_keys(z, function, bias)
    assert keys[0, 1] == -inf and keys[0, 3] == -inf
    np.testing.assert_allclose(keys[0, 2] - keys[0, 0], 1.0)
    np.testing.assert_array_equal(select(z, 4, score_function=function, expert_bias=bias), [[2, 0, 1, 3]])
    options = {"score_function": function, "num_groups": 2, "group_topk": 1}
    z, bias = np.array([[-inf, -inf, 0.0, 0.0]]), np.array([50.0, 50.0, 0.0, 0.0])
    np.testing.assert_array_equal(select(z, 2, expert_bias=bias, **options), [[2, 3]])


@pytest.mark.parametrize(
    "z, k, groups, options, want",
    [
        # By default a group's score adds its K/g = 2 largest members; the third does not count.
        ([3.0, 3.0, -9.0, 5.0, 0.0, 0.0, 2.0, 2.0, 2.0], 2, (3, 1), {}, [0, 1]),
        ([3.0, 3.0, -9.0, 5.0, 0.0, 0.0, 2.0, 2.0, 2.0], 2, (3, 1), {"score_function": "sigmoid"}, [0, 1]),
        # Sums of softmax scores instead of logits: the group with the one large logit wins.
        ([3.0, 3.0, -9.0, 5.0, 0.0, 0.0, 2.0, 2.0, 2.0], 2, (3, 1), {"normalize": False}, [3, 4]),
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 2, (2, 1), {"group_score_topk": 1}, [0, 1]),
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 2, (2, 1), {"group_score_topk": 2, "score_function": "sigmoid"}, [3, 4]),
        # Softmax scores 0.47 + 0 > 2 * 0.17; without group_score_topk, logits 3 - 9 < 2 + 2.
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 2, (2, 1), {"group_score_topk": 2}, [0, 1]),
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 2, (2, 1), {}, [3, 4]),
        # With group_score_topk, K need not be a multiple of the groups.
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 3, (2, 2), {"group_score_topk": 1}, [0, 3, 4]),
        # Tied groups: the lower index. Groups of -inf alone: still no expert of another group.
        ([0.0] * 8, 4, (4, 2), {}, [0, 1, 2, 3]),
        ([-inf] * 8, 4, (4, 2), {}, [0, 1, 2, 3]),
        # Group 3 lacks K/g = 2 finite logits, so its score is -inf.
        ([-inf, -inf, -inf, -inf, 1.0, 1.0, 5.0, -inf], 2, (4, 1), {}, [4, 5]),
        ([-inf, -inf, -inf, -inf, 1.0, 1.0, 5.0, -inf], 2, (4, 1), {"score_function": "sigmoid"}, [4, 5]),
    ],
)
def test_scores_of_groups(z, k, groups, options, want):
    got = select(np.array([z]), k, num_groups=groups[0], group_topk=groups[1], **options)
    np.testing.assert_array_equal(got, [want])


@every_function
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score_topk", [None, 1, 3])
def test_groups_agree_with_loops(function, biased, score_topk):
    z, bias = normal(50, 12, seed=1), normal(12, seed=2)
    grouping = {"num_groups": 4, "group_topk": 2, "group_score_topk": score_topk}
    got = select(z, 4, score_function=function, expert_bias=bias if biased else None, **grouping)
    for row, experts in zip(z, got, strict=True):
        s = plain_scores(row, function)
        q = s + bias if biased else row
        in_groups = q if biased or (function == "softmax" and score_topk is None) else s
        group_scores = [sum(sorted(in_groups[3 * i : 3 * i + 3])[-(score_topk or 2) :]) for i in range(4)]
        chosen = by_python_sort(group_scores, 2)
        allowed = [e for e in range(12) if e // 3 in chosen]
        assert list(experts) == sorted(allowed, key=lambda e, q=q: (-q[e], e))[:4]


@pytest.mark.parametrize("unused", [None, 0, -1])
def test_groups_of_none_zero_or_minus_one_are_not_used(unused):
    np.testing.assert_array_equal(
        select(normal(5, 8), 3, num_groups=unused, group_topk=unused), select(normal(5, 8), 3)
    )


# ---------------------------------------------------------------- weights and statistics


@every_function
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_and_statistics_are_the_formulas(function, normalize):
    """A bias changes the selection, and never a weight or a statistic."""
    z, bias, topk = normal(2, 3, 5), 10 * normal(5, seed=1), 3
    options = {"score_function": function, "normalize": normalize, "scaling_factor": 2.5, "expert_bias": bias}
    routing = route(z, topk, **options)
    s = plain_scores(z, function)
    selected = np.take_along_axis(s, select(z, topk, score_function=function, expert_bias=bias), axis=-1)
    np.testing.assert_allclose(
        routing.weights, 2.5 * (selected / selected.sum(-1, keepdims=True) if normalize else selected)
    )
    a = s / s.sum(-1, keepdims=True)
    np.testing.assert_allclose(aux_scores(z, function), a)
    np.testing.assert_allclose(routing.score_sum, a.sum((0, 1)))
    np.testing.assert_allclose(routing.lse, np.log(np.exp(z).sum(-1)))
    counts = np.bincount(routing.experts.ravel(), minlength=5)
    np.testing.assert_array_equal(routing.tokens_per_expert, counts)
    assert routing.tokens_per_expert.dtype == routing.experts.dtype == np.int32
    by_sequence = route(z.reshape(6, 5), topk, sequences=2, **options)
    for b in range(2):
        one = route(z[b], topk, **options)
        np.testing.assert_array_equal(by_sequence.tokens_per_expert[b], one.tokens_per_expert)
        np.testing.assert_allclose(by_sequence.score_sum[b], one.score_sum)


def test_epsilon_keeps_the_normalisation_finite():
    routing = route(np.full((1, 3), -inf), 2, score_function="sigmoid")
    assert not routing.weights.any() and not routing.score_sum.any()
    z = np.array([[np.log(1e-20), -inf]])  # a score of 1e-20 and an epsilon of 1e-20
    np.testing.assert_allclose(route(z, 1, score_function="sigmoid").weights, [[0.5]], rtol=1e-12)


@every_function
@pytest.mark.parametrize("broken", [nan, inf])
def test_masked_tokens_do_not_contribute(function, broken):
    z, mask, options = normal(4, 5), np.array([True, False, True, False]), {"score_function": function}
    z[1, 2], z[3] = broken, broken
    routing, alone = route(z, 2, token_mask=mask, **options), route(z[mask], 2, **options)
    assert (routing.experts[~mask] == -1).all() and not routing.weights[~mask].any() and not routing.lse[~mask].any()
    np.testing.assert_array_equal(routing.tokens_per_expert, alone.tokens_per_expert)
    np.testing.assert_allclose(routing.score_sum, alone.score_sum)
    assert not aux_scores(z, function, mask)[~mask].any()
    d_logits = route_backward(z, 2, normal(4, 2), normal(5), normal(4), token_mask=mask, **options)
    assert not d_logits[~mask].any() and np.isfinite(d_logits).all() and d_logits[mask].any()


@every_function
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("broken", [nan, inf])
def test_nan_reaches_weights_and_statistics(function, normalize, broken):
    """In softmax a NaN or +inf spoils its whole row, otherwise a NaN its own score; no other row is affected."""
    z = np.array([[1.0, 2.0, broken, -inf], [1.0, 2.0, 3.0, -inf]])
    for options in ({}, {"forced_experts": np.array([[2, 1], [2, 1]])}):
        routing = route(z, 2, score_function=function, normalize=normalize, **options)
        assert routing.experts[0, 0] == 2 and np.isfinite(routing.weights[1]).all() and np.isfinite(routing.lse[1])
        assert np.isnan(routing.lse[0])
        if function == "softmax" or np.isnan(broken):
            assert np.isnan(routing.weights[0, 0]) and np.isnan(routing.score_sum).all()
            assert np.isnan(routing.weights[0, 1]) == (normalize or function == "softmax")


@every_function
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [None, (3, 2)])
def test_minus_infinity_means_never_this_expert(function, normalize, groups):
    """With K finite logits in a row everything is finite, and equal to a routing without the other experts."""
    z = normal(5, 6)
    never = [1, 4] if groups is None else [4, 5]  # With groups, two finite logits in each of two groups.
    z[:, never] = -inf
    options = {"score_function": function, "normalize": normalize}
    grouping = {} if groups is None else {"num_groups": groups[0], "group_topk": groups[1]}
    routing = route(z, 4, **options, **grouping)
    d_logits = route_backward(z, 4, normal(5, 4), normal(6), normal(5), **options, **grouping)
    assert all(np.isfinite(value).all() for value in (*routing, d_logits)) and not d_logits[z == -inf].any()
    alone = route(np.delete(z, never, axis=1), 4, **options)
    np.testing.assert_allclose(routing.weights, alone.weights)
    np.testing.assert_allclose(np.delete(routing.score_sum, never), alone.score_sum)
    np.testing.assert_allclose(routing.lse, alone.lse)


@every_function
@pytest.mark.parametrize("shape, topk", [((0, 4), 2), ((1, 4), 4), ((3, 1), 1), ((2, 0, 4), 1)])
def test_small_shapes(function, shape, topk):
    z, lead = normal(*shape), shape[:-1]
    routing = route(z, topk, score_function=function)
    assert routing.weights.shape == (*lead, topk) and routing.score_sum.shape == shape[-1:]
    assert routing.tokens_per_expert.sum() == topk * np.prod(lead)
    d = route_backward(z, topk, np.ones((*lead, topk)), np.ones(shape[-1]), np.ones(lead), score_function=function)
    assert d.shape == shape
    # The sum of normalised weights is constant, so a constant cotangent has no gradient.
    d = route_backward(z, topk, np.ones((*lead, topk)), score_function=function)
    np.testing.assert_allclose(d, 0, atol=1e-15)


# ---------------------------------------------------------------- replay


@every_function
@pytest.mark.parametrize("normalize", [True, False])
def test_replaying_the_selection_changes_nothing(function, normalize):
    z, options = normal(4, 6), {"score_function": function, "normalize": normalize, "scaling_factor": 0.5}
    free = route(z, 3, **options)
    for name in ("forced_experts", "experts"):
        for a, b in zip(free, route(z, 3, **options, **{name: free.experts}), strict=True):
            np.testing.assert_array_equal(a, b)
    given, mask = np.array([[3, 2], [0, 1], [1, 0]]), np.array([True, False, True])
    steering = {"expert_bias": np.ones(6), "num_groups": 2, "group_topk": 1, "token_mask": mask}
    routing = route(z[:3], 2, experts=given, **options, **steering)
    np.testing.assert_array_equal(routing.experts, np.where(mask[:, None], given, -1))


@every_function
def test_replay_of_missing_and_repeated_experts(function):
    """An index outside [0, E) takes no part in the normalisation; a repeated expert counts once per assignment."""
    z, forced = normal(3, 4), np.array([[2, -1, 0], [7, -5, 4], [1, 1, 0]])
    routing, s = route(z, 3, score_function=function, forced_experts=forced), plain_scores(z, function)
    np.testing.assert_array_equal(routing.experts, [[2, -1, 0], [-1, -1, -1], [1, 1, 0]])
    np.testing.assert_allclose(routing.weights[0], np.array([s[0, 2], 0, s[0, 0]]) / (s[0, 2] + s[0, 0]))
    np.testing.assert_array_equal(routing.weights[1], 0)
    np.testing.assert_allclose(routing.weights[2], np.array([s[2, 1], s[2, 1], s[2, 0]]) / (2 * s[2, 1] + s[2, 0]))
    np.testing.assert_array_equal(routing.tokens_per_expert, [2, 2, 1, 0])
    np.testing.assert_allclose(routing.score_sum, aux_scores(z, function).sum(0))


# ---------------------------------------------------------------- dense outputs


@pytest.mark.parametrize("num_experts", [1, 8, 9, 19])
def test_dense_forms_agree(num_experts):
    topk, mask = min(num_experts, 3), np.array([True, True, False, True, True])
    routing = route(normal(5, num_experts), topk, token_mask=mask)
    probs, bytemap = dense(routing.weights, routing.experts, num_experts)
    want = np.zeros((5, num_experts))
    for t, k in itertools.product(range(5), range(topk)):
        if routing.experts[t, k] >= 0:
            want[t, routing.experts[t, k]] = routing.weights[t, k]
    np.testing.assert_array_equal(probs, want)
    np.testing.assert_array_equal(bytemap, want > 0)
    _, bitmap = dense(routing.weights, routing.experts, num_experts, "bitmap_u8")
    assert bitmap.dtype == np.uint8 and bitmap.shape == (5, (num_experts + 7) // 8)
    for t, bit in itertools.product(range(5), range(8 * bitmap.shape[1])):
        assert bool(bitmap[t, bit // 8] >> (bit % 8) & 1) == (bit < num_experts and bytemap[t, bit])
    np.testing.assert_array_equal(unpack_bitmap(bitmap, num_experts), bytemap)
    for dtype in (np.int16, np.int64):
        indices = dense(routing.weights, routing.experts, num_experts, "indices", dtype)[1]
        assert indices.dtype == dtype and (indices == routing.experts).all()


def test_dense_cotangents_of_unselected_probs_are_ignored():
    d_probs = np.array([[1.0, nan, 3.0], [nan, nan, nan]])
    np.testing.assert_array_equal(dense_backward(d_probs, np.array([[2, 0], [-1, -1]])), [[3, 1], [0, 0]])


# ---------------------------------------------------------------- errors


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
        ({"forced_experts": np.zeros((1, 2), int), "expert_bias": np.zeros(8)}, "forced_experts: got it together with"),
        (
            {"forced_experts": np.zeros((1, 2), int), "num_groups": 2, "group_topk": 1},
            "forced_experts: got it together",
        ),
        (
            {"forced_experts": np.zeros((1, 2), int), "experts": np.zeros((1, 2), int)},
            "forced_experts: got it together",
        ),
        ({"forced_experts": np.zeros((1, 1), int)}, r"experts: got shape \(1, 1\), expected \(1, 2\)"),
        ({"forced_experts": np.zeros((1, 2))}, "experts: got dtype float64"),
        ({"token_mask": np.ones(1)}, "token_mask: got"),
        ({"score_function": "tanh"}, "score_function: got 'tanh'"),
        ({"logits": np.zeros((1, 8), int)}, "logits: got dtype int64"),
    ],
)
def test_bad_routings_are_errors(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        route(**{"logits": np.zeros((1, 8)), "topk": 2, **options})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: unpack_bitmap(np.array([[0b1000]], np.uint8), 3), "expected unused bits 0"),
        (lambda: unpack_bitmap(np.array([[0]], np.uint8), 9), "got 1 bytes, expected 2"),
        (lambda: dense(np.zeros((2, 2)), np.zeros((2, 2), int), 3, "bits"), "routing_map_format: got 'bits'"),
        (lambda: score_gradient(np.zeros(3), "tanh"), "score_function: got 'tanh'"),
    ],
)
def test_other_bad_inputs_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------- agreement of a selection that rounds


def float32_selection(z, k, function, bias, groups, score_topk):
    """A backend that computes in float32, normalised."""
    s = plain_scores(z, function)
    assert s.dtype == np.float32
    b = np.float32(0) if bias is None else bias
    q = z if bias is None else s + b
    if groups is not None:
        in_groups = z if bias is None and function == "softmax" and score_topk is None else s + b
        members = score_topk or k // groups[1]
        largest = np.sort(in_groups.reshape(len(z), groups[0], -1), axis=-1)[..., -members:]
        best = np.argsort(-largest.sum(-1, dtype=np.float32), axis=-1, kind="stable")[:, : groups[1]]
        chosen = np.zeros((len(z), groups[0]), bool)
        np.put_along_axis(chosen, best, True, axis=-1)
        q = np.where(np.repeat(chosen, z.shape[1] // groups[0], axis=1), q, -inf)
    return np.argsort(-q, axis=-1, kind="stable")[:, :k]


@every_function
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups, score_topk", [(None, None), ((8, 4), None), ((8, 2), 3)])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 8.0])
def test_a_float32_backend_agrees_and_its_mistakes_do_not(function, biased, groups, score_topk, scale):
    z = (normal(60, 32, seed=3) * scale).astype(np.float32)
    z[:20] = np.round(z[:20])  # ties
    bias = normal(32, seed=4).astype(np.float32) if biased else None
    options = {"score_function": function, "expert_bias": bias}
    if groups is not None:
        options |= {"num_groups": groups[0], "group_topk": groups[1], "group_score_topk": score_topk}
    experts = float32_selection(z, 8, function, bias, groups, score_topk)
    assert selection_agrees(experts, z, **options).all()
    swapped, repeated, worst = experts.copy(), experts.copy(), experts.copy()
    swapped[:, [0, 7]] = swapped[:, [7, 0]]
    repeated[:, 7] = repeated[:, 0]
    ranking = select(z, 32, score_function=function, expert_bias=bias)
    worst[:, 7] = [ranked[~np.isin(ranked, row)][-1] for row, ranked in zip(worst, ranking, strict=True)]
    for wrong in (swapped[20:], worst[20:]):
        assert not selection_agrees(wrong, z[20:], **options).any()
    assert not selection_agrees(repeated, z, **options).any()


def test_swaps_within_the_stated_ulps_agree_and_others_do_not():
    z = np.array([[1.0, np.nextafter(1.0, 2.0), 0.0]])  # Without a bias and groups only the exact selection agrees.
    assert selection_agrees(np.array([[1, 0]]), z).all() and not selection_agrees(np.array([[0, 1]]), z).any()
    bias, ulp, base = np.array([1.0, 1.0, 0.0]), np.spacing(np.float32(1.0)), 0.5
    for function, (distance, agrees) in itertools.product(FUNCTIONS[1:], ((0.9, True), (1.2, False))):
        slope = score_gradient(np.array([base]), function)[0]
        z, options = np.array([[base + 4 * distance * ulp / slope, base, -5.0]]), {"score_function": function}
        assert selection_agrees(np.array([[0, 1]]), z, expert_bias=bias, **options).all()
        assert selection_agrees(np.array([[1, 0]]), z, expert_bias=bias, **options).all() == agrees


@pytest.mark.parametrize(
    "z, options, right, wrong",
    [
        # Equal inputs give equal keys, whose order is by index.
        ([0.0] * 6, {}, [[0, 1, 2]], [[1, 0, 2], [0, 1, 3], [-1, 0, 1], [0, 1, 6]]),
        ([0.0] * 6, {"num_groups": 3, "group_topk": 1}, [[0, 1]], [[2, 3]]),
        # NaN keys have an exact order.
        ([0.0, nan, 1.0, -inf], {"score_function": "softmax"}, [[0, 1, 2]], [[1, 0, 2], [0, 1, 3]]),
        # Group 0 is kept; groups 1 and 2 are tied at 6 with unequal members, so either may be the other one.
        (
            [4.3, 4.2, 4.1, 4.0, 5.0, 1.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0],
            {"num_groups": 3, "group_topk": 2, "score_function": "softmax", "expert_bias": None},
            [[4, 0, 1, 2], [0, 1, 2, 3]],
            [],
        ),
        (
            [4.3, 4.2, 4.1, 4.0, 5.0, 1.0, 0.0, 0.0, 2.999, 3.0, 0.0, 0.0],
            {"num_groups": 3, "group_topk": 2, "score_function": "softmax", "expert_bias": None},
            [[4, 0, 1, 2]],
            [[0, 1, 2, 3]],
        ),
    ],
)
def test_ties(z, options, right, wrong):
    z = np.array([z])
    options = {"score_function": "sigmoid", "expert_bias": np.zeros(z.size)} | options
    np.testing.assert_array_equal(select(z, len(right[0]), **options), right[:1])
    assert all(selection_agrees(np.array([row]), z, **options).all() for row in right)
    assert not any(selection_agrees(np.array([row]), z, **options).any() for row in wrong)


def test_masked_rows_agree_only_without_experts():
    options = {"score_function": "sigmoid", "expert_bias": np.zeros(4), "token_mask": np.array([True, False])}
    got = [selection_agrees(np.array([[0, 1], row]), np.zeros((2, 4)), **options)[1] for row in ([-1, -1], [0, 1])]
    assert got == [True, False]

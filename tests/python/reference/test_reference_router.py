"""The oracle's router against loops over tokens and central differences, and the agreement of rounded selections."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from cases import Case, check, normal

from anabranch.reference.router import (
    aux_scores,
    aux_scores_backward,
    dense,
    dense_backward,
    logsumexp,
    route,
    route_backward,
    score_gradient,
    scores,
    select,
    selection_agrees,
    unpack_bitmap,
)

inf, nan = np.inf, np.nan
FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]
every_function = pytest.mark.parametrize("function", FUNCTIONS)
equal, close = np.testing.assert_array_equal, np.testing.assert_allclose
T, E = 6, 8
MASK = np.array([True, True, False, True, True, False])
#: Selections with repeats, -1, indices out of range on either side, and a token without experts.
GIVEN = np.array([[0, 0, 1], [-1, 2, 1], [-1, -1, -1], [9, 0, 1], [1, 3, 0], [0, 2, -4]])


def plain_scores(z, function):
    """The formulas, also in float32. In softmax a NaN or +inf spoils its whole row, otherwise a NaN its own score."""
    with np.errstate(invalid="ignore", over="ignore"):
        if function == "softmax":
            total = np.exp(z).sum(-1, keepdims=True)
            return np.exp(z) / np.where(np.isfinite(total), total, nan)
        return 1 / (1 + np.exp(-z)) if function == "sigmoid" else np.sqrt(np.log1p(np.exp(z)))


def best_first(keys, k):
    """NaN first, then the larger key, then the smaller index; -0.0 equals +0.0."""
    return sorted(range(len(keys)), key=lambda e: (not np.isnan(keys[e]), -np.nan_to_num(keys[e]), e))[:k]


def selected_by_loops(z, k, function="softmax", normalize=True, bias=None, groups=None, score_topk=None):
    """The selection of one token, in the dtype of z. groups: their number, and the number per token."""
    biased = plain_scores(z, function) + (z.dtype.type(0) if bias is None else bias)
    biased[z == -inf] = -inf  # a bias never lifts it
    keys, allowed = z if bias is None else biased, range(len(z))
    if groups is not None:
        logits = score_topk is None and bias is None and function == "softmax" and normalize
        in_groups = (z if logits else biased).reshape(groups[0], -1)
        members = score_topk or k // groups[1]
        with np.errstate(invalid="ignore"):
            totals = [sum(group[best_first(group, members)]) for group in in_groups]
        size, chosen = len(z) // groups[0], best_first(totals, groups[1])
        allowed = [e for e in allowed if e // size in chosen]
    return [allowed[i] for i in best_first(keys[list(allowed)], k)]


# ---------------------------------------------------------------- scores


@every_function
def test_scores_are_the_formulas_and_stay_finite_where_they_saturate(function):
    z = np.array([-15.0, -1.0, 0.0, 0.5, 3.0, 15.0])
    close(scores(z, function), plain_scores(z, function), rtol=1e-12)
    close(logsumexp(z), math.log(np.exp(z).sum()), rtol=1e-15)
    with np.errstate(all="raise", under="ignore"):
        limits = [0, math.sqrt(1000) if function == "sqrtsoftplus" else 1]
        close(scores(np.array([-1000.0, 1000.0]), function), limits, atol=1e-200)
    equal(scores(np.array([-inf, 0.0]), "softmax"), [0, 1])
    if function != "softmax":
        equal(scores(np.array([-inf, inf]), function), [0, inf if function == "sqrtsoftplus" else 1])
        equal(score_gradient(np.array([-inf, inf]), function), [0, 0])
        z = np.array([-60.0, -21.0, -19.0, -3.0, 0.0, 2.0, 30.0])
        scale = 1 / scores(z, function)  # compares tiny scores too

        def backward(g):
            return {"z": g * scale * score_gradient(z, function)}

        check(Case(lambda z: [scale * scores(z, function)], backward, {"z": z}, bound=1e-7))
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        narrow = z.astype(dtype)
        equal(scores(narrow, function), scores(narrow.astype(np.float64), function))
    low = np.array([-20.5, -80.0, -300.0])  # below -20 sqrtsoftplus is half exponential
    equal(scores(low, "sqrtsoftplus"), np.exp(low / 2))
    equal(score_gradient(low, "sqrtsoftplus"), np.exp(low / 2) / 2)


# ---------------------------------------------------------------- selection


@every_function
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups, score_topk", [(None, None), ((4, 2), None), ((4, 2), 1), ((4, 2), 3)])
def test_selections_agree_with_loops(function, biased, groups, score_topk):
    """On distinct keys, ties, NaN and infinities."""
    rng = np.random.default_rng(0)
    z, bias = normal(50, 12, seed=1), normal(12, seed=2) if biased else None
    z[10:30] = rng.integers(-3, 4, size=(20, 12))
    for value in (nan, -inf, inf):
        z[20:][rng.random((30, 12)) < 0.1] = value
    z[0], z[1] = 0.0, np.tile([0.0, -0.0], 6)
    grouping = {"num_groups": groups[0], "group_topk": groups[1]} if groups else {}
    for k, normalize in itertools.product((2, 4, 6) if groups else (1, 5, 12), (True, False)):
        options = {"normalize": normalize, "group_score_topk": score_topk}
        got = select(z, k, score_function=function, expert_bias=bias, **grouping, **options)
        equal(got, [selected_by_loops(row, k, function, normalize, bias, groups, score_topk) for row in z])


@pytest.mark.parametrize(
    "z, k, groups, options, want",
    [
        # By default a group's score adds its K/g = 2 largest members; the third does not count.
        ([3.0, 3.0, -9.0, 5.0, 0.0, 0.0, 2.0, 2.0, 2.0], 2, (3, 1), {}, [0, 1]),
        # Sums of softmax scores instead of logits: the group with the one large logit wins.
        ([3.0, 3.0, -9.0, 5.0, 0.0, 0.0, 2.0, 2.0, 2.0], 2, (3, 1), {"normalize": False}, [3, 4]),
        # Softmax scores 0.47 + 0 > 2 * 0.17; without group_score_topk, logits 3 - 9 < 2 + 2.
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 2, (2, 1), {"group_score_topk": 2}, [0, 1]),
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 2, (2, 1), {}, [3, 4]),
        # With group_score_topk, K need not be a multiple of the groups.
        ([3.0, -9.0, -9.0, 2.0, 2.0, 2.0], 3, (2, 2), {"group_score_topk": 1}, [0, 3, 4]),
        # Groups of -inf alone: still no expert of another group.
        ([-inf] * 8, 4, (4, 2), {}, [0, 1, 2, 3]),
        # None, 0 and -1: groups are not used.
        *(([1.0, 3.0, 2.0], 2, (unused, unused), {}, [1, 2]) for unused in (None, 0, -1)),
    ],
)
def test_scores_of_groups(z, k, groups, options, want):
    equal(select(np.array([z]), k, num_groups=groups[0], group_topk=groups[1], **options), [want])


# ---------------------------------------------------------------- weights, statistics and gradients


def routed_by_loops(z, experts, function, normalize, mask, scaling_factor=1.7):
    """weights, score_sum and lse of given experts, a token at a time."""
    weights, score_sum, lse = np.zeros(experts.shape), np.zeros(z.shape[-1]), np.zeros(len(z))
    with np.errstate(invalid="ignore", over="ignore"):
        for t in np.flatnonzero(mask):
            s = plain_scores(z[t], function)
            score_sum += s / (s.sum() + (0 if function == "softmax" else 1e-20))
            lse[t] = np.log(np.exp(z[t]).sum()) if np.isfinite(np.exp(z[t])).all() else nan
            valid = (experts[t] >= 0) & (experts[t] < z.shape[-1])
            w = s[experts[t][valid]]
            total = w.sum() + (0 if function == "softmax" else 1e-20) if normalize else 1
            weights[t][valid] = scaling_factor * w / total
    return [weights, score_sum, lse]


ROUTINGS = {
    "one": (1, {}),
    "all": (8, {"expert_bias": 5 * normal(E, seed=3)}),
    "groups": (4, {"num_groups": 4, "group_topk": 2, "expert_bias": normal(E, seed=3)}),
    "mask": (5, {"token_mask": MASK}),
    "sequences": (2, {"sequences": 2, "token_mask": MASK}),
    "large and infinite": (3, {}),
    "replay": (3, {"forced_experts": GIVEN}),
    "replay, mask": (3, {"forced_experts": GIVEN, "token_mask": MASK}),
}


@every_function
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_agrees_with_loops_and_its_gradient_is_the_derivative(name, function, normalize):
    """A bias and groups change the selection, and never a weight or a statistic. Masked tokens may be NaN."""
    topk, options = ROUTINGS[name]
    options = options | {"score_function": function, "normalize": normalize, "scaling_factor": 1.7}
    z, mask = 2 * normal(T, E, seed=topk), options.get("token_mask", np.ones(T, bool))
    z[~mask, ::2] = nan
    if name == "large and infinite":
        z *= 6
        z[:, [1, 6]] = -inf
    z[np.abs(z + 20) < 0.1] += 1  # The formula of sqrtsoftplus changes at -20.
    routing = route(z, topk, **options)
    assert all(np.isfinite(value).all() for value in routing)
    steering = ("expert_bias", "num_groups", "group_topk", "forced_experts")
    held = {key: value for key, value in options.items() if key not in steering} | {"experts": routing.experts}
    replayed = route(z, topk, **held)
    assert all(np.array_equal(got, want) for got, want in zip(replayed, routing, strict=True))
    given = options.get("forced_experts", routing.experts)
    valid = (given >= 0) & (given < E) & mask[:, None]
    equal(routing.experts, np.where(valid, given, -1))
    counts = np.stack([np.bincount(row[ok], minlength=E) for row, ok in zip(given, valid, strict=True)])
    parts = options.get("sequences", 1)
    equal(routing.tokens_per_expert.reshape(parts, E), counts.reshape(parts, -1, E).sum(1))
    assert routing.tokens_per_expert.dtype == routing.experts.dtype == np.int32

    def loops(z):
        if parts == 1:
            return routed_by_loops(z, given, function, normalize, mask)
        halves = [routed_by_loops(z[s], given[s], function, normalize, mask[s]) for s in (slice(3), slice(3, 6))]
        weights, sums, lse = zip(*halves, strict=True)
        return [np.concatenate(weights), np.stack(sums), np.concatenate(lse)]

    def forward(z):
        r = route(z, topk, **held)
        return [r.weights, r.score_sum, r.lse]

    def backward(*cotangents):
        whole = route_backward(z, topk, *cotangents, **options)
        alone = [None] * 3
        total = np.zeros_like(whole)
        for i, cotangent in enumerate(cotangents):  # also each alone
            total += route_backward(z, topk, *alone[:i], cotangent, *alone[i + 1 :], **options)
        close(whole, total, atol=1e-13)
        return {"z": whole}

    check(Case(forward, backward, {"z": z}, loops))
    broken = z.copy()
    broken[0, 2], broken[1, 3], broken[3, ::2] = nan, inf, -inf
    for got, want in zip(forward(broken), loops(broken), strict=True):  # NaN reaches weights and sums, and no other row
        close(got, want)
    a = np.stack(
        [routed_by_loops(z[t : t + 1], given[t : t + 1], function, True, mask[t : t + 1])[1] for t in range(T)]
    )
    options = (function, mask)
    check(
        Case(
            lambda z: [aux_scores(z, *options)],
            lambda g: {"z": aux_scores_backward(z, g, *options)},
            {"z": z},
            lambda z: [a],
        )
    )


def test_small_shapes_and_epsilon():
    for shape, topk in (((0, 4), 2), ((1, 4), 4), ((3, 1), 1), ((2, 0, 4), 1)):
        z, lead = normal(*shape), shape[:-1]
        routing = route(z, topk, score_function="sigmoid")
        assert routing.weights.shape == (*lead, topk) and routing.score_sum.shape == shape[-1:]
        d = route_backward(z, topk, np.ones((*lead, topk)), score_function="sigmoid")
        assert d.shape == shape
        close(d, 0, atol=1e-15)  # The sum of normalised weights is constant.
    routing = route(np.full((1, 3), -inf), 2, score_function="sigmoid")
    assert not routing.weights.any() and not routing.score_sum.any()
    z = np.array([[np.log(1e-20), -inf]])  # a score of 1e-20 and an epsilon of 1e-20
    close(route(z, 1, score_function="sigmoid").weights, [[0.5]], rtol=1e-12)


# ---------------------------------------------------------------- dense outputs


@pytest.mark.parametrize("num_experts", [1, 8, 19])
def test_dense_forms_agree_with_loops(num_experts):
    topk = min(num_experts, 3)
    z = normal(T, num_experts)
    routing = route(z, topk, token_mask=MASK)

    def loops(weights):
        probs = np.zeros((T, num_experts))
        for t, k in itertools.product(np.flatnonzero(MASK), range(topk)):
            probs[t, routing.experts[t, k]] = weights[t, k]
        return [probs]

    def backward(g):
        d_weights = dense_backward(np.where(loops(routing.weights)[0] > 0, g, nan), routing.experts)  # others: ignored
        assert not d_weights[~MASK].any()
        return {"weights": d_weights}

    check(
        Case(
            lambda weights: [dense(weights, routing.experts, num_experts)[0]],
            backward,
            {"weights": routing.weights},
            loops,
        )
    )
    bytemap = dense(routing.weights, routing.experts, num_experts)[1]
    equal(bytemap, loops(routing.weights)[0] > 0)
    _, bitmap = dense(routing.weights, routing.experts, num_experts, "bitmap_u8")
    assert bitmap.dtype == np.uint8 and bitmap.shape == (T, (num_experts + 7) // 8)
    for t, bit in itertools.product(range(T), range(8 * bitmap.shape[1])):
        assert bool(bitmap[t, bit // 8] >> (bit % 8) & 1) == (bit < num_experts and bytemap[t, bit])
    equal(unpack_bitmap(bitmap, num_experts), bytemap)
    indices = dense(routing.weights, routing.experts, num_experts, "indices", np.int16)[1]
    assert indices.dtype == np.int16 and (indices == routing.experts).all()


# ---------------------------------------------------------------- errors

ONE = np.zeros((1, 2), int)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topk": 0}, "topk: got 0"),
        ({"num_groups": 4}, "expected both or neither"),
        ({"num_groups": 3, "group_topk": 1}, "num_groups: got 3"),
        ({"topk": 3, "num_groups": 4, "group_topk": 2}, "group_topk: got 2"),
        ({"group_score_topk": 1}, "group_score_topk: got 1 without groups"),
        ({"num_groups": 4, "group_topk": 2, "group_score_topk": 3}, "group_score_topk: got 3, expected 1 to 2"),
        ({"topk": 5, "num_groups": 4, "group_topk": 2, "group_score_topk": 1}, "group_topk: got 2"),
        ({"forced_experts": ONE, "expert_bias": np.zeros(8)}, "forced_experts: got it together with"),
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


@every_function
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups, score_topk", [(None, None), ((8, 4), None), ((8, 2), 3)])
def test_a_float32_backend_agrees_and_its_mistakes_do_not(function, biased, groups, score_topk):
    scales, tied = np.repeat([1e-5, 1.0, 8.0], 60), np.arange(180) % 3 == 0
    z = (normal(180, 32, seed=3) * scales[:, None]).astype(np.float32)
    z[tied] = np.round(z[tied])
    bias = normal(32, seed=4).astype(np.float32) if biased else None
    options = {"score_function": function, "expert_bias": bias}
    if groups is not None:
        options |= {"num_groups": groups[0], "group_topk": groups[1], "group_score_topk": score_topk}
    experts = np.array([selected_by_loops(row, 8, function, True, bias, groups, score_topk) for row in z])
    assert selection_agrees(experts, z, **options).all()
    swapped, repeated, worst = experts.copy(), experts.copy(), experts.copy()
    swapped[:, [0, 7]] = swapped[:, [7, 0]]
    repeated[:, 7] = repeated[:, 0]
    ranking = select(z, 32, score_function=function, expert_bias=bias)
    worst[:, 7] = [ranked[~np.isin(ranked, row)][-1] for row, ranked in zip(worst, ranking, strict=True)]
    distinct = ~tied & (scales > 1e-5)  # Some keys of the smallest scale are equal in float32.
    for wrong in (swapped, worst):
        assert not selection_agrees(wrong[distinct], z[distinct], **options).any()
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


TWO_OF_THREE = {"num_groups": 3, "group_topk": 2, "score_function": "softmax", "expert_bias": None}


@pytest.mark.parametrize(
    "z, options, right, wrong",
    [
        # Equal inputs give equal keys, whose order is by index.
        ([0.0] * 6, {}, [[0, 1, 2]], [[1, 0, 2], [0, 1, 3], [-1, 0, 1], [0, 1, 6]]),
        ([0.0] * 6, {"num_groups": 3, "group_topk": 1}, [[0, 1]], [[2, 3]]),
        # NaN keys have an exact order.
        ([0.0, nan, 1.0, -inf], {"score_function": "softmax"}, [[0, 1, 2]], [[1, 0, 2], [0, 1, 3]]),
        # Group 0 is kept; groups 1 and 2 are tied at 6 with unequal members, so either may be the other one.
        ([4.3, 4.2, 4.1, 4.0, 5.0, 1.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0], TWO_OF_THREE, [[4, 0, 1, 2], [0, 1, 2, 3]], []),
        ([4.3, 4.2, 4.1, 4.0, 5.0, 1.0, 0.0, 0.0, 2.9, 3.0, 0.0, 0.0], TWO_OF_THREE, [[4, 0, 1, 2]], [[0, 1, 2, 3]]),
    ],
)  # fmt: skip
def test_ties_and_masked_rows(z, options, right, wrong):
    z = np.array([z])
    options = {"score_function": "sigmoid", "expert_bias": np.zeros(z.size)} | options
    equal(select(z, len(right[0]), **options), right[:1])
    assert all(selection_agrees(np.array([row]), z, **options).all() for row in right)
    assert not any(selection_agrees(np.array([row]), z, **options).any() for row in wrong)
    nobody, mask = np.full_like(right[:1], -1), np.array([False])  # A masked row agrees only without experts.
    assert selection_agrees(nobody, z, token_mask=mask, **options).all()
    assert not selection_agrees(np.array(right[:1]), z, token_mask=mask, **options).any()

"""Routing: weights, statistics, masks, replay, dense outputs, the edges of sections 1 and 2."""

import ml_dtypes
import numpy as np
import pytest

from anabranch.reference.router import (
    aux_scores,
    dense,
    dense_backward,
    route,
    route_backward,
    select,
    unpack_bitmap,
)

inf, nan = np.inf, np.nan
FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]


def elementwise(z, function):
    return {"sigmoid": lambda: 1 / (1 + np.exp(-z)), "sqrtsoftplus": lambda: np.sqrt(np.log1p(np.exp(z)))}[function]()


def random_logits(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_normalised_softmax_is_over_the_selected_logits():
    z = np.log(np.array([[1.0, 6.0, 3.0, 5.0]]))
    routing = route(z, 2, scaling_factor=2.5)
    np.testing.assert_array_equal(routing.experts, [[1, 3]])
    np.testing.assert_allclose(routing.weights, 2.5 * np.array([[6 / 11, 5 / 11]]))


def test_raw_softmax_is_over_all():
    z = np.log(np.array([[1.0, 6.0, 3.0, 5.0]]))
    np.testing.assert_allclose(route(z, 2, normalize=False).weights, [[6 / 15, 5 / 15]])


@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
def test_elementwise_scores_are_divided_by_the_sum_of_the_selected(function):
    z = random_logits((6, 5))
    s = np.take_along_axis(elementwise(z, function), select(z, 3), axis=-1)
    raw = route(z, 3, score_function=function, normalize=False, scaling_factor=3.0).weights
    np.testing.assert_allclose(raw, 3 * s)
    normalised = route(z, 3, score_function=function, scaling_factor=3.0).weights
    np.testing.assert_allclose(normalised, 3 * s / s.sum(-1, keepdims=True))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
def test_bias_never_enters_a_weight(function, normalize):
    z, bias = random_logits((7, 6)), 10 * random_logits(6, 1)
    options = {"score_function": function, "normalize": normalize}
    biased = route(z, 2, expert_bias=bias, **options)
    assert (biased.experts != route(z, 2, **options).experts).any()
    replayed = route(z, 2, forced_experts=biased.experts, **options)
    np.testing.assert_array_equal(biased.weights, replayed.weights)
    np.testing.assert_array_equal(biased.score_sum, replayed.score_sum)


def test_epsilon_keeps_the_normalisation_finite():
    routing = route(np.full((1, 3), -inf), 2, score_function="sigmoid")
    np.testing.assert_array_equal(routing.weights, [[0, 0]])
    np.testing.assert_array_equal(routing.score_sum, [0, 0, 0])
    # one score of 1e-20 against an epsilon of 1e-20
    z = np.array([[np.log(1e-20), -inf]])
    np.testing.assert_allclose(route(z, 1, score_function="sigmoid").weights, [[0.5]], rtol=1e-12)


def test_statistics_are_over_all_leading_dimensions():
    z = random_logits((2, 3, 5))
    kept, flat = route(z, 2), route(z.reshape(6, 5), 2)
    assert kept.weights.shape == kept.experts.shape == (2, 3, 2) and kept.lse.shape == (2, 3)
    np.testing.assert_array_equal(kept.weights.reshape(6, 2), flat.weights)
    np.testing.assert_array_equal(kept.tokens_per_expert, flat.tokens_per_expert)
    np.testing.assert_array_equal(kept.score_sum, flat.score_sum)
    assert kept.tokens_per_expert.sum() == 12 and kept.tokens_per_expert.dtype == np.int32
    np.testing.assert_allclose(kept.score_sum.sum(), 6)
    by_sequence = route(z.reshape(6, 5), 2, sequences=2)
    for b in range(2):
        one = route(z[b], 2)
        np.testing.assert_array_equal(by_sequence.tokens_per_expert[b], one.tokens_per_expert)
        np.testing.assert_allclose(by_sequence.score_sum[b], one.score_sum)


@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("topk", [1, 3])
def test_auxiliary_scores_are_normalised_over_all_also_for_one_expert(function, topk):
    z = random_logits((4, 5))
    s = elementwise(z, function)
    a = s / s.sum(-1, keepdims=True)
    np.testing.assert_allclose(aux_scores(z, function), a)
    options = {"score_function": function, "normalize": False, "scaling_factor": 7.0}
    routing = route(z, topk, expert_bias=np.arange(5.0), **options)
    np.testing.assert_allclose(routing.score_sum, a.sum(0))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("broken", [nan, inf])
def test_masked_token_leaves_no_trace_whatever_it_holds(function, broken):
    z = random_logits((4, 5))
    z[1, 2], z[3] = broken, broken
    mask = np.array([True, False, True, False])
    options = {"score_function": function}
    routing = route(z, 2, token_mask=mask, **options)
    alone = route(z[mask], 2, **options)
    np.testing.assert_array_equal(routing.experts[~mask], -1)
    np.testing.assert_array_equal(routing.weights[~mask], 0)
    np.testing.assert_array_equal(routing.lse[~mask], 0)
    np.testing.assert_array_equal(routing.tokens_per_expert, alone.tokens_per_expert)
    np.testing.assert_allclose(routing.score_sum, alone.score_sum)
    np.testing.assert_array_equal(aux_scores(z, function, mask)[~mask], 0)
    rng = np.random.default_rng(5)
    cotangents = rng.normal(size=(4, 2)), rng.normal(size=5), rng.normal(size=4)
    d_logits = route_backward(z, 2, *cotangents, token_mask=mask, **options)
    np.testing.assert_array_equal(d_logits[~mask], 0)
    assert np.isfinite(d_logits).all() and (d_logits[mask] != 0).any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("broken", [nan, inf])
def test_softmax_row_with_nan_or_infinity_has_every_weight_nan(normalize, broken):
    z = np.array([[1.0, 2.0, broken, -inf], [1.0, 2.0, 3.0, -inf]])
    for selection in ({}, {"forced_experts": np.array([[0, 1], [0, 1]])}):
        routing = route(z, 2, normalize=normalize, **selection)
        assert np.isnan(routing.weights[0]).all() and np.isfinite(routing.weights[1]).all()
        assert np.isnan(routing.score_sum).all() and np.isnan(routing.lse[0])
        assert np.isfinite(routing.lse[1])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
def test_nan_reaches_the_weight_of_an_elementwise_score(normalize, function):
    z = np.array([[1.0, nan, 0.0]])
    routing = route(z, 2, score_function=function, normalize=normalize)
    np.testing.assert_array_equal(routing.experts, [[1, 0]])
    assert np.isnan(routing.weights[0, 0]) and np.isnan(routing.weights[0, 1]) == normalize
    assert np.isnan(routing.score_sum).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [None, (3, 2)])
def test_minus_infinity_means_never_this_expert(function, normalize, groups):
    """With K finite logits in a row everything is finite, and as if the others weren't there."""
    z = random_logits((5, 6))
    # K = 4; with groups, two finite logits in each of two groups
    never = [1, 4] if groups is None else [4, 5]
    z[:, never] = -inf
    options = {"score_function": function, "normalize": normalize}
    if groups is not None:
        options |= {"num_groups": groups[0], "group_topk": groups[1]}
    rng = np.random.default_rng(6)
    cotangents = rng.normal(size=(5, 4)), rng.normal(size=6), rng.normal(size=5)
    routing = route(z, 4, **options)
    d_logits = route_backward(z, 4, *cotangents, **options)
    for value in (*routing, d_logits):
        assert np.isfinite(value).all()
    np.testing.assert_array_equal(d_logits[z == -inf], 0)
    assert np.isfinite(np.take_along_axis(z, routing.experts.astype(int), -1)).all()
    alone = route(np.delete(z, never, axis=1), 4, score_function=function, normalize=normalize)
    np.testing.assert_allclose(routing.weights, alone.weights)
    np.testing.assert_allclose(np.delete(routing.score_sum, never), alone.score_sum)
    np.testing.assert_allclose(routing.lse, alone.lse)


# ---------------------------------------------------------------- replay


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
def test_replaying_the_own_selection_changes_nothing(function, normalize):
    z = random_logits((4, 6))
    options = {"score_function": function, "normalize": normalize, "scaling_factor": 0.5}
    free = route(z, 3, **options)
    for replayed in (
        route(z, 3, forced_experts=free.experts, **options),
        route(z, 3, experts=free.experts, **options),
    ):
        for a, b in zip(free, replayed, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forced_minus_one_and_out_of_range_stand_outside_the_normalisation(function):
    z = random_logits((2, 4))
    forced = np.array([[2, -1, 0], [7, -5, 4]])
    routing = route(z, 3, score_function=function, forced_experts=forced)
    np.testing.assert_array_equal(routing.experts, [[2, -1, 0], [-1, -1, -1]])
    two = route(z[:1], 2, score_function=function, forced_experts=forced[:1, [0, 2]])
    np.testing.assert_allclose(routing.weights, [[two.weights[0, 0], 0, two.weights[0, 1]], [0, 0, 0]])
    np.testing.assert_array_equal(routing.tokens_per_expert, [1, 0, 1, 0])
    np.testing.assert_allclose(routing.score_sum, aux_scores(z, function).sum(0))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_repeated_forced_expert_counts_once_a_slot(function):
    z = random_logits((1, 3))
    routing = route(z, 3, score_function=function, forced_experts=np.array([[1, 1, 0]]))
    np.testing.assert_array_equal(routing.tokens_per_expert, [1, 2, 0])
    s = np.exp(z[0]) if function == "softmax" else elementwise(z[0], function)
    np.testing.assert_allclose(routing.weights[0], np.array([s[1], s[1], s[0]]) / (2 * s[1] + s[0]))


@pytest.mark.parametrize(
    "clash",
    [{"expert_bias": np.zeros(4)}, {"num_groups": 2, "group_topk": 1}, {"experts": np.zeros((1, 1), int)}],
)
def test_forced_experts_together_with_steering_is_an_error(clash):
    with pytest.raises(ValueError, match="forced_experts: got it together with"):
        route(np.zeros((1, 4)), 1, forced_experts=np.zeros((1, 1), int), **clash)


def test_a_given_selection_goes_with_every_option():
    z, mask = random_logits((3, 4)), np.array([True, False, True])
    given = np.array([[3, 2], [0, 1], [1, 0]])
    options = {"expert_bias": np.ones(4), "num_groups": 2, "group_topk": 1, "token_mask": mask}
    routing = route(z, 2, experts=given, **options)
    np.testing.assert_array_equal(routing.experts, np.where(mask[:, None], given, -1))


def test_bad_shapes_and_dtypes_are_errors():
    z = np.zeros((2, 4))
    with pytest.raises(ValueError, match=r"experts: got shape \(2, 1\), expected \(2, 2\)"):
        route(z, 2, forced_experts=np.zeros((2, 1), int))
    with pytest.raises(TypeError, match="experts: got dtype float64"):
        route(z, 2, forced_experts=np.zeros((2, 2)))
    with pytest.raises(ValueError, match="token_mask: got"):
        route(z, 2, token_mask=np.ones(2))


# ---------------------------------------------------------------- shapes and dtypes


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape, topk", [((0, 4), 2), ((1, 4), 4), ((3, 1), 1), ((2, 0, 4), 1)])
def test_ordinary_small_inputs(function, shape, topk):
    z = random_logits(shape)
    routing = route(z, topk, score_function=function)
    assert routing.weights.shape == (*shape[:-1], topk) and routing.score_sum.shape == shape[-1:]
    assert routing.tokens_per_expert.sum() == topk * np.prod(shape[:-1])
    d = route_backward(
        z,
        topk,
        np.ones((*shape[:-1], topk)),
        np.ones(shape[-1]),
        np.ones(shape[:-1]),
        score_function=function,
    )
    assert d.shape == shape


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_expert_has_weight_one_and_no_weight_gradient(function):
    z = random_logits((3, 1))
    np.testing.assert_allclose(route(z, 1, score_function=function).weights, 1)
    d = route_backward(z, 1, random_logits((3, 1), 1), score_function=function)
    np.testing.assert_allclose(d, 0, atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_inputs_are_taken_exactly(dtype):
    z, bias = random_logits((4, 6)).astype(dtype), random_logits(6, 1).astype(dtype)
    got = route(z, 2, score_function="sigmoid", expert_bias=bias)
    want = route(z.astype(float), 2, score_function="sigmoid", expert_bias=bias.astype(float))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- dense outputs


@pytest.mark.parametrize("num_experts", [1, 7, 8, 9, 16, 19])
def test_dense_forms_say_the_same(num_experts):
    topk = min(num_experts, 3)
    z = random_logits((5, num_experts))
    mask = np.array([True, True, False, True, True])
    routing = route(z, topk, token_mask=mask)
    probs, bytemap = dense(routing.weights, routing.experts, num_experts)
    assert bytemap.dtype == bool and bytemap.shape == probs.shape == (5, num_experts)
    for t in range(5):
        chosen = [e for e in routing.experts[t] if e >= 0]
        assert sorted(chosen) == list(np.flatnonzero(bytemap[t]))
        for k, e in enumerate(routing.experts[t]):
            assert e < 0 or probs[t, e] == routing.weights[t, k]
        assert (probs[t][~bytemap[t]] == 0).all()
    _, bitmap = dense(routing.weights, routing.experts, num_experts, "bitmap_u8")
    assert bitmap.dtype == np.uint8 and bitmap.shape == (5, (num_experts + 7) // 8)
    for t in range(5):
        for bit in range(8 * bitmap.shape[1]):
            set_here = bool(bitmap[t, bit // 8] >> (bit % 8) & 1)
            assert set_here == (bit < num_experts and bool(bytemap[t, bit]))
    np.testing.assert_array_equal(unpack_bitmap(bitmap, num_experts), bytemap)
    for index_dtype in (np.int16, np.int32, np.int64):
        _, indices = dense(routing.weights, routing.experts, num_experts, "indices", index_dtype)
        assert indices.dtype == index_dtype
        np.testing.assert_array_equal(indices, routing.experts)


def test_unused_bits_have_to_be_zero():
    with pytest.raises(ValueError, match="expected unused bits 0"):
        unpack_bitmap(np.array([[0b1000]], np.uint8), 3)
    with pytest.raises(ValueError, match="got 1 bytes, expected 2"):
        unpack_bitmap(np.array([[0]], np.uint8), 9)


def test_dense_cotangents_at_unselected_probs_are_ignored():
    experts = np.array([[2, 0], [-1, -1]])
    d_probs = np.array([[1.0, nan, 3.0], [nan, nan, nan]])
    np.testing.assert_array_equal(dense_backward(d_probs, experts), [[3, 1], [0, 0]])
    with pytest.raises(ValueError, match="routing_map_format: got 'bits'"):
        dense(np.zeros((2, 2)), experts, 3, "bits")

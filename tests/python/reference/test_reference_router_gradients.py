"""Every gradient of the router against differences, with random cotangents."""

import numpy as np
import pytest
from differences import check_gradient

from anabranch.reference.router import (
    aux_scores,
    aux_scores_backward,
    dense,
    dense_backward,
    route,
    route_backward,
)

FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]
T, E = 4, 8
MASK = np.array([True, False, True, True])


def cotangents(rng, topk, sequences=None):
    shape = (E,) if sequences is None else (sequences, E)
    return rng.normal(size=(T, topk)), rng.normal(size=shape), rng.normal(size=T)


def check(z, topk, given, which=slice(0, 3), **options):
    """route_backward against differences of sum(cotangent * result), the selection held."""
    held = route(z, topk, **options).experts
    steering = ("expert_bias", "num_groups", "group_topk", "forced_experts")
    fixed = {k: v for k, v in options.items() if k not in steering} | {"experts": held}
    active = [g if i in range(3)[which] else None for i, g in enumerate(given)]

    def loss(logits):
        r = route(logits, topk, **fixed)
        results = (r.weights, r.score_sum, r.lse)
        return sum((g * v).sum() for g, v in zip(active, results, strict=True) if g is not None)

    check_gradient(loss, z, route_backward(z, topk, *active, **options), f"d_logits {options}")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "topk, groups",
    [(1, None), (2, None), (5, None), (8, None), (1, (4, 1)), (2, (4, 2)), (4, (2, 1)), (4, (4, 2))],
)
def test_joint_gradient(function, normalize, masked, biased, topk, groups):
    rng = np.random.default_rng(topk)
    z = 2 * rng.normal(size=(T, E))
    options = {"score_function": function, "normalize": normalize, "scaling_factor": 1.7}
    if masked:
        options["token_mask"] = MASK
    if biased:
        options["expert_bias"] = rng.normal(size=E)
    if groups is not None:
        options |= {"num_groups": groups[0], "group_topk": groups[1]}
    check(z, topk, cotangents(rng, topk), **options)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(2, 3)])
def test_each_cotangent_by_itself(function, normalize, which):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(T, E))
    check(z, 3, cotangents(rng, 3), which, score_function=function, normalize=normalize, scaling_factor=0.3)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
def test_replay_with_missing_and_repeated_experts(function, normalize):
    rng = np.random.default_rng(1)
    z = rng.normal(size=(T, E))
    forced = np.array([[3, -1, 3, 0], [-1, -1, -1, -1], [9, 5, -7, 6], [1, 1, 1, 1]])
    for mask in (None, MASK):
        check(
            z,
            4,
            cotangents(rng, 4),
            score_function=function,
            normalize=normalize,
            forced_experts=forced,
            token_mask=mask,
            scaling_factor=2.0,
        )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sequence_statistics(function):
    rng = np.random.default_rng(2)
    z = rng.normal(size=(T, E))
    check(z, 2, cotangents(rng, 2, sequences=2), score_function=function, sequences=2, token_mask=MASK)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normalize", [True, False])
def test_extreme_and_minus_infinite_logits(function, normalize):
    rng = np.random.default_rng(3)
    z = 12 * rng.normal(size=(T, E))
    z[np.abs(z + 20) < 0.1] += 1  # the formula of sqrtsoftplus changes at -20
    z[:, [1, 6]] = -np.inf
    check(z, 3, cotangents(rng, 3), score_function=function, normalize=normalize)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_auxiliary_scores(function, masked):
    rng = np.random.default_rng(4)
    z, g = rng.normal(size=(T, E)), rng.normal(size=(T, E))
    mask = MASK if masked else None
    check_gradient(
        lambda x: (g * aux_scores(x, function, mask)).sum(),
        z,
        aux_scores_backward(z, g, function, mask),
        f"aux_scores {function}",
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_dense_probs(function):
    rng = np.random.default_rng(5)
    z, g = rng.normal(size=(T, E)), rng.normal(size=(T, E))
    options = {"score_function": function, "token_mask": MASK}
    held = route(z, 3, **options).experts

    def loss(x):
        r = route(x, 3, experts=held, **options)
        return (g * dense(r.weights, r.experts, E)[0]).sum()

    check_gradient(loss, z, route_backward(z, 3, dense_backward(g, held), **options), "dense probs")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sum_of_normalised_weights_is_constant(function):
    z = np.random.default_rng(6).normal(size=(T, E))
    np.testing.assert_allclose(route_backward(z, 3, np.ones((T, 3)), score_function=function), 0, atol=1e-15)

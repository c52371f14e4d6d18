"""route() against the oracle: every option, every shape, every dtype, forward and backward."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from frameworks import BOTH
from router_cases import GROUPS, check, logits

pytestmark = BOTH

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def options_of(score_function, normalize, bias, groups, mask, T, E, seed=7):
    rng = np.random.default_rng(seed)
    options = {"score_function": score_function, "normalize": normalize, "scaling_factor": 2.5}
    if bias:
        scale = 0.02 if score_function == "softmax" else 0.2
        options["expert_bias"] = (scale * rng.standard_normal(E)).astype(np.float32)
    if groups:
        options |= GROUPS
    if mask:
        options["token_mask"] = rng.random(T) < 0.7
    return options


@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("groups", [False, True], ids=["", "groups"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_every_combination_of_options(score_function, normalize, bias, groups, mask):
    T, E, K = 203, 64, 8
    check(logits(T, E), K, **options_of(score_function, normalize, bias, groups, mask, T, E))


SHAPES = [
    (0, 64, 8),
    (1, 1, 1),
    (1, 64, 8),
    (7, 3, 2),
    (7, 3, 3),
    (300, 1, 1),
    (129, 64, 64),
    (4097, 64, 8),
    (4097, 130, 7),
    (257, 130, 130),
    (130, 512, 10),
    (130, 512, 33),
    (65, 2304, 36),
    (9, 2304, 2304),
]


@pytest.mark.parametrize("score_function, normalize", list(itertools.product(SCORE_FUNCTIONS, [True, False])))
@pytest.mark.parametrize("T, E, K", SHAPES)
def test_every_shape(T, E, K, score_function, normalize):
    # Experts are compared one by one if they have enough tokens to average over.
    check(logits(T, E), K, per_expert=T >= 100, each=T < 4097, score_function=score_function, normalize=normalize)


@pytest.mark.slow
@pytest.mark.parametrize("score_function, normalize", [("softmax", False), ("sigmoid", True)])
def test_many_experts_and_tokens(score_function, normalize):
    check(logits(2049, 2304), 36, each=False, score_function=score_function, normalize=normalize)


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128])
def test_every_length_of_list(K):
    check(logits(21, 128), K, per_expert=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("score_function, normalize", list(itertools.product(SCORE_FUNCTIONS, [True, False])))
def test_half_precision_logits_lose_only_the_rounding_of_the_gradient(score_function, normalize, dtype):
    T, E = 257, 130
    check(logits(T, E, dtype), 8, **options_of(score_function, normalize, False, False, True, T, E))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_bias_and_groups_in_half_precision(score_function, dtype):
    T, E = 257, 64
    options = options_of(score_function, True, True, True, False, T, E)
    options["expert_bias"] = options["expert_bias"].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    check(logits(T, E, dtype), 8, **options)


@pytest.mark.parametrize(
    "E, K, groups",
    [
        (24, 6, (8, 6)),  # one expert per group
        (24, 24, (1, 1)),  # one group
        (24, 24, (24, 24)),  # groups of one
        (30, 6, (6, 2)),  # groups of 5, which do not fill a vector
        (130, 12, (13, 4)),
        (2304, 36, (72, 12)),
        (512, 96, (4, 2)),  # lists longer than a block
        (512, 66, (256, 66)),
    ],
)
@pytest.mark.parametrize("score_function, bias", [("softmax", False), ("sigmoid", False), ("sqrtsoftplus", True)])
def test_group_sizes(E, K, groups, score_function, bias):
    T = 37
    options = options_of(score_function, True, bias, False, True, T, E)
    check(logits(T, E), K, per_expert=False, num_groups=groups[0], group_topk=groups[1], **options)


@pytest.mark.parametrize(
    "score_function, normalize, bias",
    [
        *(("softmax", normalize, bias) for normalize in (True, False) for bias in (False, True)),
        ("sigmoid", True, True),
        ("sqrtsoftplus", False, False),
    ],
)
@pytest.mark.parametrize(
    "E, K, groups, score_topk",
    [
        (64, 8, (8, 4), 1),  # DeepSeek-V2's maximum
        (64, 8, (8, 4), 2),  # the default number, but a sum of scores
        (256, 8, (8, 4), 2),
        (256, 6, (8, 4), 1),  # K is not a multiple of the groups
        (64, 7, (8, 1), 8),  # all experts of a group
        (64, 8, (8, 1), 3),  # K fills the groups
        (30, 5, (6, 2), 4),
        (130, 12, (13, 7), 10),
        (512, 33, (4, 2), 100),  # a list longer than a block and than K
    ],
)
def test_group_scores_sum_group_score_topk_experts(E, K, groups, score_topk, score_function, normalize, bias):
    T = 203
    options = options_of(score_function, normalize, bias, False, True, T, E)
    grouping = {"num_groups": groups[0], "group_topk": groups[1], "group_score_topk": score_topk}
    check(logits(T, E), K, per_expert=False, **grouping, **options)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
def test_forced_experts_may_repeat_be_missing_or_out_of_range(score_function, normalize, mask):
    T, E, K = 203, 64, 6
    rng = np.random.default_rng(3)
    forced = rng.integers(-1, 8, (T, K)).astype(np.int32)
    forced[::5, 2] = E
    forced[1::5, 3] = -7
    forced[2::7] = -1
    forced[3::7] = 2
    options = options_of(score_function, normalize, False, False, mask, T, E)
    check(logits(T, E), K, forced_experts=forced, **options)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_forced_experts_of_any_integer_dtype(dtype):
    forced = np.array([[0, 40000 if dtype != np.int16 else 99], [-3, 2]]).astype(dtype)
    if dtype == np.int64:
        forced[0, 1] = 2**32 + 1  # would wrap around to expert 1
    from anabranch.jax import route

    assert route(np.zeros((2, 4), np.float32), 2, forced_experts=forced).experts.tolist() == [[0, -1], [-1, 2]]


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_extreme_logits(score_function, normalize):
    rng = np.random.default_rng(5)
    T, E, K = 203, 64, 8
    z = rng.choice([-80.0, -30.0, -20.0, -19.9, -1.0, -0.0, 0.0, 1.0, 17.0, 30.0, 80.0], (T, E)).astype(np.float32)
    z += rng.standard_normal((T, E)).astype(np.float32) * 0.1
    check(z, K, score_function=score_function, normalize=normalize)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_infinitely_unlikely_experts(score_function, normalize):
    T, E, K = 203, 64, 8
    z = logits(T, E)
    z[np.random.default_rng(2).random((T, E)) < 0.6] = -np.inf
    z[:, :K] = logits(T, K, seed=9)  # at least K finite logits
    check(z, K, score_function=score_function, normalize=normalize)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"normalize": False}, {"score_function": "sigmoid"}, {"score_function": "sqrtsoftplus"}]
)
def test_nan_stays_with_its_token(options, dtype):
    T, E, K = 60, 40, 4
    z = logits(T, E, dtype)
    z[3, 5] = np.nan
    z[9, 7] = np.inf
    z[20] = -np.inf
    z[31, :] = np.nan
    z[44, [1, 2]] = np.inf
    check(z, K, per_expert=False, **options)

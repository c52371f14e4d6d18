"""Every bad argument is an error that names it, its value and what was expected."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import fused_compute_score_for_moe_aux_loss, fused_topk_with_score_function, route

Z = jnp.zeros((6, 8))
BIAS = jnp.zeros(8)
FORCED = jnp.zeros((6, 2), jnp.int32)
TRACED = "a traced value"

ROUTE = [
    (dict(logits=jnp.zeros((6, 8), jnp.int32)), TypeError, "logits: got int32[6, 8], expected float32 or"),
    (dict(logits=np.zeros((6, 8))), TypeError, "logits: got float64[6, 8], expected float32 or"),
    (dict(logits=jnp.zeros(())), ValueError, "logits: got float32[], expected"),
    (dict(logits=[[1.0, 2.0]]), TypeError, "logits: got list"),
    (dict(logits=jnp.zeros((6, 0))), ValueError, "topk: got 2, expected an integer in [1, 0], which is empty"),
    (dict(topk=0), ValueError, "topk: got 0, expected an integer in [1, 8]"),
    (dict(topk=9), ValueError, "topk: got 9, expected an integer in [1, 8]"),
    (dict(topk=2.0), TypeError, "topk: got float 2.0"),
    (dict(topk=True), TypeError, "topk: got bool True"),
    (dict(topk=TRACED), TypeError, "topk: got int32[]"),
    (dict(score_function="relu"), ValueError, "score_function: got 'relu', expected one of 's"),
    (dict(score_function=1), ValueError, "score_function: got 1"),
    (dict(normalize=1), TypeError, "normalize: got int 1, expected True or False"),
    (dict(normalize=TRACED), TypeError, "normalize: got"),
    (dict(scaling_factor=math.inf), ValueError, "scaling_factor: got inf, expected a finite number"),
    (dict(scaling_factor=math.nan), ValueError, "scaling_factor: got nan"),
    (dict(scaling_factor=1e39), ValueError, "scaling_factor: got 1e+39"),
    (dict(scaling_factor="2"), TypeError, "scaling_factor: got str"),
    (dict(scaling_factor=jnp.float32(2)), TypeError, "scaling_factor: got float32[]"),
    (dict(scaling_factor=TRACED), TypeError, "scaling_factor: got"),
    (dict(expert_bias=jnp.zeros(7)), ValueError, "expert_bias: got float32[7], expected"),
    (dict(expert_bias=jnp.zeros((1, 8))), ValueError, "expert_bias: got float32[1, 8]"),
    (dict(expert_bias=jnp.zeros(8, jnp.int32)), TypeError, "expert_bias: got int32[8]"),
    (dict(token_mask=jnp.zeros(6, jnp.int32)), TypeError, "token_mask: got int32[6], expected bool [6]"),
    (dict(token_mask=jnp.zeros(5, bool)), ValueError, "token_mask: got bool[5], expected bool [6]"),
    (dict(token_mask=jnp.zeros((6, 1), bool)), ValueError, "token_mask: got bool[6, 1]"),
    (dict(num_groups=3, group_topk=1), ValueError, "num_groups: got 3, expected a divisor of 8 experts"),
    (dict(num_groups=4), ValueError, "group_topk: got None"),
    (dict(group_topk=2), ValueError, "num_groups: got None"),
    (dict(num_groups=4, group_topk=0), ValueError, "group_topk: got 0"),
    (dict(num_groups=2, group_topk=4, topk=4), ValueError, "group_topk: got 4"),
    (dict(num_groups=4, group_topk=2, topk=3), ValueError, "group_topk: got 2"),
    (dict(num_groups=4, group_topk=1, topk=4), ValueError, "group_topk: got 1"),
    (dict(group_score_topk=2), ValueError, "group_score_topk: got 2 without groups, expected None"),
    (dict(num_groups=4, group_topk=2, group_score_topk=0), ValueError, "group_score_topk: got 0, expected an integer"),
    (dict(num_groups=4, group_topk=2, group_score_topk=3), ValueError, "group_score_topk: got 3, expected an integer"),
    (dict(num_groups=4, group_topk=2, group_score_topk=1.0), TypeError, "group_score_topk: got float 1.0"),
    (dict(num_groups=4, group_topk=2, group_score_topk=TRACED), TypeError, "group_score_topk: got"),
    (dict(num_groups=4, group_topk=2, group_score_topk=1, topk=5), ValueError, "group_topk: got 2, expected 1 <= gr"),
    (dict(num_groups=4, group_topk=5, group_score_topk=1), ValueError, "group_topk: got 5"),
    (dict(num_groups=-2, group_topk=1), ValueError, "num_groups: got -2"),
    (dict(num_groups=TRACED, group_topk=1), TypeError, "num_groups: got"),
    (dict(num_groups=4.0, group_topk=1), TypeError, "num_groups: got float"),
    (dict(forced_experts=FORCED, expert_bias=BIAS), ValueError, "expert_bias: got one together with forced_experts"),
    (dict(forced_experts=FORCED, num_groups=4, group_topk=2), ValueError, "num_groups: got one together with"),
    (dict(forced_experts=FORCED[:, :1]), ValueError, "forced_experts: got int32[6, 1], expected"),
    (dict(forced_experts=FORCED.astype(jnp.float32)), TypeError, "forced_experts: got float32[6, 2]"),
    (dict(sequence_stats=1), TypeError, "sequence_stats: got int 1"),
    (dict(logits=jnp.zeros(8), sequence_stats=True), ValueError, "logits: got float32[8], expected [..., S, E]"),
]


def refused(call, arguments, error, message):
    """The error is raised outside and inside of a trace, before anything runs."""
    traced = [name for name, value in arguments.items() if value is TRACED]
    if not traced:
        with pytest.raises(error, match=re.escape(message)):
            call(**arguments)

    def inside(value):
        return call(**{name: value if name in traced else other for name, other in arguments.items()})

    with pytest.raises(error, match=re.escape(message)):
        jax.jit(inside)(jnp.int32(1))


@pytest.mark.parametrize("arguments, error, message", ROUTE, ids=[row[2][:40] for row in ROUTE])
def test_route(arguments, error, message):
    refused(route, {"logits": Z, "topk": 2, **arguments}, error, message)


NOT_DENSE = {"normalize", "token_mask", "forced_experts", "sequence_stats", "group_score_topk"}
DENSE = [
    *[row for row in ROUTE if not NOT_DENSE & set(row[0])],
    (
        dict(score_function="softmax", expert_bias=BIAS),
        ValueError,
        "expert_bias: got one with score_function 'softmax'",
    ),
    (dict(use_pre_softmax=1), TypeError, "use_pre_softmax: got int 1"),
    (dict(compute_aux_scores=TRACED), TypeError, "compute_aux_scores: got"),
    (dict(compute_aux_scores=True, topk=9), ValueError, "topk: got 9"),
    (dict(routing_map_format="dense"), ValueError, "routing_map_format: got 'dense', expected a RoutingMapFormat"),
    (dict(routing_map_format=2), ValueError, "routing_map_format: got 2"),
    (dict(routing_map_format=None), ValueError, "routing_map_format: got None"),
    (dict(topk_indices_dtype=jnp.uint8), TypeError, "topk_indices_dtype: got uint8, expected int16 or int32 or int64"),
    (dict(topk_indices_dtype="float32"), TypeError, "topk_indices_dtype: got float32"),
    (dict(topk_indices_dtype="never"), TypeError, "topk_indices_dtype: got 'never'"),
    (dict(topk_indices_dtype=jax.random.key(0)), TypeError, "topk_indices_dtype: got key<fry>[]"),
    (dict(topk_indices_dtype=np.zeros(2, np.int32)), TypeError, "topk_indices_dtype: got int32[2]"),
    (
        dict(topk_indices_dtype="int32", routing_map_format="bitmap_u8"),
        ValueError,
        "routing_map_format: got bitmap_u8 together with topk_indices_dtype",
    ),
    (dict(logits=jnp.zeros((1, 32769)), topk_indices_dtype="int16"), ValueError, "topk_indices_dtype: got int16 for"),
]


@pytest.mark.parametrize("arguments, error, message", DENSE, ids=[row[2][:40] for row in DENSE])
def test_fused_topk_with_score_function(arguments, error, message):
    if "expert_bias" in arguments and "softmax" not in arguments.values():
        arguments = {"score_function": "sigmoid", **arguments}
    refused(fused_topk_with_score_function, {"logits": Z, "topk": 2, **arguments}, error, message)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(score_function="tanh"), ValueError, "score_function: got 'tanh'"),
        (dict(topk=9), ValueError, "topk: got 9"),
        (dict(logits=jnp.zeros((2, 2), bool)), TypeError, "logits: got bool"),
        (dict(routing_map_format=True), ValueError, "routing_map_format: got True"),
    ],
)
def test_fused_compute_score_for_moe_aux_loss(arguments, error, message):
    arguments = {"logits": Z, "topk": 2, "score_function": "sigmoid", **arguments}
    refused(fused_compute_score_for_moe_aux_loss, arguments, error, message)


@pytest.mark.parametrize("unused", [None, 0, -1])
def test_values_that_mean_no_groups(unused):
    want = fused_topk_with_score_function(Z, 2)
    got = fused_topk_with_score_function(Z, 2, num_groups=unused, group_topk=unused)
    assert all(bool((a == b).all()) for a, b in zip(got, want, strict=True))
    assert route(Z, 2, num_groups=unused, group_topk=unused).experts.tolist() == route(Z, 2).experts.tolist()


def test_more_slots_than_indices_can_count():
    huge = jax.ShapeDtypeStruct((2**28, 8), jnp.float32)
    with pytest.raises(ValueError, match="logits: got 268435456 tokens with topk 8, expected fewer than 2"):
        jax.eval_shape(lambda z: route(z, 8), huge)
    with pytest.raises(ValueError, match="logits: got 268435456 tokens"):
        jax.eval_shape(lambda z: fused_topk_with_score_function(z, 8), huge)

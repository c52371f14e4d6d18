"""TransformerEngine's forms: dense probabilities, every routing map, auxiliary scores, and their gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

import te_in_torch
from anabranch import torch
from anabranch.jax import (
    RoutingMapFormat,
    ScoreFunction,
    fused_compute_score_for_moe_aux_loss,
    fused_topk_with_score_function,
)
from anabranch.reference import router as reference
from frameworks import both, call, vjp
from oracle import assert_close, assert_close_per_expert
from router_cases import BOUND, PER_EXPERT, ROUNDING, check_selection, logits

pytestmark = pytest.mark.usefixtures("platform")

CASES = [
    {"score_function": "softmax"},
    {"score_function": "softmax", "use_pre_softmax": True, "scaling_factor": 0.5},
    {"score_function": "softmax", "num_groups": 8, "group_topk": 2},
    {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4, "expert_bias": True, "scaling_factor": 2.5},
    {"score_function": "sigmoid", "topk": 1},
    {"score_function": "sqrtsoftplus", "expert_bias": True},
    {"score_function": "sqrtsoftplus", "topk": 1, "num_groups": -1, "group_topk": 0},
]


def dense(z, topk, **options):
    """The results of the current framework."""
    return call(
        fused_topk_with_score_function, te_in_torch.fused_topk_with_score_function, np.asarray(z), topk, **options
    )


def probs_and_pull(z, topk, **options):
    """(probs, their pullback to the logits), with the experts as a requested output."""
    options |= {"topk_indices_dtype": "int32"}
    return vjp(
        lambda logits: fused_topk_with_score_function(logits, topk, **options)[0],
        lambda logits: te_in_torch.fused_topk_with_score_function(logits, topk, **options)[0],
        {"logits": z},
    )


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_probabilities_map_and_gradient(case, dtype):
    T, E = 203, 64
    options = dict(case)
    K = options.pop("topk", 8)
    z = logits(T, E, dtype)
    rng = np.random.default_rng(4)
    if options.pop("expert_bias", False):
        options["expert_bias"] = (0.1 * rng.standard_normal(E)).astype(z.dtype)
    d_probs = rng.standard_normal((T, E)).astype(z.dtype)
    d_probs[0, :] = np.nan  # cotangents at unselected probabilities are ignored
    probs, pull = probs_and_pull(z, K, **options)
    experts = np.asarray(dense(z, K, topk_indices_dtype="int32", **options)[1])
    np.put_along_axis(d_probs, experts[:1], np.float32(1.5).astype(z.dtype), axis=1)
    d_logits = pull(d_probs)["logits"]

    softmax = options["score_function"] == "softmax"
    wanted = {
        "score_function": options["score_function"],
        "normalize": not options.pop("use_pre_softmax", False) if softmax else K > 1,
        **{n: options[n] for n in ("expert_bias",) if n in options},
        **({n: options[n] for n in ("num_groups", "group_topk")} if options.get("num_groups", 0) > 0 else {}),
    }
    check_selection(experts, z, K, wanted)
    wanted["scaling_factor"] = options.get("scaling_factor", 1.0)
    routing = reference.route(z, K, experts=experts, **wanted)
    want, want_map = reference.dense(routing.weights, experts, E)
    rounding = ROUNDING[dtype]
    assert probs.dtype == z.dtype
    assert_close(probs, want, BOUND + rounding, "probs")
    d_weights = reference.dense_backward(d_probs, experts)
    d_want = reference.route_backward(z, K, d_weights, experts=experts, **wanted)
    assert d_logits.dtype == z.dtype
    assert_close(d_logits, d_want, BOUND + rounding, "d_logits")
    assert_close_per_expert(d_logits, d_want, PER_EXPERT + rounding, "d_logits", axis=-1)

    for layout in RoutingMapFormat:
        other_probs, got = dense(z, K, routing_map_format=layout, **{**case_options(case), **array_options(options)})
        np.testing.assert_array_equal(other_probs, probs)
        if layout is RoutingMapFormat.BITMAP_U8:
            assert got.dtype == np.uint8 and got.shape == (T, E // 8)
            got = reference.unpack_bitmap(got, E)
        assert got.dtype == bool
        np.testing.assert_array_equal(got, want_map)


def case_options(case):
    return {name: value for name, value in case.items() if name not in ("topk", "expert_bias")}


def array_options(options):
    return {name: options[name] for name in ("expert_bias",) if name in options}


@both
@pytest.mark.parametrize("E", [1, 7, 8, 9, 130])
def test_unused_bits_of_a_bitmap_are_zero(E):
    z = logits(33, E)
    K = min(E, 3)
    _, bits = dense(z, K, routing_map_format="bitmap_u8")
    _, experts = dense(z, K, topk_indices_dtype="int32")
    assert bits.shape == (33, (E + 7) // 8)
    _, want = reference.dense(np.ones(experts.shape), np.asarray(experts), E)
    np.testing.assert_array_equal(reference.unpack_bitmap(bits, E), want)


@both
@pytest.mark.parametrize("dtype", [jnp.int16, np.int32, "int64", np.dtype("int16")])
def test_indices_of_every_dtype(dtype):
    z = logits(50, 40)
    _, indices = dense(z, 6, topk_indices_dtype=dtype)
    assert indices.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(indices, reference.select(z, 6))


@both
@pytest.mark.parametrize("topk", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_auxiliary_scores(score_function, dtype, topk):
    T, E = 203, 130
    z = logits(T, E, dtype)
    d_scores = np.random.default_rng(1).standard_normal((T, E)).astype(np.float32)

    functions = (fused_compute_score_for_moe_aux_loss, torch.fused_compute_score_for_moe_aux_loss)
    scores, pull = vjp(*(lambda logits, f=f: f(logits, topk, score_function)[1] for f in functions), {"logits": z})
    d_logits = pull(d_scores)["logits"]
    routing_map, _ = call(*functions, z, topk, score_function)
    assert scores.dtype == np.float32 and d_logits.dtype == z.dtype
    assert_close(scores, reference.aux_scores(z, score_function), BOUND, "scores")
    d_want = reference.aux_scores_backward(z, d_scores, score_function)
    assert_close(d_logits, d_want, BOUND + ROUNDING[dtype], "d_logits")
    assert_close_per_expert(d_logits, d_want, PER_EXPERT + ROUNDING[dtype], "d_logits", axis=-1)
    _, want_map = reference.dense(np.ones((T, topk)), reference.select(z, topk), E)
    np.testing.assert_array_equal(routing_map, want_map)
    bits, _ = call(*functions, z, topk, score_function, "bitmap_u8")
    np.testing.assert_array_equal(reference.unpack_bitmap(bits, E), want_map)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_auxiliary_scores_by_the_other_name(score_function):
    """`fused_topk_with_score_function` returns the same with compute_aux_scores, whatever its other options are."""
    E, topk = 130, 5
    z = jnp.asarray(logits(203, E))
    routing_map, scores = fused_compute_score_for_moe_aux_loss(z, topk, score_function)
    other, other_map = fused_topk_with_score_function(
        z,
        topk,
        use_pre_softmax=True,
        num_groups=3,
        group_topk=1,
        scaling_factor=7.0,
        score_function=score_function,
        expert_bias=jnp.ones(E),
        compute_aux_scores=True,
    )
    np.testing.assert_array_equal(other, scores)
    np.testing.assert_array_equal(other_map, routing_map)


def test_names_and_values_of_the_enums():
    z = logits(5, 8)
    want = fused_topk_with_score_function(z, 2, score_function=ScoreFunction.SIGMOID)
    for name in ("sigmoid", "SIGMOID", "Sigmoid"):
        for got, expected in zip(fused_topk_with_score_function(z, 2, score_function=name), want, strict=True):
            np.testing.assert_array_equal(got, expected)
    bits = fused_topk_with_score_function(z, 2, routing_map_format=RoutingMapFormat.BITMAP_U8)[1]
    for layout in (1, "bitmap_u8", "BITMAP_U8"):
        np.testing.assert_array_equal(fused_topk_with_score_function(z, 2, routing_map_format=layout)[1], bits)
    assert [m.name for m in ScoreFunction] == ["SIGMOID", "SOFTMAX", "SQRTSOFTPLUS"]


def test_positional_argument_order_is_transformer_engines():
    z, bias = logits(9, 16), np.zeros(16, np.float32)
    by_position = fused_topk_with_score_function(z, 4, False, 4, 2, 1.5, ScoreFunction.SIGMOID, bias, False, 0)
    by_name = fused_topk_with_score_function(
        z, 4, num_groups=4, group_topk=2, scaling_factor=1.5, score_function="sigmoid", expert_bias=bias
    )
    for got, want in zip(by_position, by_name, strict=True):
        np.testing.assert_array_equal(got, want)


@both
def test_leading_axes_are_kept():
    z = logits(12, 16).reshape(3, 4, 16)
    flat = dense(z.reshape(12, 16), 2)
    probs, routing_map = dense(z, 2)
    np.testing.assert_array_equal(probs.reshape(12, 16), flat[0])
    np.testing.assert_array_equal(routing_map.reshape(12, 16), flat[1])


@both
@pytest.mark.parametrize("T", [0, 1])
def test_no_token_or_one(T):
    probs, routing_map = dense(logits(T, 16), 2)
    assert probs.shape == routing_map.shape == (T, 16)
    assert probs_and_pull(logits(T, 16), 2)[1](np.ones((T, 16), np.float32))["logits"].shape == (T, 16)

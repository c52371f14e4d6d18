"""Random shapes, options and logits against the oracle."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from anabranch.jax import route
from anabranch.reference import router as reference
from oracle import assert_close
from router_cases import BOUND, DTYPES, ROUNDING, check_selection

pytestmark = pytest.mark.usefixtures("platform")


@st.composite
def routings(draw):
    """Logits [T, E], K and options, any valid combination."""
    per_group, groups = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    E, T = per_group * groups, draw(st.integers(1, 40))
    kept = draw(st.integers(1, groups))
    score_topk = draw(st.none() | st.integers(1, per_group))
    K = draw(st.integers(1, kept * per_group)) if score_topk else kept * draw(st.integers(1, per_group))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    z = draw(st.sampled_from([0.1, 2.0, 20.0])) * rng.standard_normal((T, E))
    if draw(st.booleans()):
        z = np.round(z)  # many ties
    if draw(st.booleans()):
        z[rng.random((T, E)) < 0.3] = -np.inf
        z[:, rng.permutation(E)[:K]] = rng.standard_normal((T, K))
    options = {
        "score_function": draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        "normalize": draw(st.booleans()),
        "scaling_factor": draw(st.sampled_from([1.0, 2.5, -0.5])),
    }
    if draw(st.booleans()):
        options["token_mask"] = rng.random(T) < 0.7
    if draw(st.integers(0, 3)) == 0:
        options["forced_experts"] = rng.integers(-2, E + 2, (T, K)).astype(np.int32)
    else:
        if draw(st.booleans()):
            options["num_groups"], options["group_topk"] = groups, kept
            if score_topk:
                options["group_score_topk"] = score_topk
            # Every group has at least K/g finite logits; otherwise infinities and NaN decide the order of groups.
            z = np.maximum(z, -1e4)
        if draw(st.booleans()):
            options["expert_bias"] = (0.1 * rng.standard_normal(E)).astype(DTYPES[dtype])
    return z.astype(DTYPES[dtype]), K, options


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(routings())
def test_route_and_its_gradient(routing):
    z, K, options = routing
    arrays = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}

    def differentiable(z):
        routing = route(z, K, **arrays)
        return (routing.weights, routing.score_sum, routing.lse), (routing.experts, routing.tokens_per_expert)

    results, pull, (experts, counts) = jax.vjp(differentiable, jnp.asarray(z), has_aux=True)
    experts = np.asarray(experts)
    selected = {}
    if "forced_experts" not in options:
        check_selection(experts, z, K, options)
        selected = {"experts": experts}
    want = reference.route(z, K, **options, **selected)
    np.testing.assert_array_equal(experts, want.experts)
    np.testing.assert_array_equal(counts, want.tokens_per_expert)
    for name, got in zip(("weights", "score_sum"), results, strict=False):
        assert_close(got, getattr(want, name), BOUND, name)
    # lse = max + log(sum): the rounding error of the sum, which is at least 1, remains when both terms nearly cancel.
    np.testing.assert_array_less(np.abs(np.asarray(results[2], np.float64) - want.lse), BOUND * (1 + np.abs(want.lse)))

    rng = np.random.default_rng(0)
    cotangent = tuple(rng.standard_normal(result.shape).astype(np.float32) for result in results)
    d_want = reference.route_backward(z, K, *cotangent, **options, **selected)
    d_got = np.asarray(pull(cotangent)[0], np.float64)
    # A replayed expert may have a logit of -inf; both results are then NaN.
    finite = np.isfinite(d_want)
    np.testing.assert_array_equal(np.isfinite(d_got), finite)
    # With few tokens the terms may cancel, so errors are relative to the size of the cotangents.
    error = np.abs(d_got - d_want)[finite]
    scale = np.abs(d_want[finite]).max(initial=0.0)
    assert (error <= (2 * BOUND + ROUNDING[str(z.dtype)]) * (scale + 1.0)).all()

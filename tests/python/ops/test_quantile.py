"""Quantile balancing against the oracle: the histogram of thresholds, and the bias computed from it."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch as pytorch
from torch._subclasses.fake_tensor import FakeTensorMode

import in_torch
from anabranch import torch
from anabranch.jax import fused_topk_with_score_function, quantile_bias, route
from anabranch.reference import quantile as reference
from anabranch.reference import router as reference_router
from frameworks import both, call
from router_cases import DTYPES, logits

pytestmark = pytest.mark.usefixtures("platform")

INF, NAN = np.inf, np.nan
#: Rounding of scores and keys to float32, in ulps of the larger of both (semantics, section 1).
ULPS = {"softmax": 32, "sigmoid": 4, "sqrtsoftplus": 4}


def check_histogram(got, z, topk, bounds, bins, **options):
    """Every count is in the oracle's bin, or in the next one if rounding may have moved it across the border.

    For every prefix of bins, the count is between the number of positions that are certainly inside and the number of
    positions that may be inside.
    """
    mask = options.pop("token_mask", None)
    lower, upper = np.float32(bounds[0]).astype(float), np.float32(bounds[1]).astype(float)
    positions = reference.bin_positions(z, topk, lower, upper, bins, **options)
    positions = positions.reshape(-1, positions.shape[-1])
    if mask is not None:
        positions[~np.asarray(mask).ravel()] = NAN
    s = reference_router.scores(z, options["score_function"])
    largest = max(np.abs(s[np.isfinite(s)]).max(initial=0), np.abs(options["expert_bias"]).max(), *np.abs(bounds))
    rounding = 2 * (ULPS[options["score_function"]] + 4) * np.spacing(np.float32(largest)) * bins / (upper - lower)
    got = np.asarray(got)
    assert got.dtype == np.int32 and got.shape == (positions.shape[-1], bins)
    np.testing.assert_array_equal(got.sum(axis=1), (~np.isnan(positions)).sum(axis=0))
    through = got.cumsum(axis=1)
    for e, expert_positions in enumerate(positions.T):
        known = np.sort(expert_positions[~np.isnan(expert_positions)])
        borders = np.arange(1, bins)
        surely = np.searchsorted(known, borders - rounding, side="left")
        maybe = np.searchsorted(known, borders + rounding, side="right")
        assert (surely <= through[e, :-1]).all() and (through[e, :-1] <= maybe).all(), f"expert {e}"


def assert_same_routing(got, want, name=""):
    """Integers are equal; floats may differ by the order of sums, which the CUDA kernels choose."""
    if np.issubdtype(want.dtype, np.integer) or want.dtype == bool:
        np.testing.assert_array_equal(got, want, err_msg=name)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, err_msg=name)


def check(z, topk, bounds=(-1.0, 1.0), bins=200, **options):
    routing = call(route, torch.route, z, topk, qb_bin_bounds=bounds, qb_bins=bins, **options)
    plain = call(route, torch.route, z, topk, **options)
    for name in ("weights", "experts", "tokens_per_expert", "score_sum", "lse"):
        assert_same_routing(getattr(routing, name), getattr(plain, name), name)
    assert plain.qb_histogram is None
    options.pop("normalize", None)
    check_histogram(routing.qb_histogram, np.asarray(z), topk, bounds, bins, **options)
    return routing.qb_histogram


def bias_of(E, scale=0.2, seed=5):
    return (scale * np.random.default_rng(seed).standard_normal(E)).astype(np.float32)


@both
@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_histograms_of_every_score_function_and_dtype(score_function, dtype, mask):
    T, E, K = 407, 64, 8
    options = {"token_mask": np.random.default_rng(2).random(T) < 0.7} if mask else {}
    bias = bias_of(E, 0.02 if score_function == "softmax" else 0.2)
    check(logits(T, E, dtype), K, score_function=score_function, expert_bias=bias, **options)


@both
@pytest.mark.parametrize(
    "T, E, K",
    [
        (0, 8, 2),
        (1, 2, 1),
        (300, 3, 2),  # all experts but one
        (70, 8, 7),
        (70, 33, 8),
        (70, 130, 129),
        (203, 128, 15),
        (203, 128, 16),  # one more than a list of 16 ranks
        (130, 512, 32),
        (130, 384, 8),
        (130, 512, 64),
        (33, 2304, 36),
        (2100, 256, 8),
        (2100, 64, 6),
    ],
)
def test_histograms_of_every_shape(T, E, K):
    check(logits(T, E), K, score_function="sigmoid", expert_bias=bias_of(E))


@both
@pytest.mark.parametrize("bins", [1, 2, 7, 1000, 20000])
def test_values_outside_of_the_bounds_are_in_the_first_and_the_last_bin(bins):
    E = 24
    histogram = check(
        logits(300, E), 4, bounds=(0.125, 0.25), bins=bins, score_function="sigmoid", expert_bias=bias_of(E)
    )
    assert bins == 1 or (histogram[:, 0].sum() > 300 and histogram[:, -1].sum() > 300)


@both
@pytest.mark.parametrize("E, K", [(8, 3), (40, 8), (130, 33)])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_equal_keys_infinities_and_nan(score_function, E, K):
    rng = np.random.default_rng(3)
    z = np.round(rng.standard_normal((12, E))).astype(np.float32)
    z[0] = 0
    z[1, 1] = NAN
    z[2, : K + 1] = NAN  # the threshold is NaN: nothing is counted
    z[3] = NAN
    z[4, K:] = -INF  # the threshold is -inf
    z[5] = -INF
    z[6, 0] = INF
    histogram = check(z, K, bins=16, score_function=score_function, expert_bias=np.zeros(E, np.float32))
    assert histogram.sum() < 12 * E
    check(z, K, bins=16, score_function=score_function, expert_bias=np.sign(bias_of(E)))


def test_a_token_without_a_finite_threshold_counts_below_all_bins():
    z = np.array([[1.0, -INF, -INF]], np.float32)
    routing = route(
        z, 1, score_function="sigmoid", expert_bias=np.ones(3, np.float32), qb_bin_bounds=(-9.0, 9.0), qb_bins=3
    )
    assert routing.qb_histogram.tolist() == [[1, 0, 0]] * 3


@st.composite
def balancings(draw):
    E = draw(st.integers(2, 70))
    T, K, bins = draw(st.integers(1, 40)), draw(st.integers(1, E - 1)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    z = draw(st.sampled_from([0.1, 2.0, 20.0])) * rng.standard_normal((T, E))
    if draw(st.booleans()):
        z = np.round(z)  # many ties
    if draw(st.booleans()):
        z[rng.random((T, E)) < 0.3] = -INF
    lower = draw(st.sampled_from([-1.0, -0.3, 0.0, 0.2]))
    options = {
        "score_function": draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        "normalize": draw(st.booleans()),
        "expert_bias": (0.1 * rng.standard_normal(E)).astype(np.float32),
    }
    if draw(st.booleans()):
        options["token_mask"] = rng.random(T) < 0.7
    return z.astype(DTYPES[draw(st.sampled_from(list(DTYPES)))]), K, (lower, lower + 0.7), bins, options


@both
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(balancings())
def test_histograms_of_any_routing(balancing):
    z, K, bounds, bins, options = balancing
    check(jnp.asarray(z), K, bounds, bins, **options)


def test_leading_axes_sequences_jit_grad_and_vmap():
    z, bias, bounds = logits(60, 16).reshape(3, 4, 5, 16), bias_of(16), np.array([-1.0, 1.0], np.float32)

    def step(z, bounds):
        return route(
            z, 4, score_function="sigmoid", expert_bias=bias, sequence_stats=True, qb_bin_bounds=bounds, qb_bins=50
        )

    want = step(z.reshape(60, 16), bounds).qb_histogram
    np.testing.assert_array_equal(step(z, bounds).qb_histogram, want)
    np.testing.assert_array_equal(jax.jit(step)(z, bounds).qb_histogram, want)
    mapped = jax.vmap(step, in_axes=(0, None))(z, bounds).qb_histogram
    assert mapped.shape == (3, 16, 50)
    np.testing.assert_array_equal(mapped.sum(axis=0), want)
    gradient = jax.grad(lambda z: jnp.sum(step(z, bounds).weights ** 2))(z)
    plain = jax.grad(lambda z: jnp.sum(route(z, 4, score_function="sigmoid", expert_bias=bias).weights ** 2))(z)
    np.testing.assert_allclose(gradient, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", [{}, {"routing_map_format": "bitmap_u8"}, {"topk_indices_dtype": "int16"}])
@pytest.mark.parametrize("mode", [None, "two_kernel", "fused_atomic"])
def test_transformer_engines_names(layout, mode):
    T, E, K, bins = 203, 40, 6, 100
    z, bias, bounds = logits(T, E), bias_of(E), jnp.array([-1.0, 1.0])
    before = jnp.arange(E * bins, dtype=jnp.int32).reshape(E, bins)
    options = {"score_function": "sigmoid", "expert_bias": bias}

    def dense(z):
        return fused_topk_with_score_function(
            z, K, qb_histogram=before, qb_bin_bounds=bounds, qb_histogram_mode=mode, **options, **layout
        )

    probs, routing_map, histogram = dense(z)
    plain = fused_topk_with_score_function(z, K, **options, **layout)
    assert_same_routing(probs, plain[0])
    assert_same_routing(routing_map, plain[1])
    want = route(z, K, qb_bin_bounds=bounds, qb_bins=bins, **options).qb_histogram
    np.testing.assert_array_equal(histogram, before + want)
    gradient = jax.grad(lambda z: jnp.sum(dense(z)[0] ** 2))(z)
    plain = jax.grad(lambda z: jnp.sum(fused_topk_with_score_function(z, K, **options)[0] ** 2))(z)
    np.testing.assert_allclose(gradient, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("E, bins, most", [(2, 1, 5), (7, 40, 100), (60, 200, 3000), (256, 1000, 2**24)])
def test_the_bias_is_the_quantile(E, bins, most):
    rng = np.random.default_rng(0)
    histogram = rng.integers(0, most // bins + 2, (E, bins)).astype(np.int32)
    histogram[rng.random((E, bins)) < 0.5] = 0
    histogram[0] = 0
    for K in {1, E // 2, E - 1}:
        got = quantile_bias(histogram, -0.5, 2.0, K)
        assert got.dtype == np.float32 and got.shape == (E,)
        np.testing.assert_allclose(got, reference.quantile_bias(histogram, -0.5, 2.0, K), atol=2e-6)


def test_counts_beyond_float32_stay_exact():
    # The quantile is at the end of the first bin; with one count less it would be past the gap.
    n = 2**24 + 2
    histogram = np.array([[n // 2, 0, 0, n // 2], [n // 2 - 1, 0, 0, n // 2 + 1]], np.int32)
    want = reference.quantile_bias(histogram, 0.0, 4.0, 1)
    assert want[1] - want[0] > 1.9
    np.testing.assert_allclose(quantile_bias(histogram, 0.0, 4.0, 1), want, atol=1e-5)


def test_counts_beyond_int32_are_nan_and_never_wrapped():
    """JAX's sums are int32 by default, torch's are int64."""
    counts = np.full((2, 4), 2**30, np.int32)
    assert np.isnan(quantile_bias(counts, 0.0, 4.0, 1)).all()
    bias = torch.quantile_bias(in_torch.tensor(counts), 0.0, 4.0, 1)
    np.testing.assert_allclose(in_torch.array(bias), 0.0)
    z, full = logits(3, 4, "float32"), np.full((4, 2), 2**31 - 2, np.int32)
    bias, bounds = np.zeros(4, np.float32), (-1.0, 1.0)
    ours = fused_topk_with_score_function(
        z, 1, score_function="sigmoid", expert_bias=bias, qb_histogram=full, qb_bin_bounds=bounds
    )[2]
    theirs = in_torch.tensor(full)
    torch.fused_topk_with_score_function(
        *(in_torch.tensor(z), 1, False, None, None, None, "sigmoid", in_torch.tensor(bias)),
        qb_histogram=theirs,
        qb_bin_bounds=bounds,
    )
    np.testing.assert_array_equal(ours, in_torch.array(theirs))
    assert np.max(ours) == 2**31 - 1 and np.min(ours) == 2**31 - 2


def test_biases_of_quantiles_balance_and_get_no_gradient():
    T, E, K = 4000, 24, 4
    z = logits(T, E) + 2 * np.random.default_rng(1).standard_normal(E).astype(np.float32)
    bias, bounds = jnp.zeros(E), (-1.0, 1.0)

    @jax.jit
    def step(bias):
        routing = route(z, K, score_function="sigmoid", expert_bias=bias, qb_bin_bounds=bounds, qb_bins=1000)
        return routing.tokens_per_expert, quantile_bias(routing.qb_histogram, *bounds, K)

    worst = []
    for _ in range(6):
        counts, bias = step(bias)
        worst.append(float(counts.max()) * E / (T * K))
    assert worst[0] > 3 and worst[-1] < 1.15
    gradient = jax.grad(lambda lower: quantile_bias(jnp.ones((4, 3), jnp.int32), lower, 2.0, 2).sum())(0.5)
    assert gradient == 0


Z, BIAS = jnp.zeros((6, 8)), jnp.zeros(8)
BAD = [
    (dict(qb_bins=None), "qb_bin_bounds: got one by itself"),
    (dict(qb_bin_bounds=None), "qb_bins: got one by itself"),
    (dict(expert_bias=None), "expert_bias: got None with quantile balancing"),
    (dict(topk=8), "topk: got 8 with quantile balancing, expected fewer than the 8 experts"),
    (dict(num_groups=4, group_topk=2), "num_groups: got 4 with quantile balancing"),
    (dict(qb_bins=0), "qb_bins: got 0"),
    (dict(qb_bins=2**20 + 1), "qb_bins: got 1048577"),
    (dict(qb_bin_bounds=(1.0, 1.0)), "qb_bin_bounds: got 1.0, 1.0, expected lower < upper"),
    (dict(qb_bin_bounds=np.array([1.0, 0.0], np.float32)), "qb_bin_bounds: got 1.0, 0.0"),
    (dict(qb_bin_bounds=np.array([-INF, INF], np.float32)), "qb_bin_bounds: got -inf, inf, expected lower < upper"),
    (dict(qb_bin_bounds=(1.0, 2.0, 3.0)), "qb_bin_bounds: got (1.0, 2.0, 3.0), expected (lower, upper)"),
    (dict(qb_bin_bounds=jnp.zeros(3)), "qb_bin_bounds: got float32[3]"),
    (dict(qb_bin_bounds=(float("nan"), 1.0)), "qb_bin_bounds: got nan"),
    (dict(forced_experts=jnp.zeros((6, 2), jnp.int32)), "expert_bias: got one together with forced_experts"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[row[1][:40] for row in BAD])
def test_inconsistent_options_are_errors(arguments, message):
    good = {"topk": 2, "score_function": "sigmoid", "expert_bias": BIAS, "qb_bin_bounds": (-1.0, 1.0), "qb_bins": 10}
    with pytest.raises(ValueError, match=re.escape(message)):
        route(Z, **(good | arguments))


@pytest.mark.parametrize("ends", [(1.0, 1.0), (1.0, -1.0), (NAN, 1.0), (-1.0, INF)], ids=str)
def test_bounds_in_a_cpu_tensor_are_checked_in_eager_mode(ends):
    logits, bias, bounds = pytorch.zeros(6, 8), pytorch.zeros(8), pytorch.tensor(ends)
    options = dict(score_function="sigmoid", expert_bias=bias)
    message = re.escape(f"got {ends[0]}, {ends[1]}, expected lower < upper, both finite")
    with pytest.raises(ValueError, match=f"qb_bin_bounds: {message}"):
        torch.route(logits, 2, **options, qb_bin_bounds=bounds, qb_bins=10)
    with pytest.raises(ValueError, match=f"qb_bin_bounds: {message}"):
        torch.route(
            logits, 2, **options, qb_bin_bounds=(bounds[0], ends[1] if ends[1] < INF else bounds[1]), qb_bins=10
        )
    histogram = pytorch.zeros(8, 10, dtype=pytorch.int32)
    with pytest.raises(ValueError, match=f"qb_bin_bounds: {message}"):
        positional = (logits, 2, False, None, None, None, "sigmoid", bias)
        torch.fused_topk_with_score_function(*positional, qb_histogram=histogram, qb_bin_bounds=bounds)
    with pytest.raises(ValueError, match=f"lower: {message}"):
        torch.quantile_bias(histogram, *bounds.unbind(), 2)


def test_bounds_of_a_program_or_a_transformation_are_data():
    logits, options = pytorch.zeros(3, 6, 8), dict(score_function="sigmoid", expert_bias=pytorch.zeros(8), qb_bins=10)

    def histogram(logits, bounds):
        return torch.route(logits, 2, **options, qb_bin_bounds=bounds).qb_histogram

    bounds = pytorch.tensor([[-1.0, 1.0], [0.0, 2.0], [1.0, 1.0]])
    found = pytorch.func.vmap(histogram)(logits, bounds)
    assert pytorch.equal(found[0], histogram(logits[0], bounds[0]))
    compiled = pytorch.compile(histogram, fullgraph=True, backend="eager")
    assert pytorch.equal(compiled(logits[1], bounds[1]), found[1])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert histogram(logits[0], bounds[0]).shape == (8, 10)


COUNTS = jnp.zeros((8, 10), jnp.int32)
BAD_DENSE = [
    (dict(qb_histogram=None), ValueError, "qb_bin_bounds: got one without qb_histogram"),
    (dict(qb_histogram=None, qb_bin_bounds=None, qb_histogram_mode="two_kernel"), ValueError, "qb_histogram_mode: got"),
    (dict(qb_bin_bounds=None), ValueError, "qb_bin_bounds: got None with qb_histogram"),
    (dict(qb_histogram_mode="atomic"), ValueError, "qb_histogram_mode: got 'atomic'"),
    (dict(qb_histogram=COUNTS.astype(jnp.float32)), TypeError, "qb_histogram: got float32[8, 10]"),
    (dict(qb_histogram=COUNTS[:7]), ValueError, "qb_histogram: got int32[7, 10]"),
    (dict(qb_histogram=COUNTS[:, :0]), ValueError, "qb_histogram: got"),
    (dict(compute_aux_scores=True), ValueError, "qb_histogram: got one with compute_aux_scores"),
    (dict(expert_bias=None), ValueError, "expert_bias: got None with quantile balancing"),
    (dict(score_function="softmax"), ValueError, "expert_bias: got one with score_function 'softmax'"),
]


@pytest.mark.parametrize("arguments, error, message", BAD_DENSE, ids=[row[2][:40] for row in BAD_DENSE])
def test_inconsistent_arguments_of_transformer_engines_function_are_errors(arguments, error, message):
    good = {"score_function": "sigmoid", "expert_bias": BIAS, "qb_histogram": COUNTS, "qb_bin_bounds": (-1.0, 1.0)}
    with pytest.raises(error, match=re.escape(message)):
        fused_topk_with_score_function(Z, 2, **(good | arguments))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(histogram=COUNTS.astype(jnp.float32)), TypeError, "histogram: got float32[8, 10]"),
        (dict(histogram=COUNTS[:, :0]), ValueError, "histogram: got int32[8, 0]"),
        (dict(topk=8), ValueError, "topk: got 8"),
        (dict(lower=1.0), ValueError, "lower: got 1.0, 1.0"),
    ],
)
def test_bad_arguments_of_the_bias(arguments, error, message):
    good = {"histogram": COUNTS, "lower": -1.0, "upper": 1.0, "topk": 2}
    with pytest.raises(error, match=re.escape(message)):
        quantile_bias(**(good | arguments))

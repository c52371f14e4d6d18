"""TransformerEngine's forms of dispatch and combine against the oracle with random cotangents."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_in_torch
from anabranch.jax import combine, dispatch, plan, routing_map_to_selected_experts, token_combine, token_dispatch
from anabranch.reference import dispatch as reference
from dispatch_cases import BOUND, FLOATS, assert_products_close, normal
from frameworks import both, call, in_torch, vjp
from oracle import assert_close, assert_close_per_expert

pytestmark = pytest.mark.usefixtures("platform")


def routing(T, E, share, seed=0):
    """A map whose tokens have any number of experts, some none; expert 0 has no token if there are others."""
    routed = np.random.default_rng(seed).random((T, E)) < share
    if E > 1:
        routed[:, 0] = False
    routed[: T // 5] = False
    return routed


# T, E, share of routed pairs, align_size, rows as a share of the routed pairs
SHAPES = [
    *itertools.product((0, 1, 7), (1, 3, 64), (0.4,), (None, 1, 8), (1.0,)),
    (4097, 64, 0.1, None, 1.0),
    (4097, 130, 0.05, 128, 1.0),
    (500, 2304, 0.01, 8, 1.0),
    (300, 9, 0.5, None, 0.6),
    (300, 9, 0.5, 8, 0.6),
    (300, 9, 0.5, 8, 2.0),
    (50, 7, 1.0, 4, 1.0),
]


def check(T, E, share, align, rows, dtype="float32", probs_dtype="float32", D=10):
    rng = np.random.default_rng(T + E)
    routed = routing(T, E, share)
    n = int(routed.sum() * rows)
    inp, probs = normal(rng, (T, D), dtype), normal(rng, (T, E), probs_dtype)
    probs = np.where(rng.random(probs.shape) < 0.2, np.zeros_like(probs), probs)
    functions = (token_dispatch, te_in_torch.token_dispatch)
    dispatched = call(*functions, inp, routed, n, probs, align)
    output, permuted, row_id_map, pad_offsets, counts = dispatched
    want = reference.token_dispatch(inp, routed, n, probs, align)
    assert (output.dtype, permuted.dtype) == (inp.dtype, probs.dtype)
    for name, expected in zip(dispatched._fields, want, strict=True):
        got = getattr(dispatched, name)
        if name == "tokens_per_expert" and in_torch() and align is None:
            expected = None
        assert (got is None) == (expected is None)
        if got is not None:
            np.testing.assert_array_equal(np.asarray(got).astype(np.float64), expected)
    sizes_dtype = np.int64 if in_torch() else np.int32  # as in TransformerEngine
    assert row_id_map.dtype == np.int32 and all(a is None or a.dtype == sizes_dtype for a in (pad_offsets, counts))

    d_output, d_permuted = normal(rng, output.shape, dtype), normal(rng, permuted.shape, probs_dtype)
    _, pull = vjp(*(lambda inp, f=f: f(inp, routed, n, probs, align)[0] for f in functions), {"inp": inp})
    d_inp = pull(d_output)["inp"]
    _, pull = vjp(*(lambda probs, f=f: f(inp, routed, n, probs, align)[1] for f in functions), {"probs": probs})
    d_probs = pull(d_permuted)["probs"]
    assert (d_inp.dtype, d_probs.dtype) == (inp.dtype, probs.dtype)
    want_inp, want_probs = reference.token_dispatch_backward(d_output, d_permuted, want[2], want[3])
    assert_close(d_inp, want_inp, BOUND[dtype], "d_inp")
    assert_close_per_expert(d_probs, want_probs, 0.0, "d_probs", axis=1)

    expert_rows = normal(rng, output.shape, dtype)
    functions = (token_combine, te_in_torch.token_combine)
    out, pull = vjp(
        *(lambda rows, probs, f=f: f(rows, row_id_map, probs, pad_offsets) for f in functions),
        {"rows": expert_rows, "probs": probs},
    )
    assert out.dtype == expert_rows.dtype
    assert_close(out, reference.token_combine(expert_rows, want[2], probs, want[3]), BOUND[dtype], "out")
    d_out = normal(rng, out.shape, dtype)
    gradients = pull(d_out)
    d_rows, d_merging = gradients["rows"], gradients["probs"]
    want_rows, want_merging = reference.token_combine_backward(d_out, expert_rows, want[2], probs, want[3])
    assert (d_rows.dtype, d_merging.dtype) == (expert_rows.dtype, probs.dtype)
    assert_close(d_rows, want_rows, BOUND[dtype], "d_rows")
    sizes = (np.abs(np.asarray(a, np.float64)) for a in (d_out, expert_rows))
    _, sizes = reference.token_combine_backward(*sizes, want[2], np.ones((T, E)), want[3])
    assert_products_close(d_merging, want_merging, sizes, "d_merging_probs")

    plain, pull = vjp(
        *(lambda rows, f=f: f(rows, row_id_map, None, pad_offsets) for f in functions), {"rows": expert_rows}
    )
    assert_close(plain, reference.token_combine(expert_rows, want[2], None, want[3]), BOUND[dtype], "sum")
    want_rows, _ = reference.token_combine_backward(d_out, expert_rows, want[2], None, want[3])
    assert_close(pull(d_out)["rows"], want_rows, 0.0, "d_rows of the sum")


@both
@pytest.mark.parametrize(("T", "E", "share", "align", "rows"), SHAPES)
def test_token_dispatch_and_combine_are_the_oracles(T, E, share, align, rows):
    check(T, E, share, align, rows)


@both
@pytest.mark.parametrize(("dtype", "probs_dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_every_mix_of_dtypes(dtype, probs_dtype):
    check(60, 7, 0.4, 8, 1.0, dtype, probs_dtype, D=70)


def test_results_unpack_and_leading_dimensions_are_flattened():
    rng = np.random.default_rng(0)
    inp, routed, probs = normal(rng, (2, 6, 4)), routing(12, 5, 0.5).reshape(2, 6, 5), normal(rng, (2, 6, 5))
    n = int(routed.sum())
    output, permuted, row_id_map, pad_offsets, tokens_per_expert = token_dispatch(inp, routed, n, probs)
    flat = token_dispatch(inp.reshape(12, 4), routed.reshape(12, 5).astype(np.int32), n, probs.reshape(12, 5))
    for a, b in zip(
        (output, permuted, row_id_map, tokens_per_expert), (flat[0], flat[1], flat[2], flat[4]), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert pad_offsets is None
    assert output.shape == (n, 4)
    assert token_combine(output, row_id_map, probs).shape == (12, 4)
    d_inp = jax.grad(lambda inp: token_dispatch(inp, routed, n).output.sum())(inp)
    np.testing.assert_array_equal(d_inp, np.broadcast_to(routed.sum(-1, keepdims=True), inp.shape))


def test_without_probs_there_are_none():
    result = token_dispatch(jnp.ones((4, 3)), routing(4, 2, 1.0), 4)
    assert result.permuted_probs is None


def test_both_forms_agree():
    """The map form of a compact routing has the rows and the combined tokens of the compact form."""
    rng = np.random.default_rng(1)
    T, E, K, D = 200, 9, 3, 16
    experts = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32)
    routed, dense = np.zeros((T, E), bool), np.zeros((T, E), np.float32)
    np.put_along_axis(routed, experts, True, 1)
    weights = normal(rng, (T, K))
    np.put_along_axis(dense, experts, weights, 1)
    x = normal(rng, (T, D))
    for align in (None, 8):
        by_map = token_dispatch(x, routed, T * K, align_size=align)
        compact = plan(experts, E, align_size=align or 0)
        np.testing.assert_array_equal(by_map.output, dispatch(x, compact))
        np.testing.assert_array_equal(by_map.tokens_per_expert, compact.group_sizes)
        out = token_combine(by_map.output, by_map.row_id_map, dense, by_map.pad_offsets)
        assert_close(out, np.asarray(combine(dispatch(x, compact), compact, weights)), BOUND["float32"], "out")


@both
def test_any_row_id_map_is_safe():
    """Rows, experts and counts out of range are skipped."""
    functions = (token_combine, te_in_torch.token_combine)
    inp = np.arange(1.0, 5.0, dtype=np.float32)[:, None]
    row_id_map = np.array([[3, 0, 0, 1, 2], [9, -5, 1, 0, 99], [1, 1, 7, -2, 2], [2, 2, 1, 1, -4]], np.int32)
    assert call(*functions, inp, row_id_map).ravel().tolist() == [5.0, 0.0, 0.0, 0.0]
    huge = np.array([2**31 - 1, -(2**31)], np.int32)
    assert call(*functions, inp, row_id_map, None, huge).ravel().tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", FLOATS)
def test_selected_experts_are_the_oracles(dtype):
    rng = np.random.default_rng(0)
    for T, E, K in ((0, 3, 2), (1, 1, 1), (40, 9, 1), (40, 9, 4), (40, 9, 9), (300, 130, 6)):
        routed, probs = routing(T, E, 0.3), normal(rng, (T, E), dtype)
        (experts, selected), pull = jax.vjp(lambda p, m=routed, k=K: routing_map_to_selected_experts(p, m, k), probs)
        want_experts, want = reference.routing_map_to_selected_experts(probs, routed, K)
        assert (experts.dtype, selected.dtype) == (jnp.int32, probs.dtype)
        np.testing.assert_array_equal(experts, want_experts)
        assert_close(selected, want, 0.0, "probs")
        d = normal(rng, (T, K), dtype)
        (d_probs,) = pull((np.zeros((T, K), jax.dtypes.float0), jnp.asarray(d)))
        want_d = reference.routing_map_to_selected_experts_backward(d, want_experts, E)
        assert_close(d_probs, want_d, 0.0, "d_probs")
    experts, selected = routing_map_to_selected_experts(probs.reshape(3, 100, 130), routed.reshape(3, 100, 130), 6)
    np.testing.assert_array_equal(experts.reshape(300, 6), want_experts)

"""dispatch() and combine(), forward and backward, against the oracle with random cotangents."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import in_torch
from anabranch import torch
from anabranch.jax import combine, dispatch, plan
from anabranch.jax.ops.dispatch import combine_backward, dispatch_backward, gather_sum
from anabranch.reference import dispatch as reference
from dispatch_cases import BOUND, CASES, FLOATS, Case, assert_products_close, normal
from frameworks import both, vjp
from oracle import assert_close, assert_rows_close

pytestmark = pytest.mark.usefixtures("platform")


def our_plan(case):
    return plan(case.experts(), case.E, align_size=case.align, num_rows=case.num_rows)


def product_sizes(d_out, rows, want_plan):
    """sum_i |d_out[t, i] rows[row, i]| per assignment."""
    d_out, rows = (np.abs(np.asarray(a, np.float64)) for a in (d_out, rows))
    return reference.combine_backward(d_out, rows, want_plan, np.ones(want_plan.row_of_slot.shape))[1]


def check_dispatch(case, D, dtype):
    rng, layout, want_plan = case.rng(), our_plan(case), case.reference_plan()
    x = normal(rng, (case.T, D), dtype)
    rows, pull = vjp(lambda x: dispatch(x, layout), lambda x: torch.dispatch(x, in_torch.plan_of(layout)), {"x": x})
    assert rows.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(rows, np.float64), reference.dispatch(x, want_plan))
    d_rows = normal(rng, rows.shape, dtype)
    d_x = pull(d_rows)["x"]
    assert d_x.dtype == x.dtype
    assert_close(d_x, reference.dispatch_backward(d_rows, want_plan), BOUND[dtype], "d_x")


def check_combine(case, D, dtype, weights_dtype="float32"):
    rng, layout, want_plan = case.rng(), our_plan(case), case.reference_plan()
    rows = normal(rng, (layout.slot_of_row.size, D), dtype)
    weights = normal(rng, (case.T, case.K), weights_dtype)
    weights = np.where(rng.random(weights.shape) < 0.1, np.zeros_like(weights), weights)
    out, pull = vjp(
        lambda rows, weights: combine(rows, layout, weights),
        lambda rows, weights: torch.combine(rows, in_torch.plan_of(layout), weights),
        {"rows": rows, "weights": weights},
    )
    assert out.dtype == rows.dtype
    assert_close(out, reference.combine(rows, want_plan, weights), BOUND[dtype], "out")
    d_out = normal(rng, out.shape, dtype)
    gradients = pull(d_out)
    d_rows, d_weights = gradients["rows"], gradients["weights"]
    assert (d_rows.dtype, d_weights.dtype) == (rows.dtype, weights.dtype)
    want_rows, want_weights = reference.combine_backward(d_out, rows, want_plan, weights)
    assert_rows_close(d_rows, want_rows, np.diff(want_plan.offsets), BOUND[dtype], "d_rows")
    assert_products_close(d_weights, want_weights, product_sizes(d_out, rows, want_plan), "d_weights")


@both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dispatch_and_combine_are_the_oracles(case):
    check_dispatch(case, 24, "float32")
    check_combine(case, 24, "float32")


@both
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("D", [1, 63, 64, 513, 1100])
def test_every_width_and_dtype(dtype, D):
    for case in (Case(30, 6, 3, 8), Case(30, 6, 3, 8, 0.6, "invalid")):
        check_dispatch(case, D, dtype)
        check_combine(case, D, dtype)


@both
@pytest.mark.parametrize(("dtype", "weights_dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_weights_of_every_dtype(dtype, weights_dtype):
    check_combine(Case(60, 6, 3, 8, choice="masked"), 40, dtype, weights_dtype)


@pytest.mark.parametrize(("dtype", "cotangent"), list(itertools.product(FLOATS, FLOATS)))
def test_the_rules_accept_cotangents_of_every_dtype(dtype, cotangent):
    case = Case(60, 6, 3, 8, 0.8)
    rng, layout, want = case.rng(), our_plan(case), case.reference_plan()
    d_rows = normal(rng, (layout.slot_of_row.size, 40), cotangent)
    d_x = dispatch_backward(jnp.asarray(d_rows), layout, dtype)
    assert d_x.dtype == dtype
    assert_close(d_x, reference.dispatch_backward(d_rows, want), BOUND[dtype], "d_x")
    rows, weights = normal(rng, d_rows.shape, dtype), normal(rng, (60, 3))
    d_out = normal(rng, (60, 40), cotangent)
    for w in (None, weights):
        got = combine_backward(jnp.asarray(d_out), jnp.asarray(rows), layout, w, dtype)
        want_rows, want_weights = reference.combine_backward(d_out, rows, want, w)
        assert got.rows.dtype == dtype
        assert_rows_close(got.rows, want_rows, np.diff(want.offsets), BOUND[dtype], "d_rows")
        if w is not None:
            assert_products_close(got.weights, want_weights, product_sizes(d_out, rows, want), "d_weights")


@pytest.mark.parametrize(("dtype", "addend_dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_sums_of_rows_accept_an_addend(dtype, addend_dtype):
    """Each element, also of tokens without rows, is within the float32 roundings of its terms and one to its dtype."""
    case = Case(60, 6, 3, 8, 0.8, "masked")
    rng, layout, want_plan = case.rng(), our_plan(case), case.reference_plan()
    d_rows = normal(rng, (layout.slot_of_row.size, 37), dtype)
    addend = normal(rng, (60, 37), addend_dtype)
    got = gather_sum(jnp.asarray(d_rows), layout.row_of_slot, None, dtype, jnp.asarray(addend))
    assert (got.shape, got.dtype) == ((60, 37), dtype)

    wide, wide_addend = d_rows.astype(np.float64), addend.astype(np.float64)
    want = reference.dispatch_backward(wide, want_plan) + wide_addend
    sizes = reference.dispatch_backward(np.abs(wide), want_plan) + np.abs(wide_addend)
    in_float32 = 4 * 2.0**-24 * sizes  # three rows and the addend
    info = jnp.finfo(dtype)
    once = float(info.eps) / 2 * (np.abs(want) + in_float32) + float(info.smallest_subnormal) / 2
    wrong = np.abs(np.asarray(got, np.float64) - want) > in_float32 + once
    assert not wrong.any(), f"{wrong.sum()} elements are wrong, the first at {np.argwhere(wrong)[0]}"


@both
def test_combine_without_weights_is_the_sum():
    case = Case(60, 6, 3, 8)
    rng, layout, want = case.rng(), our_plan(case), case.reference_plan()
    rows = normal(rng, (layout.slot_of_row.size, 40))
    out, pull = vjp(
        lambda rows: combine(rows, layout),
        lambda rows: torch.combine(rows, in_torch.plan_of(layout)),
        {"rows": rows},
    )
    assert_close(out, reference.combine(rows, want), BOUND["float32"], "out")
    d_out = normal(rng, out.shape)
    assert_close(pull(d_out)["rows"], reference.combine_backward(d_out, rows, want)[0], 0.0, "d_rows")


@both
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape_and_dtype(data):
    E = data.draw(st.integers(1, 6), "E")
    case = Case(
        data.draw(st.integers(0, 9), "T"),
        E,
        data.draw(st.integers(1, E), "K"),
        data.draw(st.sampled_from([0, 1, 2, 8]), "align"),
        data.draw(st.sampled_from([None, 0.5, 2.0]), "rows"),
        data.draw(st.sampled_from(["distinct", "masked", "invalid", "repeated", "cold", "one"]), "choice"),
    )
    D, dtype = data.draw(st.integers(1, 20), "D"), data.draw(st.sampled_from(FLOATS), "dtype")
    check_dispatch(case, D, dtype)
    check_combine(case, D, dtype, data.draw(st.sampled_from(FLOATS), "weights dtype"))


def test_leading_dimensions_are_kept():
    case = Case(24, 5, 2)
    rng, layout = case.rng(), our_plan(case)
    folded = layout._replace(row_of_slot=layout.row_of_slot.reshape(2, 3, 4, 2))
    x, weights = normal(rng, (24, 8)), normal(rng, (24, 2))
    rows = dispatch(x.reshape(2, 3, 4, 8), folded)
    np.testing.assert_array_equal(rows, dispatch(x, layout))
    out = combine(rows, folded, weights.reshape(2, 3, 4, 2))
    assert out.shape == (2, 3, 4, 8)
    np.testing.assert_array_equal(out.reshape(24, 8), combine(rows, layout, weights))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int32"])
def test_dispatch_copies_other_dtypes(dtype):
    case = Case(30, 5, 2, 8)
    x = case.rng().integers(0, 2 if dtype == "bool" else 100, (30, 7)).astype(dtype)
    rows = dispatch(x, our_plan(case))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(rows, np.float64), reference.dispatch(x.astype(float), case.reference_plan())
    )


def test_nan_and_infinity_stay_in_their_rows():
    case = Case(40, 5, 2, 8)
    layout, want = our_plan(case), case.reference_plan()
    x = np.array(normal(case.rng(), (40, 6)))
    x[3, 2], x[5, 1], x[7] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(dispatch(x, layout), reference.dispatch(x, want))
    rows = np.array(dispatch(x, layout))
    rows[want.slot_of_row < 0] = np.nan  # padding is never read
    weights = normal(case.rng(), (40, 2))
    assert_close(combine(rows, layout, weights), reference.combine(rows, want, weights), BOUND["float32"], "out")
    d_out = np.array(normal(case.rng(), (40, 6)))
    d_out[9] = np.nan
    got = combine_backward(jnp.asarray(d_out), jnp.asarray(rows), layout, jnp.asarray(weights), jnp.float32)
    want_rows, want_weights = reference.combine_backward(d_out, rows, want, weights)
    assert_close(got.rows, want_rows, BOUND["float32"], "d_rows")
    assert_close(got.weights, want_weights, BOUND["float32"], "d_weights")


def test_a_zero_weight_has_a_gradient_and_does_not_hide_nan():
    layout = plan(np.array([[0, 1]], np.int32), 2)
    rows = jnp.array([[2.0, 3.0], [5.0, 7.0]])
    d_weights = jax.grad(lambda w: combine(rows, layout, w).sum())(jnp.zeros((1, 2)))
    assert d_weights.tolist() == [[5.0, 12.0]]
    assert np.isnan(combine(rows.at[0, 0].set(jnp.nan), layout, jnp.zeros((1, 2)))[0, 0])

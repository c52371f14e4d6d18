"""plan() against the oracle, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import torch
from anabranch.jax import plan
from anabranch.reference import dispatch as reference
from dispatch_cases import CASES, Case
from frameworks import both, call

pytestmark = pytest.mark.usefixtures("platform")


def assert_same_plan(got, want):
    for name in want._fields:
        ours = getattr(got, name)
        assert ours.dtype == jnp.int32, name
        np.testing.assert_array_equal(np.asarray(ours), getattr(want, name), err_msg=name)


@both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_is_the_oracles(case):
    got = call(plan, torch.plan, case.experts(), case.E, align_size=case.align, num_rows=case.num_rows)
    assert_same_plan(got, case.reference_plan())


@both
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_plan_is_the_oracles_for_any_indices(data):
    T, K = data.draw(st.integers(0, 12), "T"), data.draw(st.integers(1, 5), "K")
    P = data.draw(st.sampled_from([1, 1, 2, 3]), "P")
    E, align = P * data.draw(st.integers(1, 9), "E / P"), data.draw(st.sampled_from([0, 1, 2, 3, 8]), "align")
    index = st.integers(-2, E) | st.sampled_from([-(2**31), 2**31 - 1])
    experts = data.draw(st.lists(index, min_size=T * K, max_size=T * K), "experts")
    experts = np.array(experts, np.int32).reshape(T, K)
    multiple = P * max(align, 1)
    num_rows = data.draw(st.none() | st.integers(0, 40).map(lambda n: n * multiple), "num_rows")
    got = call(plan, torch.plan, experts, E, align_size=align, num_rows=num_rows, num_destinations=P)
    assert_same_plan(got, reference.plan(experts, E, align, num_rows, P))


def test_plan_keeps_leading_dimensions():
    experts = Case(24, 5, 2).experts()
    folded = plan(experts, 5)
    got = plan(experts.reshape(2, 3, 4, 2), 5)
    assert got.row_of_slot.shape == (2, 3, 4, 2)
    assert_same_plan(got._replace(row_of_slot=got.row_of_slot.reshape(24, 2)), folded)


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_plan_accepts_every_index_dtype(dtype):
    experts = Case(50, 5, 2, choice="masked").experts()
    with jax.enable_x64(True):
        got = plan(jnp.asarray(experts, dtype), 5)
    assert_same_plan(got, reference.plan(experts, 5))


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("as_jax", [True, False])
def test_plan_counts_wide_indices_as_invalid_rather_than_wrapping_them(x64, as_jax):
    experts = np.array([[2**32], [2**32 + 1], [-(2**32)], [2**32 - 1], [1]], np.int64)
    if as_jax and not x64:
        pytest.skip("JAX has no int64 then")
    with jax.enable_x64(x64):
        got = plan(jnp.asarray(experts) if as_jax else experts, 2)
    assert got.dropped == 4
    assert got.tokens_per_expert.tolist() == [0, 1]


def test_expert_of_row_is_that_of_its_slot():
    """Rows without an assignment have -1, not the expert that index -1 wraps around to; also under jit and vmap."""
    experts = np.stack([np.roll(Case(24, 5, 2, choice="invalid").experts(), n, axis=0) for n in range(3)])
    plans = jax.jit(jax.vmap(lambda e: plan(e, 5, align_size=4)))(experts)
    inside = jax.jit(jax.vmap(lambda e: plan(e, 5, align_size=4).expert_of_row))(experts)
    want = np.stack([np.append(e.ravel(), -1)[slots] for e, slots in zip(experts, plans.slot_of_row, strict=True)])
    np.testing.assert_array_equal(plans.expert_of_row, want)
    np.testing.assert_array_equal(inside, want)
    assert (want == -1).any() and (want == 4).any()


def test_the_default_rows_suffice_for_every_routing():
    for case in CASES:
        if case.rows is None and case.choice != "invalid":
            assert plan(case.experts(), case.E, align_size=case.align).dropped == 0, case


def test_plan_has_no_gradient_and_blocks_no_other():
    def loss(x):
        experts = jnp.argsort(x, axis=1)[:, :2].astype(jnp.int32)
        return plan(experts, 4).offsets.sum() * (x**2).sum()

    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * x * plan(jnp.zeros((3, 2), jnp.int32), 4).offsets[1:].sum() * 0
                               + 2 * x * (loss(x) / (x**2).sum()))  # fmt: skip

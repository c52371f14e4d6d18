"""Plan, dispatch, combine, chunk sort: section 5 sentence by sentence, against loops and differences."""

import numpy as np
import pytest
from differences import check_gradient

from anabranch.reference.dispatch import (
    combine,
    combine_backward,
    dispatch,
    dispatch_backward,
    plan,
    rows_needed,
    sort_chunks_by_index,
    sort_chunks_by_index_backward,
)

nan = np.nan


def random_experts(seed, shape=(7, 3), num_experts=5):
    """With -1, indices out of range, repeats, and an expert without a token."""
    experts = np.random.default_rng(seed).integers(-2, num_experts + 1, size=shape)
    experts[experts == 3] = 0
    return experts


def plan_by_loops(experts, num_experts, align_size, num_rows):
    a = max(align_size, 1)
    flat = experts.reshape(-1)
    slots = [[s for s in range(flat.size) if flat[s] == e] for e in range(num_experts)]
    row_of_slot, slot_of_row, expert_of_row = [-1] * flat.size, [-1] * num_rows, [-1] * num_rows
    dropped = sum(e < -1 or e >= num_experts for e in flat)
    offsets, row = [0], 0
    for e, mine in enumerate(slots):
        for position, slot in enumerate(mine):
            if row + position < num_rows:
                row_of_slot[slot], slot_of_row[row + position], expert_of_row[row + position] = row + position, slot, e
            else:
                dropped += 1
        row += -(-len(mine) // a) * a
        offsets.append(min(row, num_rows))
    counts = [len(mine) for mine in slots]
    return counts, np.diff(offsets), offsets, row_of_slot, slot_of_row, dropped, expert_of_row


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("align_size", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("num_rows", [None, 0, 8, 16, 64])
def test_plan_agrees_with_loops(seed, align_size, num_rows):
    experts = random_experts(seed)
    got = plan(experts, 5, align_size, num_rows)
    size = rows_needed(21, 5, align_size) if num_rows is None else num_rows
    want = plan_by_loops(experts, 5, align_size, size)
    for field, a, b in zip(got._fields, got, want, strict=True):
        np.testing.assert_array_equal(np.ravel(a), np.ravel(b), err_msg=field)
        assert a.dtype == np.int32, field


@pytest.mark.parametrize("num_slots, num_experts, align_size, rows", [
    (21, 5, 0, 21), (21, 5, 1, 21), (21, 5, 8, 56), (3, 5, 8, 24), (0, 5, 8, 0), (7, 5, 4, 20), (1, 1, 128, 128),
])  # fmt: skip
def test_static_rows(num_slots, num_experts, align_size, rows):
    assert rows_needed(num_slots, num_experts, align_size) == rows


@pytest.mark.parametrize("align_size", [2, 3, 8])
def test_static_rows_hold_every_routing(align_size):
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_experts = rng.integers(1, 9)
        experts = rng.integers(0, num_experts, size=(rng.integers(0, 9), rng.integers(1, 4)))
        assert plan(experts, num_experts, align_size).dropped == 0


def test_out_of_range_is_dropped_and_counted_and_minus_one_is_not():
    p = plan(np.array([[-1, 4], [2**30, -(2**30)], [3, 0]]), 4)
    assert p.dropped == 3
    np.testing.assert_array_equal(p.row_of_slot, [[-1, -1], [-1, -1], [1, 0]])
    np.testing.assert_array_equal(p.tokens_per_expert, [1, 0, 0, 1])


def test_counts_are_from_before_dropping():
    p = plan(np.zeros((5, 1), int), 2, 0, 3)
    np.testing.assert_array_equal(p.tokens_per_expert, [5, 0])
    np.testing.assert_array_equal(p.group_sizes, [3, 0])
    np.testing.assert_array_equal(p.row_of_slot.ravel(), [0, 1, 2, -1, -1])
    assert p.dropped == 2


def test_rows_have_to_be_aligned():
    with pytest.raises(ValueError, match="num_rows: got 6, expected a multiple of 4"):
        plan(np.zeros((2, 1), int), 2, 4, 6)
    with pytest.raises(TypeError, match="experts: got dtype float64"):
        plan(np.zeros((2, 1)), 2)


@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (2, 3, 2)])
def test_ordinary_small_plans_keep_leading_dimensions(shape):
    p = plan(np.zeros(shape, int), 1, 4)
    assert p.row_of_slot.shape == shape and p.tokens_per_expert == np.prod(shape)
    x = np.random.default_rng(0).normal(size=(*shape[:-1], 3))
    rows = dispatch(x, p)
    assert rows.shape == (p.slot_of_row.size, 3)
    np.testing.assert_allclose(combine(rows, p), shape[-1] * x)
    assert dispatch_backward(rows, p).shape == x.shape


def test_dispatch_copies_tokens_and_zeroes_the_rest():
    experts = np.array([[1, 0], [1, -1]])
    x = np.array([[1.0, nan], [3.0, 4.0]])
    rows = dispatch(x, plan(experts, 2, 2))
    np.testing.assert_array_equal(rows, [[1, nan], [0, 0], [1, nan], [3, 4], [0, 0], [0, 0]])


def test_combine_skips_slots_without_a_row():
    p = plan(np.array([[0, 9], [0, -1]]), 1, 2, 2)
    rows = np.array([[1.0], [2.0]])
    weights = np.array([[2.0, nan], [0.0, np.inf]])
    np.testing.assert_array_equal(combine(rows, p, weights), [[2], [0]])
    d_rows, d_weights = combine_backward(np.array([[10.0], [20.0]]), rows, p, weights)
    np.testing.assert_array_equal(d_rows, [[20], [0]])
    # slots without a row get 0; a weight of exactly 0 gets its gradient
    np.testing.assert_array_equal(d_weights, [[10, 0], [40, 0]])


def test_padding_gets_no_gradient_and_gives_none():
    p = plan(np.array([[0], [1]]), 2, 2)
    d_rows, _ = combine_backward(np.full((2, 1), 5.0), np.full((4, 1), nan), p)
    np.testing.assert_array_equal(d_rows, [[5], [0], [5], [0]])
    np.testing.assert_array_equal(dispatch_backward(np.array([[1.0], [nan], [2.0], [nan]]), p), [[1], [2]])


@pytest.mark.parametrize("num_rows", [None, 8])
@pytest.mark.parametrize("align_size", [0, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients(num_rows, align_size, weighted):
    rng = np.random.default_rng(1)
    experts = random_experts(2)
    p = plan(experts, 5, align_size, num_rows)
    out_of_range = ((experts < -1) | (experts >= 5)).sum()
    assert (p.dropped > out_of_range) == (num_rows == 8)
    x, rows = rng.normal(size=(7, 2)), rng.normal(size=(p.slot_of_row.size, 2))
    g_rows, g_out = rng.normal(size=rows.shape), rng.normal(size=x.shape)
    check_gradient(lambda v: (g_rows * dispatch(v, p)).sum(), x, dispatch_backward(g_rows, p), "d_x")
    w = rng.normal(size=(7, 3)) if weighted else None
    d_rows, d_w = combine_backward(g_out, rows, p, w)
    check_gradient(lambda v: (g_out * combine(v, p, w)).sum(), rows, d_rows, "d_rows")
    if weighted:
        check_gradient(lambda v: (g_out * combine(rows, p, v)).sum(), w, d_w, "d_weights")
    else:
        assert d_w is None


# ---------------------------------------------------------------- chunk sort


def test_output_chunk_i_is_input_chunk_order_i():
    inp = np.arange(9.0)[:, None]
    out, row_id_map = sort_chunks_by_index(inp, np.array([2, 0, 3, 1]), np.array([3, 1, 0, 2]))
    np.testing.assert_array_equal(out.ravel(), [5, 0, 1, 2, 3, 4, 6, 7, 8])
    np.testing.assert_array_equal(row_id_map, [1, 2, 3, 4, 5, 0, 6, 7, 8])
    assert row_id_map.dtype == np.int32


@pytest.mark.parametrize("sizes", [[2, 3, 4], [0, 0, 0], [4, 4, 4]])
def test_chunk_sort_gradient_and_sizes_past_the_rows(sizes):
    rng = np.random.default_rng(2)
    inp, g = rng.normal(size=(10, 2)), rng.normal(size=(10, 2))
    sizes, order = np.array(sizes), np.array([2, 0, 1])
    d = sort_chunks_by_index_backward(g, sizes, order)
    check_gradient(lambda v: (g * sort_chunks_by_index(v, sizes, order)[0]).sum(), inp, d, "d_inp")
    _, row_id_map = sort_chunks_by_index(inp, sizes, order)
    np.testing.assert_array_equal(np.sort(row_id_map), np.arange(10))


def test_chunk_sort_refuses_what_is_no_permutation():
    with pytest.raises(ValueError, match="sorted_indices"):
        sort_chunks_by_index(np.zeros((4, 1)), np.array([2, 2]), np.array([0, 0]))
    with pytest.raises(ValueError, match="split_sizes: got -1"):
        sort_chunks_by_index(np.zeros((4, 1)), np.array([2, -1]), np.array([0, 1]))

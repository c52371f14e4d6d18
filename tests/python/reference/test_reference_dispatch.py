"""The oracle's plan, dispatch, combine, chunk sort, token maps and ragged exchange against loops."""

import numpy as np
import pytest

from anabranch.reference.dispatch import (
    combine,
    combine_backward,
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    dispatch,
    dispatch_backward,
    local_permute_after_a2a,
    local_unpermute_before_a2a,
    plan,
    routing_map_to_selected_experts,
    routing_map_to_selected_experts_backward,
    rows_needed,
    sort_chunks_by_index,
    token_combine,
    token_combine_backward,
    token_dispatch,
    token_dispatch_backward,
)

nan = np.nan
T, E, D = 6, 5, 2
equal = np.testing.assert_array_equal


def plan_by_loops(experts, align_size, num_rows):
    a = max(align_size, 1)
    flat = experts.reshape(-1)
    slots = [[s for s in range(flat.size) if flat[s] == e] for e in range(E)]
    row_of_slot, slot_of_row, expert_of_row = [-1] * flat.size, [-1] * num_rows, [-1] * num_rows
    dropped = sum(e < -1 or e >= E for e in flat)
    offsets, row = [0], 0
    for e, mine in enumerate(slots):
        for position, slot in enumerate(mine):
            if row + position < num_rows:
                row_of_slot[slot], slot_of_row[row + position], expert_of_row[row + position] = row + position, slot, e
            else:
                dropped += 1
        row += -(-len(mine) // a) * a
        offsets.append(min(row, num_rows))
    return [len(mine) for mine in slots], np.diff(offsets), offsets, row_of_slot, slot_of_row, dropped, expert_of_row


@pytest.mark.parametrize("align_size", [0, 1, 2, 8])
@pytest.mark.parametrize("num_rows", [None, 0, 8, 64])
def test_plan_agrees_with_loops(align_size, num_rows):
    """With -1, indices out of range, repeated experts, and an expert without a token."""
    for seed in range(4):
        experts = np.random.default_rng(seed).integers(-2, E + 1, size=(7, 3))
        experts[experts == 3] = 0
        want = plan_by_loops(experts, align_size, rows_needed(21, E, align_size) if num_rows is None else num_rows)
        got = plan(experts, E, align_size, num_rows)
        for field, a, b in zip(got._fields, got, want, strict=True):
            equal(np.ravel(a), np.ravel(b), err_msg=field)
            assert a.dtype == np.int32, field


def test_default_rows_hold_every_routing():
    cases = [
        (21, 5, 0, 21),
        (21, 5, 1, 21),
        (21, 5, 8, 56),
        (3, 5, 8, 24),
        (0, 5, 8, 0),
        (7, 5, 4, 20),
        (1, 1, 128, 128),
    ]
    for num_slots, num_experts, align_size, rows in cases:
        assert rows_needed(num_slots, num_experts, align_size) == rows
    rng = np.random.default_rng(0)
    for align_size in (2, 3, 8):
        for _ in range(50):
            num_experts = rng.integers(1, 9)
            experts = rng.integers(0, num_experts, size=(rng.integers(0, 9), rng.integers(1, 4)))
            assert plan(experts, num_experts, align_size).dropped == 0


@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (2, 3, 2)])
def test_leading_dimensions(shape):
    p, x = plan(np.zeros(shape, int), 1, 4), np.random.default_rng(0).normal(size=(*shape[:-1], 3))
    rows = dispatch(x, p)
    assert p.row_of_slot.shape == shape and rows.shape == (p.slot_of_row.size, 3)
    np.testing.assert_allclose(combine(rows, p), shape[-1] * x)
    assert dispatch_backward(rows, p).shape == x.shape
    out, _, row_id_map, _, counts = token_dispatch(x, np.ones((*shape[:-1], 2)), 12)
    tokens = int(np.prod(shape[:-1]))
    assert out.shape == (12, 3) and row_id_map.shape == (tokens, 5) and (counts == tokens).all()


def test_rows_without_an_assignment_are_zero_and_assignments_without_a_row_are_skipped():
    rows = dispatch(np.array([[1.0, nan], [3.0, 4.0]]), plan(np.array([[1, 0], [1, -1]]), 2, 2))
    equal(rows, [[1, nan], [0, 0], [1, nan], [3, 4], [0, 0], [0, 0]])
    p, rows = plan(np.array([[0, 9], [0, -1]]), 1, 2, 2), np.array([[1.0], [2.0]])
    weights = np.array([[2.0, nan], [0.0, np.inf]])
    equal(combine(rows, p, weights), [[2], [0]])
    d_rows, d_weights = combine_backward(np.array([[10.0], [20.0]]), rows, p, weights)
    equal(d_rows, [[20], [0]])
    equal(d_weights, [[10, 0], [40, 0]])  # A weight of exactly 0 gets its gradient.
    p = plan(np.array([[0], [1]]), 2, 2)
    equal(combine_backward(np.full((2, 1), 5.0), np.full((4, 1), nan), p)[0], [[5], [0], [5], [0]])
    equal(dispatch_backward(np.array([[1.0], [nan], [2.0], [nan]]), p), [[1], [2]])


def test_chunk_sort_agrees_with_concatenation():
    inp, sizes, order = np.arange(20.0).reshape(10, 2), np.array([3, 0, 2, 4]), np.array([2, 0, 3, 1])
    output, row_id_map = sort_chunks_by_index(inp, sizes, order)
    starts = np.cumsum(sizes) - sizes
    equal(output, np.concatenate([*(inp[starts[c] : starts[c] + sizes[c]] for c in order), inp[9:]]))
    equal(output[row_id_map], inp)
    assert row_id_map.dtype == np.int32
    equal(np.sort(sort_chunks_by_index(inp, np.array([4, 4, 4]), np.array([2, 0, 1]))[1]), np.arange(10))  # clipped


# ---------------------------------------------------------------- TransformerEngine's token maps


def token_map():
    """A token with no expert, one with all, an expert without a token."""
    routed = np.random.default_rng(0).random((T, E)) < 0.4
    routed[1], routed[2], routed[:, 3] = False, True, False
    return routed


@pytest.mark.parametrize("align_size", [None, 1, 4])
def test_token_dispatch_and_combine_agree_with_loops(align_size):
    rng, routed, a = np.random.default_rng(1), token_map(), align_size or 1
    inp, probs, n = rng.normal(size=(T, D)), rng.normal(size=(T, E)), routed.sum()
    num_rows = n if align_size is None else (n + E * (a - 1)) // a * a
    want, want_probs, padding, rows, row = np.zeros((num_rows, D)), np.zeros(num_rows), [], {}, 0
    for e in range(E):
        padding.append(row - len(rows))
        for t in np.flatnonzero(routed[:, e]):
            want[row], want_probs[row], rows[t, e] = inp[t], probs[t, e], len(rows)
            row += 1
        row = -(-row // a) * a
    output, permuted_probs, row_id_map, pad_offsets, sizes = token_dispatch(inp, routed, n, probs, align_size)
    equal(output, want)
    equal(permuted_probs, want_probs)
    equal(sizes, -(-routed.sum(0) // a) * a)
    assert sizes.dtype == row_id_map.dtype == np.int32 and row_id_map.shape == (T, 2 * E + 1)
    assert (
        pad_offsets is None if align_size is None else (pad_offsets == padding).all() and pad_offsets.dtype == np.int32
    )
    for t in range(T):  # The map lists unpadded rows in descending order, with their experts.
        count = row_id_map[t, -1]
        listed = list(zip(row_id_map[t, :count], row_id_map[t, E : E + count], strict=True))
        assert listed == sorted(((rows[t, e], e) for e in np.flatnonzero(routed[t])), reverse=True)
    for merging in (None, probs):
        scale = ((1 if merging is None else merging) * routed).sum(1)
        combined = token_combine(output, row_id_map, merging, pad_offsets)
        np.testing.assert_allclose(combined, scale[:, None] * inp, atol=1e-12)
    assert token_dispatch(inp, routed, n, None, align_size)[1] is None
    d_rows, _ = token_combine_backward(np.ones((T, D)), np.full_like(output, nan), row_id_map, None, pad_offsets)
    equal(d_rows != 0, want != 0)  # The gradient of padding is 0.
    assert token_dispatch_backward(d_rows, None, row_id_map, pad_offsets)[1] is None
    equal(token_dispatch(inp, routed, n, 0 * probs, align_size)[0], want)  # A probability of 0 keeps its row.


def test_selected_experts_ascend():
    routed = np.array([[True, False, True], [False, True, False]])
    experts, selected = routing_map_to_selected_experts(np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), routed, 2)
    equal(experts, [[0, 2], [1, -1]])
    equal(selected, [[0.1, 0.3], [0.5, 0]])
    d = routing_map_to_selected_experts_backward(np.array([[1.0, 2.0], [3.0, 4.0]]), experts, 3)
    equal(d, [[1, 0, 2], [0, 3, 0]])


# ---------------------------------------------------------------- ragged exchange


def ragged_all_to_all(sent, params, sizes):
    """jax.lax.ragged_all_to_all: writes rank r's slice for rank d at output_offsets[d] of rank d."""
    received = [np.full(size, -1.0) for size in sizes]
    for rank, (input_offsets, send_sizes, output_offsets, _) in enumerate(params):
        for d in range(len(params)):
            piece = sent[rank][input_offsets[d] : input_offsets[d] + send_sizes[d]]
            received[d][output_offsets[d] : output_offsets[d] + piece.size] = piece
    return received


@pytest.mark.parametrize("ranks, num_experts", [(1, 3), (2, 4), (4, 8), (3, 3)])
def test_exchange_and_reverse_exchange(ranks, num_experts):
    counts = np.random.default_rng(ranks).integers(0, 4, size=(ranks, num_experts))
    counts[0], counts[:, 0] = 0, 0  # a rank with nothing to send, an expert without a row

    def labels(order):
        """Rows (source, expert, position) in an order of (source, expert)."""
        return np.array([100.0 * s + 10 * e + i for s, e in order for i in range(counts[s, e])])

    sent = [labels((r, e) for e in range(num_experts)) for r in range(ranks)]
    there = [compute_ragged_all_to_all_params(counts, r, ranks) for r in range(ranks)]
    received = ragged_all_to_all(sent, there, [p[3].sum() for p in there])
    for r in range(ranks):
        mine = range(r * (num_experts // ranks), (r + 1) * (num_experts // ranks))
        equal(received[r], labels((s, e) for s in range(ranks) for e in mine))
        x = np.concatenate([received[r], [-7.0, -8.0]])[:, None]  # Rows past the received ones stay.
        y, sizes, state = local_permute_after_a2a(x, counts, r, ranks)
        equal(y.ravel(), [*labels((s, e) for e in mine for s in range(ranks)), -7, -8])
        equal(sizes, counts[:, list(mine)].sum(0))
        equal(local_unpermute_before_a2a(y, state), x)
    back = [compute_reverse_ragged_all_to_all_params(counts, r, ranks) for r in range(ranks)]
    for rows, want in zip(ragged_all_to_all(received, back, [p[3].sum() for p in back]), sent, strict=True):
        equal(rows, want)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plan(np.zeros((2, 1), int), 2, 4, 6), "num_rows: got 6, expected a multiple of 4"),
        (lambda: plan(np.zeros((2, 1)), 2), "experts: got dtype float64"),
        (lambda: sort_chunks_by_index(np.zeros((4, 1)), np.array([2, 2]), np.array([0, 0])), "sorted_indices"),
        (lambda: sort_chunks_by_index(np.zeros((4, 1)), np.array([2, -1]), np.array([0, 1])), "split_sizes: got -1"),
        (
            lambda: compute_ragged_all_to_all_params(np.zeros((2, 3), int), 0, 2),
            r"all_shards_tokens_per_expert: got shape \(2, 3\)",
        ),
    ],
)
def test_bad_inputs_are_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()

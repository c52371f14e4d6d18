"""The oracle's plan, dispatch, combine, chunk sort, token maps and exchange against loops and central differences."""

import itertools

import numpy as np
import pytest
from cases import Case, check, normal

from anabranch.reference import dispatch as d

nan = np.nan
T, E, D = 6, 5, 2
equal = np.testing.assert_array_equal
#: Selections with repeats, -1, indices out of range on either side, and a token without experts.
GIVEN = np.array([[0, 0, 1], [-1, 2, 1], [-1, -1, -1], [9, 0, 1], [1, 3, 0], [0, 2, -4]])


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


@pytest.mark.parametrize("align_size, num_rows", list(itertools.product((0, 1, 2, 8), (None, 0, 8, 64))))
def test_plan_agrees_with_loops(align_size, num_rows):
    """With -1, indices out of range, repeated experts, and an expert without a token."""
    for seed in range(4):
        experts = np.random.default_rng(seed).integers(-2, E + 1, size=(7, 3))
        experts[experts == 3] = 0
        want = plan_by_loops(experts, align_size, d.rows_needed(21, E, align_size) if num_rows is None else num_rows)
        got = d.plan(experts, E, align_size, num_rows)
        for field, a, b in zip(got._fields, got, want, strict=True):
            equal(np.ravel(a), np.ravel(b), err_msg=field)
            assert a.dtype == np.int32, field
        if num_rows is None:  # The default holds every routing.
            assert got.dropped == ((experts < -1) | (experts >= E)).sum()


def test_rows_needed():
    cases = {(21, 5, 0): 21, (21, 5, 8): 56, (3, 5, 8): 24, (0, 5, 8): 0, (7, 5, 4): 20, (1, 1, 128): 128}
    assert {given: d.rows_needed(*given) for given in cases} == cases


@pytest.mark.parametrize("shape", [(0, 2), (2, 3, 2)])
def test_leading_dimensions(shape):
    p, x = d.plan(np.zeros(shape, int), 1, 4), normal(*shape[:-1], 3)
    rows = d.dispatch(x, p)
    assert p.row_of_slot.shape == shape and rows.shape == (p.slot_of_row.size, 3)
    np.testing.assert_allclose(d.combine(rows, p), shape[-1] * x)
    assert d.dispatch_backward(rows, p).shape == x.shape
    out, _, row_id_map, _, counts = d.token_dispatch(x, np.ones((*shape[:-1], 2)), 12)
    tokens = int(np.prod(shape[:-1]))
    assert out.shape == (12, 3) and row_id_map.shape == (tokens, 5) and (counts == tokens).all()


@pytest.mark.parametrize("align_size, num_rows", list(itertools.product((0, 4), (None, 8))))
def test_dispatch_and_combine_agree_with_loops(align_size, num_rows):
    """Padding and assignments without a row may be NaN. A weight of exactly 0 gets its gradient."""
    p = d.plan(GIVEN, E, align_size, num_rows)
    pairs = [(t, k, p.row_of_slot[t, k]) for t, k in np.ndindex(GIVEN.shape) if p.row_of_slot[t, k] >= 0]
    x, rows, weights = normal(T, D), normal(p.slot_of_row.size, D), normal(T, 3)
    weights[0, 0], weights[p.row_of_slot < 0], rows[p.slot_of_row < 0] = 0, nan, nan

    def dispatched(x):
        want = np.zeros_like(rows)
        for t, _, row in pairs:
            want[row] = x[t]
        return [want]

    def combined(rows, weights=None):
        want = np.zeros((T, D))
        for t, k, row in pairs:
            want[t] += rows[row] * (1 if weights is None else weights[t, k])
        return [want]

    def backward(g, weights=weights):
        d_rows, d_weights = d.combine_backward(g, rows, p, weights)
        assert weights is None or d_weights[0, 0] != 0
        return {"rows": d_rows} | ({} if weights is None else {"weights": d_weights})

    check(Case(lambda x: [d.dispatch(x, p)], lambda g: {"x": d.dispatch_backward(g, p)}, {"x": x}, dispatched))
    check(Case(lambda rows: [d.combine(rows, p)], lambda g: backward(g, None), {"rows": rows}, combined))
    operands = {"rows": rows, "weights": weights}
    check(Case(lambda rows, weights: [d.combine(rows, p, weights)], backward, operands, combined))


@pytest.mark.parametrize("sizes", [[3, 0, 2, 4], [0, 0, 0, 0], [4, 4, 4, 4]])
def test_chunk_sort_agrees_with_concatenation(sizes):
    """Rows past the chunks stay; chunks past the rows are clipped."""
    sizes, order = np.array(sizes), np.array([2, 0, 3, 1])
    ends = np.minimum(np.cumsum(sizes), 10)
    starts = np.append(0, ends[:-1])

    def loops(inp):
        return [np.concatenate([*(inp[starts[c] : ends[c]] for c in order), inp[ends[-1] :]])]

    def backward(g):
        return {"inp": d.sort_chunks_by_index_backward(g, sizes, order)}

    inp = normal(10, D)
    check(Case(lambda inp: [d.sort_chunks_by_index(inp, sizes, order)[0]], backward, {"inp": inp}, loops))
    output, row_id_map = d.sort_chunks_by_index(inp, sizes, order)
    equal(output[row_id_map], inp)
    assert row_id_map.dtype == np.int32


# ---------------------------------------------------------------- TransformerEngine's token maps


@pytest.mark.parametrize("align_size, n", list(itertools.product((None, 1, 4), (30, 5))))
def test_token_dispatch_and_combine_agree_with_loops(align_size, n):
    """With a token without an expert, one with all, an expert without a token; 5 rows drop some pairs."""
    routed, a = np.random.default_rng(0).random((T, E)) < 0.4, align_size or 1
    routed[1], routed[2], routed[:, 3] = False, True, False
    operands = {"inp": normal(T, D), "probs": normal(T, E)}
    operands["probs"][2, 0] = 0.0  # It keeps its row.
    num_rows = n if align_size is None else (n + E * (a - 1)) // a * a
    unpadded, padded, padding, row = {}, {}, [], 0
    for e in range(E):
        padding.append(row - len(unpadded))
        for t in np.flatnonzero(routed[:, e]):
            unpadded[t, e], padded[t, e] = len(unpadded), row
            row += 1
        row = -(-row // a) * a
    placed = {pair: row for pair, row in padded.items() if row < num_rows}

    def dispatched(inp, probs):
        rows, of_rows = np.zeros((num_rows, D)), np.zeros(num_rows)
        for (t, e), row in placed.items():
            rows[row], of_rows[row] = inp[t], probs[t, e]
        return [rows, of_rows]

    def combined(inp, probs=None):
        want = np.zeros((T, D))
        for (t, e), row in placed.items():
            want[t] += inp[row] * (1 if probs is None else probs[t, e])
        return [want]

    output, _, row_id_map, pads, sizes = d.token_dispatch(operands["inp"], routed, n, operands["probs"], align_size)
    equal(sizes, -(-routed.sum(0) // a) * a)
    assert sizes.dtype == row_id_map.dtype == np.int32 and row_id_map.shape == (T, 2 * E + 1)
    assert pads is None if align_size is None else (pads == padding).all() and pads.dtype == np.int32
    for t in range(T):  # The map lists unpadded rows in descending order, with their experts.
        count = row_id_map[t, -1]
        listed = list(zip(row_id_map[t, :count], row_id_map[t, E : E + count], strict=True))
        assert listed == sorted(((unpadded[t, e], e) for e in np.flatnonzero(routed[t])), reverse=True)

    def dispatch_backward(g, g_probs):
        return dict(zip(operands, d.token_dispatch_backward(g, g_probs, row_id_map, pads), strict=True))

    def forward(inp, probs):
        return list(d.token_dispatch(inp, routed, n, probs, align_size)[:2])

    check(Case(forward, dispatch_backward, operands, dispatched))
    assert d.token_dispatch(operands["inp"], routed, n, None, align_size)[1] is None
    assert d.token_dispatch_backward(output, None, row_id_map, pads)[1] is None
    rows = np.full((num_rows, D), nan)  # Padding is not read.
    rows[list(placed.values())] = normal(len(placed), D)
    for probs in (None, operands["probs"]):
        given = {"inp": rows} | ({} if probs is None else {"probs": probs})

        def backward(g, probs=probs, given=given):
            return dict(zip(given, d.token_combine_backward(g, rows, row_id_map, probs, pads), strict=False))

        check(Case(lambda inp, probs=None: [d.token_combine(inp, row_id_map, probs, pads)], backward, given, combined))


def test_selected_experts_ascend():
    routed = np.array([[True, False, True], [False, True, False]])
    experts, selected = d.routing_map_to_selected_experts(np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), routed, 2)
    equal(experts, [[0, 2], [1, -1]])
    equal(selected, [[0.1, 0.3], [0.5, 0]])
    d_probs = d.routing_map_to_selected_experts_backward(np.array([[1.0, 2.0], [3.0, 4.0]]), experts, 3)
    equal(d_probs, [[1, 0, 2], [0, 3, 0]])


# ---------------------------------------------------------------- ragged exchange


def ragged_all_to_all(sent, params, sizes):
    """jax.lax.ragged_all_to_all: writes rank r's slice for rank s at output_offsets[s] of rank s."""
    received = [np.full(size, -1.0) for size in sizes]
    for rank, (input_offsets, send_sizes, output_offsets, _) in enumerate(params):
        for s in range(len(params)):
            piece = sent[rank][input_offsets[s] : input_offsets[s] + send_sizes[s]]
            received[s][output_offsets[s] : output_offsets[s] + piece.size] = piece
    return received


@pytest.mark.parametrize("ranks, num_experts", [(1, 3), (4, 8)])
def test_exchange_and_reverse_exchange(ranks, num_experts):
    counts = np.random.default_rng(ranks).integers(0, 4, size=(ranks, num_experts))
    counts[0], counts[:, 0] = 0, 0  # a rank with nothing to send, an expert without a row

    def labels(order):
        """Rows (source, expert, position) in an order of (source, expert)."""
        return np.array([100.0 * s + 10 * e + i for s, e in order for i in range(counts[s, e])])

    sent = [labels((r, e) for e in range(num_experts)) for r in range(ranks)]
    there = [d.compute_ragged_all_to_all_params(counts, r, ranks) for r in range(ranks)]
    received = ragged_all_to_all(sent, there, [p[3].sum() for p in there])
    for r in range(ranks):
        mine = range(r * (num_experts // ranks), (r + 1) * (num_experts // ranks))
        equal(received[r], labels((s, e) for s in range(ranks) for e in mine))
        x = np.concatenate([received[r], [-7.0, -8.0]])[:, None]  # Rows past the received ones stay.
        y, sizes, state = d.local_permute_after_a2a(x, counts, r, ranks)
        equal(y.ravel(), [*labels((s, e) for e in mine for s in range(ranks)), -7, -8])
        equal(sizes, counts[:, list(mine)].sum(0))
        equal(d.local_unpermute_before_a2a(y, state), x)
        equal(d.local_permute_after_a2a_backward(y, counts, r, ranks), x)  # Both are permutations.
        equal(d.local_unpermute_before_a2a_backward(x, state), y)
    back = [d.compute_reverse_ragged_all_to_all_params(counts, r, ranks) for r in range(ranks)]
    for rows, want in zip(ragged_all_to_all(received, back, [p[3].sum() for p in back]), sent, strict=True):
        equal(rows, want)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: d.plan(np.zeros((2, 1), int), 2, 4, 6), "num_rows: got 6, expected a multiple of 4"),
        (lambda: d.plan(np.zeros((2, 1)), 2), "experts: got dtype float64"),
        (lambda: d.sort_chunks_by_index(np.zeros((4, 1)), np.array([2, 2]), np.array([0, 0])), "sorted_indices"),
        (lambda: d.sort_chunks_by_index(np.zeros((4, 1)), np.array([2, -1]), np.array([0, 1])), "split_sizes: got -1"),
        (
            lambda: d.compute_ragged_all_to_all_params(np.zeros((2, 3), int), 0, 2),
            r"all_shards_tokens_per_expert: got shape \(2, 3\)",
        ),
    ],
)
def test_bad_inputs_are_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()

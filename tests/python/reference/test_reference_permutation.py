"""TransformerEngine's map form and its exchange helpers, against loops, differences and a simulated exchange."""

import numpy as np
import pytest
from differences import check_gradient

from anabranch.reference.dispatch import (
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    local_permute_after_a2a,
    local_permute_after_a2a_backward,
    local_unpermute_before_a2a,
    local_unpermute_before_a2a_backward,
    routing_map_to_selected_experts,
    routing_map_to_selected_experts_backward,
    token_combine,
    token_combine_backward,
    token_dispatch,
    token_dispatch_backward,
)

T, E, D = 6, 5, 2


def random_map(seed=0):
    """A token with no expert, one with all, an expert without a token."""
    routed = np.random.default_rng(seed).random((T, E)) < 0.4
    routed[1], routed[2] = False, True
    routed[:, 3] = False
    return routed


def rows_by_loops(routed, align_size):
    """{(token, expert): row}, and the padding before each expert."""
    rows, padding, row = {}, [], 0
    for e in range(E):
        padding.append(row - len(rows))
        for t in np.flatnonzero(routed[:, e]):
            rows[t, e] = row
            row += 1
        row = -(-row // align_size) * align_size
    return rows, padding


@pytest.mark.parametrize("align_size", [None, 1, 4])
def test_token_dispatch_agrees_with_loops(align_size):
    rng = np.random.default_rng(1)
    routed, inp, probs = random_map(), rng.normal(size=(T, D)), rng.normal(size=(T, E))
    n = routed.sum()
    rows, padding = rows_by_loops(routed, align_size or 1)
    a = align_size or 1
    num_rows = n if align_size is None else (n + E * (a - 1)) // a * a
    want, want_probs = np.zeros((num_rows, D)), np.zeros(num_rows)
    for (t, e), row in rows.items():
        want[row], want_probs[row] = inp[t], probs[t, e]
    output, permuted_probs, row_id_map, pad_offsets, sizes = token_dispatch(inp, routed, n, probs, align_size)
    np.testing.assert_array_equal(output, want)
    np.testing.assert_array_equal(permuted_probs, want_probs)
    np.testing.assert_array_equal(sizes, -(-routed.sum(0) // a) * a)
    if align_size is None:
        assert pad_offsets is None
    else:
        np.testing.assert_array_equal(pad_offsets, padding)
        assert pad_offsets.dtype == np.int32
    assert sizes.dtype == row_id_map.dtype == np.int32


def test_row_id_map_lists_unpadded_rows_descending_with_their_experts():
    routed = random_map()
    rows, _ = rows_by_loops(routed, 1)
    for align_size in (None, 4):
        _, permuted_probs, row_id_map, _, _ = token_dispatch(np.zeros((T, D)), routed, 9, None, align_size)
        assert row_id_map.shape == (T, 2 * E + 1) and permuted_probs is None
        for t in range(T):
            want = sorted(((rows[t, e], e) for e in range(E) if routed[t, e]), reverse=True)
            count = row_id_map[t, -1]
            got = list(zip(row_id_map[t, :count], row_id_map[t, E : E + count], strict=True))
            assert count == len(want) and got == want


@pytest.mark.parametrize("align_size", [None, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_combine_takes_the_map_back(align_size, weighted):
    rng = np.random.default_rng(2)
    routed, inp, probs = random_map(), rng.normal(size=(T, D)), rng.normal(size=(T, E))
    rows, _, row_id_map, pad_offsets, _ = token_dispatch(inp, routed, routed.sum(), None, align_size)
    out = token_combine(rows, row_id_map, probs if weighted else None, pad_offsets)
    scale = ((probs if weighted else 1) * routed).sum(1)
    np.testing.assert_allclose(out, scale[:, None] * inp, atol=1e-12)


@pytest.mark.parametrize("align_size", [None, 4])
@pytest.mark.parametrize("n", [30, 5])
def test_gradients_also_where_pairs_are_dropped(align_size, n):
    rng = np.random.default_rng(3)
    routed, inp, probs = random_map(), rng.normal(size=(T, D)), rng.normal(size=(T, E))
    probs[2, 0] = 0.0
    output, permuted_probs, row_id_map, pads, _ = token_dispatch(inp, routed, n, probs, align_size)
    g, g_probs = rng.normal(size=output.shape), rng.normal(size=permuted_probs.shape)
    d_inp, d_probs = token_dispatch_backward(g, g_probs, row_id_map, pads)

    def dispatched(x, p):
        rows, row_probs, *_ = token_dispatch(x, routed, n, p, align_size)
        return (g * rows).sum() + (g_probs * row_probs).sum()

    check_gradient(lambda v: dispatched(v, probs), inp, d_inp, "d_inp")
    check_gradient(lambda v: dispatched(inp, v), probs, d_probs, "d_probs")
    assert d_probs[2, 0] != 0
    assert token_dispatch_backward(g, None, row_id_map, pads)[1] is None

    g_out = rng.normal(size=(T, D))
    for p in (None, probs):
        d_rows, d_merging = token_combine_backward(g_out, output, row_id_map, p, pads)
        check_gradient(lambda v, p=p: (g_out * token_combine(v, row_id_map, p, pads)).sum(), output, d_rows, "d_rows")
        if p is not None:
            check_gradient(
                lambda v: (g_out * token_combine(output, row_id_map, v, pads)).sum(), p, d_merging, "d_merging"
            )


def test_padding_is_zero_in_gradients_too():
    routed = np.array([[True], [False], [True], [True]])
    _, _, row_id_map, pads, _ = token_dispatch(np.ones((4, 1)), routed, 3, None, 4)
    d_rows, _ = token_combine_backward(np.ones((4, 1)), np.full((4, 1), np.nan), row_id_map, None, pads)
    np.testing.assert_array_equal(d_rows.ravel(), [1, 1, 1, 0])


def test_a_row_keeps_its_token_also_where_the_prob_is_zero():
    output, probs, *_ = token_dispatch(np.ones((1, 2)), np.array([[1]]), 1, np.zeros((1, 1)))
    np.testing.assert_array_equal(output, [[1, 1]])
    np.testing.assert_array_equal(probs, [0])


def test_leading_dimensions_are_folded():
    inp, routed = np.ones((2, 3, 4)), np.ones((2, 3, 2), np.int32)
    output, _, row_id_map, _, counts = token_dispatch(inp, routed, 12)
    assert output.shape == (12, 4) and row_id_map.shape == (6, 5)
    np.testing.assert_array_equal(counts, [6, 6])


def test_selected_experts_ascend():
    routed = np.array([[True, False, True], [False, True, False]])
    probs = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    experts, selected = routing_map_to_selected_experts(probs, routed, 2)
    np.testing.assert_array_equal(experts, [[0, 2], [1, -1]])
    np.testing.assert_array_equal(selected, [[0.1, 0.3], [0.5, 0]])
    d = routing_map_to_selected_experts_backward(np.array([[1.0, 2.0], [3.0, 4.0]]), experts, 3)
    np.testing.assert_array_equal(d, [[1, 0, 2], [0, 3, 0]])


# ---------------------------------------------------------------- exchange


def ragged_all_to_all(sent, params, sizes):
    """What jax.lax.ragged_all_to_all does: rank r's slice for rank d lands at output_offsets[d] there."""
    received = [np.full(size, -1.0) for size in sizes]
    for rank, (input_offsets, send_sizes, output_offsets, _) in enumerate(params):
        for d in range(len(params)):
            piece = sent[rank][input_offsets[d] : input_offsets[d] + send_sizes[d]]
            received[d][output_offsets[d] : output_offsets[d] + piece.size] = piece
    return received


@pytest.mark.parametrize("ranks, num_experts", [(1, 3), (2, 4), (4, 8), (3, 3)])
def test_exchange_there_and_back(ranks, num_experts):
    rng = np.random.default_rng(ranks)
    counts = rng.integers(0, 4, size=(ranks, num_experts))
    counts[0] = 0  # a rank with nothing to send
    counts[:, 0] = 0  # a cold expert
    # rank r's rows by expert, each labelled source, expert, position
    sent = [
        np.array([100.0 * r + 10 * e + i for e in range(num_experts) for i in range(counts[r, e])])
        for r in range(ranks)
    ]
    there = [compute_ragged_all_to_all_params(counts, r, ranks) for r in range(ranks)]
    received = ragged_all_to_all(sent, there, [p[3].sum() for p in there])
    local = num_experts // ranks
    returned = []
    for r in range(ranks):
        mine = range(r * local, (r + 1) * local)
        by_rank = [100.0 * s + 10 * e + i for s in range(ranks) for e in mine for i in range(counts[s, e])]
        np.testing.assert_array_equal(received[r], by_rank)
        x = np.concatenate([received[r], [-7.0, -8.0]])[:, None]  # rows past the received ones stay
        y, sizes, state = local_permute_after_a2a(x, counts, r, ranks)
        by_expert = [100.0 * s + 10 * e + i for e in mine for s in range(ranks) for i in range(counts[s, e])]
        np.testing.assert_array_equal(y.ravel(), [*by_expert, -7, -8])
        np.testing.assert_array_equal(sizes, counts[:, list(mine)].sum(0))
        np.testing.assert_array_equal(local_unpermute_before_a2a(y, state), x)
        g = rng.normal(size=x.shape)
        d = local_permute_after_a2a_backward(g, counts, r, ranks)
        check_gradient(lambda v, r=r, g=g: (g * local_permute_after_a2a(v, counts, r, ranks)[0]).sum(), x, d, "d_x")
        d = local_unpermute_before_a2a_backward(g, state)
        check_gradient(lambda v, g=g, s=state: (g * local_unpermute_before_a2a(v, s)).sum(), y, d, "d_y")
        returned.append(received[r])
    back = [compute_reverse_ragged_all_to_all_params(counts, r, ranks) for r in range(ranks)]
    for r, rows in enumerate(ragged_all_to_all(returned, back, [p[3].sum() for p in back])):
        np.testing.assert_array_equal(rows, sent[r])


def test_counts_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"all_shards_tokens_per_expert: got shape \(2, 3\)"):
        compute_ragged_all_to_all_params(np.zeros((2, 3), int), 0, 2)

"""Chunk sort and the helpers of the ragged exchange against the oracle, and an exchange simulated with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import frameworks
import in_torch
from anabranch import torch
from anabranch.jax import (
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    local_permute_after_a2a,
    local_unpermute_before_a2a,
    sort_chunks_by_index,
)
from anabranch.reference import dispatch as reference
from dispatch_cases import normal
from frameworks import both, only_torch, vjp
from oracle import assert_close

pytestmark = pytest.mark.usefixtures("platform")


@both
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_chunk_sort_is_the_oracles(data):
    S, R = data.draw(st.integers(0, 7), "S"), data.draw(st.integers(0, 30), "R")
    sizes = np.array(data.draw(st.lists(st.integers(0, 8), min_size=S, max_size=S), "sizes"), np.int32)
    order = np.array(data.draw(st.permutations(range(S)), "order"), np.int32)
    inp = normal(np.random.default_rng(R), (R, 3))
    output, pull = vjp(
        lambda inp: sort_chunks_by_index(inp, sizes, order)[0],
        lambda inp: torch.moe_sort_chunks_by_index(inp, in_torch.tensor(sizes), in_torch.tensor(order)),
        {"inp": inp},
    )
    want, want_map = reference.sort_chunks_by_index(inp, sizes, order)
    assert_close(output, want, 0.0, "output")
    if not frameworks.in_torch():
        np.testing.assert_array_equal(sort_chunks_by_index(inp, sizes, order)[1], want_map)
    d = normal(np.random.default_rng(S), (R, 3))
    d_inp = pull(d)["inp"]
    assert_close(d_inp, reference.sort_chunks_by_index_backward(d, sizes, order), 0.0, "d_inp")


def test_row_counts_beyond_int32_are_an_error():
    counts = np.full((2, 4), 2**29)
    with pytest.raises(ValueError, match=r"all_shards_tokens_per_expert: got 2147483648 rows that a rank sends"):
        compute_ragged_all_to_all_params(counts, 0, 2)


def test_probs_go_with_their_chunks():
    rng = np.random.default_rng(0)
    inp, probs, d = normal(rng, (3, 4, 5)), normal(rng, (3, 4)), normal(rng, (12,))
    sizes, order = np.array([3, 2, 5]), np.array([2, 0, 1])  # two rows follow the chunks
    plain = sort_chunks_by_index(inp, sizes, order)
    (output, row_id_map, moved), pull = jax.vjp(lambda p: sort_chunks_by_index(inp, sizes, order, p), probs)
    jax.tree.map(np.testing.assert_array_equal, (output, row_id_map), plain)
    np.testing.assert_array_equal(np.asarray(moved)[np.asarray(row_id_map)], probs.ravel())
    zeros = (np.zeros_like(output), np.zeros(row_id_map.shape, jax.dtypes.float0), d)
    np.testing.assert_array_equal(pull(zeros)[0].ravel(), d[np.asarray(row_id_map)])
    for wrong, error in ((probs[:2], ValueError), (probs.astype(np.int32), TypeError)):
        with pytest.raises(error, match=r"^probs: got"):
            sort_chunks_by_index(inp, sizes, order, wrong)


@only_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_probs_go_with_their_chunks_in_torch(dtype):
    rng = np.random.default_rng(0)
    inp, probs, d = normal(rng, (12, 5)), normal(rng, (12,), dtype), normal(rng, (12,), dtype)
    sizes, order = np.array([3, 2, 5]), np.array([2, 0, 1])  # two rows follow the chunks
    want, row_id_map = reference.sort_chunks_by_index(inp, sizes, order)
    moved, pull = in_torch.vjp(
        lambda inp, probs: torch.moe_sort_chunks_by_index_with_probs(
            inp, probs, in_torch.tensor(sizes), in_torch.tensor(order)
        )[1],
        {"inp": inp, "probs": probs},
    )
    np.testing.assert_array_equal(in_torch.array(moved)[row_id_map], probs)
    np.testing.assert_array_equal(pull(d)["probs"], d[row_id_map])
    output, _ = in_torch.arrays(
        torch.moe_sort_chunks_by_index_with_probs(*map(in_torch.tensor, (inp, probs, sizes, order)))
    )
    np.testing.assert_array_equal(output, want)


@only_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool", "uint8"])
def test_chunk_sort_moves_every_dtype_in_torch(dtype):
    inp = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 2, (20, 3)), dtype))
    integers = np.array([7, 2, 8], np.int16), np.array([1, 2, 0])
    output = in_torch.array(torch.moe_sort_chunks_by_index(*map(in_torch.tensor, (inp, *integers))))
    assert output.dtype == inp.dtype
    np.testing.assert_array_equal(output, reference.sort_chunks_by_index(inp.astype(np.float64), *integers)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_chunk_sort_moves_every_dtype_and_flattens(dtype):
    inp = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 5, 3)), dtype)
    output, row_id_map = sort_chunks_by_index(inp, np.array([7, 2, 8]), np.array([1, 2, 0]))
    assert output.shape == (20, 3)
    assert output.dtype == dtype
    np.testing.assert_array_equal(output[row_id_map], inp.reshape(20, 3))


@pytest.mark.parametrize("wide", ["int16", "int32", "int64"])
def test_chunk_sort_accepts_every_index_dtype(wide):
    with jax.enable_x64(True):
        output, _ = sort_chunks_by_index(
            jnp.arange(3.0, dtype=jnp.float32)[:, None], jnp.asarray([1, 2], wide), jnp.asarray([1, 0], wide)
        )
    assert output.ravel().tolist() == [1.0, 2.0, 0.0]


def counts(ranks, E, seed=0):
    """Rows of every rank for every expert, with an expert without rows and a rank without tokens."""
    counts = np.random.default_rng(seed).integers(0, 9, (ranks, E)).astype(np.int32)
    counts[:, E // 2] = 0
    counts[ranks // 2] = 0 if ranks > 1 else counts[ranks // 2]
    return counts


RANKS = [(1, 3), (2, 6), (4, 4), (4, 12), (8, 16)]


@pytest.mark.parametrize(("ranks", "E"), RANKS)
def test_params_are_the_oracles(ranks, E):
    table = counts(ranks, E)
    for rank in range(ranks):
        for ours, theirs in (
            (compute_ragged_all_to_all_params, reference.compute_ragged_all_to_all_params),
            (compute_reverse_ragged_all_to_all_params, reference.compute_reverse_ragged_all_to_all_params),
        ):
            want = theirs(table, rank, ranks)
            for got in (ours(table, rank, ranks), jax.jit(ours, static_argnums=2)(table, jnp.int32(rank), ranks)):
                for a, b in zip(got, want, strict=True):
                    assert a.dtype == jnp.int32
                    np.testing.assert_array_equal(a, b)


def exchange(buffers, params, size):
    """jax.lax.ragged_all_to_all in numpy: copies every rank's slices into every rank's buffer."""
    received = [np.zeros((size, buffers[0].shape[1]), np.float32) for _ in buffers]
    for source, (input_offsets, send_sizes, output_offsets, _) in enumerate(params):
        for target, (begin, count, at) in enumerate(zip(input_offsets, send_sizes, output_offsets, strict=True)):
            received[target][at : at + count] = buffers[source][begin : begin + count]
    for target, (_, _, _, recv_sizes) in enumerate(params):
        sent = [int(p[1][target]) for p in params]
        assert recv_sizes.tolist() == sent
    return received


@pytest.mark.parametrize(("ranks", "E"), RANKS)
def test_rows_get_to_their_experts_and_back(ranks, E):
    table, local = counts(ranks, E), E // ranks
    # a row's value encodes its source, its expert and its position
    buffers = [
        np.array([[r, e, i] for e in range(E) for i in range(table[r, e])], np.float32).reshape(-1, 3)
        for r in range(ranks)
    ]
    size = int(table.sum()) + 5
    there = [compute_ragged_all_to_all_params(table, r, ranks) for r in range(ranks)]
    back = [compute_reverse_ragged_all_to_all_params(table, r, ranks) for r in range(ranks)]
    returned = []
    for rank, rows in enumerate(exchange(buffers, there, size)):
        x, sizes, state = local_permute_after_a2a(jnp.asarray(rows), table, rank, ranks)
        np.testing.assert_array_equal(sizes, table[:, rank * local : (rank + 1) * local].sum(0))
        begin = 0
        for e, count in enumerate(sizes):
            group = np.asarray(x[begin : begin + int(count)])
            assert (group[:, 1] == rank * local + e).all()
            assert (np.diff(group[:, 0]) >= 0).all()
            begin += int(count)
        returned.append(np.asarray(local_unpermute_before_a2a(x, state)))
        np.testing.assert_array_equal(returned[-1], rows)
    for buffer, received in zip(buffers, exchange(returned, back, size), strict=True):
        np.testing.assert_array_equal(received[: len(buffer)], buffer)


def test_local_permutation_and_its_gradient_are_the_oracles():
    table, rng = counts(4, 12), np.random.default_rng(0)
    for rank in range(4):
        x, d = normal(rng, (150, 4)), normal(rng, (150, 4))
        y, pull = jax.vjp(lambda x, r=rank: local_permute_after_a2a(x, table, r, 4)[0], x)
        want, want_sizes, want_state = reference.local_permute_after_a2a(x, table, rank, 4)
        assert_close(y, want, 0.0, "x")
        assert_close(
            pull(jnp.asarray(d))[0], reference.local_permute_after_a2a_backward(d, table, rank, 4), 0.0, "d_x_recv"
        )
        _, sizes, state = local_permute_after_a2a(x, table, rank, 4)
        np.testing.assert_array_equal(sizes, want_sizes)
        back, pull = jax.vjp(lambda y, s=state: local_unpermute_before_a2a(y, s), y)
        assert_close(back, x.astype(np.float64), 0.0, "back")
        want_d = reference.local_unpermute_before_a2a_backward(d, want_state)
        assert_close(pull(jnp.asarray(d))[0], want_d, 0.0, "d_y")

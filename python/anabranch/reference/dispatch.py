"""Plan, dispatch, combine, chunk sort and the ragged exchange in numpy float64, with their gradients.

`docs/semantics.md`, sections 5 and 7, as code. A slot is one assignment (token t, choice k), number t*K + k; a row is
one line of the dispatched buffer. Index -1 means "no expert" and "no row". TransformerEngine's functions and its
helpers for the exchange are at the end.
"""

from typing import NamedTuple

import numpy as np

from .router import count_tokens
from .scores import as_float64


class Plan(NamedTuple):
    """The row of every assignment, and the assignment of every row.

    tokens_per_expert: int32[E], before any dropping.
    group_sizes: int32[E], counts rounded up to align_size and clipped to R.
    offsets: int32[E + 1], running sum of group_sizes.
    row_of_slot: int32[..., K], -1 if the assignment has no row.
    slot_of_row: int32[R], -1 in padding and past the last group.
    dropped: int32, the number of assignments past R or with an index outside [-1, E).
    expert_of_row: int32[R], -1 in padding and past the last group.
    """

    tokens_per_expert: np.ndarray
    group_sizes: np.ndarray
    offsets: np.ndarray
    row_of_slot: np.ndarray
    slot_of_row: np.ndarray
    dropped: np.int32
    expert_of_row: np.ndarray


def as_integers(array, name):
    """`array` as int64; refuses dtypes other than integers."""
    array = np.asarray(array)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: got dtype {array.dtype}, expected an integer dtype")
    return array.astype(np.int64)


def rows_needed(num_slots, num_experts, align_size=0):
    """The number of rows that suffices for every routing: floor((N + min(E, N) (a - 1)) / a) a."""
    a = max(align_size, 1)
    return (num_slots + min(num_experts, num_slots) * (a - 1)) // a * a


def plan(experts, num_experts, align_size=0, num_rows=None, num_destinations=1):
    """Computes the rows of the assignments in order of expert, then token, then slot.

    Args:
      experts: int[..., K]; -1 is no expert, an index outside [-1, E) is dropped.
      num_experts: E.
      align_size: every group's size is rounded up to a multiple of it.
      num_rows: R, a multiple of max(align_size, 1). Default: enough for every assignment (`rows_needed`) in any region.
      num_destinations: P. The rows form P equal regions and the experts P equal ranges; the groups of a range start
        and end in its region.

    Returns: `Plan`; offsets contains the first row of every group and the end of the last.
    """
    experts = as_integers(experts, "experts")
    flat = experts.reshape(-1)
    a = max(align_size, 1)
    if num_rows is None:
        num_rows = num_destinations * rows_needed(flat.size, num_experts // num_destinations, align_size)
    if num_rows < 0 or num_rows % (a * num_destinations):
        raise ValueError(f"num_rows: got {num_rows}, expected a multiple of {a * num_destinations}")
    invalid = (flat < -1) | (flat >= num_experts)
    flat = np.where(invalid, -1, flat)

    counts = count_tokens(flat, num_experts)
    aligned = (-(-counts.astype(np.int64) // a) * a).reshape(num_destinations, -1)
    begin = np.arange(num_destinations)[:, None] * (num_rows // num_destinations)
    starts = (begin + np.cumsum(aligned, axis=1) - aligned).reshape(-1)
    limits = np.broadcast_to(begin + num_rows // num_destinations, aligned.shape).reshape(-1)
    # A stable sort by expert lists every expert's assignments in the order (token, slot).
    by_expert = np.argsort(flat, kind="stable")[flat.size - counts.sum() :]
    expert = flat[by_expert]
    rank = np.arange(by_expert.size) - (np.cumsum(counts) - counts)[expert]
    row = starts[expert] + rank
    fits = row < limits[expert]

    row_of_slot = np.full(flat.size, -1, np.int32)
    slot_of_row = np.full(num_rows, -1, np.int32)
    row_of_slot[by_expert[fits]] = row[fits]
    expert_of_row = slot_of_row.copy()
    slot_of_row[row[fits]] = by_expert[fits]
    expert_of_row[row[fits]] = expert[fits]
    first, end = np.minimum(starts, limits), np.minimum(starts + aligned.reshape(-1), limits)
    offsets = np.append(first, end[-1:]).astype(np.int32)
    sizes = (end - first).astype(np.int32)
    dropped = np.int32(invalid.sum() + (~fits).sum())
    row_of_slot = row_of_slot.reshape(experts.shape)
    return Plan(counts, sizes, offsets, row_of_slot, slot_of_row, dropped, expert_of_row)


def _slots(plan):
    """The row of every assignment, [T, K], and the mask of assignments that have one."""
    rows = plan.row_of_slot.reshape(-1, plan.row_of_slot.shape[-1])
    return rows, rows >= 0


def dispatch(x, plan):
    """rows[row_of_slot[t, k]] = x[t]; all other rows are zero. x [..., D] -> float64[R, D]."""
    x = as_float64(x, "x")
    x = x.reshape(-1, x.shape[-1])
    rows = np.zeros((plan.slot_of_row.size, x.shape[-1]))
    filled = plan.slot_of_row >= 0
    rows[filled] = x[plan.slot_of_row[filled] // plan.row_of_slot.shape[-1]]
    return rows


def dispatch_backward(d_rows, plan):
    """d_x[t] = sum_k d_rows[row(t, k)]. d_rows [R, D] -> float64[..., D]."""
    return combine(d_rows, plan)


def combine(rows, plan, weights=None):
    """out[t] = sum_k w[t, k] rows[row(t, k)] over assignments with a row; w = 1 if no weights are given.

    Args: rows [R, D]; weights [..., K] or None. Returns: float64[..., D].
    """
    rows = as_float64(rows, "rows")
    row_of_slot, has_row = _slots(plan)
    w = np.ones(row_of_slot.shape) if weights is None else as_float64(weights, "weights")
    w = w.reshape(row_of_slot.shape)
    out = np.zeros((row_of_slot.shape[0], rows.shape[-1]))
    for k in range(row_of_slot.shape[1]):
        there = has_row[:, k]
        out[there] += w[there, k, None] * rows[row_of_slot[there, k]]
    return out.reshape(*plan.row_of_slot.shape[:-1], rows.shape[-1])


def combine_backward(d_out, rows, plan, weights=None):
    """Gradients of `combine`: (d_rows float64[R, D], d_weights float64[..., K], None without weights).

    d_rows[row] = w[t, k] d_out[t], zero in rows without an assignment.
    d_w[t, k] = <d_out[t], rows[row]>, zero for assignments without a row; a w of exactly 0 gets its gradient too.
    """
    rows, d_out = as_float64(rows, "rows"), as_float64(d_out, "d_out")
    d_out = d_out.reshape(-1, rows.shape[-1])
    row_of_slot, has_row = _slots(plan)
    token, k = np.nonzero(has_row)
    row = row_of_slot[token, k]
    w = 1.0 if weights is None else as_float64(weights, "weights").reshape(row_of_slot.shape)[token, k, None]
    d_rows = np.zeros_like(rows)
    d_rows[row] = w * d_out[token]
    if weights is None:
        return d_rows, None
    d_weights = np.zeros(row_of_slot.shape)
    d_weights[token, k] = (d_out[token] * rows[row]).sum(-1)
    return d_rows, d_weights.reshape(plan.row_of_slot.shape)


# ---------------------------------------------------------------- chunk sort


def chunk_sort_map(split_sizes, sorted_indices, num_rows):
    """int32[R]: the destination of every input row; identity past the sum of the sizes.

    Sizes whose sum exceeds R are clipped to it, as in a plan, so the result is always a permutation.
    """
    sizes = as_integers(split_sizes, "split_sizes")
    order = as_integers(sorted_indices, "sorted_indices")
    if (sizes < 0).any():
        raise ValueError(f"split_sizes: got {sizes.min()}, expected no negative size")
    if not np.array_equal(np.sort(order), np.arange(sizes.size)):
        raise ValueError(f"sorted_indices: got {order}, expected a permutation of 0 to {sizes.size - 1}")
    starts = np.minimum(np.concatenate([[0], np.cumsum(sizes)]), num_rows)
    destination = np.arange(num_rows)
    written = 0
    for chunk in order:
        begin, end = starts[chunk], starts[chunk + 1]
        destination[begin:end] = written + np.arange(end - begin)
        written += end - begin
    return destination.astype(np.int32)


def sort_chunks_by_index(inp, split_sizes, sorted_indices):
    """Output chunk i is input chunk sorted_indices[i].

    Args: inp [..., D], its rows in chunks of split_sizes int[S]; sorted_indices int[S].
    Returns: (output float64[R, D], row_id_map int32[R], the destination of every input row).
    """
    inp = as_float64(inp, "inp")
    inp = inp.reshape(-1, inp.shape[-1])
    row_id_map = chunk_sort_map(split_sizes, sorted_indices, inp.shape[0])
    output = np.empty_like(inp)
    output[row_id_map] = inp
    return output, row_id_map


def sort_chunks_by_index_backward(d_output, split_sizes, sorted_indices):
    """d_inp float64[R, D]: gathers every row's cotangent from the row's destination."""
    d_output = as_float64(d_output, "d_output")
    return d_output[chunk_sort_map(split_sizes, sorted_indices, d_output.shape[0])]


# ---------------------------------------------------------------- TransformerEngine's functions
#
# They take a bool map [T, E] in which a token may have any number of experts. `row_id_map` contains rows of the layout
# without padding. If `pad_offsets` is given, pad_offsets[e], the padding before expert e, is added to the rows of
# expert e.


def _as_map(routing_map):
    routing_map = np.asarray(routing_map)
    return (routing_map != 0).reshape(-1, routing_map.shape[-1])


def make_row_id_map(routing_map):
    """int32[T, 2E+1]: a token's destination rows in descending order, from column E their experts, then their number.

    Rows are ordered by (expert, token). Entries that the format leaves unspecified are -1.
    """
    routed = _as_map(routing_map)
    num_tokens, num_experts = routed.shape
    # Rows number the routed (expert, token) pairs in that order.
    rows = np.where(routed, np.cumsum(routed.T).reshape(num_experts, num_tokens).T - 1, -1)
    descending = np.argsort(-rows, axis=1, kind="stable")
    rows = np.take_along_axis(rows, descending, axis=1)
    experts = np.where(rows >= 0, descending, -1)
    return np.concatenate([rows, experts, routed.sum(1, keepdims=True)], axis=1).astype(np.int32)


def _routed_pairs(row_id_map, pad_offsets, num_rows):
    """(token, expert, row) of every routed pair whose row is inside the buffer, descending per token."""
    row_id_map = as_integers(row_id_map, "row_id_map")
    num_experts = (row_id_map.shape[1] - 1) // 2
    listed = np.arange(num_experts) < row_id_map[:, -1:]
    token, position = np.nonzero(listed)
    row, expert = row_id_map[token, position], row_id_map[token, num_experts + position]
    if pad_offsets is not None:
        row = row + as_integers(pad_offsets, "pad_offsets")[expert]
    inside = row < num_rows
    return token[inside], expert[inside], row[inside]


def token_dispatch(inp, routing_map, num_out_tokens, probs=None, align_size=None):
    """Copies every token to one row per expert of the token.

    Args:
      inp: [..., D]. routing_map: bool or integer [..., E], nonzero where routed.
      num_out_tokens: n, the number of rows without padding; pairs past the buffer are dropped.
      probs: [..., E] or None.
      align_size: a; every expert's rows are padded to a multiple of a. None: no padding.

    Returns: (output float64[R, D], permuted_probs float64[R] or None, row_id_map int32[T, 2E+1],
      pad_offsets int32[E] or None, tokens_per_expert int32[E]), R = n or floor((n + E (a-1)) / a) a.
    """
    inp = as_float64(inp, "inp")
    inp = inp.reshape(-1, inp.shape[-1])
    routed = _as_map(routing_map)
    num_experts = routed.shape[1]
    counts = routed.sum(axis=0)
    num_rows, pad_offsets = num_out_tokens, None
    if align_size is not None:
        num_rows = (num_out_tokens + num_experts * (align_size - 1)) // align_size * align_size
        aligned = -(-counts // align_size) * align_size
        pad_offsets = (np.cumsum(aligned - counts) - (aligned - counts)).astype(np.int32)
        counts = aligned
    row_id_map = make_row_id_map(routed)
    token, expert, row = _routed_pairs(row_id_map, pad_offsets, num_rows)
    output = np.zeros((num_rows, inp.shape[-1]))
    output[row] = inp[token]
    permuted_probs = None
    if probs is not None:
        permuted_probs = np.zeros(num_rows)
        permuted_probs[row] = as_float64(probs, "probs").reshape(routed.shape)[token, expert]
    return output, permuted_probs, row_id_map, pad_offsets, counts.astype(np.int32)


def token_dispatch_backward(d_output, d_permuted_probs, row_id_map, pad_offsets=None):
    """(d_inp float64[T, D], d_probs float64[T, E], None without d_permuted_probs)."""
    d_output = as_float64(d_output, "d_output")
    token, expert, row = _routed_pairs(row_id_map, pad_offsets, d_output.shape[0])
    d_inp = np.zeros((row_id_map.shape[0], d_output.shape[1]))
    np.add.at(d_inp, token, d_output[row])
    if d_permuted_probs is None:
        return d_inp, None
    d_probs = np.zeros((row_id_map.shape[0], (row_id_map.shape[1] - 1) // 2))
    d_probs[token, expert] = as_float64(d_permuted_probs, "d_permuted_probs")[row]
    return d_inp, d_probs


def token_combine(inp, row_id_map, merging_probs=None, pad_offsets=None):
    """out[t] = sum over t's experts e of p[t, e] inp[row]; p = 1 without merging_probs. float64[T, D]."""
    inp = as_float64(inp, "inp")
    token, expert, row = _routed_pairs(row_id_map, pad_offsets, inp.shape[0])
    values = inp[row]
    if merging_probs is not None:
        p = as_float64(merging_probs, "merging_probs")
        values = p.reshape(-1, p.shape[-1])[token, expert, None] * values
    out = np.zeros((row_id_map.shape[0], inp.shape[1]))
    np.add.at(out, token, values)
    return out


def token_combine_backward(d_out, inp, row_id_map, merging_probs=None, pad_offsets=None):
    """(d_inp float64[R, D], zero in padding; d_merging_probs float64[T, E] or None)."""
    inp, d_out = as_float64(inp, "inp"), as_float64(d_out, "d_out")
    token, expert, row = _routed_pairs(row_id_map, pad_offsets, inp.shape[0])
    d_inp = np.zeros_like(inp)
    if merging_probs is None:
        d_inp[row] = d_out[token]
        return d_inp, None
    p = as_float64(merging_probs, "merging_probs")
    d_inp[row] = p.reshape(-1, p.shape[-1])[token, expert, None] * d_out[token]
    d_probs = np.zeros((row_id_map.shape[0], p.shape[-1]))
    d_probs[token, expert] = (d_out[token] * inp[row]).sum(-1)
    return d_inp, d_probs


def routing_map_to_selected_experts(sparse_probs, routing_map, topk):
    """(experts int32[T, K] ascending, their probs float64[T, K]); -1 and 0 after a token's last expert."""
    routed = _as_map(routing_map)
    ascending = np.argsort(~routed, axis=1, kind="stable")[:, :topk]
    there = np.take_along_axis(routed, ascending, axis=1)
    probs = as_float64(sparse_probs, "sparse_probs").reshape(routed.shape)
    experts = np.where(there, ascending, -1).astype(np.int32)
    return experts, np.where(there, np.take_along_axis(probs, ascending, axis=1), 0.0)


def routing_map_to_selected_experts_backward(d_selected, experts, num_experts):
    """d_sparse_probs float64[T, E] from the cotangent [T, K] of the selected probs."""
    d_probs = np.zeros((experts.shape[0], num_experts))
    token, k = np.nonzero(experts >= 0)
    d_probs[token, experts[token, k]] = as_float64(d_selected, "d_selected")[token, k]
    return d_probs


# ---------------------------------------------------------------- ragged exchange
#
# Ranks own contiguous equal ranges of experts; `counts[r, e]` is the number of rows of rank r for expert e. Offsets and
# sizes are as in jax.lax.ragged_all_to_all.


def _traffic(all_shards_tokens_per_expert, num_expert_shards):
    """Row counts [source, destination, local expert]."""
    counts = as_integers(all_shards_tokens_per_expert, "all_shards_tokens_per_expert")
    if counts.shape[0] != num_expert_shards or counts.shape[1] % num_expert_shards:
        raise ValueError(
            f"all_shards_tokens_per_expert: got shape {counts.shape}, "
            f"expected ({num_expert_shards}, a multiple of {num_expert_shards})"
        )
    return counts.reshape(num_expert_shards, num_expert_shards, -1)


def _ragged_params(sends, rank):
    """One rank's four arrays, from the row counts sends[source, destination]."""
    sizes = sends[rank]
    input_offsets = np.cumsum(sizes) - sizes
    # At the receiver, this rank's slice follows the slices of the ranks before it.
    output_offsets = sends[:rank].sum(axis=0)
    return tuple(a.astype(np.int32) for a in (input_offsets, sizes, output_offsets, sends[:, rank]))


def compute_ragged_all_to_all_params(all_shards_tokens_per_expert, shard_id, num_expert_shards):
    """(input_offsets, send_sizes, output_offsets, recv_sizes), int32[ranks] each, for sending rows to the experts."""
    return _ragged_params(_traffic(all_shards_tokens_per_expert, num_expert_shards).sum(-1), shard_id)


def compute_reverse_ragged_all_to_all_params(all_shards_tokens_per_expert, shard_id, num_expert_shards):
    """The four arrays for sending the experts' rows back to their sources: sends and receives are exchanged."""
    return _ragged_params(_traffic(all_shards_tokens_per_expert, num_expert_shards).sum(-1).T, shard_id)


def local_permute_after_a2a(x_recv, all_shards_tokens_per_expert, shard_id, num_expert_shards):
    """Reorders received rows from (source rank, local expert) to (local expert, source rank).

    Returns: (x float64[R, D], local_group_sizes int32[E / ranks], state). `local_unpermute_before_a2a` takes state, the
      pair (chunk sizes, chunk order).
    """
    arrived = _traffic(all_shards_tokens_per_expert, num_expert_shards)[:, shard_id]
    order = np.arange(arrived.size).reshape(arrived.shape).T.ravel()
    x, _ = sort_chunks_by_index(x_recv, arrived.ravel(), order)
    return x, arrived.sum(axis=0).astype(np.int32), (arrived.T.ravel(), np.argsort(order))


def local_permute_after_a2a_backward(d_x, all_shards_tokens_per_expert, shard_id, num_expert_shards):
    """d_x_recv float64[R, D]."""
    arrived = _traffic(all_shards_tokens_per_expert, num_expert_shards)[:, shard_id]
    order = np.arange(arrived.size).reshape(arrived.shape).T.ravel()
    return sort_chunks_by_index_backward(d_x, arrived.ravel(), order)


def local_unpermute_before_a2a(expert_outputs, state):
    """The inverse of `local_permute_after_a2a`. float64[R, D]."""
    return sort_chunks_by_index(expert_outputs, *state)[0]


def local_unpermute_before_a2a_backward(d_output, state):
    """d_expert_outputs float64[R, D]."""
    return sort_chunks_by_index_backward(d_output, *state)

"""Helpers for the ragged exchange between ranks that own experts in contiguous equal ranges.

`counts[r, e]` is the number of rows of rank r for expert e; P ranks own E/P of the E experts each. The functions
compute integers and reorder the incoming rows; the exchange itself is jax.lax.ragged_all_to_all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.jax.binding import check
from anabranch.jax.ops.chunk_sort import sort_by_index


class RaggedParams(NamedTuple):
    """The sizes and offsets for jax.lax.ragged_all_to_all, int32[P] each."""

    input_offsets: jax.Array
    """First row of the slice for each rank."""
    send_sizes: jax.Array
    """Rows sent to each rank."""
    output_offsets: jax.Array
    """First row of this rank's slice at each receiver, after the slices of lower ranks."""
    recv_sizes: jax.Array
    """Rows received from each rank."""


class ChunkOrder(NamedTuple):
    """State for `local_unpermute_before_a2a`: the sizes of the current chunks, and the order that undoes the sort."""

    split_sizes: jax.Array
    """int32[P * E/P]"""
    sorted_indices: jax.Array
    """int32[P * E/P]"""


def _traffic(all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: Any) -> tuple[jax.Array, jax.Array]:
    """Row counts [source, destination, local expert], and the rank as int32[]."""
    P = check.integer("num_expert_shards", num_expert_shards, 1, check.INDEX_LIMIT - 1)
    counts = check.amounts(
        "all_shards_tokens_per_expert",
        all_shards_tokens_per_expert,
        check.INDICES,
        (("num_expert_shards", P), "E"),
        minimum=0,
    )
    if counts.shape[1] < P or counts.shape[1] % P:
        raise ValueError(
            f"all_shards_tokens_per_expert: got {check.describe(counts)}, expected E a multiple of "
            f"num_expert_shards {P}"
        )
    if hasattr(shard_id, "dtype"):
        given = check.amounts("shard_id", shard_id, check.INDICES, (), 0, P - 1)
        rank = jnp.clip(check.indices("shard_id", given, ()), 0, P - 1)
    else:
        rank = jnp.int32(check.integer("shard_id", shard_id, 0, P - 1))
    if isinstance(all_shards_tokens_per_expert, np.ndarray):
        rows = all_shards_tokens_per_expert.astype(np.int64).reshape(P, P, -1).sum(-1)  # [source, destination]
        if (most := max(rows.sum(0).max(), rows.sum(1).max())) >= check.INDEX_LIMIT:
            raise ValueError(
                f"all_shards_tokens_per_expert: got {most} rows that a rank sends or receives, expected fewer than 2^31"
            )
    counts = check.indices("all_shards_tokens_per_expert", counts, counts.shape)
    return counts.reshape(P, P, -1), rank


def _ragged_params(sends: jax.Array, rank: jax.Array) -> RaggedParams:
    """One rank's parameters from the row counts sends[source, destination]."""
    before = jnp.cumsum(sends, axis=0) - sends
    sizes = sends[rank]
    return RaggedParams(jnp.cumsum(sizes) - sizes, sizes, before[rank], sends[:, rank])


def compute_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> RaggedParams:
    """Computes the sizes and offsets with which a rank sends its rows to the ranks that own their experts.

    Args:
      all_shards_tokens_per_expert: int16, int32 or int64 [P, E], the number of rows of every rank for every expert.
      shard_id: this rank, an integer or an integer array [] (such as jax.lax.axis_index); on a device it is clipped to
        [0, P).
      num_expert_shards: P; E % P == 0.

    Returns:
      (input_offsets, send_sizes, output_offsets, recv_sizes), int32[P] each; integers have no gradient.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: a shape or number does not fit.

    Source: the function of this name in transformer_engine.jax.

    >>> [p.tolist() for p in compute_ragged_all_to_all_params(jnp.array([[1, 2], [3, 4]]), 1, 2)]
    [[0, 3], [3, 4], [1, 2], [2, 4]]
    """
    traffic, rank = _traffic(all_shards_tokens_per_expert, shard_id, num_expert_shards)
    return _ragged_params(traffic.sum(-1, dtype=jnp.int32), rank)


def compute_reverse_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> RaggedParams:
    """Computes the sizes and offsets with which a rank sends rows back to their sources.

    Arguments and results are those of `compute_ragged_all_to_all_params`, with sends and receives exchanged. There is
    no gradient.

    Raises:
      TypeError, ValueError: as in `compute_ragged_all_to_all_params`.

    Source: the function of this name in transformer_engine.jax.

    >>> [p.tolist() for p in compute_reverse_ragged_all_to_all_params(jnp.array([[1, 2], [3, 4]]), 1, 2)]
    [[0, 2], [2, 4], [1, 3], [3, 4]]
    """
    traffic, rank = _traffic(all_shards_tokens_per_expert, shard_id, num_expert_shards)
    return _ragged_params(traffic.sum(-1, dtype=jnp.int32).T, rank)


def local_permute_after_a2a(
    x_recv: Any, all_shards_tokens_per_expert: Any, shard_id: Any, num_expert_shards: int
) -> tuple[jax.Array, jax.Array, ChunkOrder]:
    """Reorders the rows that a rank received, from (source rank, local expert) to (local expert, source rank).

    Args:
      x_recv: [R, D]; rows past the received ones do not move. Dtypes as for `sort_chunks_by_index`.
      all_shards_tokens_per_expert: int16, int32 or int64 [P, E], the number of rows of every rank for every expert.
      shard_id: this rank, an integer or an integer array [].
      num_expert_shards: P; E % P == 0.

    Returns:
      (x [R, D] by (local expert, source rank); local group sizes int32[E/P]; state for `local_unpermute_before_a2a`).

    Gradient: for x_recv; the cotangent of a row is gathered from the row's new position.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: a shape or number does not fit.

    Source: the function of this name in transformer_engine.jax.

    >>> counts = jnp.array([[1, 1, 9, 9], [0, 1, 9, 9]])
    >>> x, sizes, state = local_permute_after_a2a(jnp.arange(3.0)[:, None], counts, 0, 2)
    >>> x.ravel().tolist(), sizes.tolist()
    ([0.0, 1.0, 2.0], [1, 2])
    """
    traffic, rank = _traffic(all_shards_tokens_per_expert, shard_id, num_expert_shards)
    arrived = traffic[:, rank]  # [source, local expert]
    chunks = jnp.arange(arrived.size, dtype=jnp.int32).reshape(arrived.shape)
    order = chunks.T.ravel()
    x, _ = sort_by_index("local_permute_after_a2a", {"x_recv": x_recv}, arrived.ravel(), order)
    back = chunks.reshape(arrived.shape[::-1]).T.ravel()  # the inverse of a transpose is the transpose back
    return x, arrived.sum(0, dtype=jnp.int32), ChunkOrder(arrived.T.ravel(), back)


def local_unpermute_before_a2a(expert_outputs: Any, state: ChunkOrder) -> jax.Array:
    """Undoes `local_permute_after_a2a`, before rows are sent back to their source ranks.

    Args:
      expert_outputs: [R, D], rows by (local expert, source rank). Dtypes as for `sort_chunks_by_index`.
      state: from `local_permute_after_a2a`.

    Returns:
      [R, D], rows by (source rank, local expert).

    Gradient: for expert_outputs; the cotangent of a row is gathered from the row's new position.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: a shape does not fit.

    Source: the function of this name in transformer_engine.jax.

    >>> x, sizes, state = local_permute_after_a2a(jnp.array([[1.0], [2.0]]), jnp.array([[1, 1]]), 0, 1)
    >>> local_unpermute_before_a2a(x, state).ravel().tolist()
    [1.0, 2.0]
    """
    if not isinstance(state, ChunkOrder):
        raise TypeError(f"state: got {check.describe(state)}, expected the state of local_permute_after_a2a")
    rows = {"expert_outputs": expert_outputs}
    return sort_by_index("local_unpermute_before_a2a", rows, *state, prefix="state.")[0]

"""Bad arguments are refused by name before anything is traced."""

import jax
import jax.numpy as jnp
import pytest

from anabranch import jax as ab

EXPERTS = jnp.zeros((4, 2), jnp.int32)
PLAN = ab.plan(EXPERTS, 3)
X, ROWS, WEIGHTS = jnp.ones((4, 5)), jnp.ones((8, 5)), jnp.ones((4, 2))
ROUTED = jnp.ones((4, 3), bool)
IDS = jnp.zeros((4, 7), jnp.int32)
COUNTS = jnp.ones((2, 4), jnp.int32)


def shape(dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def traced(function):
    """Calls a function with shapes only: errors that do not depend on data must be raised without data."""
    return lambda **arguments: jax.eval_shape(lambda: function(**arguments))


BAD = [
    (ab.plan, dict(experts=[[0]], num_experts=3), TypeError, "experts: got list"),
    (ab.plan, dict(experts=X, num_experts=3), TypeError, r"experts: got float32\[4, 5\], expected int16 or int32"),
    (ab.plan, dict(experts=jnp.int32(3), num_experts=3), ValueError, r"experts: got int32\[\], expected"),
    (ab.plan, dict(experts=jnp.zeros((4, 0), jnp.int32), num_experts=3), ValueError, "experts: .* K >= 1"),
    (ab.plan, dict(experts=EXPERTS, num_experts=0), ValueError, "num_experts: got 0, expected an integer in"),
    (ab.plan, dict(experts=EXPERTS, num_experts=2.0), TypeError, "num_experts: got float 2.0"),
    (ab.plan, dict(experts=EXPERTS, num_experts=3, align_size=-1), ValueError, "align_size: got -1"),
    (ab.plan, dict(experts=EXPERTS, num_experts=3, align_size=True), TypeError, "align_size: got bool True"),
    (ab.plan, dict(experts=EXPERTS, num_experts=3, num_rows=-8), ValueError, "num_rows: got -8"),
    (ab.plan, dict(experts=EXPERTS, num_experts=3, align_size=8, num_rows=12), ValueError, "num_rows: got 12, .* 8"),
    (ab.plan, dict(experts=EXPERTS, num_experts=3, num_rows=2**31), ValueError, "num_rows: got 2147483648"),
    (ab.plan, dict(experts=EXPERTS, num_experts=2**30, align_size=2**30), ValueError, "align_size: got"),
    (ab.plan, dict(experts=EXPERTS, num_experts=4, num_destinations=2, num_rows=5), ValueError,
     "num_rows: got 5, expected a multiple of num_destinations 2"),
    (ab.plan, dict(experts=EXPERTS, num_experts=4, num_destinations=2, align_size=4, num_rows=12), ValueError,
     r"num_rows: got 12, expected a multiple of align_size 4 \* num_destinations 2"),
    (ab.dispatch, dict(x=X, plan=tuple(PLAN)), TypeError, "plan: got tuple"),
    (ab.dispatch, dict(x=X[:3], plan=PLAN), ValueError, r"x: got float32\[3, 5\], expected .* \[4, D\]"),
    (ab.dispatch, dict(x=X[None], plan=PLAN), ValueError, r"x: got float32\[1, 4, 5\], expected"),
    (ab.dispatch, dict(x=X.astype(complex), plan=PLAN), TypeError, "x: got complex64"),
    (ab.dispatch, dict(x=X, plan=PLAN._replace(slot_of_row=X)), TypeError, r"plan.slot_of_row: got float32"),
    (ab.dispatch, dict(x=X, plan=PLAN._replace(row_of_slot=None)), TypeError, r"plan.row_of_slot: got NoneType"),
    (ab.combine, dict(rows=ROWS[:7], plan=PLAN), ValueError, r"rows: got float32\[7, 5\], expected .* \[R=8, D\]"),
    (ab.combine, dict(rows=ROWS.astype(int), plan=PLAN), TypeError, "rows: got int32"),
    (ab.combine, dict(rows=ROWS, plan=PLAN, weights=WEIGHTS.T), ValueError, r"weights: got float32\[2, 4\]"),
    (ab.combine, dict(rows=ROWS, plan=PLAN, weights=EXPERTS), TypeError, "weights: got int32"),
    (ab.combine, dict(rows=ROWS, plan=PLAN, weights=0.5), TypeError, "weights: got float 0.5"),
    (ab.token_dispatch, dict(inp=X, routing_map=ROUTED[:3], num_out_tokens=9), ValueError, "routing_map: .* 3 tokens"),
    (ab.token_dispatch, dict(inp=X, routing_map=ROUTED * 1.0, num_out_tokens=9), TypeError, "routing_map: got float32"),
    (ab.token_dispatch, dict(inp=X, routing_map=ROUTED[:, :0], num_out_tokens=9), ValueError, "routing_map: .* E >= 1"),
    (ab.token_dispatch, dict(inp=X, routing_map=ROUTED, num_out_tokens=-1), ValueError, "num_out_tokens: got -1"),
    (ab.token_dispatch, dict(inp=X, routing_map=ROUTED, num_out_tokens=9.0), TypeError, "num_out_tokens: got float"),
    (ab.token_dispatch, dict(inp=X, routing_map=ROUTED, num_out_tokens=9, probs=X), ValueError, "probs: .* E=3"),
    (ab.token_dispatch, dict(inp=X, routing_map=ROUTED, num_out_tokens=9, align_size=0), ValueError,
     "align_size: got 0"),
    (ab.token_combine, dict(inp=ROWS[None], row_id_map=IDS), ValueError, r"inp: got float32\[1, 8, 5\]"),
    (ab.token_combine, dict(inp=ROWS, row_id_map=IDS[:, :6]), ValueError, r"row_id_map: got int32\[4, 6\]"),
    (ab.token_combine, dict(inp=ROWS, row_id_map=X), TypeError, "row_id_map: got float32"),
    (ab.token_combine, dict(inp=ROWS, row_id_map=IDS, merging_probs=X), ValueError, "merging_probs: .* E=3"),
    (ab.token_combine, dict(inp=ROWS, row_id_map=IDS, pad_offsets=IDS[0]), ValueError, r"pad_offsets: .* \[E=3\]"),
    (ab.routing_map_to_selected_experts, dict(sparse_probs=X, routing_map=ROUTED, topk=1), ValueError, "routing_map"),
    (ab.routing_map_to_selected_experts, dict(sparse_probs=ROUTED * 1.0, routing_map=ROUTED, topk=4), ValueError,
     r"topk: got 4, expected an integer in \[1, 3\]"),
    (ab.sort_chunks_by_index, dict(inp=X[0], split_sizes=IDS[0], sorted_indices=IDS[0]), ValueError, "inp: got"),
    (ab.sort_chunks_by_index, dict(inp=X, split_sizes=X[0], sorted_indices=IDS[0]), TypeError, "split_sizes: got"),
    (ab.sort_chunks_by_index, dict(inp=X, split_sizes=IDS[0], sorted_indices=IDS[0, :2]), ValueError,
     r"sorted_indices: .* \[S=7\]"),
    (ab.compute_ragged_all_to_all_params, dict(all_shards_tokens_per_expert=COUNTS, shard_id=2, num_expert_shards=2),
     ValueError, r"shard_id: got 2, expected an integer in \[0, 1\]"),
    (ab.compute_ragged_all_to_all_params,
     dict(all_shards_tokens_per_expert=COUNTS, shard_id=X[0, 0], num_expert_shards=2), TypeError,
     "shard_id: got float32"),
    (ab.compute_reverse_ragged_all_to_all_params,
     dict(all_shards_tokens_per_expert=COUNTS[:, :3], shard_id=0, num_expert_shards=2), ValueError, "a multiple of num_expert_shards 2"),
    (ab.local_permute_after_a2a,
     dict(x_recv=X, all_shards_tokens_per_expert=COUNTS, shard_id=0, num_expert_shards=4), ValueError,
     "num_expert_shards=4"),
    (ab.local_unpermute_before_a2a, dict(expert_outputs=X, state=(IDS, IDS)), TypeError, "state: got tuple"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"), BAD, ids=[f"{b[0].__name__}-{b[3]}" for b in BAD]
)
def test_bad_arguments_are_refused_by_name(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(**arguments)
    with pytest.raises(error, match=message):
        traced(function)(**arguments)


def test_too_many_slots_are_refused_without_data():
    with pytest.raises(ValueError, match="experts: got 1073741824 x 2 slots, expected fewer than 2"):
        jax.eval_shape(lambda e: ab.plan(e, 3), shape((2**30, 2), jnp.int32))
    with pytest.raises(ValueError, match="routing_map: got 1073741824 x 2 slots"):
        jax.eval_shape(lambda m: ab.token_dispatch(jnp.ones((2**30, 1)), m, 5), shape((2**30, 2), bool))
    with pytest.raises(ValueError, match="inp: got 2147483648, expected an integer in"):
        jax.eval_shape(lambda x: ab.sort_chunks_by_index(x, IDS[0], IDS[0]), shape((2**31, 0)))

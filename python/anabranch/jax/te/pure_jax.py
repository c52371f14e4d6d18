"""Dispatch and combine of selected experts under TransformerEngine's `pure_jax_` names.

TransformerEngine has a second implementation there; these functions call `plan`, `dispatch` and `combine`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check
from anabranch.jax.ops.dispatch import combine, dispatch
from anabranch.jax.ops.plan import Plan, plan


class PureJaxPermState(NamedTuple):
    """The state that `pure_jax_token_dispatch` returns for `pure_jax_token_combine`.

    Attributes:
      plan: the plan of the rows.
    """

    plan: Plan


def pure_jax_token_dispatch(
    inputs: Any,
    selected_experts: Any,
    num_experts: int,
    num_experts_per_tok: int,
    align_size: int = 0,
    roll_to_expert_id: Any = None,
) -> tuple[jax.Array, PureJaxPermState, jax.Array]:
    """Copies every token to one row per expert of the token; rows of an expert are contiguous, by (token, slot).

    Args:
      inputs: [..., D], as for `dispatch`; leading dimensions are flattened to T.
      selected_experts: int16, int32 or int64 [..., K]; an index outside [0, E) is no expert.
      num_experts: E.
      num_experts_per_tok: K.
      align_size: a; every expert's rows are padded to a multiple of it; 0: no padding.
      roll_to_expert_id: None, or an integer r, which may be traced: the order of experts is r, r + 1, ..., r - 1.

    Returns:
      (rows [T K + E max(a - 1, 0), D], zero in padding; a PureJaxPermState; group_sizes int32 [E] in the order of the
      rows).

    Gradient: for inputs, the sum of the token's rows, in float32.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, or a number is out of range.

    Source: the function of this name in transformer_engine.jax.permutation. Without align_size that function rolls
    group_sizes once more than the rows.

    >>> experts = jnp.array([[1, 0], [1, -1]])
    >>> rows, _, group_sizes = pure_jax_token_dispatch(jnp.array([[1.0], [2.0]]), experts, 2, 2)
    >>> rows.ravel().tolist(), group_sizes.tolist()
    ([1.0, 1.0, 2.0, 0.0], [1, 2])
    """
    E = check.integer("num_experts", num_experts, 1, check.INDEX_LIMIT - 1)
    K = check.integer("num_experts_per_tok", num_experts_per_tok, 1, check.INDEX_LIMIT - 1)
    a = check.integer("align_size", align_size, 0, check.INDEX_LIMIT - 1)
    experts = check.indices("selected_experts", selected_experts, (..., ("K", K)))
    experts = experts.reshape(math.prod(experts.shape[:-1]), K)
    inputs = check.array("inputs", inputs, (*check.FLOATS, "bool", "uint8", *check.INDICES), (..., "D"))
    T = math.prod(inputs.shape[:-1])
    if experts.shape[0] != T:
        raise ValueError(f"selected_experts: got {experts.shape[0]} tokens, expected {T}, those of inputs")
    num_rows = T * K + E * max(a - 1, 0)
    if num_rows >= check.INDEX_LIMIT:
        raise ValueError(f"align_size: got {a}, which requires {num_rows} rows, expected fewer than 2^31")
    if roll_to_expert_id is not None:
        first = roll_to_expert_id
        if isinstance(first, int):
            first = check.integer("roll_to_expert_id", first, -check.INDEX_LIMIT, check.INDEX_LIMIT - 1)
        else:
            first = check.amounts("roll_to_expert_id", first, check.INDICES, ())
        experts = jnp.where((experts >= 0) & (experts < E), (experts - first) % E, -1)
    routed = plan(experts, E, align_size=a, num_rows=num_rows // max(a, 1) * max(a, 1))
    rows = dispatch(inputs.reshape(T, inputs.shape[-1]), routed)
    rows = jnp.pad(rows, ((0, num_rows - rows.shape[0]), (0, 0)))
    return rows, PureJaxPermState(routed), routed.group_sizes


def pure_jax_token_combine(
    expert_outputs: Any,
    perm_state: PureJaxPermState,
    routing_weights: Any,
    num_experts_per_tok: int,
    batch_size: int,
    sequence_length: int,
) -> jax.Array:
    """Sums the rows of every token: the sum over its K assignments of weight * row.

    Args:
      expert_outputs: float32, bfloat16 or float16 [R, D], with the rows of `pure_jax_token_dispatch`.
      perm_state: its state.
      routing_weights: float32, bfloat16 or float16 [..., K], T K numbers.
      num_experts_per_tok: K.
      batch_size, sequence_length: B and S, T = B S.

    Returns:
      [B, S, D], dtype of expert_outputs, accumulated in float32, slots ascending.

    Gradient: for expert_outputs and routing_weights, as in `combine`.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit.

    Source: the function of this name in transformer_engine.jax.permutation, which rounds weights to the rows' dtype.

    >>> experts, x = jnp.array([[1, 0]]), jnp.array([[[1.0]]])
    >>> rows, state, _ = pure_jax_token_dispatch(x, experts, 2, 2)
    >>> pure_jax_token_combine(rows, state, jnp.array([[0.5, 0.25]]), 2, 1, 1).tolist()
    [[[0.75]]]
    """
    if not isinstance(perm_state, PureJaxPermState) or not isinstance(perm_state.plan, Plan):
        raise TypeError(f"perm_state: got {check.describe(perm_state)}, expected that of pure_jax_token_dispatch")
    T, K = perm_state.plan.row_of_slot.shape
    if check.integer("num_experts_per_tok", num_experts_per_tok, 1, check.INDEX_LIMIT - 1) != K:
        raise ValueError(f"num_experts_per_tok: got {num_experts_per_tok}, expected {K}, as in the dispatch")
    B = check.integer("batch_size", batch_size, 0, check.INDEX_LIMIT - 1)
    S = check.integer("sequence_length", sequence_length, 0, check.INDEX_LIMIT - 1)
    if B * S != T:
        raise ValueError(f"batch_size: got {B} x {S} tokens, expected {T}, as in the dispatch")
    rows = check.array("expert_outputs", expert_outputs, check.FLOATS, ("R", "D"))
    planned = perm_state.plan.slot_of_row.shape[0]
    if rows.shape[0] < planned:
        raise ValueError(f"expert_outputs: got {check.describe(rows)}, expected the rows of the dispatch")
    weights = check.array("routing_weights", routing_weights, check.FLOATS, (..., "K"))
    if weights.size != T * K:
        raise ValueError(f"routing_weights: got {check.describe(weights)}, expected {T} x {K} numbers")
    return combine(rows[:planned], perm_state.plan, weights.reshape(T, K)).reshape(B, S, rows.shape[1])

"""Replay on meshes of 8 devices against the float64 oracle: sharded tokens, transports, bounded buffers."""

import jax
import numpy as np
import pytest
from meshes import around, kept_and_dropped, mesh_of, placed, put

from anabranch.jax import Parallel
from moe_cases import check_layer, operands
from replay_cases import record

T, E, K, D, F = 32, 4, 2, 16, 24
TOKENS = ("x", "output", "token_mask", "replay", "weights")
OPTIONS = dict(topk=K, aux_loss_coeff=0.3, z_loss_coeff=0.1, score_function="sigmoid", num_groups=2, group_topk=1)


@pytest.mark.parametrize("of_record", [{}, {"mask": False}, {"weights": False}], ids=str)
def test_tokens_in_any_sharding(axis_type, of_record):
    mesh = mesh_of(axis_type, a=4, b=2)
    mask = np.arange(T) % 5 > 0

    def place(name, array):
        return put(mesh, array, *(("b", "a"),) if name in TOKENS else ())

    with around(mesh):
        check_layer(operands(T, E, K, D, F), put=place, replay=record(T, E, K, **of_record), token_mask=mask, **OPTIONS)


@pytest.mark.parametrize("transport", ["ring", "all_to_all", "ragged"])
def test_every_axis_and_bounded_buffers(transport):
    """Drops are counted, and the returned selection is the one before dropping."""
    mesh = mesh_of(data=2, expert=2, tensor=2)
    capacity = None if transport == "ring" else 0.7
    parallel = Parallel(
        expert_axis="expert", data_axes="data", tensor_axis="tensor", transport=transport, capacity_factor=capacity
    )
    arrays, options = operands(T, E, K, D, F), OPTIONS | {"replay": record(T, E, K)}
    kept = None
    if capacity:
        kept, dropped = kept_and_dropped(arrays, options, parallel, 2, 2)
        assert dropped.sum() > 5
    with jax.set_mesh(mesh):
        check_layer(arrays, put=placed(mesh, parallel), parallel=parallel, kept=kept, **options)

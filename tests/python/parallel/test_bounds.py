"""The static bounds of the transports' buffers: no exchange exceeds them, and the worst case reaches them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.exchange_sizes import capacity_of, traffic
from anabranch.jax.parallel.exchange import Bounds, Padded, Ragged
from anabranch.jax.parallel.transports import choose
from anabranch.rows import num_rows_needed


def bounds(ranks, local, tokens, topk, align_size=0, capacity=None):
    per_token = min(topk, local)
    return Bounds(ranks, ranks * local, align_size, tokens, topk, per_token, capacity, "expert")


def aligned(counts, a):
    return -(-counts // max(a, 1)) * max(a, 1)


def counts_of(experts, num_experts):
    """int [P, E]: assignments of every rank to every expert."""
    return np.stack([np.bincount(rank.ravel(), minlength=num_experts) for rank in experts])


@settings(max_examples=200, deadline=None)
@given(
    ranks=st.integers(1, 5),
    local=st.integers(1, 5),
    tokens=st.integers(0, 9),
    align_size=st.sampled_from([0, 1, 3, 8]),
    favourites=st.integers(1, 25),
    data=st.data(),
)
def test_rows_fit_for_every_routing(ranks, local, tokens, align_size, favourites, data):
    E = ranks * local
    topk = data.draw(st.integers(1, E), "topk")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), "seed"))
    few = rng.permutation(E)[: max(favourites, topk)]  # all tokens choose from these
    experts = np.array([[rng.permutation(few)[:topk] for _ in range(tokens)] for _ in range(ranks)])
    experts = experts.reshape(ranks, tokens, topk).astype(int)
    rows = aligned(counts_of(experts, E), align_size).reshape(ranks, ranks, local)
    b = bounds(ranks, local, tokens, topk, align_size)
    assert rows.sum(-1).max() <= Padded(b).bounds.region
    assert rows.sum((1, 2)).max() <= Ragged(b)._outgoing_rows
    assert rows.sum((0, 2)).max() <= Ragged(b)._incoming_rows
    assert rows.sum((0, 2)).max() <= num_rows_needed(b.arriving_slots, b.experts, align_size)
    together = aligned(counts_of(experts, E).sum(0), align_size).reshape(ranks, local).sum(-1)
    assert together.max() <= num_rows_needed(b.arriving_slots, local, align_size)  # transport="ring"


@pytest.mark.parametrize("capacity", [None, 5, 1000])
def test_the_worst_case_fills_the_buffers(capacity):
    """All ranks send all they can to one rank: 4 ranks of 6 tokens, each with 2 of its 3 assignments there."""
    b = bounds(4, 2, 6, 3, capacity=capacity)
    assert b.pair_slots == min(12, capacity or 12) and b.arriving_slots == min(48, capacity or 48)
    assert Padded(b).bounds.region == b.pair_slots and Ragged(b)._incoming_rows == b.arriving_slots


def test_padding_of_every_source_and_expert_has_room():
    """Each rank has one assignment per expert, which gets 8 rows."""
    b = bounds(4, 2, 1, 8, align_size=8)
    assert (
        Padded(b).bounds.region == 2 * 8 and Ragged(b)._incoming_rows == 4 * 2 * 8 and Ragged(b)._outgoing_rows == 8 * 8
    )


def test_a_capacity_beyond_all_slots_drops_nothing():
    """A bound past int32 is no error if it is not used."""
    for factor in (4.0, 3e5, 3e38):
        assert capacity_of(factor, tokens=4096, topk=2, ranks=4, slots_per_token=2) is None
    assert capacity_of(3.9, tokens=10, topk=2, ranks=4, slots_per_token=2) == 78
    assert capacity_of(1e-30, tokens=10, topk=2, ranks=4, slots_per_token=2) == 1


@pytest.mark.parametrize("transport", ["ring", "p2p", "all_to_all", "ragged"])
def test_counts_and_rows_beyond_int32_are_an_error(transport):
    bounds(256, 4, 2**20, 4, align_size=128).check(transport)
    with pytest.raises(ValueError, match=r"x: got 1048576 tokens with topk 4 on each of 512 ranks, expected fewer"):
        bounds(512, 4, 2**20, 4, capacity=10).check(transport)
    with pytest.raises(ValueError, match=rf"align_size: got 2147483647, with which transport '{transport}' needs"):
        bounds(2, 4, 8, 4, align_size=2**31 - 1).check(transport)


def test_traffic_and_choice():
    b, ring = bounds(8, 4, 1000, 2), 2 * 7 * 1000 * 2
    assert traffic(b, 2) == {"ring": ring, "p2p": ring, "all_to_all": 2 * 7 * 2000 * 2, "ragged": 2 * 2000 * 7 / 8 * 2}
    assert choose("cpu", bounds(2, 4, 1000, 1), 4) == "ring"
    assert choose("gpu", bounds(512, 4, 1000, 1), 2) == "ragged"
    assert choose("gpu", b, 2) == "ring" and choose("gpu", b, 2, p2p=True) == "p2p"
    # A tight bound makes regions small: 100 rows for all assignments that a rank may get.
    tight = bounds(8, 4, 1000, 2, capacity=100)
    assert choose("cpu", tight, 2) == choose("gpu", tight, 2, p2p=True) == "all_to_all"

"""Selects the assignments that fit into the bounded buffers of expert parallelism."""

import numpy as np


def kept_slots(experts, num_experts, capacity):
    """Every rank accepts the first `capacity` assignments to its experts in the order (source rank, token, slot).

    Args:
      experts: int [P, T, K], for the T tokens of each of P ranks; below 0: no expert.
      num_experts: E; rank r owns experts [r E/P, (r + 1) E/P).
      capacity: the number of assignments that a rank accepts.

    Returns: bool [P, T, K], False for an assignment that does not fit.
    """
    experts = np.asarray(experts)
    ranks, T, K = experts.shape
    taken = [0] * ranks
    kept = np.ones(experts.shape, bool)
    for source in range(ranks):
        for t in range(T):
            for k in range(K):
                expert = int(experts[source, t, k])
                if expert < 0:
                    continue
                rank = expert // (num_experts // ranks)
                kept[source, t, k] = taken[rank] < capacity
                taken[rank] += 1
    return kept

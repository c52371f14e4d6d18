"""The oracle's replay against a loop over tokens and central differences."""

import numpy as np
import pytest
from cases import Case, check, normal

from anabranch.reference.balance import load_balance_loss, z_loss
from anabranch.reference.moe import moe, moe_backward
from anabranch.reference.replay import Replay
from anabranch.reference.router import route

T, E, K, D, F = 8, 4, 2, 3, 5
MASK = np.array([True, True, False, True, True, False, True, True])
#: Repeats, -1, indices out of range on either side, and a token without experts.
GIVEN = np.array([[0, 0], [-1, 2], [1, 3], [-1, -1], [9, 1], [3, 2], [2, -4], [1, 0]])
REPLAYED = np.array([True, True, True, True, True, False, False, False])
RECORDED = normal(T, K, seed=7)
LOSSES = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
GROUPS = {"expert_bias": np.array([2.0, -1.0, 0.5, 0.0]), "num_groups": 2, "group_topk": 1}
CASES = {
    "experts": (Replay(GIVEN), {}),
    "weights": (Replay(GIVEN, RECORDED), {"normalize": False, "token_mask": MASK}),
    "mask": (Replay(GIVEN, None, REPLAYED), {"score_function": "sigmoid", **GROUPS}),
    "weights, mask": (Replay(GIVEN, RECORDED, REPLAYED), {"score_function": "sqrtsoftplus", "token_mask": MASK}),
    "weights, mask, groups": (Replay(GIVEN, RECORDED, REPLAYED), {"normalize": False, **GROUPS}),
}


def expert(x, e, w_in, w_out):
    gate, up = np.einsum("d,dpf->pf", x, w_in[e])
    return (gate / (1 + np.exp(-gate)) * up) @ w_out[e]


@pytest.mark.parametrize("name", CASES)
def test_a_replay_agrees_with_a_loop_over_tokens(name):
    replay, chosen = CASES[name]
    options = {"topk": K, "scaling_factor": 1.7, **chosen, **LOSSES}
    operands = {"x": normal(T, D), "gate": normal(D, E), "w_in": normal(E, D, 2, F), "w_out": normal(E, F, D)}
    masked = ~chosen.get("token_mask", np.ones(T, bool))
    whole = moe(**operands, **options, replay=replay)
    router_options = {key: value for key, value in options.items() if key not in LOSSES and key != "token_mask"}
    of_weights = {key: value for key, value in router_options.items() if key not in GROUPS}

    def loops(x, gate, w_in, w_out):
        output, experts, weights = np.zeros((T, D)), np.full((T, K), -1), np.zeros((T, K))
        statistics = route(x[~masked] @ gate, **of_weights)
        for t in np.flatnonzero(~masked):
            logits = (x[t] @ gate)[None]
            if replay.mask is None or replay.mask[t]:
                one = route(logits, forced_experts=GIVEN[t : t + 1], **of_weights)
                own = one.weights[0] if replay.weights is None else RECORDED[t] * (one.experts[0] >= 0)
            else:
                one = route(logits, **router_options)
                own = one.weights[0]
            experts[t], weights[t] = one.experts[0], own
            output[t] = sum(w * expert(x[t], e, w_in, w_out) for w, e in zip(own, experts[t], strict=True) if e >= 0)
        counts = np.bincount(experts[experts >= 0], minlength=E)
        np.testing.assert_array_equal(whole.experts, experts)
        np.testing.assert_array_equal(whole.tokens_per_expert, counts)
        n = (~masked).sum()
        return [
            output,
            load_balance_loss(statistics.score_sum, counts, K, 0.3, n),
            z_loss(statistics.lse, 0.2, n),
            weights,
        ]

    def forward(**arrays):
        out = moe(**arrays, **options, replay=replay, experts=whole.experts)  # held: a difference must not move it
        return [out.output, out.aux_loss, out.z_loss, out.weights]

    def backward(*cotangents):
        found = moe_backward(**operands, d_output=cotangents[0], **_named(cotangents), **options, replay=replay)
        return {key: found[key] for key in operands}

    assert whole.dropped == 0
    check(Case(forward, backward, operands, loops, 1e-7))


def _named(cotangents):
    return dict(zip(("d_aux_loss", "d_z_loss", "d_weights"), cotangents[1:], strict=True))


def test_a_replay_and_forced_experts_exclude_each_other():
    with pytest.raises(ValueError, match="forced_experts: got it together with replay, expected it alone"):
        route(np.zeros((T, E)), K, forced_experts=GIVEN, replay=Replay(GIVEN))

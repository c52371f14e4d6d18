"""The whole layer: forward against a loop over tokens, every gradient against differences."""

import numpy as np
import pytest
from differences import check_gradient

from anabranch.reference.balance import load_balance_loss, z_loss
from anabranch.reference.experts import activation
from anabranch.reference.moe import (
    moe,
    moe_backward,
    routed_experts,
    routed_experts_backward,
    shared_expert,
    shared_expert_backward,
)
from anabranch.reference.router import route

T, E, D, F = 6, 4, 3, 5
MASK = np.array([True, True, False, True, True, False])


def random_layer(seed=0, gated=True, biased=True):
    rng = np.random.default_rng(seed)
    parts = 2 if gated else 1
    layer = {
        "x": rng.normal(size=(T, D)),
        "gate": rng.normal(size=(D, E)),
        "w_in": rng.normal(size=(E, D, parts, F)),
        "w_out": rng.normal(size=(E, F, D)),
    }
    if biased:
        layer |= {"b_in": rng.normal(size=(E, parts, F)), "b_out": rng.normal(size=(E, D))}
    return layer, (rng.normal(size=(T, D)), rng.normal(), rng.normal())


ROUTINGS = {
    "softmax": {"topk": 2},
    "raw softmax": {"topk": 2, "normalize": False},
    "one expert": {"topk": 1, "score_function": "sigmoid", "normalize": False},
    "every expert": {"topk": 4, "score_function": "sqrtsoftplus"},
    "bias and groups": {
        "topk": 2,
        "score_function": "sigmoid",
        "expert_bias": np.array([1.0, -1.0, 0.5, 0.0]),
        "num_groups": 2,
        "group_topk": 1,
        "scaling_factor": 2.5,
    },
    "mask": {"topk": 2, "token_mask": MASK},
    "replay": {
        "topk": 3,
        "score_function": "sigmoid",
        "forced_experts": np.array([[0, 0, 1], [-1, 2, 1], [-1, -1, -1], [9, 0, 1], [1, 1, 1], [0, 2, -4]]),
    },
}
LOSSES = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name, gated, biased", [("silu", True, True), ("gelu", False, False), ("relu2", True, False)])
@pytest.mark.parametrize("align_size", [0, 4])
def test_forward_agrees_with_a_loop_over_tokens(routing, name, gated, biased, align_size):
    layer, _ = random_layer(1, gated, biased)
    options = ROUTINGS[routing]
    x, logits = layer["x"], layer["x"] @ layer["gate"]
    r = route(logits, **options)
    want = np.zeros((T, D))
    for t in range(T):
        for w, e in zip(r.weights[t], r.experts[t], strict=True):
            if e < 0:
                continue
            h = np.einsum("d,dpf->pf", x[t], layer["w_in"][e]) + (layer["b_in"][e] if biased else 0)
            a = activation(h[0], name) * (h[1] if gated else 1)
            want[t] += w * (a @ layer["w_out"][e] + (layer["b_out"][e] if biased else 0))
    for early in (False, True):
        got = moe(**layer, **options, **LOSSES, activation=name, weight_early=early, align_size=align_size)
        np.testing.assert_allclose(got.output, want, atol=1e-12)
        np.testing.assert_array_equal(got.tokens_per_expert, r.tokens_per_expert)
        n = options.get("token_mask", np.ones(T)).sum()
        k = options["topk"]
        np.testing.assert_allclose(got.aux_loss, load_balance_loss(r.score_sum, r.tokens_per_expert, k, 0.3, n))
        np.testing.assert_allclose(got.z_loss, z_loss(r.lse, 0.2, n))
        assert got.dropped == 0


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("align_size, early", [(0, False), (4, True)])
def test_gradients(routing, align_size, early):
    networks = [("silu", True, True), ("gelu", False, True), ("relu2", True, False)]
    name, gated, biased = networks[
        ([*ROUTINGS].index(routing) + early) % 3
    ]  # each with several routings, early and late
    layer, cotangents = random_layer(2, gated, biased)
    options = ROUTINGS[routing] | LOSSES | {"activation": name, "align_size": align_size, "weight_early": early}
    grads = moe_backward(
        layer["x"],
        layer["gate"],
        layer["w_in"],
        layer["w_out"],
        *cotangents,
        **options,
        b_in=layer.get("b_in"),
        b_out=layer.get("b_out"),
    )
    steering = ("expert_bias", "num_groups", "group_topk", "forced_experts")
    held = {k: v for k, v in options.items() if k not in steering}
    held["experts"] = route(layer["x"] @ layer["gate"], **ROUTINGS[routing]).experts
    d_output, d_aux, d_z = cotangents

    def loss(key, value):
        out = moe(**layer | {key: value}, **held)
        return (d_output * out.output).sum() + d_aux * out.aux_loss + d_z * out.z_loss

    for key, value in layer.items():
        check_gradient(lambda v, key=key: loss(key, v), value, grads[key], f"d_{key}", 1e-7)
    assert biased or (grads["b_in"] is None and grads["b_out"] is None)


def test_masked_tokens_leave_no_trace_whatever_they_hold():
    layer, (d_output, d_aux, d_z) = random_layer(3)
    kept = layer | {"x": layer["x"][MASK]}
    layer["x"][~MASK] = np.nan
    operands = [layer.pop(key) for key in ("x", "gate", "w_in", "w_out")]
    options = layer | {"topk": 2} | LOSSES
    out = moe(*operands, token_mask=MASK, **options)
    want = moe(**kept, topk=2, **LOSSES)
    np.testing.assert_array_equal(out.output[~MASK], 0)
    np.testing.assert_allclose(out.output[MASK], want.output)
    np.testing.assert_allclose((out.aux_loss, out.z_loss), (want.aux_loss, want.z_loss))
    d_output[~MASK] = np.nan
    grads = moe_backward(*operands, d_output, d_aux, d_z, token_mask=MASK, **options)
    expected = moe_backward(kept["x"], *operands[1:], d_output[MASK], d_aux, d_z, **options)
    np.testing.assert_array_equal(grads["x"][~MASK], 0)
    for key in grads.keys() - {"gate_bias"}:
        got = grads[key][MASK] if key in ("x", "weights") else grads[key]
        np.testing.assert_allclose(got, expected[key], atol=1e-12)


def test_gradients_of_the_bias_of_the_gate_and_from_the_weights():
    layer, cotangents = random_layer(7)
    rng = np.random.default_rng(8)
    layer["gate_bias"], d_weights = rng.normal(size=E), rng.normal(size=(T, 2))
    options = {"topk": 2, "score_function": "sigmoid", "token_mask": MASK} | LOSSES
    experts = route(layer["x"] @ layer["gate"] + layer["gate_bias"], 2, score_function="sigmoid").experts
    options["experts"] = np.where(MASK[:, None], experts, -1)
    operands = [layer[key] for key in ("x", "gate", "w_in", "w_out")]
    biases = {key: layer[key] for key in ("gate_bias", "b_in", "b_out")}
    grads = moe_backward(*operands, *cotangents, d_weights, **biases, **options)
    d_output, d_aux, d_z = cotangents

    def loss(key, value):
        out = moe(**layer | {key: value}, **options)
        return (d_output * out.output).sum() + d_aux * out.aux_loss + d_z * out.z_loss + (d_weights * out.weights).sum()

    for key, value in layer.items():
        check_gradient(lambda v, key=key: loss(key, v), value, grads[key], f"d_{key}", 1e-7)


# Repeats, holes, a wrong index either way, and a token without experts.
GIVEN = np.array([[0, 0, 1], [-1, 2, 1], [-1, -1, -1], [9, 0, 1], [1, 3, 0], [0, 2, -4]])


@pytest.mark.parametrize("early, align_size, bounded", [(False, 0, False), (True, 4, True)])
@pytest.mark.parametrize("gated, biased", [(True, True), (False, False)])
def test_after_the_router(gated, biased, early, align_size, bounded):
    layer, (d_output, *_) = random_layer(9, gated, biased)
    del layer["gate"]
    rng = np.random.default_rng(10)
    layer["weights"] = rng.normal(size=GIVEN.shape)
    layer["weights"][0, 1] = 0.0
    kept = rng.random(GIVEN.shape) < 0.8 if bounded else None
    options = {"experts": GIVEN, "weight_early": early, "align_size": align_size, "kept": kept}

    def loss(key, value):
        return (d_output * routed_experts(**layer | {key: value}, **options).output).sum()

    grads = routed_experts_backward(**layer, **options, d_output=d_output)
    for key, value in layer.items():
        check_gradient(lambda v, key=key: loss(key, v), value, grads[key], f"d_{key}", 1e-7)
    out = routed_experts(**layer, **options)
    valid = (GIVEN >= 0) & (GIVEN < E)
    np.testing.assert_array_equal(out.tokens_per_expert, np.bincount(GIVEN[valid], minlength=E))
    lost = (GIVEN >= E) | (GIVEN < -1)
    assert out.dropped == (lost | valid & ~(valid if kept is None else kept)).sum()
    holds = valid if kept is None else valid & kept
    want = np.zeros((T, D))
    for t, k in zip(*np.nonzero(holds), strict=True):
        e = GIVEN[t, k]
        h = np.einsum("d,dpf->pf", layer["x"][t], layer["w_in"][e]) + (layer["b_in"][e] if biased else 0)
        a = activation(h[0], "silu") * (h[1] if gated else 1)
        want[t] += layer["weights"][t, k] * (a @ layer["w_out"][e] + (layer["b_out"][e] if biased else 0))
    np.testing.assert_allclose(out.output, want, atol=1e-12)


@pytest.mark.parametrize("gate_shape", [None, (D,), (D, 1)])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_shared_expert(parts, gate_shape):
    rng = np.random.default_rng(11)
    layer = {"x": rng.normal(size=(T, D)), "w_in": rng.normal(size=(D, parts, F)), "w_out": rng.normal(size=(F, D))}
    if gate_shape:
        layer["w_gate"] = rng.normal(size=gate_shape)
    d_output = rng.normal(size=(T, D))
    h = np.einsum("td,dpf->ptf", layer["x"], layer["w_in"])
    want = (activation(h[0], "silu") * (h[1] if parts == 2 else 1)) @ layer["w_out"]
    if gate_shape:
        want = want / (1 + np.exp(-layer["x"] @ layer["w_gate"].reshape(D, 1)))
    np.testing.assert_allclose(shared_expert(**layer), want, atol=1e-12)
    grads = shared_expert_backward(**layer, d_output=d_output)
    for key, value in layer.items():

        def loss(v, key=key):
            return (d_output * shared_expert(**layer | {key: v})).sum()

        check_gradient(loss, value, grads[key], f"d_{key}", 1e-7)


def test_leading_dimensions_are_kept():
    layer, (d_output, *_) = random_layer(4, biased=False)
    flat, options = moe(**layer, topk=2), {"topk": 2, "token_mask": MASK.reshape(2, 3)}
    folded = layer | {"x": layer["x"].reshape(2, 3, D)}
    np.testing.assert_array_equal(moe(**folded, topk=2).output, flat.output.reshape(2, 3, D))
    grads = moe_backward(**folded, d_output=d_output.reshape(2, 3, D), **options)
    want = moe_backward(**layer, d_output=d_output, topk=2, token_mask=MASK)
    np.testing.assert_array_equal(grads["x"], want["x"].reshape(2, 3, D))


def test_no_tokens():
    layer, _ = random_layer(5)
    layer["x"] = np.zeros((0, D))
    out = moe(**layer, topk=2, **LOSSES, align_size=4)
    assert out.output.shape == (0, D) and out.aux_loss == out.z_loss == 0
    grads = moe_backward(
        layer.pop("x"), layer.pop("gate"), layer.pop("w_in"), layer.pop("w_out"), np.zeros((0, D)), 1.0, 1.0, topk=2,
        **layer, **LOSSES,
    )  # fmt: skip
    for key, gradient in grads.items():
        assert gradient is None if key == "gate_bias" else (gradient == 0).all(), key


def test_expert_without_tokens_gets_gradients_of_exactly_zero():
    layer, (d_output, *_) = random_layer(6)
    operands = [layer.pop(key) for key in ("x", "gate", "w_in", "w_out")]
    forced = np.zeros((T, 1), int)
    grads = moe_backward(*operands, d_output, topk=1, forced_experts=forced, **layer)
    for key in ("w_in", "w_out", "b_in", "b_out"):
        assert (grads[key][0] != 0).all() and (grads[key][1:] == 0).all(), key


def test_unknown_options_are_refused():
    layer, _ = random_layer()
    with pytest.raises(TypeError, match="temperature"):
        moe(**layer, topk=1, temperature=2.0)

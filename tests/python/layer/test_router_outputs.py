"""The layer requests from the router only the outputs that its losses and its backward pass need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from anabranch import jax as in_jax
from anabranch import torch as in_torch
from anabranch.jax.binding import ffi
from anabranch.torch.binding import calls, define

T, D, E, K, F = 37, 8, 6, 2, 4
EXTRA = {"tokens_per_expert", "score_sum", "lse"}
LOSSES = {"none": {}, "aux": {"aux_loss_coeff": 0.1}, "z": {"z_loss_coeff": 0.1}}
#: Requested outputs besides weights and experts, by score function and losses: (forward alone, with a gradient) in JAX.
#: torch does not know in the forward pass whether a gradient will be requested.
ASKED = {
    ("softmax", "none"): (set(), {"lse"}),
    ("softmax", "aux"): ({"score_sum"}, {"score_sum", "lse"}),
    ("softmax", "z"): ({"lse"}, {"lse"}),
    ("sigmoid", "none"): (set(), set()),
    ("sigmoid", "aux"): ({"score_sum"}, {"score_sum"}),
    ("sigmoid", "z"): ({"lse"}, {"lse"}),
}
CASES = pytest.mark.parametrize(("score_function", "losses"), ASKED)


def operands():
    random = np.random.default_rng(0)
    shapes = (T, D), (D, E), (E, D, 2, F), (E, F, D)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


@CASES
def test_in_jax(score_function, losses, monkeypatch):
    asked, call = [], ffi.call

    def spy(target, given, results, **options):
        if target == "ab_xla_router_forward":
            asked.append({name for name in EXTRA if results[name] is not None})
        return call(target, given, results, **options)

    monkeypatch.setattr(ffi, "call", spy)

    def loss(*arrays):
        out = in_jax.moe(*arrays, topk=K, score_function=score_function, **LOSSES[losses])
        return jnp.sum(out.output**2) + out.aux_loss + out.z_loss, out.tokens_per_expert

    arrays = [jnp.asarray(a) for a in operands()]
    counts = loss(*arrays)[1]
    alone, with_gradient = ASKED[score_function, losses]
    assert asked and all(names == alone for names in asked), asked
    del asked[:]
    jax.grad(lambda *a: loss(*a)[0], argnums=(0, 1, 2, 3))(*arrays)
    assert asked and asked[-1] == with_gradient, asked
    assert int(counts.sum()) == T * K


@CASES
def test_in_torch(score_function, losses, monkeypatch):
    asked, call = [], calls.router_forward

    def spy(tensors, **options):
        asked.append({name for name in EXTRA if tensors[name] is not None})
        return call(tensors, **options)

    monkeypatch.setattr(calls, "router_forward", spy)
    define.forget_prepared()
    x, *rest = map(torch.from_numpy, operands())
    x.requires_grad_()
    out = in_torch.moe(x, *rest, topk=K, score_function=score_function, **LOSSES[losses])
    assert asked == [ASKED[score_function, losses][1]]
    (out.output.square().sum() + out.aux_loss + out.z_loss).backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    assert int(out.tokens_per_expert.sum()) == x.shape[0] * K


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("moe", "array"), [(in_jax.moe, jnp.asarray), (in_torch.moe, torch.from_numpy)])
def test_losses_change_nothing_else(moe, array, score_function):
    """Losses do not change a bit of the other outputs, and neither loss changes the other."""
    arrays = [array(a) for a in operands()]
    found = {name: moe(*arrays, topk=K, score_function=score_function, **given) for name, given in LOSSES.items()}
    both = moe(*arrays, topk=K, score_function=score_function, **LOSSES["aux"], **LOSSES["z"])
    for out in found.values():
        for name in ("output", "weights", "experts", "tokens_per_expert"):
            np.testing.assert_array_equal(np.asarray(getattr(out, name)), np.asarray(getattr(both, name)))
    for name in ("aux", "z"):
        alone, beside = (float(getattr(out, f"{name}_loss")) for out in (found[name], both))
        assert alone == beside != 0.0

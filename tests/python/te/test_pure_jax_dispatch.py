"""TransformerEngine's pure_jax_ functions against their definitions: rows, group sizes, combine and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import pure_jax_token_combine, pure_jax_token_dispatch
from dispatch_cases import normal

pytestmark = pytest.mark.usefixtures("platform")

B, S, E, K, D = 3, 7, 5, 2, 4


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((B, S, E)), axis=-1)[..., :K].astype(np.int32)
    return normal(rng, (B, S, D)), experts, normal(rng, (B, S, K)), normal(rng, (B, S, D))


@pytest.mark.parametrize("align", [0, 1, 4])
@pytest.mark.parametrize("roll", [None, 0, 3, -1])
def test_rows_and_group_sizes(align, roll):
    x, experts, _, _ = inputs()
    rows, _, sizes = pure_jax_token_dispatch(x, experts, E, K, align, roll)
    a = max(align, 1)
    assert rows.shape == (B * S * K + E * (a - 1), D)
    order = [(e + (roll or 0)) % E for e in range(E)]
    groups = [x.reshape(-1, D)[(experts.reshape(-1, K) == e).any(-1)] for e in order]
    np.testing.assert_array_equal(sizes, [-(-len(group) // a) * a for group in groups])
    want = np.zeros(rows.shape, np.float32)
    for begin, group in zip(np.cumsum([0, *np.asarray(sizes)[:-1]]), groups, strict=True):
        want[begin : begin + len(group)] = group
    np.testing.assert_array_equal(rows, want)


@pytest.mark.parametrize("align,roll", [(0, None), (4, 2)])
def test_combine_inverts_dispatch_with_gradients(align, roll):
    x, experts, weights, d_out = inputs(1)

    @jax.jit
    def layer(x, weights, roll):
        rows, state, _ = pure_jax_token_dispatch(x, experts, E, K, align, roll)
        return pure_jax_token_combine(jnp.sin(rows), state, weights, K, B, S)

    roll = None if roll is None else jnp.int32(roll)
    output, pull = jax.vjp(lambda x, w: layer(x, w, roll), x, weights)
    np.testing.assert_allclose(output, np.sin(x) * weights.sum(-1, keepdims=True), rtol=2e-6, atol=1e-6)
    d_x, d_weights = pull(jnp.asarray(d_out))
    np.testing.assert_allclose(d_x, d_out * np.cos(x) * weights.sum(-1, keepdims=True), rtol=1e-5, atol=1e-5)
    want = np.broadcast_to((d_out * np.sin(x)).sum(-1, keepdims=True), weights.shape)
    np.testing.assert_allclose(d_weights, want, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_named():
    x, experts, weights, _ = inputs()
    rows, state, _ = pure_jax_token_dispatch(x, experts, E, K)
    good = (x, experts, E, K)
    for changed, name in (
        ((x, experts[:2], E, K), "selected_experts"),
        ((x, experts, E, 3), "selected_experts"),
        ((x, experts, 0, K), "num_experts"),
        ((*good, -1), "align_size"),
        ((*good, 2**31 - 1), "align_size"),
        ((*good, 0, 1.5), "roll_to_expert_id"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: got"):
            pure_jax_token_dispatch(*changed)
    good = (rows, state, weights, K, B, S)
    for i, value, name in (
        (0, rows[:-1], "expert_outputs"),
        (1, (rows,), "perm_state"),
        (2, weights[:2], "routing_weights"),
        (3, 3, "num_experts_per_tok"),
        (4, 4, "batch_size"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: got"):
            pure_jax_token_combine(*good[:i], value, *good[i + 1 :])

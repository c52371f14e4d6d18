"""The balance losses against the oracle, their gradients, and their errors."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from anabranch import torch
from anabranch.jax import fused_moe_aux_loss, load_balance_loss, route, z_loss
from anabranch.reference import balance as reference
from frameworks import both, call, in_torch, vjp
from in_torch import tensor
from oracle import assert_close

pytestmark = pytest.mark.usefixtures("platform")

# float32: 2e-6 for a sum over experts and a product of four numbers.
BOUND = 2e-6


def statistics(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (100 * rng.random(shape)).astype(np.float32), rng.integers(0, 200, shape).astype(np.int32)


@pytest.mark.parametrize("E", [1, 7, 256, 2304])
@pytest.mark.parametrize("num_tokens", [0, 1, 4097])
@pytest.mark.parametrize("as_array", [False, True], ids=["int", "array"])
def test_load_balance_loss(E, num_tokens, as_array):
    score_sum, counts = statistics(E)
    K = min(E, 4)
    given = jnp.int32(num_tokens) if as_array else num_tokens
    loss, pull = jax.vjp(lambda s: load_balance_loss(s, counts, K, 0.01, given), jnp.asarray(score_sum))
    assert loss.dtype == np.float32 and loss.shape == ()
    assert_close(loss, reference.load_balance_loss(score_sum, counts, K, 0.01, num_tokens), BOUND, "loss")
    (gradient,) = pull(jnp.float32(1.7))
    want = reference.load_balance_loss_backward(score_sum, counts, K, 0.01, num_tokens, 1.7)
    assert_close(gradient, want, BOUND, "d_score_sum")


@pytest.mark.parametrize("leading", [(5,), (1,), (2, 3), (0,)])
def test_load_balance_loss_of_sequences(leading):
    score_sum, counts = statistics(*leading, 16)
    tokens = np.random.default_rng(1).integers(0, 9, leading).astype(np.int32)
    tokens.ravel()[:1] = 0  # a fully masked sequence
    B = int(np.prod(leading))
    flat = score_sum.reshape(B, 16), counts.reshape(B, 16)
    loss, pull = jax.vjp(lambda s: load_balance_loss(s, counts, 4, 0.01, tokens), jnp.asarray(score_sum))
    assert_close(loss, reference.load_balance_loss(*flat, 4, 0.01, tokens.reshape(B)), BOUND, "loss")
    want = reference.load_balance_loss_backward(*flat, 4, 0.01, tokens.reshape(B), 1.7)
    assert_close(pull(jnp.float32(1.7))[0].reshape(B, 16), want, BOUND, "d_score_sum")


def test_losses_without_tokens_are_zero_even_for_nan_sums():
    nan = jnp.full(4, jnp.nan)
    loss, gradient = jax.value_and_grad(lambda s: load_balance_loss(s, jnp.ones(4), 1, 1.0, 0))(nan)
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.float32])
def test_counts_of_any_dtype_get_no_gradient(dtype):
    score_sum, counts = statistics(8)
    want = load_balance_loss(score_sum, counts, 2, 0.1, 64)
    assert load_balance_loss(score_sum, counts.astype(dtype), 2, 0.1, 64) == want
    gradient = jax.grad(lambda c: load_balance_loss(score_sum, c, 2, 0.1, 64))(counts.astype(np.float32))
    assert not gradient.any()


@pytest.mark.parametrize("shape", [(0,), (1,), (4097,), (3, 50)])
@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
def test_z_loss(shape, mask):
    rng = np.random.default_rng(0)
    lse = (5 * rng.standard_normal(shape)).astype(np.float32)
    token_mask = rng.random(shape) < 0.6 if mask else None
    real = lse if token_mask is None else np.where(token_mask, lse, 0)
    N = lse.size if token_mask is None else int(token_mask.sum())
    loss, pull = jax.vjp(lambda x: z_loss(x, 0.01, token_mask), jnp.asarray(lse))
    assert_close(loss, reference.z_loss(real, 0.01, N), BOUND, "loss")
    assert_close(pull(jnp.float32(-2.0))[0], reference.z_loss_backward(real, 0.01, N, -2.0), BOUND, "d_lse")
    assert_close(z_loss(lse, 0.01, token_mask, 77), reference.z_loss(real, 0.01, 77), BOUND, "loss of a shard")


def test_losses_through_the_router_are_those_of_the_whole_batch():
    z = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)

    def losses(z):
        routing = route(z, 4)
        return load_balance_loss(routing.score_sum, routing.tokens_per_expert, 4, 0.5, len(z)) + z_loss(
            routing.lse, 0.1
        )

    halves = [route(half, 4) for half in np.split(z, 2)]
    score_sum, counts = (sum(getattr(half, n) for half in halves) for n in ("score_sum", "tokens_per_expert"))
    parts = load_balance_loss(score_sum, counts, 4, 0.5, 64) + sum(
        z_loss(half.lse, 0.1, num_tokens=64) for half in halves
    )
    np.testing.assert_allclose(losses(z), parts, rtol=1e-6)
    assert np.isfinite(jax.jit(jax.grad(losses))(z)).all()


def fused_in_torch(probs, counts, topk, coeff, total_num_tokens=None, num_experts=None):
    """Calls the function with all arguments in TransformerEngine's order."""
    T, C = probs.shape
    if isinstance(counts, np.ndarray):
        counts = tensor(counts)
    if total_num_tokens is None:
        total_num_tokens = T
    elif not isinstance(total_num_tokens, int):
        total_num_tokens = tensor(np.asarray(total_num_tokens))
    return torch.fused_moe_aux_loss(probs, counts, total_num_tokens, num_experts or C, topk, coeff)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("T, C, options", [(203, 16, {}), (1, 1, {}), (0, 4, {}), (203, 48, {"num_experts": 16}),
                                           (300, 16, {"total_num_tokens": 77}), (300, 16, {"total_num_tokens": 0})])  # fmt: skip
def test_fused_moe_aux_loss(T, C, options, dtype):
    probs = jnp.asarray(np.random.default_rng(0).random((T, C)), dtype)
    _, counts = statistics(C)
    K = min(C, 4)
    if "total_num_tokens" in options and T == 300:
        traced = {"total_num_tokens": jnp.int32(options["total_num_tokens"])}
    else:
        traced = {}
    functions = (fused_moe_aux_loss, fused_in_torch)
    loss, pull = vjp(
        *(lambda probs, f=f: f(probs, counts, K, 0.01, **{**options, **traced}) for f in functions),
        {"probs": np.asarray(probs)},
    )
    want = reference.fused_moe_aux_loss(np.asarray(probs), counts, K, 0.01, **options)
    assert loss.dtype == np.float32
    assert_close(loss, np.asarray(want), BOUND, "loss")
    gradient = pull(np.float32(1.7))["probs"]
    assert gradient.dtype == probs.dtype
    d_want = reference.fused_moe_aux_loss_backward(np.asarray(probs), counts, K, 0.01, **options, d_loss=1.7)
    rounding = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-8}[dtype]  # float16 has subnormal gradients
    assert_close(gradient, d_want, BOUND + rounding, "d_probs")


@both
@pytest.mark.parametrize("tokens", [5.5, 0.0, float("nan")])
def test_fused_moe_aux_loss_of_tokens_that_are_not_whole(tokens):
    """A mean over sequences, for instance. Checks the loss and its gradient, also for no tokens and for NaN."""
    probs = np.random.default_rng(0).random((9, 4)).astype(np.float32)
    counts = np.array([1, 2, 3, 4], np.int32)
    functions = (fused_moe_aux_loss, fused_in_torch)
    loss, pull = vjp(
        *(lambda probs, f=f: f(probs, counts, 2, 0.1, jnp.float32(tokens)) for f in functions),
        {"probs": probs},
    )
    whole = reference.fused_moe_aux_loss(probs, counts, 2, 0.1, 1)
    d_whole = reference.fused_moe_aux_loss_backward(probs, counts, 2, 0.1, 1, d_loss=1.7)
    factor = tokens**-2 if tokens else 0.0
    assert_close(loss, np.asarray(whole * factor), BOUND, "loss")
    assert_close(pull(np.float32(1.7))["probs"], d_whole * factor, BOUND, "d_probs")


@both
def test_fused_moe_aux_loss_of_counts_of_any_dtype():
    functions = (fused_moe_aux_loss, fused_in_torch)
    probs = np.random.default_rng(0).random((9, 4)).astype(np.float32)
    want = call(*functions, probs, np.array([1, 2, 3, 4], np.int32), 1, 0.1)
    only = (np.int64, np.float16, ml_dtypes.bfloat16) if in_torch() else (np.int8,)
    for dtype in (*only, np.uint8, np.int16, np.float32):
        assert call(*functions, probs, np.array([1, 2, 3, 4], dtype), 1, 0.1) == want


def test_transforms():
    probs = np.random.default_rng(0).random((3, 9, 4)).astype(np.float32)
    counts = np.array([1, 2, 3, 4])
    step = jax.value_and_grad(lambda p: fused_moe_aux_loss(p, counts, 1, 0.1))
    losses, gradients = jax.jit(jax.vmap(step))(probs)
    for i in range(3):
        loss, gradient = step(probs[i])
        np.testing.assert_allclose(losses[i], loss, rtol=1e-6)
        np.testing.assert_allclose(gradients[i], gradient, rtol=1e-6)


S, C = jnp.ones(4), jnp.ones(4, jnp.int32)
P = jnp.ones((6, 4))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: load_balance_loss(S.astype(jnp.bfloat16), C, 1, 1.0, 4), TypeError, "score_sum: got bfloat16[4]"),
        (lambda: load_balance_loss(S, C[:3], 1, 1.0, 4), ValueError, "tokens_per_expert: got int32[3]"),
        (lambda: load_balance_loss(S, C > 0, 1, 1.0, 4), TypeError, "tokens_per_expert: got bool[4]"),
        (lambda: load_balance_loss(S, C, 0, 1.0, 4), ValueError, "topk: got 0"),
        (lambda: load_balance_loss(S, C, 1, jnp.float32(1), 4), TypeError, "coeff: got float32[]"),
        (lambda: load_balance_loss(S, C, 1, float("nan"), 4), ValueError, "coeff: got nan"),
        (lambda: load_balance_loss(S, C, 1, 1.0, -1), ValueError, "num_tokens: got -1"),
        (lambda: load_balance_loss(S, C, 1, 1.0, 4.0), TypeError, "num_tokens: got float 4.0"),
        (lambda: load_balance_loss(S, C, 1, 1.0, C), ValueError, "num_tokens: got int32[4]"),
        (lambda: z_loss(S.astype(jnp.float16), 1.0), TypeError, "lse: got float16[4]"),
        (lambda: z_loss(S, 1.0, C), TypeError, "token_mask: got int32[4]"),
        (lambda: z_loss(S, 1.0, jnp.ones(3, bool)), ValueError, "token_mask: got bool[3]"),
        (lambda: z_loss(S, float("inf")), ValueError, "coeff: got inf"),
        (lambda: fused_moe_aux_loss(S, C, 1, 1.0), ValueError, "probs: got float32[4]"),
        (lambda: fused_moe_aux_loss(P.astype(jnp.int32), C, 1, 1.0), TypeError, "probs: got int32[6, 4]"),
        (lambda: fused_moe_aux_loss(P, C[:2], 1, 1.0), ValueError, "tokens_per_expert: got int32[2]"),
        (lambda: fused_moe_aux_loss(P, C, 1, 1.0, -3), ValueError, "total_num_tokens: got -3"),
        (lambda: fused_moe_aux_loss(P, C, 1, 1.0, None, 3), ValueError, "num_experts: got 3, expected a divisor"),
        (lambda: fused_moe_aux_loss(P, C, 1, 1.0, None, 0), ValueError, "num_experts: got 0"),
        (lambda: fused_moe_aux_loss(P, C, True, 1.0), TypeError, "topk: got bool True"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()

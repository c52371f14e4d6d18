"""Packed weights in JAX: transformations, refused gradients, and the Flax layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from anabranch.jax import Fp8Blocks, Mxfp4, expert_ffn, moe, unpack
from anabranch.jax.nnx import MoE, PackedWeights
from packed_cases import bits, random_packed

T, E, K, D, F = 9, 4, 2, 128, 128
PFD = dict(w_in_layout="pfd", w_out_layout="df")
X = jnp.asarray(np.random.default_rng(0).standard_normal((T, D)), jnp.float32)
GATE = jnp.asarray(np.random.default_rng(1).standard_normal((D, E)), jnp.float32)


def pair(kind, leading=()):
    return tuple(
        jax.tree.map(jnp.asarray, random_packed(kind, (*leading, *shape), seed=seed))
        for seed, shape in enumerate(((E, 2, F, D), (E, D, F)))
    )


def loss(x, w_in, w_out):
    return jnp.sum(jnp.sin(moe(x, GATE, w_in, w_out, topk=K, **PFD).output))


def assert_trees_equal(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(bits(g), bits(w)), got, want)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_blocks"])
def test_scan_over_layers_with_and_without_checkpoints(kind):
    """Packed matrices are pytrees: a scan slices them. The gradient of x needs none of theirs."""
    stacked = pair(kind, (3,))

    def forward(x, weights, remat):
        def layer(x, weights):
            return x + 0.1 * moe(x, GATE, *weights, topk=K, **PFD).output, None

        step = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jax.lax.scan(step, x, weights)[0] ** 2)

    plain = tuple(unpack(w, jnp.float32) for w in stacked)
    for remat in (False, True):
        got = jax.jit(jax.grad(forward), static_argnums=2)(X, stacked, remat)
        assert_trees_equal(got, jax.jit(jax.grad(forward), static_argnums=2)(X, plain, remat))


def test_jit_of_grad_and_grad_of_jit():
    w_in, w_out = pair("mxfp4")
    want = jax.grad(loss)(X, w_in, w_out)
    assert_trees_equal(jax.jit(jax.grad(loss))(X, w_in, w_out), want)
    assert_trees_equal(jax.grad(jax.jit(loss))(X, w_in, w_out), want)


def test_a_derivative_with_respect_to_fp8_blocks_raises():
    w_in, w_out = pair("fp8_blocks")
    message = "^w_in: got a derivative with respect to a packed matrix"
    with pytest.raises(TypeError, match=message):
        jax.grad(loss, 1)(X, w_in, w_out)
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda scales: loss(X, w_in._replace(scales=scales), w_out))(w_in.scales)
    with pytest.raises(TypeError, match=message.replace("w_in", "w_out")):
        jax.grad(lambda q: expert_ffn(X, w_in, w_out._replace(q=q), jnp.array([3, 2, 0, 4]), **PFD).sum())(w_out.q)
    frozen = jax.lax.stop_gradient((w_in, w_out))
    assert_trees_equal(jax.grad(lambda x: loss(x, *frozen))(X), jax.grad(loss)(X, w_in, w_out))


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_derivative_of_unpack_raises(compiled):
    packed = pair("fp8_blocks")[0]

    def total(packed, x):
        return jnp.sum(compiled(lambda packed: unpack(packed, jnp.float32))(packed)) + jnp.sum(x)

    for derivative in (
        jax.grad(lambda scales: total(packed._replace(scales=scales), X)),
        lambda scales: jax.grad(lambda q: total(packed._replace(q=q), X))(packed.q),
        lambda scales: jax.jvp(lambda scales: total(packed._replace(scales=scales), X), (scales,), (scales,)),
    ):
        with pytest.raises(TypeError, match=r"^packed: got a derivative with respect to a packed matrix"):
            derivative(packed.scales)
    assert_trees_equal(jax.grad(total, 1)(packed, X), jnp.ones_like(X))
    assert_trees_equal(jax.grad(lambda x: total(jax.lax.stop_gradient(packed), x))(X), jnp.ones_like(X))


def test_codes_are_integers_without_a_gradient():
    w_in, w_out = pair("mxfp4")
    gradients = jax.grad(loss, (0, 1), allow_int=True)(X, w_in, w_out)
    assert isinstance(gradients[1], Mxfp4)
    assert gradients[1].codes.dtype == gradients[1].scales.dtype == jax.dtypes.float0


@pytest.mark.parametrize("packed", ["mxfp4", "fp8_blocks"])
def test_nnx(packed):
    options = dict(num_experts=E, topk=K, lora_rank=3, use_bias=True, **PFD)
    layer = MoE(D, F, packed=packed, **options, rngs=nnx.Rngs(0))
    kind = Mxfp4 if packed == "mxfp4" else Fp8Blocks
    names = {f"{name}_{field}" for name in ("w_in", "w_out") for field in kind._fields}
    assert {path[0] for path in nnx.to_flat_state(nnx.state(layer, PackedWeights)).paths} == names
    weights = [kind(*(getattr(layer, f"{n}_{field}")[...] for field in kind._fields)) for n in ("w_in", "w_out")]
    plain = MoE(D, F, **options, rngs=nnx.Rngs(0))
    for name, value in zip(("w_in", "w_out"), weights, strict=True):
        error = np.asarray(unpack(value, jnp.float32) - getattr(plain, name)[...])
        assert 0 < np.abs(error).max() < 0.2 * np.abs(getattr(plain, name)[...]).max()  # the weights it would have
        setattr(plain, name, nnx.Param(unpack(value, jnp.float32)))
    assert_trees_equal(layer(X).output, plain(X).output)

    def of(layer):
        return jnp.sum(jnp.sin(layer(X).output))

    got, want = (nnx.grad(of)(layer) for layer in (layer, plain))
    for path, gradient in nnx.to_flat_state(got):
        np.testing.assert_array_equal(gradient[...], dict(nnx.to_flat_state(want))[path][...])
    assert "w_in" not in {path[0] for path, _ in nnx.to_flat_state(got)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(packed="nvfp4"), "packed: got 'nvfp4', expected one of 'mxfp4', 'fp8_blocks'"),
        (dict(packed="mxfp4"), "packed: got 'mxfp4' with w_in_layout 'dpf', expected 'pfd' or 'fpd'"),
        (dict(packed="fp8_blocks", w_in_layout="fpd", w_out_layout="df"), "packed: got 'fp8_blocks' with w_in_layout"),
        (dict(packed="mxfp4", precision="fp8", **PFD), "precision: got 'fp8' with packed='mxfp4'"),
    ],
)
def test_errors_of_nnx(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        MoE(D, F, num_experts=E, topk=K, **options, rngs=nnx.Rngs(0))


def test_nnx_with_a_width_that_cuts_a_block():
    with pytest.raises(ValueError, match=r"^hidden_features: got 72 with packed='mxfp4', expected a multiple of 32"):
        MoE(64, 72, num_experts=E, topk=K, packed="mxfp4", **PFD, rngs=nnx.Rngs(0))

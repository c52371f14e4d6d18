"""moe() on tokens in any sharding, with replicated experts, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from meshes import P, around, assert_trees_close, collectives, mesh_of, put

from anabranch.jax import Parallel, moe
from moe_cases import check_layer, operands

TOKENS = ("x", "output", "token_mask", "forced_experts")


def shard(mesh, *spec):
    return lambda name, array: put(mesh, array, *(spec if name in TOKENS else ()))


@pytest.mark.parametrize("spec", [("a",), (("b", "a"),)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_losses_and_every_gradient(axis_type, spec, dtype):
    arrays = operands(64, 7, 3, 24, 40, dtype=dtype, bias=True, skew=2.0, cold=2)
    mask = np.random.default_rng(0).random(64) < 0.8
    mesh = mesh_of(axis_type, a=4, b=2)
    options = dict(topk=3, aux_loss_coeff=0.3, z_loss_coeff=0.1, token_mask=mask, align_size=8)
    with around(mesh):
        check_layer(arrays, put=shard(mesh, *spec), **options)


def test_float32_weights_of_a_bfloat16_layer(axis_type):
    """The weights' gradients are sums over the shards without a rounding to bfloat16."""
    arrays = operands(64, 7, 3, 24, 40, dtype="bfloat16", bias=True, skew=2.0, cold=2)
    mesh = mesh_of(axis_type, a=4, b=2)
    place = shard(mesh, ("b", "a"))

    def put_wide(name, array):
        return place(name, array.astype(np.float32) if name in ("w_in", "w_out") else array)

    with around(mesh):
        _, gradients = check_layer(arrays, put=put_wide, topk=3, aux_loss_coeff=0.3)
    for name in ("w_in", "w_out"):
        got = np.asarray(gradients[name])
        assert got.dtype == np.float32 and (got != got.astype(ml_dtypes.bfloat16).astype(np.float32)).any()


def test_one_shard_may_have_all_the_load(axis_type):
    """All tokens of one shard go to one expert, and all of another are masked."""
    arrays = operands(64, 4, 1, 8, 16, bias=True)
    forced = np.random.default_rng(1).integers(0, 4, (64, 1)).astype(np.int32)
    forced[:8], forced[8:16] = 2, -1
    mesh = mesh_of(axis_type, a=8)
    with around(mesh):
        check_layer(arrays, put=shard(mesh, "a"), topk=1, aux_loss_coeff=1.0, forced_experts=forced, weight_early=True)


def _arguments(seed=0):
    arrays = operands(64, 6, 2, 16, 24, seed=seed)
    return [arrays[name] for name in ("x", "gate", "w_in", "w_out")]


def _step(layer, x, *weights):
    def loss(x, *weights):
        result = layer(x, *weights)
        return jnp.sum(jnp.sin(result.output)) + result.aux_loss + result.z_loss, result

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, *weights)


def _layer(*arguments, **options):
    return moe(*arguments, topk=2, aux_loss_coeff=0.2, z_loss_coeff=0.1, **options)


def test_two_token_dimensions(axis_type):
    x, *weights = _arguments()
    x = x.reshape(8, 8, 16)
    mesh = mesh_of(axis_type, a=4, b=2)
    arrays = [put(mesh, x, "a", "b"), *(put(mesh, w) for w in weights)]
    want = jax.jit(lambda *a: _step(_layer, *a))(x, *weights)
    got = jax.jit(lambda *a: _step(_layer, *a))(*arrays)
    assert_trees_close(got, want, rtol=1e-5, atol=1e-5)
    # Sums of weight gradients and of statistics; no token moves.
    found = collectives(lambda *a: _step(_layer, *a), *arrays)
    assert {name for name, _ in found} == {"all-reduce"}


@pytest.mark.parametrize("masked", [False, True])
def test_inside_a_shard_map_losses_are_global(axis_type, masked):
    mesh = mesh_of(axis_type, a=4, b=2)
    tokens, whole = P(("a", "b")), P()
    mask = np.random.default_rng(4).random(64) < 0.6 if masked else np.ones(64, bool)

    def layer(mask, *arguments, **options):
        return _layer(*arguments, token_mask=mask if masked else None, **options)

    def shards(*arguments):
        result = layer(*arguments, parallel=Parallel(data_axes=("a", "b")))
        return result._replace(
            dropped=jax.lax.psum(result.dropped, ("a", "b")),
            dropped_by_source=jax.lax.psum(result.dropped_by_source, ("a", "b")),
        )

    out_specs = type(_layer(*_arguments()))(tokens, *[whole] * 5, tokens, tokens)
    on_shards = jax.shard_map(shards, mesh=mesh, in_specs=(tokens, tokens, whole, whole, whole), out_specs=out_specs)
    x, *weights = _arguments()
    arrays = [put(mesh, mask, ("a", "b")), put(mesh, x, ("a", "b")), *(put(mesh, w) for w in weights)]
    want = jax.jit(lambda mask, *a: _step(functools.partial(layer, mask), *a))(mask, x, *weights)
    got = jax.jit(lambda mask, *a: _step(functools.partial(on_shards, mask), *a))(*arrays)
    assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


def test_weights_that_xla_shards_are_gathered_and_their_gradients_summed():
    """FSDP by sharding annotations alone."""
    x, *weights = _arguments()
    mesh = mesh_of(a=8)
    specs = [("a",), (None, "a"), (None, "a")]  # D of the gate and of w_in, F of w_out
    arrays = [put(mesh, x, "a"), *(put(mesh, w, *spec) for w, spec in zip(weights, specs, strict=True))]
    want = jax.jit(lambda *a: _step(_layer, *a))(x, *weights)
    assert_trees_close(jax.jit(lambda *a: _step(_layer, *a))(*arrays), want, rtol=1e-5, atol=1e-5)


def test_vmap_scan_and_remat(axis_type):
    x, *weights = _arguments()
    mesh = mesh_of(axis_type, a=8)
    stacked = [np.stack([w, 0.5 * w]) for w in weights]

    def step(x, *stacked):
        layers = jax.checkpoint(lambda x, w: (x + _layer(x, *w).output, None))

        def loss(x, *stacked):
            return jnp.sum(jnp.sin(jax.lax.scan(layers, x, stacked)[0]))

        mapped = jax.vmap(lambda *w: _layer(x, *w).output)(*stacked)
        return mapped, jax.grad(loss, argnums=(0, 1, 2, 3))(x, *stacked)

    arrays = [put(mesh, x, "a"), *(put(mesh, w) for w in stacked)]
    assert_trees_close(jax.jit(step)(*arrays), jax.jit(step)(x, *stacked), rtol=2e-5, atol=2e-5)

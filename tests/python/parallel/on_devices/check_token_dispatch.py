"""TransformerEngine's dispatch and combine on tokens that are sharded outside of a jax.shard_map, shard by shard.

As in TransformerEngine's test of distributed permutation, the result concatenates the rows that each shard computes by
itself, combine inverts dispatch, and gradients agree.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import P, assert_no_traffic_of_tokens, assert_trees_close, mesh_of, put

from anabranch.jax import token_combine, token_dispatch

T, E, K, D = 128, 4, 2, 16
_rng = np.random.default_rng(0)
X = _rng.uniform(-1, 1, (T, D)).astype(np.float32)
MAP = np.zeros((T, E), np.int32)
np.put_along_axis(MAP, np.argsort(_rng.random((T, E)), axis=1)[:, :K], 1, 1)
PROBS = _rng.uniform(0.1, 1, (T, E)).astype(np.float32)
MERGING = np.float32(MAP / K)
SHARDS = pytest.mark.parametrize("shards,axes", [(4, "a"), (8, ("b", "a"))], ids=["4", "8"])


def rows_of(shards, align):
    """A num_out_tokens with enough rows for every shard."""
    n = T // shards * K
    return shards * (n if align is None else (n + E * (align - 1)) // align * align)


def divided(shards):
    return (np.split(array, shards) for array in (X, MAP, PROBS))


@SHARDS
@pytest.mark.parametrize("align", [None, 8])
def test_rows_of_every_shard_are_its_own(axis_type, shards, axes, align):
    mesh, n = mesh_of(axis_type, a=4, b=2), rows_of(shards, align)
    x, routed, probs = (put(mesh, array, axes) for array in (X, MAP, PROBS))

    def step(x, routed, probs, n=n):
        def dispatched(x, probs):
            result = token_dispatch(x, routed, n, probs, align)
            return result[:2], result[2:]

        results, pull, others = jax.vjp(dispatched, x, probs, has_aux=True)
        return (*results, *others, pull(jax.tree.map(jnp.sin, results)))

    results = jax.tree.map(np.asarray, jax.jit(step)(x, routed, probs))
    output, permuted, row_id_map, pad_offsets, counts, gradients = results
    rows = output.shape[0] // shards
    assert output.shape[0] == (n if align is None else (n + E * (align - 1)) // align * align)
    usable = rows if align is None else rows // align * align
    for i, (one_x, one_map, one_probs) in enumerate(zip(*divided(shards), strict=True)):
        shard_rows = slice(i * rows, (i + 1) * rows)
        own = token_dispatch(one_x, one_map, usable if align is None else usable - E * (align - 1), one_probs, align)
        found = own.output.shape[0]
        assert found <= rows
        np.testing.assert_array_equal(output[shard_rows][:found], own.output)
        np.testing.assert_array_equal(permuted[shard_rows][:found], own.permuted_probs)
        assert not np.asarray(output[shard_rows])[found:].any()
        np.testing.assert_array_equal(row_id_map[i * (T // shards) : (i + 1) * (T // shards), -1], one_map.sum(1))
    assert (pad_offsets is None) == (align is None) and (align is None or not np.asarray(pad_offsets).any())
    assert int(counts.sum()) >= T * K
    # The expected gradients of sin, computed from every token's rows.
    expected = K * np.sin(X)
    assert_trees_close(np.asarray(gradients[0]), expected, rtol=1e-5, atol=1e-6)
    assert_trees_close(np.asarray(gradients[1]), np.where(MAP, np.sin(PROBS), 0), rtol=1e-6, atol=1e-6)


@SHARDS
@pytest.mark.parametrize("align", [None, 8])
def test_combine_inverts_dispatch(axis_type, shards, axes, align):
    mesh, n = mesh_of(axis_type, a=4, b=2), rows_of(shards, align)
    arrays = [put(mesh, array, axes) for array in (X, MAP, MERGING)]

    def round_trip(x, routed, merging):
        result = token_dispatch(x, routed, n, align_size=align)
        return token_combine(result.output, result.row_id_map, merging, result.pad_offsets)

    def step(x, routed, merging):
        output, pull = jax.vjp(lambda x, m: round_trip(x, routed, m), x, merging)
        return output, *pull(2 * output)

    output, d_x, d_merging = jax.jit(step)(*arrays)
    assert_trees_close(np.asarray(output), X, rtol=1e-6, atol=1e-6)
    assert_trees_close(np.asarray(d_x), 2 * X, rtol=1e-6, atol=1e-6)
    want = np.where(MAP, 2 * np.sum(X * X, axis=1, keepdims=True), 0)
    assert_trees_close(np.asarray(d_merging), want, rtol=1e-5, atol=1e-5)
    assert not output.sharding.is_fully_replicated
    if align is None:
        assert_no_traffic_of_tokens(step, arrays, E)


@pytest.mark.parametrize("align", [None, 4])
def test_rows_that_do_not_suffice(axis_type, align):
    """Pairs without a row on their shard are dropped; they do not use the next shard's rows."""
    mesh, n = mesh_of(axis_type, a=8), 160 if align is None else 164  # of 256 slots
    arrays = [put(mesh, array, "a") for array in (X, MAP, MERGING)]

    def round_trip(x, routed, merging):
        result = token_dispatch(x, routed, n, align_size=align)
        return result.output, token_combine(result.output, result.row_id_map, merging, result.pad_offsets)

    def alone(x, routed, merging, rows):
        result = token_dispatch(x, routed, rows if align is None else rows - E * (align - 1), align_size=align)
        return token_combine(result.output, result.row_id_map, merging, result.pad_offsets)

    output, combined = map(np.asarray, jax.jit(round_trip)(*arrays))
    rows = output.shape[0] // 8 if align is None else output.shape[0] // 8 // align * align
    shards = [np.split(array, 8) for array in (X, MAP, MERGING)]
    want = np.concatenate([alone(*shard, rows) for shard in zip(*shards, strict=True)])
    np.testing.assert_array_equal(combined, want)
    assert (combined == 0).all(axis=1).any() and not np.isnan(combined).any()


def test_leading_dimensions(axis_type):
    mesh = mesh_of(axis_type, a=8)
    arrays = [put(mesh, array.reshape(16, 8, -1), "a") for array in (X, MAP, MERGING)]

    def round_trip(x, routed, merging):
        result = token_dispatch(x, routed, T * K)
        return token_combine(result.output, result.row_id_map, merging)

    assert_trees_close(np.asarray(jax.jit(round_trip)(*arrays)), X, rtol=1e-6, atol=1e-6)


def test_rows_of_another_shard_make_a_token_nan(axis_type):
    """A map of all tokens that is sharded later is not used as if it were the maps of the shards."""
    mesh = mesh_of(axis_type, a=4, b=2)
    whole = token_dispatch(X, MAP, T * K)
    rows, row_id_map = put(mesh, np.asarray(whole.output), "a"), put(mesh, np.asarray(whole.row_id_map), "a")
    output = np.asarray(jax.jit(token_combine)(rows, row_id_map))
    foreign = np.isnan(output).all(axis=1)
    assert foreign.sum() > T / 2
    np.testing.assert_allclose(output[~foreign], K * X[~foreign], rtol=1e-6)


def test_rows_that_do_not_divide_are_refused(axis_type):
    mesh = mesh_of(axis_type, a=8)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"num_out_tokens: got .* a multiple of the 8"):
        jax.jit(lambda x, m: token_dispatch(x, m, T * K + 1).output)(put(mesh, X, "a"), put(mesh, MAP, "a"))


def test_a_map_that_is_divided_otherwise_is_refused():
    mesh = mesh_of(AxisType.Explicit, a=8)
    with pytest.raises(ValueError, match=r"routing_map: got int32.* sharded as .* expected its first dimension as"):
        jax.jit(lambda x, m: token_dispatch(x, m, T * K).output)(put(mesh, X, "a"), put(mesh, MAP))


def test_inside_a_shard_map_it_is_the_shards_own(axis_type):
    mesh = mesh_of(axis_type, a=8)

    def local(x, routed):
        result = token_dispatch(x, routed, T * K // 8)
        return result.output, result.row_id_map

    on_shards = jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"))
    results = jax.jit(on_shards)(put(mesh, X, "a"), put(mesh, MAP, "a"))
    output, row_id_map = map(np.asarray, results)
    own = token_dispatch(X[-16:], MAP[-16:], T * K // 8)
    np.testing.assert_array_equal(output[-32:], own.output)
    np.testing.assert_array_equal(row_id_map[-16:, -1], own.row_id_map[:, -1])

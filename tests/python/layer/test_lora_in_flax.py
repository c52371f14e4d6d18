"""Adapters of the Flax layers, and init_lora, merge_lora and join_lora in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from anabranch.jax import Lora, expert_ffn, init_lora, join_lora, merge_lora, moe
from anabranch.jax.linen import MoEBlock
from anabranch.jax.nnx import MoE
from anabranch.layouts import Layouts
from lora_cases import with_lora
from moe_cases import operands

E, K, D, F, R = 4, 2, 12, 16, 3
X = jnp.asarray(np.random.default_rng(0).standard_normal((9, D)), jnp.float32)


def filled(variables):
    """The same structure with random values."""
    leaves, tree = jax.tree.flatten(variables)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    return tree.unflatten(
        [0.3 * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    )


def assert_trees_equal(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(np.asarray(g), np.asarray(w)), got, want)


@pytest.mark.parametrize("layouts", [Layouts("dpf", "fd"), Layouts("fpd", "df")], ids="-".join)
def test_nnx(layouts):
    options = dict(num_experts=E, topk=K, w_in_layout=layouts.w_in, w_out_layout=layouts.w_out)
    layer = MoE(D, F, **options, lora_rank=R, lora_alpha=6.0, lora_shared=("a_in",), rngs=nnx.Rngs(0))
    plain = MoE(D, F, **options, rngs=nnx.Rngs(0))
    assert_trees_equal(layer(X).output, plain(X).output)  # B is 0
    graph, lora, rest = nnx.split(layer, nnx.LoRAParam, ...)
    assert {name[0] for name in nnx.to_flat_state(lora).paths} == {f"lora_{name}" for name in Lora._fields}
    assert layer.lora_a_in.shape == (1, D, R) and layer.lora_b_in.shape == (E, R, 2, F)
    assert nnx.to_flat_state(rest).paths == nnx.to_flat_state(nnx.state(plain)).paths
    layer = nnx.merge(graph, filled(lora), rest)
    factors = Lora(*(getattr(layer, f"lora_{name}")[...] for name in Lora._fields))
    named = dict(w_in=layer.w_in[...], w_out=layer.w_out[...])
    given = dict(topk=K, w_in_layout=layouts.w_in, w_out_layout=layouts.w_out, lora=factors, lora_scale=2.0)
    want = moe(X, layer.gate[...], **named, **given)
    assert_trees_equal(layer(X).output, want.output)

    def loss(layer):
        return jnp.sum(jnp.sin(layer(X).output))

    step = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
    gradients = step(layer)
    assert set(nnx.to_flat_state(gradients).paths) == set(nnx.to_flat_state(lora).paths)

    def direct(factors):
        return jnp.sum(jnp.sin(moe(X, layer.gate[...], **named, **given | {"lora": factors}).output))

    for name, want in zip(Lora._fields, jax.grad(direct)(factors), strict=True):
        np.testing.assert_array_equal(np.asarray(gradients[f"lora_{name}"][...]), np.asarray(want))


def test_linen():
    plain, block = (
        MoEBlock(
            num_experts=E, num_experts_per_tok=K, intermediate_size=F, wi_kernel_axes=(), wo_kernel_axes=(), **lora
        )
        for lora in ({}, dict(lora_rank=R, lora_alpha=6.0, lora_shared=("a_in",)))
    )
    variables = block.init(jax.random.key(0), X)
    assert {name: value.shape for name, value in variables["lora"].items()} == {
        "a_in": (1, D, R),
        "b_in": (E, R, 2, F),
        "a_out": (E, F, R),
        "b_out": (E, R, D),
    }
    params = variables["params"]
    assert_trees_equal(plain.init(jax.random.key(0), X)["params"].keys(), params.keys())
    assert_trees_equal(block.apply(variables, X)[0], plain.apply({"params": params}, X)[0])
    lora = filled(variables["lora"])

    def output(lora):
        return block.apply({"params": params, "lora": lora}, X)[0]

    def direct(lora):
        return moe(
            X, params["gate_kernel"], params["wi"], params["wo"], topk=K, lora=Lora(**lora), lora_scale=2.0
        ).output

    assert_trees_equal(output(lora), direct(lora))
    got, want = (jax.grad(lambda lora, f=f: jnp.sum(jnp.sin(f(lora))))(lora) for f in (output, direct))
    assert_trees_equal(got, want)


def test_linen_names_the_axes_of_the_factors():
    block = MoEBlock(num_experts=E, num_experts_per_tok=K, intermediate_size=F, lora_rank=R, lora_shared=("a_in",))
    variables = block.init(jax.random.key(0), X)
    assert {name: box.names for name, box in variables["lora"].items()} == {
        "a_in": (None, "embed", None),
        "b_in": ("exp", None, None, "mlp"),
        "a_out": ("exp", "mlp", None),
        "b_out": ("exp", None, "embed"),
    }
    assert_trees_equal(block.apply(variables, X)[0], block.apply(nn.meta.unbox(variables), X)[0])


def test_options_of_modules():
    for wrong, message in (
        (dict(lora_rank=-1), "lora_rank: got -1, expected an integer"),
        (dict(lora_alpha=2.0), "lora_alpha: got 2.0 without adapters, expected lora_rank >= 1"),
        (dict(lora_shared=("a_in",)), "lora_shared: got .* without adapters"),
        (dict(lora_rank=2, lora_shared=("w",)), "lora_shared: got 'w', expected one of 'a_in'"),
        (dict(lora_rank=2, lora_shared=("a_in", "a_in")), "lora_shared: got .*expected distinct"),
    ):
        with pytest.raises(ValueError, match=message):
            MoE(D, F, E, K, rngs=nnx.Rngs(0), **wrong)
        with pytest.raises(ValueError, match=message):
            MoEBlock(num_experts=E, **wrong)
    with pytest.raises(TypeError, match="lora_scale"):
        MoE(D, F, E, K, rngs=nnx.Rngs(0), lora_scale=2.0)


@pytest.mark.parametrize("layouts", [Layouts("dpf", "fd"), Layouts("fpd", "df"), Layouts("pfd", "df")], ids="-".join)
@pytest.mark.parametrize("shared", [(), ("a_in", "b_out")])
def test_merged_weights(shared, layouts):
    arrays = with_lora(operands(9, E, K, D, F), (R, R), shared)
    w_in, w_out = (arrays[n].transpose(layouts.from_ours(n)) for n in ("w_in", "w_out"))
    lora = Lora(*(arrays[f"lora_{name}"] for name in Lora._fields))
    options = dict(w_in_layout=layouts.w_in, w_out_layout=layouts.w_out)
    sizes = np.array([4, 0, 2, 3], np.int32)
    want = expert_ffn(arrays["x"], w_in, w_out, sizes, lora=lora, lora_scale=(0.5, -2.0), **options)
    merged = merge_lora(w_in, w_out, lora, (0.5, -2.0), **options)
    assert [array.shape for array in merged] == [w_in.shape, w_out.shape]
    np.testing.assert_allclose(expert_ffn(arrays["x"], *merged, sizes, **options), want, rtol=2e-5, atol=2e-5)
    new = init_lora(jax.random.key(0), w_in, w_out, R, shared=shared, **options)
    assert [factor.shape for factor in new] == [factor.shape for factor in lora]
    assert_trees_equal(merge_lora(w_in, w_out, new, **options), (w_in, w_out))
    bounds = [D**-0.5, F**-0.5]
    for factor, bound in zip((new.a_in, new.a_out), bounds, strict=True):
        assert 0.8 * bound < float(jnp.abs(factor).max()) <= bound


def test_joined_adapters_of_gate_and_up():
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    gate, up = (normal(1, D, R), normal(E, R, F)), (normal(E, D, 2), normal(1, 2, F))
    a_in, b_in = join_lora(gate, up)
    assert a_in.shape == (E, D, R + 2) and b_in.shape == (E, R + 2, 2, F)
    joined = jnp.einsum("edr,erpf->edpf", a_in, b_in)
    for part, (a, b) in enumerate((gate, up)):
        want = jnp.broadcast_to(a, (E, *a.shape[1:])) @ jnp.broadcast_to(b, (E, *b.shape[1:]))
        np.testing.assert_allclose(joined[:, :, part], want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"up\[0\]: got float32\[4, 11, 2\]"):
        join_lora(gate, (up[0][:, 1:], up[1]))


def test_projections():
    w_in, w_out = jnp.ones((E, D, 2, F)), jnp.ones((E, F, D))
    lora = init_lora(jax.random.key(0), w_in, w_out, R, projections=("out",), dtype=jnp.bfloat16)
    assert lora.a_in is None and lora.b_in is None and lora.a_out.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="projections: got 'up', expected one of 'in', 'out'"):
        init_lora(jax.random.key(0), w_in, w_out, R, projections=("up",))
    with pytest.raises(TypeError, match="projections: got "):
        init_lora(jax.random.key(0), w_in, w_out, R, projections="in")

"""The layer after the router against the oracle, and against `moe` behind its own router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.activation import PLAIN
from anabranch.jax import Activation, moe, route, routed_experts
from anabranch.jax.ops.matmul import matmul
from frameworks import both
from moe_cases import LAYOUTS, TWO_INPUTS, layouts_of, operands, stored
from routed_cases import POSITIONAL, check_routed, routed_operands

pytestmark = pytest.mark.usefixtures("platform")


@both
@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize("dtype,weights_dtype", [("float32", "float32"), ("bfloat16",) * 2, ("float16", "float32")])
def test_repeats_holes_and_wrong_indices(dtype, weights_dtype, weight_early):
    arrays = routed_operands(53, 7, 3, 24, 40, dtype=dtype, weights_dtype=weights_dtype, bias=True, wrong=True)
    check_routed(arrays, weight_early=weight_early, align_size=8)


@both
@pytest.mark.parametrize("T,E,K", [(0, 3, 2), (1, 1, 1), (300, 3, 1), (40, 130, 5)])
def test_sizes(T, E, K):
    check_routed(routed_operands(T, E, K, 8, 16, bias=True), activation="relu2")


@both
def test_ungated_experts_and_one_without_tokens():
    arrays = routed_operands(40, 5, 2, 16, 24, parts=1, bias=True)
    arrays["experts"][arrays["experts"] == 3] = 1
    check_routed(arrays, activation="gelu")


@both
@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(0, 30),
    E=st.integers(1, 9),
    K=st.integers(1, 4),
    D=st.integers(1, 9),
    F=st.integers(1, 9),
    parts=st.sampled_from([1, 2]),
    activation=st.sampled_from([*PLAIN, *TWO_INPUTS]),
    layouts=st.sampled_from(LAYOUTS),
    bias=st.booleans(),
    weight_early=st.booleans(),
    align_size=st.sampled_from([0, 1, 4]),
    wrong=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_combination(T, E, K, D, F, parts, activation, layouts, bias, weight_early, align_size, wrong, seed):
    parts = 2 if isinstance(activation, Activation) else parts
    arrays = routed_operands(T, E, K, D, F, parts=parts, bias=bias, wrong=wrong, seed=seed)
    check_routed(
        arrays,
        tiny=True,
        seed=seed + 1,
        activation=activation,
        weight_early=weight_early,
        align_size=align_size,
        w_in_layout=layouts[0],
        w_out_layout=layouts[1],
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_early": True, "align_size": 8}, {"w_in_layout": "fpd", "w_out_layout": "df"}],
    ids=["late", "early", "transposed"],
)
def test_moe_is_the_router_and_this(dtype, options):
    """Outputs, counts and the gradients of the expert weights have equal bits."""
    arrays = operands(61, 6, 2, 24, 32, dtype=dtype, bias=True, skew=2.0, cold=1)
    x, gate = jnp.asarray(arrays["x"]), jnp.asarray(arrays["gate"])
    laid_out = stored(arrays, layouts_of(options))
    experts = {name: jnp.asarray(laid_out[name]) for name in ("w_in", "w_out", "b_in", "b_out")}
    mask = jnp.arange(61) % 5 != 0
    routing = dict(score_function="sigmoid", scaling_factor=2.5, token_mask=mask)
    d_output = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape), x.dtype)

    @jax.jit
    def whole(experts):
        result, pull = jax.vjp(lambda e: moe(x, gate, topk=2, **e, **routing, **options).output, experts)
        return moe(x, gate, topk=2, **experts, **routing, **options), result, pull(d_output)

    @jax.jit
    def by_hand(experts):
        chosen = route(matmul(x, gate, (1, 0)), 2, **routing)
        given = (x, chosen.experts, chosen.weights)
        result, pull = jax.vjp(lambda e: routed_experts(*given, **e, **options).output, experts)
        return chosen, routed_experts(*given, **experts, **options), result, pull(d_output)

    got, *got_gradients = whole(experts)
    chosen, want, *want_gradients = by_hand(experts)
    for name in ("output", "tokens_per_expert", "dropped"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for name in ("experts", "weights"):
        np.testing.assert_array_equal(getattr(got, name), getattr(chosen, name))
    jax.tree.map(np.testing.assert_array_equal, got_gradients, want_gradients)


def test_a_recorded_selection_replays():
    arrays = operands(40, 6, 3, 8, 16)
    main = [jnp.asarray(arrays[name]) for name in ("x", "gate", "w_in", "w_out")]
    first = moe(*main, topk=3)
    again = moe(*main, topk=3, forced_experts=first.experts)
    np.testing.assert_array_equal(again.output, first.output)
    np.testing.assert_array_equal(again.weights, first.weights)


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_experts_of_any_index_dtype(dtype):
    arrays = routed_operands(20, 5, 2, 8, 8)
    want = routed_experts(*(arrays[name] for name in POSITIONAL))
    given = arrays | {"experts": arrays["experts"].astype(dtype)}
    jax.tree.map(np.testing.assert_array_equal, routed_experts(*(given[name] for name in POSITIONAL)), want)
    if dtype == "int64":
        given["experts"][0, 0] = 2**32  # 0 in 32 bits
        assert int(routed_experts(*(given[name] for name in POSITIONAL)).dropped) == 1


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("index_dtype", ["int16", "int32", "int64"])
def test_torch_converts_neither_experts_nor_weights(index_dtype, weights_dtype, is_traced):
    torch = pytest.importorskip("torch")
    import in_torch
    from anabranch.torch import routed_experts

    arrays = routed_operands(20, 5, 2, 8, 8, wrong=True, weights_dtype=weights_dtype)
    x, w_in, w_out = (in_torch.tensor(arrays[name]) for name in ("x", "w_in", "w_out"))
    experts = in_torch.tensor(arrays["experts"].clip(-(2**15), 2**15 - 1)).to(getattr(torch, index_dtype))
    if index_dtype == "int64":
        experts[0, 0] = 2**32 + 1  # 1 in 32 bits
    exact = in_torch.tensor(arrays["weights"].astype(np.float32))
    weights = exact.to(getattr(torch, weights_dtype)).requires_grad_()
    cotangent = in_torch.tensor(np.random.default_rng(0).standard_normal(x.shape).astype(np.float32))

    def step(experts, weights):
        result = routed_experts(x, experts, weights, w_in, w_out)
        return *result, *torch.autograd.grad(result.output, weights, cotangent)

    if is_traced:
        torch.compiler.reset()  # of the other cases, whose number has a limit
        layer = torch.compile(routed_experts, backend="aot_eager", fullgraph=True)
        output, *counts = layer(x, experts, weights, w_in, w_out)
        got = output, *counts, *torch.autograd.grad(output, weights, cotangent)
    else:
        with torch.profiler.profile() as profile:
            routed_experts(x, experts, weights.detach(), w_in, w_out)
        assert not {"aten::_to_copy", "aten::clamp"} & {event.key for event in profile.key_averages()}
        got = step(experts, weights)
    want = step(experts.clamp(-2, 5).int(), exact.requires_grad_())
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))
    assert got[-1].dtype == weights.dtype


def _step(*arguments):
    output, pull = jax.vjp(lambda x, w, *m: routed_experts(x, arguments[1], w, *m).output, arguments[0], *arguments[2:])
    return output, pull(jnp.cos(output))


def test_leading_dimensions_vmap_and_remat():
    arrays = routed_operands(24, 5, 2, 8, 8)
    main = [jnp.asarray(arrays[name]) for name in POSITIONAL]
    want = jax.jit(_step)(*main)

    folded = [a.reshape(2, 3, 4, -1) if i < 3 else a for i, a in enumerate(main)]
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(g.reshape(w.shape), w), jax.jit(_step)(*folded), want)

    stacked = [jnp.stack([a[:12], a[12:]]) if i < 3 else a for i, a in enumerate(main)]
    mapped = jax.vmap(_step, in_axes=(0, 0, 0, None, None))(*stacked)
    for i in range(2):
        single = _step(*(a[i] if j < 3 else a for j, a in enumerate(stacked)))
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g[i], w, rtol=1e-5, atol=1e-6), mapped, single)  # noqa: B023

    def layer(x, experts, weights, *matrices):
        return routed_experts(x, experts, weights, *matrices).output

    def through(layer):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(layer(*a))), (0, 2, 3, 4)))(*main)

    jax.tree.map(np.testing.assert_array_equal, through(jax.checkpoint(layer)), through(layer))


BAD = [
    ("x", dict(x=np.zeros((12, 8), np.int32)), TypeError),
    ("experts", dict(experts=np.zeros((12, 2), np.float32)), TypeError),
    ("experts", dict(experts=np.zeros((11, 2), np.int32)), ValueError),
    ("experts", dict(experts=np.zeros((12, 0), np.int32)), ValueError),
    ("weights", dict(weights=np.zeros((12, 3), np.float32)), ValueError),
    ("weights", dict(weights=np.zeros((12, 2), np.int32)), TypeError),
    ("w_in", dict(w_in=np.zeros((4, 7, 2, 6), np.float32)), ValueError),
    ("w_out", dict(w_out=np.zeros((3, 6, 8), np.float32)), ValueError),
    ("activation", dict(activation="tanh"), ValueError),
    ("weight_early", dict(weight_early=1), TypeError),
    ("align_size", dict(align_size=-1), ValueError),
    ("parallel", dict(parallel="expert"), TypeError),
]


@pytest.mark.parametrize("name,change,error", BAD, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(BAD)])
def test_bad_arguments_are_named(name, change, error):
    arrays = routed_operands(12, 4, 2, 8, 6)
    with pytest.raises(error, match=rf"^{name}: got"):
        routed_experts(**{n: a for n, a in arrays.items() if n in POSITIONAL} | change)

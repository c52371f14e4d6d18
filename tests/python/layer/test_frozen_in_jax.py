"""Operands without a gradient cost nothing in JAX; errors of adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import expert_ffn, grouped_matmul, moe, routed_experts
from anabranch.lora import NAMES
from lora_cases import as_lora, with_lora
from moe_cases import operands

pytestmark = pytest.mark.usefixtures("platform")

T, E, K, D, F = 61, 6, 2, 20, 28


def results_of_calls(function, *arguments):
    """The results that the program requests from each call of the experts' backward pass, a set of names per call."""
    text = jax.jit(function).lower(*arguments).as_text()
    lines = [line for line in text.splitlines() if "ab_xla_expert_ffn_backward" in line]
    assert lines
    names = (line.split('results = "')[1].split('"')[0].split(",") for line in lines)
    return [{name for name in call if name != "workspace"} for call in names]


ARRAYS = with_lora(operands(T, E, K, D, F, bias=True), (5, 3))
POSITIONAL = ("x", "gate", "w_in", "w_out")


def loss(arrays):
    rest = {name: arrays[name] for name in ("gate_bias", "b_in", "b_out")}
    result = moe(*(arrays[name] for name in POSITIONAL), topk=K, **rest, lora=as_lora(arrays))
    return jnp.sum(jnp.sin(result.output))


def gradient(wanted, stop=()):
    def function(arrays):
        def of_wanted(part):
            whole = arrays | part
            return loss({n: jax.lax.stop_gradient(a) if n in stop else a for n, a in whole.items()})

        return jax.grad(of_wanted)({name: arrays[name] for name in wanted})

    return function


@pytest.mark.parametrize("outer", [lambda function: function, jax.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize(
    "wanted", [("x",), ("gate",), NAMES, ("x", *NAMES), ("w_in",), ("w_out", "b_in"), ("lora_b_out",), ("lora_a_in",)]
)
def test_gradients_of_frozen_operands_are_not_computed(wanted, outer):
    everything = jax.grad(loss)(ARRAYS)
    function = outer(gradient(wanted))
    got = function(ARRAYS)
    for name, value in got.items():
        # XLA may choose another algorithm for the gate's GEMM where it is recomputed on a GPU.
        rtol = 1e-4 if outer is jax.checkpoint and jax.default_backend() == "gpu" else 0.0
        want = np.asarray(everything[name])
        np.testing.assert_allclose(np.asarray(value), want, rtol=rtol, atol=rtol * np.abs(want).max(), err_msg=name)
    requested = set().union(*results_of_calls(function, ARRAYS))
    parameters = {f"d_{name}" for name in ("w_in", "w_out", "b_in", "b_out", *NAMES)}
    assert requested & parameters == {f"d_{name}" for name in wanted} & parameters
    assert ("dh" in requested) == bool(set(wanted) & {"x", "w_in", "b_in", "lora_a_in", "lora_b_in"})
    assert ("weighted_a" in requested) == bool(set(wanted) & {"w_out", "lora_a_out", "lora_b_out"})


def test_stop_gradient_freezes():
    frozen = ("w_in", "w_out", "b_in", "b_out", "gate")
    requested = set().union(*results_of_calls(gradient(("x", *frozen), stop=frozen), ARRAYS))
    assert not requested & {f"d_{name}" for name in frozen}


def test_weights_outside_of_a_scan_are_frozen():
    def function(arrays, xs):
        def layers(x):
            def layer(x, _):
                return x + routed(x, arrays), None

            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0])

        return jax.grad(layers)(xs)

    requested = set().union(*results_of_calls(function, ARRAYS, ARRAYS["x"]))
    assert not {name for name in requested if name.startswith(("d_w_", "d_b_", "d_lora"))}


def routed(x, arrays):
    experts = jnp.tile(jnp.arange(K, dtype=jnp.int32), (T, 1))
    weights = jnp.full((T, K), 0.5)
    return routed_experts(x, experts, weights, arrays["w_in"], arrays["w_out"], lora=as_lora(arrays)).output


def test_errors():
    arrays = {name: jnp.asarray(a) for name, a in ARRAYS.items()}
    lora = as_lora(arrays)

    def call(lora, **options):
        return moe(*(arrays[name] for name in POSITIONAL), topk=K, lora=lora, **options)

    for wrong, kind, message in (
        (lora._replace(b_in=None), ValueError, "lora.b_in: got None, expected a factor, since lora.a_in is given"),
        (lora._replace(a_out=None), ValueError, "lora.a_out: got None, expected a factor, since lora.b_out is given"),
        (lora._replace(b_in=lora.b_in[:, :-1]), ValueError, r"lora.b_in: got float32\[6, 4, 2, 28\]"),
        (lora._replace(a_in=lora.a_in[:2]), ValueError, r"lora.a_in: got float32\[2, 20, 5\], expected a first dim"),
        (lora._replace(a_in=lora.a_in[..., :0], b_in=lora.b_in[:, :0]), ValueError, "a rank of at least 1"),
        (lora._replace(a_in=lora.a_in[:, :-1]), ValueError, r"lora.a_in: got float32\[6, 19, 5\], expected .*D=20"),
        (lora._replace(b_out=lora.b_out.astype(jnp.int32)), TypeError, "lora.b_out: got int32"),
        (lora._replace(b_out=lora.b_out.astype(jnp.bfloat16)), TypeError, "lora.b_out: got bfloat16"),
        (tuple(lora), TypeError, "lora: got tuple"),
    ):
        with pytest.raises(kind, match=message):
            call(wrong)
    for scale, kind in ((float("inf"), ValueError), (1e39, ValueError), ("1", TypeError), ((1, 2, 3), ValueError)):
        with pytest.raises(kind, match="lora_scale: got"):
            call(lora, lora_scale=scale)


SIZES = np.array([11, 0, 20, 9, 15, 6], np.int32)
CHOSEN = np.arange(T * K, dtype=np.int32).reshape(T, K) % E
WEIGHTS = np.full((T, K), 0.5, np.float32)
#: The operands of a function that are differentiated, x first, and the function.
SHARING = {
    "moe": (POSITIONAL, lambda *o: moe(*o, topk=K).output),
    "routed_experts": (("x", "w_in", "w_out"), lambda x, *w: routed_experts(x, CHOSEN, WEIGHTS, *w).output),
    "expert_ffn": (("x", "w_in", "w_out"), lambda x, *w: expert_ffn(x, *w, SIZES)),
    "grouped_matmul": (("x", "w_in"), lambda x, w: grouped_matmul(x, w[:, :, 0], SIZES)),
}


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("name", SHARING)
def test_derivatives_that_share_a_program(name, outer):
    """JAX has one program for derivatives with respect to different operands; none may change the others."""
    names, function = SHARING[name]
    given = [jnp.asarray(ARRAYS[name]) for name in names]
    layer, every = outer(function), range(len(given))

    def loss(*operands):
        return jnp.sum(jnp.sin(layer(*operands)))

    jax.clear_caches()
    want = jax.grad(loss, every)(*given)
    assert all(jnp.any(gradient != 0) for gradient in want)
    jax.clear_caches()
    _, pull = jax.vjp(loss, *given)
    d_x = jax.grad(loss)(*given)
    jax.tree.map(np.testing.assert_array_equal, pull(jnp.float32(1)), want)
    np.testing.assert_allclose(d_x, want[0], rtol=1e-5, atol=1e-6)
    jax.clear_caches()
    with pytest.raises(TypeError, match="got a forward-mode derivative"):
        jax.jvp(loss, tuple(given), tuple(given))
    jax.grad(loss)(*given)
    jax.tree.map(np.testing.assert_array_equal, jax.grad(loss, every)(*given), want)


@pytest.mark.parametrize("program", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_trained_layer_below_a_frozen_one(outer, program):
    x, *weights = (jnp.asarray(ARRAYS[name]) for name in POSITIONAL)
    frozen = [-0.5 * weight for weight in weights]

    def gradients(of_layer):
        def loss(weights):
            return jnp.sum(jnp.sin(of_layer(of_layer(x, *weights) + x, *frozen)))

        return program(jax.grad(loss))(weights)

    jax.clear_caches()
    want = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(_layer(_layer(x, *w) + x, *frozen)))))(weights)
    assert all(jnp.any(gradient != 0) for gradient in want)
    jax.clear_caches()
    for got, expected in zip(gradients(outer(_layer)), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * float(jnp.abs(expected).max()))


def _layer(*operands):
    return moe(*operands, topk=K).output

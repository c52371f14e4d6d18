"""Float32 factors of a 16-bit layer in JAX: both passes read the same rounded factors; gradients are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import moe, routed_experts
from anabranch.lora import NAMES
from anabranch.precision import BLOCK
from lora_cases import as_lora, lora_factors
from moe_cases import operands

T, E, K = 9, 5, 2


def arrays_of(width):
    factors = lora_factors(E, width, 2, width, (8, 8), shared=("b_out",), dtype="float32")
    return operands(T, E, K, width, width, dtype="bfloat16", cold=1) | factors


def of_moe(arrays, **options):
    main = (arrays[name] for name in ("x", "gate", "w_in", "w_out"))
    return moe(*main, topk=K, lora=as_lora(arrays), lora_scale=(0.5, 2.0), **options).output


def of_routed(arrays, **options):
    experts = jnp.arange(T * K, dtype=jnp.int32).reshape(T, K) % (E - 1)
    weights = jnp.linspace(0.1, 1.0, T * K).reshape(T, K)
    main = (arrays["x"], experts, weights, arrays["w_in"], arrays["w_out"])
    return routed_experts(*main, lora=as_lora(arrays), lora_scale=(0.5, 2.0), **options).output


def gradients(function, arrays, **options):
    """Those of x and the factors."""

    def loss(part):
        return jnp.sum(jnp.sin(function(arrays | part, **options).astype(jnp.float32)))

    return jax.grad(loss)({name: arrays[name] for name in ("x", *NAMES)})


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("precision", ["highest", "fp8"])
@pytest.mark.parametrize("function", [of_moe, of_routed])
def test_bits_are_those_of_rounded_factors(function, precision, outer):
    """Rounding each factor once before the layer gives the same results; only the gradients' last rounding differs."""
    arrays = arrays_of(BLOCK if precision == "fp8" else 16)
    rounded = arrays | {name: arrays[name].astype(jnp.bfloat16) for name in NAMES}
    step = outer(lambda arrays: gradients(function, arrays, precision=precision))
    got, want = step(arrays), step(rounded)
    for name, gradient in got.items():
        assert gradient.dtype == arrays[name].dtype, name
        np.testing.assert_array_equal(np.asarray(gradient.astype(want[name].dtype)), np.asarray(want[name]), name)


@pytest.mark.parametrize("function", [of_moe, of_routed])
def test_each_factor_is_rounded_once(function):
    arrays = arrays_of(16)
    text = jax.jit(lambda arrays: gradients(function, arrays)).lower(arrays).as_text()
    shapes = {"x".join(map(str, arrays[name].shape)) for name in NAMES}
    roundings = [line for line in text.splitlines() for s in shapes if f"<{s}xf32>) -> tensor<{s}xbf16>" in line]
    assert len(roundings) == len(NAMES)


@pytest.mark.parametrize("function", [of_moe, of_routed])
def test_without_a_gradient_the_factors_are_passed_as_they_are(function):
    """The library then rounds the factors of experts with rows only."""
    text = jax.jit(function).lower(arrays_of(16)).as_text()
    (call,) = (line for line in text.splitlines() if "ab_xla_expert_ffn_forward" in line)
    assert f"tensor<{E}x16x8xf32>" in call and f"tensor<{E}x16x8xbf16>" not in call

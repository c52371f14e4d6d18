"""The shared expert and its gate against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import BOUND

from anabranch.jax import Activation, shared_expert
from anabranch.reference import moe as reference
from oracle import assert_close

pytestmark = pytest.mark.usefixtures("platform")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("gate", [None, (24,), (24, 1)], ids=str)
@pytest.mark.parametrize(
    "parts,activation", [(2, "silu"), (1, "relu2"), (2, Activation.swiglu_oai(limit=0.5))], ids=str
)
def test_output_and_gradients(parts, activation, gate, dtype):
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 7, 24), "w_in": (24, parts, 40), "w_out": (40, 24)} | ({"w_gate": gate} if gate else {})
    arrays = {name: jnp.asarray(rng.standard_normal(s) / s[0] ** 0.5, dtype) for name, s in shapes.items()}
    if gate:
        arrays["w_gate"] = arrays["w_gate"].astype(jnp.float32)
    d_output = jnp.asarray(rng.standard_normal((3, 7, 24)), dtype)
    output, pull = jax.vjp(jax.jit(lambda arrays: shared_expert(**arrays, activation=activation)), arrays)
    (gradients,) = pull(d_output)
    numbers = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    assert output.dtype == dtype
    assert_close(output, reference.shared_expert(**numbers, activation=activation), BOUND[dtype], "output")
    wanted = reference.shared_expert_backward(**numbers, activation=activation, d_output=np.asarray(d_output, float))
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype
        assert_close(np.asarray(gradient, np.float64), wanted[name], BOUND[dtype], f"d_{name}")


@pytest.mark.parametrize(
    "name,change",
    [
        ("w_in", dict(w_in=np.zeros((4, 3, 5), np.float32))),
        ("w_in", dict(w_in=np.zeros((4, 2, 5), np.float16))),
        ("w_out", dict(w_out=np.zeros((4, 5), np.float32))),
        ("w_gate", dict(w_gate=np.zeros(5, np.float32))),
        ("w_gate", dict(w_gate=np.zeros((4, 2), np.float32))),
        ("activation", dict(activation="tanh")),
        ("token_mask", dict(token_mask=np.ones(2, bool))),
    ],
)
def test_bad_arguments_are_named(name, change):
    good = dict(x=np.ones((3, 4), np.float32), w_in=np.ones((4, 2, 5), np.float32), w_out=np.ones((5, 4), np.float32))
    with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
        shared_expert(**good | change)

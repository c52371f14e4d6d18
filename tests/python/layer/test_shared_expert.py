"""The shared expert and its gate against the oracle."""

import functools

import numpy as np
import pytest

import frameworks
from anabranch.activation import Activation
from anabranch.jax import shared_expert as shared_expert_of_jax
from anabranch.reference import moe as reference
from anabranch.torch import shared_expert as shared_expert_of_torch
from moe_cases import BOUND, DTYPES, saved_dtype
from oracle import assert_close

pytestmark = frameworks.BOTH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("gate", [None, (24,), (24, 1)], ids=str)
@pytest.mark.parametrize(
    "parts,activation", [(2, "silu"), (1, "relu2"), (2, Activation.swiglu_oai(limit=0.5))], ids=str
)
def test_output_and_gradients(parts, activation, gate, dtype):
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 7, 24), "w_in": (24, parts, 40), "w_out": (40, 24)} | ({"w_gate": gate} if gate else {})
    arrays = {name: (rng.standard_normal(s) / s[0] ** 0.5).astype(DTYPES[dtype]) for name, s in shapes.items()}
    if gate:
        arrays["w_gate"] = arrays["w_gate"].astype(np.float32)
    d_output = rng.standard_normal((3, 7, 24)).astype(DTYPES[dtype])
    functions = (functools.partial(f, activation=activation) for f in (shared_expert_of_jax, shared_expert_of_torch))
    output, gradients = frameworks.with_gradients(*functions, arrays, d_output)
    numbers = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    assert output.dtype == dtype
    assert_close(output, reference.shared_expert(**numbers, activation=activation), BOUND[dtype], "output")
    kept_as = saved_dtype(activation, dtype) if frameworks.in_torch() else None
    wanted = reference.shared_expert_backward(
        **numbers, activation=activation, d_output=np.asarray(d_output, float), saved_dtype=kept_as
    )
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
        frameworks.call(shared_expert_of_jax, shared_expert_of_torch, **good | change)

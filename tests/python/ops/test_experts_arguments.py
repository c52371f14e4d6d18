"""Every bad argument is refused before anything runs. The error names it, its value and what was expected."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import expert_ffn, grouped_matmul

F32 = jnp.float32


def ffn_arguments(**changes):
    arguments = dict(
        rows=jnp.ones((6, 3), F32),
        w_in=jnp.ones((2, 3, 2, 4), F32),
        w_out=jnp.ones((2, 4, 3), F32),
        group_sizes=jnp.array([2, 3], jnp.int32),
        b_in=jnp.ones((2, 2, 4), F32),
        b_out=jnp.ones((2, 3), F32),
        weights=jnp.ones(6, F32),
    )
    return arguments | changes


def test_good_arguments_pass():
    assert expert_ffn(**ffn_arguments()).shape == (6, 3)
    assert expert_ffn(**ffn_arguments(rows=np.ones((6, 3), np.float32))).shape == (6, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(rows=[[1.0]]), TypeError, "rows: got list [[1.0]], expected an array"),
        (dict(rows=jnp.ones((6, 3), jnp.int32)), TypeError, "rows: got int32[6, 3], expected float32 or bfloat16"),
        (dict(rows=jnp.ones((2, 3, 3))), ValueError, "rows: got float32[2, 3, 3], expected"),
        (
            dict(w_in=jnp.ones((2, 3, 2, 4), jnp.bfloat16)),
            TypeError,
            "w_in: got bfloat16[2, 3, 2, 4], expected float32",
        ),
        (dict(w_in=jnp.ones((2, 3, 3, 4))), ValueError, "w_in: got float32[2, 3, 3, 4], expected [E, D, 2, F]"),
        (dict(w_in=jnp.ones((3, 3, 2, 4))), ValueError, "w_in: got float32[3, 3, 2, 4], expected float32 [E=2, D=3"),
        (dict(w_in=jnp.ones((2, 3, 8))), ValueError, "w_in: got float32[2, 3, 8]"),
        (dict(w_out=jnp.ones((2, 5, 3))), ValueError, "w_out: got float32[2, 5, 3], expected float32 [E=2, F=4, D=3]"),
        (dict(w_out=jnp.ones((2, 4, 3), jnp.float16)), TypeError, "w_out: got float16[2, 4, 3], expected float32"),
        (dict(b_in=jnp.ones((2, 1, 4))), ValueError, "b_in: got float32[2, 1, 4], expected float32 [E=2, P=2, F=4]"),
        (dict(b_out=jnp.ones((3,))), ValueError, "b_out: got float32[3], expected float32 [E=2, D=3]"),
        (dict(weights=jnp.ones((5,))), ValueError, "weights: got float32[5], expected"),
        (dict(weights=jnp.ones((6,), jnp.int32)), TypeError, "weights: got int32[6], expected float32"),
        (dict(group_sizes=jnp.ones(2)), TypeError, "group_sizes: got float32[2], expected int16 or int32 or int64"),
        (dict(group_sizes=jnp.ones((2, 1), jnp.int32)), ValueError, "group_sizes: got int32[2, 1], expected"),
        (
            dict(activation="tanh"),
            ValueError,
            "activation: got 'tanh', expected one of 'silu', 'gelu', 'relu', 'relu2'",
        ),
        (dict(activation="swiglu_clamped"), ValueError, "activation: got 'swiglu_clamped', expected one of"),
        (dict(activation=None), TypeError, "activation: got NoneType None, expected a name or an Activation"),
        (dict(w_in_layout="fdp"), ValueError, "w_in_layout: got 'fdp', expected one of 'dpf', 'pfd', 'dfp', 'fpd'"),
        (dict(w_in_layout="pfd"), ValueError, "w_in: got float32[2, 3, 2, 4], expected float32 [E=2, 2 or 1, F, D=3]"),
        (
            dict(w_in_layout="pfd", w_in=jnp.ones((2, 5, 4, 3))),
            ValueError,
            "w_in: got float32[2, 5, 4, 3], expected [E, 2, F, D] (gate, up) or [E, 1, F, D]",
        ),
        (
            dict(w_in_layout="dfp", w_in=jnp.ones((2, 3, 4, 2))),
            ValueError,
            "b_in: got float32[2, 2, 4], expected float32 [E=2, F=4, P=2]",
        ),
        (dict(w_out_layout="df"), ValueError, "w_out: got float32[2, 4, 3], expected float32 [E=2, D=3, F=4]"),
        (dict(weight_early=1), TypeError, "weight_early: got int 1, expected True or False"),
        (dict(weight_early=True, weights=None), ValueError, "weight_early: got True without weights"),
    ],
)
def test_expert_ffn_refuses(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        expert_ffn(**ffn_arguments(**changes))
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(lambda: expert_ffn(**ffn_arguments(**changes)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(x=jnp.ones(3)), ValueError, "x: got float32[3], expected"),
        (dict(x=1.0), TypeError, "x: got float 1.0, expected an array"),
        (dict(w=jnp.ones((2, 4, 4))), ValueError, "w: got float32[2, 4, 4], expected float32 [E=2, D=3, N]"),
        (dict(w=jnp.ones((2, 3, 4), jnp.bfloat16)), TypeError, "w: got bfloat16[2, 3, 4], expected float32"),
        (dict(transpose_w=True), ValueError, "w: got float32[2, 3, 4], expected float32 [E=2, N, D=3]"),
        (dict(transpose_w=None), TypeError, "transpose_w: got NoneType None, expected True or False"),
        (dict(group_sizes=jnp.ones(3, jnp.int32)), ValueError, "w: got float32[2, 3, 4], expected float32 [E=3"),
    ],
)
def test_grouped_matmul_refuses(changes, error, message):
    arguments = dict(x=jnp.ones((5, 3)), w=jnp.ones((2, 3, 4)), group_sizes=jnp.array([2, 3])) | changes
    with pytest.raises(error, match=re.escape(message)):
        grouped_matmul(**arguments)

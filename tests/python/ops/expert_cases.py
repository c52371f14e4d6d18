"""Networks to compare with the oracle, and the error bound of each result.

float32: a sum of n products has a relative error of about sqrt(n) 2^-24 (random signs). With n <= 2048 this stays below
FLOAT32 through all later steps.

bfloat16 and float16: every rounded tensor gets a relative error of at most u, the unit roundoff (2^-8 and 2^-11). GEMMs
are linear and propagate such errors unchanged; an activation's slope or value doubles the error of its argument (relu2
exactly; silu and gelu less where values are large). In the worst case errors add, so a bound is a count of roundings:

    y          a, y                                        2
    rows       gate (twice), up, dh, dx                    5
    w_in, b_in gate (twice), up, dh, the gradient          5
    w_out      gate (twice), up, w a, the gradient         5
    b_out      the gradient                                1
    weights    gate (twice), up                            3

The gradient of a row weight is a sum of products of either sign. Its error is relative to the norm of the terms,
because the sum itself may be zero by chance.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.activation import PLAIN, Activation, as_activation
from anabranch.reference import experts as reference
from oracle import assert_close_per_expert, assert_rows_close, remembered

FLOAT32 = 2e-6
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ROUNDINGS = {"y": 2, "rows": 5, "w_in": 5, "b_in": 5, "w_out": 5, "b_out": 1, "weights": 3}


# Limits that intermediate columns reach and exceed.
ACTIVATIONS = (
    *map(Activation.glu, PLAIN),
    Activation.swiglu_clamped(limit=0.8),
    Activation.swiglu_oai(alpha=1.702, limit=0.9),
    Activation.swiglu_then_clamp(limit=0.6),
    Activation.situ(a=0.7, b=1.1),
)


def parts_of(activation):
    """The values of P that the activation allows."""
    return (2,) if activation.gated_only else (1, 2)


def bound(dtype, name):
    return FLOAT32 if dtype == "float32" else ROUNDINGS[name] * UNIT_ROUNDOFF[dtype]


@dataclasses.dataclass
class Network:
    """Operands of expert_ffn as JAX arrays; biases and weights may be None."""

    rows: jnp.ndarray
    w_in: jnp.ndarray
    w_out: jnp.ndarray
    group_sizes: np.ndarray
    b_in: jnp.ndarray | None
    b_out: jnp.ndarray | None
    weights: jnp.ndarray | None
    d_y: jnp.ndarray

    @property
    def arrays(self):
        """The differentiable operands that are not None, by the name of their gradient."""
        names = ("rows", "w_in", "w_out", "b_in", "b_out", "weights")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def random_array(rng, shape, dtype="float32", scale=1.0):
    return jax.device_put((rng.standard_normal(shape) * scale).astype(jnp.dtype(dtype)))


def random_sizes(rng, num_rows, num_experts):
    """Uneven groups: a few experts get most rows, many get none."""
    popularity = rng.permutation(1.0 / (1 + np.arange(num_experts)) ** 1.5)
    return rng.multinomial(num_rows, popularity / popularity.sum()).astype(np.int32)


def network(rng, group_sizes, width, parts, expert_width, *, dtype="float32", spare=0, biases=True, weights="float32"):
    """Random operands of unit size; `spare` rows past the groups."""
    group_sizes = np.asarray(group_sizes, np.int32)
    E, R = len(group_sizes), int(group_sizes.sum()) + spare
    return Network(
        rows=random_array(rng, (R, width), dtype),
        w_in=random_array(rng, (E, width, parts, expert_width), dtype, width**-0.5),
        w_out=random_array(rng, (E, expert_width, width), dtype, expert_width**-0.5),
        group_sizes=group_sizes,
        b_in=random_array(rng, (E, parts, expert_width), dtype, 0.5) if biases else None,
        b_out=random_array(rng, (E, width), dtype, 0.5) if biases else None,
        weights=random_array(rng, (R,), weights) if weights else None,
        d_y=random_array(rng, (R, width), dtype),
    )


@remembered
def oracle(net, activation, slot_of_row=None):
    """(y, gradients by name) of the float64 oracle; it is the same for early and late weights."""
    given = dict(
        group_sizes=net.group_sizes,
        activation=activation,
        b_in=net.b_in,
        b_out=net.b_out,
        row_weights=net.weights,
        slot_of_row=slot_of_row,
    )
    y = reference.expert_ffn(net.rows, net.w_in, net.w_out, **given)
    # Where slopes jump, rounding h across a limit changes the slope.
    kept = net.rows.dtype if as_activation(activation).limit else None
    gradients = reference.expert_ffn_backward(net.d_y, net.rows, net.w_in, net.w_out, **given, saved_dtype=kept)
    return y, named(gradients)


def named(gradients):
    names = ("rows", "w_in", "w_out", "b_in", "b_out", "weights", "lora")
    return {name: value for name, value in zip(names, gradients, strict=True) if value is not None}


@remembered
def weight_gradient_scale(net, activation):
    """[R]: norm of the terms of <da', a> + <d_y, b_out> for each row."""
    rows, w_in, w_out = (np.asarray(array, np.float64) for array in (net.rows, net.w_in, net.w_out))
    E, D, P, F = w_in.shape
    expert = np.repeat(np.arange(E), net.group_sizes)
    used = len(expert)
    h = reference.grouped_matmul(rows, w_in.reshape(E, D, P * F), net.group_sizes).reshape(-1, P, F)[:used]
    if net.b_in is not None:
        h = h + np.asarray(net.b_in, np.float64)[expert]
    a = reference.gated_activation(h[:, 0], h[:, 1] if P == 2 else np.ones_like(h[:, 0]), activation)
    d_y = np.asarray(net.d_y, np.float64)
    terms = [reference.grouped_matmul(d_y, w_out.swapaxes(1, 2), net.group_sizes)[:used] * a]
    if net.b_out is not None:
        terms.append(d_y[:used] * np.asarray(net.b_out, np.float64)[expert])
    scale = np.zeros(len(rows))
    scale[:used] = np.sqrt(sum((term**2).sum(axis=1) for term in terms))
    return scale


def assert_weight_gradient_close(got, want, scale, group_sizes, limit):
    """Compares the rows of each expert, relative to the norm of the terms."""
    offsets = np.concatenate([[0], np.cumsum(group_sizes)])
    error = np.asarray(got, np.float64) - want
    for e in range(len(group_sizes)):
        rows = slice(offsets[e], offsets[e + 1])
        assert np.linalg.norm(error[rows]) <= limit * np.linalg.norm(scale[rows]), f"weights, expert {e}"
    assert not np.asarray(got, np.float64)[offsets[-1] :].any(), "weights past the groups"


def assert_matches_oracle(net, activation, y, gradients, slot_of_row=None):
    """Compares y and every gradient per expert; each gradient has its operand's dtype."""
    want, want_gradients = oracle(net, activation, slot_of_row)
    dtype = str(net.rows.dtype)
    assert y.dtype == net.rows.dtype
    assert_rows_close(y, want, net.group_sizes, bound(dtype, "y"), "y")
    assert gradients.keys() == want_gradients.keys() == net.arrays.keys()
    for name, got in gradients.items():
        assert got.dtype == net.arrays[name].dtype, name
        limit = bound(dtype, name)
        if name == "weights":
            limit += UNIT_ROUNDOFF.get(str(got.dtype), 0.0)
            scale = weight_gradient_scale(net, activation)
            assert_weight_gradient_close(got, want_gradients[name], scale, net.group_sizes, limit)
        elif name == "rows":
            assert_rows_close(got, want_gradients[name], net.group_sizes, limit, name)
        else:
            assert_close_per_expert(got, want_gradients[name], limit, name)

"""The shared expert: a dense network that processes every token, in addition to the routed experts."""

import jax
import jax.numpy as jnp

from anabranch.activation import Activation, as_activation
from anabranch.jax.binding import check
from anabranch.jax.binding.eager import compiled
from anabranch.jax.ops.experts import activate, activate_gated
from anabranch.precision import TF32, dense_precision_number


def _matmul(x: jax.Array, w: jax.Array, precision: int) -> jax.Array:
    """x [..., D] w [D, N], accumulated in float32. XLA's default precision would let a GPU round float32 to TF32."""
    float32_precision = jax.lax.Precision.HIGH if precision == TF32 else jax.lax.Precision.HIGHEST
    chosen = float32_precision if x.dtype == jnp.float32 else None
    return jnp.matmul(x, w, precision=chosen, preferred_element_type=jnp.float32)


def shared_expert(
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    activation: str | Activation = "silu",
    w_gate: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    precision: str = "highest",
) -> jax.Array:
    """A dense expert for every token; add its output to that of `moe`.

        output = sigmoid(<x, w_gate>) * phi(x W_gate, x W_up) W_out        (ungated: act(x W_in) W_out)

    Args:
      x: [..., D] float32, bfloat16 or float16.
      w_in: [D, 2, S] (gate and up columns) or [D, 1, S]; dtype of x, as for w_out.
      w_out: [S, D].
      activation: as in `moe`.
      w_gate: [D] or [D, 1] float, the gate of the whole expert; None: no gate.
      token_mask: bool [...]; False marks padding, which has zero output and gradients, whatever its values.
      precision: how float32 x and weights are multiplied, "highest" or "tf32", as in `moe`. XLA computes these GEMMs;
        "tf32" is its `Precision.HIGH`.

    Returns:
      [..., D], dtype of x. GEMMs accumulate in float32; the gate is float32, and the output is rounded once, after it.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, or an unknown activation or precision.

    Gradients: for x, w_in, w_out and w_gate, in their dtypes, by JAX itself. XLA also partitions sharded arrays.

    Source: semantics, section 9; DeepSeekMoE (arXiv:2401.06066); the gate is that of the Qwen models.

    Example:
      >>> import jax.numpy as jnp
      >>> from anabranch.jax import shared_expert
      >>> w_in, w_out = jnp.ones([2, 1, 3]), jnp.ones([3, 2])
      >>> shared_expert(jnp.ones([1, 2]), w_in, w_out, activation="relu", w_gate=jnp.zeros(2)).tolist()
      [[3.0, 3.0]]
    """
    x = check.array("x", x, check.FLOATS, (..., "D"))
    D, dtype = x.shape[-1], (str(x.dtype),)
    w_in = check.array("w_in", w_in, dtype, (("D", D), "2 or 1", "S"))
    _, P, S = w_in.shape
    if P not in (1, 2):
        raise ValueError(f"w_in: got {check.describe(w_in)}, expected [D, 2, S] (gate, up) or [D, 1, S]")
    w_out = check.array("w_out", w_out, dtype, (("S", S), ("D", D)))
    act, number = as_activation(activation, P), dense_precision_number(precision)
    column = getattr(w_gate, "ndim", 1) == 2
    w_gate = check.optional_array("w_gate", w_gate, check.FLOATS, (("D", D), 1) if column else (("D", D),))
    mask = check.optional_array("token_mask", token_mask, check.BOOL, x.shape[:-1])
    return _shared_expert(act, number, x, w_in, w_out, w_gate, mask)


@compiled(static_argnums=(0, 1))
def _shared_expert(
    act: Activation,
    number: int,
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    w_gate: jax.Array | None,
    mask: jax.Array | None,
) -> jax.Array:
    """`shared_expert` of checked arguments; number: the precision."""
    D, P, S = w_in.shape
    if mask is not None:  # masks x too: 0 * NaN in the gradients of the weights would be NaN
        x = jnp.where(mask[..., None], x, 0)
    h = _matmul(x, w_in.reshape(D, P * S), number).reshape(*x.shape[:-1], P, S)
    a = activate_gated(h[..., 0, :], h[..., 1, :], act) if P == 2 else activate(h[..., 0, :], act.name)
    output = _matmul(a.astype(x.dtype), w_out, number)
    if w_gate is not None:
        logits = jnp.sum(x.astype(jnp.float32) * w_gate.reshape(D).astype(jnp.float32), axis=-1, keepdims=True)
        output = jax.nn.sigmoid(logits) * output
    output = output.astype(x.dtype)
    return output if mask is None else jnp.where(mask[..., None], output, 0)

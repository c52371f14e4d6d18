"""The experts: grouped matrix products and the gated feed-forward network.

Sizes: T tokens, R rows, E experts, K experts a token, D model width, F expert width, P parts of w_in: 2 (gate and up)
for a gated expert, 1 for an ungated one.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax import _check, _ffi
from anabranch.jax._sharding import vary_alike

# Numbered as in include/anabranch/experts.h.
ACTIVATIONS = ("silu", "gelu", "relu", "relu2")

_INDEX_LIMIT = 2**31


def activate(h: jax.Array, activation: str) -> jax.Array:
    """act(h) elementwise, for dense layers: one of ACTIVATIONS. Differentiable by JAX itself."""
    if activation == "silu":
        return jax.nn.silu(h)
    if activation == "gelu":
        return jax.nn.gelu(h, approximate=True)
    relu = jax.nn.relu(h)
    return relu * relu if activation == "relu2" else relu


def _group_sizes(value: Any) -> jax.Array:
    """group_sizes as int32; a wider size is clipped, so that none wraps around into range."""
    sizes = _check.array("group_sizes", value, _check.INDICES, ("E",))
    if sizes.dtype == jnp.int64:
        sizes = jnp.clip(sizes, 0, _INDEX_LIMIT - 1)
    return sizes.astype(jnp.int32)


def _rows(name: str, value: Any) -> jax.Array:
    rows = _check.array(name, value, _check.FLOATS, ("R", "D"))
    if rows.shape[0] >= _INDEX_LIMIT:
        raise ValueError(f"{name}: got {_check.describe(rows)}, expected fewer than 2^31 rows")
    return rows


def _like(array: jax.Array | None, dtype: Any = None) -> jax.ShapeDtypeStruct | None:
    return None if array is None else jax.ShapeDtypeStruct(array.shape, dtype or array.dtype)


# ---------------------------------------------------------------- grouped matmul


def grouped_product(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transpose_w: bool) -> jax.Array:
    """y[R, N] = x w[e], or x w[e]^T, on the rows of expert e; the rule without its gradient."""
    y = jax.ShapeDtypeStruct((x.shape[0], w.shape[1 if transpose_w else 2]), x.dtype)
    operands = {"x": x, "w": w, "group_sizes": group_sizes}
    return _ffi.call("ab_xla_grouped_matmul", operands, {"y": y}, transpose_w=int(transpose_w))["y"]


def grouped_weight_gradient(x: jax.Array, d_y: jax.Array, group_sizes: jax.Array, dtype: Any) -> jax.Array:
    """d_w[E, D, N] = x^T d_y over the rows of expert e, of any float dtype; zero for an expert without rows."""
    E, (R, D), N = group_sizes.shape[0], x.shape, d_y.shape[1]
    operands = {"x": x, "d_y": d_y, "group_sizes": group_sizes}
    results = {"d_w": jax.ShapeDtypeStruct((E, D, N), dtype)}
    workspace = _ffi.weight_gradient_workspace(R, E, D, N, x.dtype, d_y.dtype)
    return _ffi.call("ab_xla_grouped_matmul_dw", operands, results, workspace=workspace)["d_w"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(transpose_w: bool, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return grouped_product(x, w, group_sizes, transpose_w=transpose_w)


def _grouped_matmul_forward(transpose_w: bool, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> tuple[Any, Any]:
    return grouped_product(x, w, group_sizes, transpose_w=transpose_w), (x, w, group_sizes)


def _grouped_matmul_backward(transpose_w: bool, residuals: Any, d_y: jax.Array) -> tuple[Any, Any, None]:
    x, w, group_sizes = residuals
    d_x = grouped_product(d_y.astype(x.dtype), w, group_sizes, transpose_w=not transpose_w)
    left, right = (d_y, x) if transpose_w else (x, d_y)
    return d_x, grouped_weight_gradient(left, right, group_sizes, w.dtype), None


_grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


def grouped_matmul(x: Any, w: Any, group_sizes: Any, *, transpose_w: bool = False) -> jax.Array:
    """Multiplies the rows of each expert by that expert's matrix: y = x w[e].

    Args:
      x: float32, bfloat16 or float16 [R, D]; rows of one expert stand together, expert 0 first.
      w: [E, D, N], or with transpose_w [E, N, D]; dtype of x.
      group_sizes: int16, int32 or int64 [E]: rows of each expert, on the device. Sizes past R are cut, negative ones
        count as 0.
      transpose_w: y = x w[e]^T; w is used as it is stored, nothing is copied.

    Returns:
      [R, N] of x's dtype, accumulated in float32. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit.

    Gradient: d_x = d_y w[e]^T, zero past the sizes; d_w[e] = x^T d_y, zero for an expert without rows; dtypes of x and
    w. Source: semantics, section 6.

    >>> w = jnp.array([[[1.0], [1.0]], [[2.0], [3.0]]])
    >>> grouped_matmul(jnp.ones((3, 2)), w, jnp.array([1, 2])).ravel().tolist()
    [2.0, 5.0, 5.0]
    """
    x = _rows("x", x)
    sizes = _group_sizes(group_sizes)
    E, D = sizes.shape[0], x.shape[1]
    transpose_w = _check.boolean("transpose_w", transpose_w)
    w = _check.array("w", w, (str(x.dtype),), (("E", E), "N", ("D", D)) if transpose_w else (("E", E), ("D", D), "N"))
    return _grouped_matmul(transpose_w, *vary_alike(x, w, sizes))


@dataclasses.dataclass(frozen=True)
class SlotProduct:
    """Rows of slots [R, N] that stand nowhere: x w[e] + bias[e], or x w[e]^T, on the rows of expert e.

    Only their sums by token are an array. On a GPU the rows come in chunks of columns, so that they need little memory.
    """

    x: jax.Array
    """[R, D]"""
    w: jax.Array
    """[E, D, N]; with transpose_w [E, N, D]"""
    group_sizes: jax.Array
    """int32 [E]"""
    slot_of_row: jax.Array
    """int32 [R]: t*K + k, or -1 for padding."""
    bias: jax.Array | None = None
    """[E, N]"""
    early_weights: jax.Array | None = None
    """float [T, K], which x has already: they multiply the bias."""
    transpose_w: bool = False
    skip_rest: bool = False
    """See FfnConfig."""

    def sum(
        self, row_of_slot: jax.Array, weights: jax.Array | None, dtype: Any, addend: jax.Array | None = None
    ) -> jax.Array:
        """`dispatch.gather_sum` of the rows, [T, N]: sum_k weights[t, k] rows[row_of_slot[t, k]] + addend[t].

        Weights [T, K], and none where x has early ones.
        """
        assert weights is None or self.early_weights is None
        (R, D), E, N = self.x.shape, self.w.shape[0], self.w.shape[1 if self.transpose_w else 2]
        results = _ffi.call(
            "ab_xla_grouped_matmul_combine",
            {
                "x": self.x,
                "w": self.w,
                "group_sizes": self.group_sizes,
                "bias": self.bias,
                "slot_of_row": self.slot_of_row,
                "row_of_slot": row_of_slot,
                "weights": weights if self.early_weights is None else self.early_weights,
                "addend": addend,
            },
            {"out": jax.ShapeDtypeStruct((row_of_slot.shape[0], N), dtype)},
            workspace=_ffi.grouped_matmul_combine_workspace(R, E, N, D, self.x.dtype, transpose_w=self.transpose_w),
            transpose_w=int(self.transpose_w),
            weight_early=int(self.early_weights is not None),
            skip_rest=int(self.skip_rest),
        )
        out: jax.Array = results["out"]
        return out


# ---------------------------------------------------------------- feed-forward network


@dataclasses.dataclass(frozen=True)
class FfnConfig:
    """Options of the feed-forward network."""

    activation: str = "silu"
    weight_early: bool = False
    """Weights multiply before W_out instead of after it."""
    topk: int = 0
    """K when x holds tokens and slot_of_row tells which a row reads; 0 when x holds rows."""
    skip_rest: bool = False
    """Rows that no slot has may hold anything in what the rules by slot return: nobody reads them."""


class FfnOperands(NamedTuple):
    """What the forward rule reads and, with h, the backward rule again."""

    x: jax.Array
    """[T, D] with slot_of_row, else [R, D]."""
    slot_of_row: jax.Array | None
    """int32[R]: t*K + k, or -1 for padding. None: x holds the rows."""
    group_sizes: jax.Array | None
    """int32[E]; None only among gradients."""
    w_in: jax.Array
    """[E, D, P, F]."""
    w_out: jax.Array
    """[E, F, D]."""
    b_in: jax.Array | None
    """[E, P, F]."""
    b_out: jax.Array | None
    """[E, D]."""
    weights: jax.Array | None
    """float [T, K] with slot_of_row, else [R]. None: 1."""


class MatrixGradients(NamedTuple):
    """Gradients of the matrices and biases; None where the operand is None."""

    w_in: jax.Array
    w_out: jax.Array
    b_in: jax.Array | None
    b_out: jax.Array | None


class FfnGradients(NamedTuple):
    """What the backward rule returns; None where the operand is None."""

    rows: jax.Array
    """[R, D], the gradient of the rows that were read; dtype of x."""
    matrices: MatrixGradients
    weights: jax.Array | None
    """Of the shape and dtype of the weights."""


class HiddenGradients(NamedTuple):
    """What the first half of the backward rule by slot returns."""

    dh: jax.Array
    """[R, P, F], in the place of h."""
    weighted_a: jax.Array
    """[R, F]: w a. Both have dtype of x and are for `ffn_backward_of_matrices`."""
    rows: SlotProduct
    """The gradient of the rows that were read, [R, D]."""
    weights: jax.Array
    """Of the shape and dtype of the weights."""


def ffn_forward(config: FfnConfig, operands: FfnOperands, *, keep_h: bool) -> tuple[jax.Array, jax.Array | None]:
    """The forward rule: (y [R, D], h [R, P, F] if keep_h), both of x's dtype; padding rows are zero.

    Weights multiply y, or before W_out if they come early; pass none where combine applies them.
    """
    results = _forward(config, operands._asdict(), "y", operands.x.shape[1], keep_h=keep_h)
    return results["y"], results["h"]


def ffn_forward_by_slot(
    config: FfnConfig, operands: FfnOperands, *, keep_h: bool
) -> tuple[SlotProduct, jax.Array | None]:
    """The forward rule with slot_of_row for rows that are summed by token next: (y as a product, h).

    Early weights are the operands'; late ones are for the sum.
    """
    assert operands.slot_of_row is not None and operands.group_sizes is not None
    first_half = operands._asdict() | {"w_out": None, "b_out": None}
    results = _forward(config, first_half, "a", operands.w_in.shape[3], keep_h=keep_h)
    y = SlotProduct(
        results["a"],
        operands.w_out,
        operands.group_sizes,
        operands.slot_of_row,
        operands.b_out,
        operands.weights,
        skip_rest=config.skip_rest,
    )
    return y, results["h"]


def _forward(config: FfnConfig, operands: dict[str, Any], result: str, columns: int, *, keep_h: bool) -> dict[str, Any]:
    """The result, y or a, of so many columns, and h."""
    x, w_in, slots = operands["x"], operands["w_in"], operands["slot_of_row"]
    R = x.shape[0] if slots is None else slots.shape[0]
    return _ffi.call(
        "ab_xla_expert_ffn_forward",
        operands,
        {
            result: jax.ShapeDtypeStruct((R, columns), x.dtype),
            "h": jax.ShapeDtypeStruct((R, *w_in.shape[2:]), x.dtype) if keep_h else None,
        },
        workspace=0 if result == "a" else _ffi.ffn_forward_workspace(R, w_in.shape[3], x.dtype),
        activation=ACTIVATIONS.index(config.activation),
        weight_early=int(config.weight_early),
        topk=config.topk,
        skip_rest=int(config.skip_rest and result == "a"),
    )


def ffn_backward(
    config: FfnConfig,
    operands: FfnOperands,
    h: jax.Array,
    d_out: jax.Array,
    weight_dtypes: tuple[Any, Any] | None = None,
) -> FfnGradients:
    """The backward rule, the same for early and late weights.

    Args:
      config: as in the forward pass.
      operands: as in the forward pass, with the weights also where combine applied them.
      h: [R, P, F], kept by the forward rule. Its buffer is taken over.
      d_out: float [T, D] with slot_of_row, else [R, D]: the cotangent of the weighted output, of any float dtype.
      weight_dtypes: of the gradients of w_in and w_out, each that of x or float32; None: of x.
    """
    x, weights, w_in = operands.x, operands.weights, operands.w_in
    results = _backward(
        config,
        operands,
        d_out,
        {"h": h},
        {
            "dh": _like(h),
            "dx_rows": jax.ShapeDtypeStruct((h.shape[0], x.shape[1]), x.dtype),
            "d_weights": _like(weights, jnp.float32),
            **_matrix_gradients(operands, weight_dtypes),
        },
        _ffi.ffn_backward_workspace(h.shape[0], w_in.shape, x.dtype, d_out.dtype),
    )
    d_weights = None if weights is None else results["d_weights"].astype(weights.dtype)
    return FfnGradients(results["dx_rows"], _matrices_of(results), d_weights)


def ffn_backward_by_slot(config: FfnConfig, operands: FfnOperands, h: jax.Array, d_out: jax.Array) -> HiddenGradients:
    """`ffn_backward` with slot_of_row, for gradients of rows that are summed by token next: all but the matrices'.

    Those are left for `ffn_backward_of_matrices`. Where the sums come first, what they need for a moment can stand
    where the matrices' gradients will.
    """
    assert operands.slot_of_row is not None and operands.group_sizes is not None and operands.weights is not None
    (R, P, F), w_in = h.shape, operands.w_in
    results = _backward(
        config,
        operands,
        d_out,
        {"h": h},
        {
            "dh": _like(h),
            "weighted_a": jax.ShapeDtypeStruct((R, F), operands.x.dtype),
            "d_weights": _like(operands.weights, jnp.float32),
        },
        _ffi.ffn_dots_workspace(R, F),
        skip_rest=int(config.skip_rest),
    )
    rows = SlotProduct(
        results["dh"].reshape(R, P * F),
        w_in.reshape(*w_in.shape[:2], P * F),
        operands.group_sizes,
        operands.slot_of_row,
        transpose_w=True,
        skip_rest=config.skip_rest,
    )
    d_weights = results["d_weights"].astype(operands.weights.dtype)
    return HiddenGradients(results["dh"], results["weighted_a"], rows, d_weights)


def ffn_backward_of_matrices(
    config: FfnConfig,
    operands: FfnOperands,
    dh: jax.Array,
    weighted_a: jax.Array,
    d_out: jax.Array,
    weight_dtypes: tuple[Any, Any] | None = None,
) -> MatrixGradients:
    """The rest of `ffn_backward_by_slot`; dtypes as for `ffn_backward`."""
    results = _backward(
        config,
        operands,
        d_out,
        {"dh": dh, "weighted_a": weighted_a},
        _matrix_gradients(operands, weight_dtypes),
        _ffi.matrix_gradients_workspace(dh.shape[0], operands.w_in.shape, operands.x.dtype, d_out.dtype),
    )
    return _matrices_of(results)


def _matrix_gradients(operands: FfnOperands, dtypes: tuple[Any, Any] | None) -> dict[str, Any]:
    w_in_dtype, w_out_dtype = dtypes or (operands.x.dtype, operands.x.dtype)
    return {
        "d_w_in": _like(operands.w_in, w_in_dtype),
        "d_w_out": _like(operands.w_out, w_out_dtype),
        "d_b_in": _like(operands.b_in),
        "d_b_out": _like(operands.b_out),
    }


def _matrices_of(results: dict[str, Any]) -> MatrixGradients:
    return MatrixGradients(results["d_w_in"], results["d_w_out"], results["d_b_in"], results["d_b_out"])


def _backward(
    config: FfnConfig,
    operands: FfnOperands,
    d_out: jax.Array,
    hidden: dict[str, jax.Array],
    results: dict[str, Any],
    workspace: int,
    skip_rest: int = 0,
) -> dict[str, Any]:
    """The results, from h or from what a first call made of it; dh takes h's place."""
    inputs = operands._asdict()
    del inputs["b_in"]
    return _ffi.call(
        "ab_xla_expert_ffn_backward",
        {**inputs, "d_out": d_out, **hidden},
        results,
        aliases={"h": "dh"} if "h" in hidden else None,
        workspace=workspace,
        activation=ACTIVATIONS.index(config.activation),
        topk=config.topk,
        skip_rest=skip_rest,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_ffn(config: FfnConfig, operands: FfnOperands) -> jax.Array:
    return ffn_forward(config, operands, keep_h=False)[0]


def _expert_ffn_forward(config: FfnConfig, operands: FfnOperands) -> tuple[jax.Array, Any]:
    y, h = ffn_forward(config, operands, keep_h=True)
    return y, (operands, h)


def _expert_ffn_backward(config: FfnConfig, residuals: Any, d_y: jax.Array) -> tuple[FfnOperands]:
    operands, h = residuals
    gradients = ffn_backward(config, operands, h, d_y)
    return (
        FfnOperands(
            x=gradients.rows,
            slot_of_row=None,
            group_sizes=None,
            weights=gradients.weights,
            **gradients.matrices._asdict(),
        ),
    )


_expert_ffn.defvjp(_expert_ffn_forward, _expert_ffn_backward)


def expert_ffn(
    rows: Any,
    w_in: Any,
    w_out: Any,
    group_sizes: Any,
    *,
    activation: str = "silu",
    b_in: Any = None,
    b_out: Any = None,
    weights: Any = None,
    weight_early: bool = False,
) -> jax.Array:
    """The feed-forward network of each expert on its rows: y = w (a W_out[e] + b_out[e]).

    h = x W_in[e] + b_in[e]; gated (P = 2): a = act(h_gate) h_up, ungated (P = 1): a = act(h).

    Args:
      rows: float32, bfloat16 or float16 [R, D]; rows of one expert stand together, expert 0 first.
      w_in: [E, D, 2, F] (gate, up) or [E, D, 1, F]; dtype of rows, as for w_out and the biases.
      w_out: [E, F, D].
      group_sizes: int16, int32 or int64 [E]: rows of each expert, on the device. Sizes past R are cut, negative ones
        count as 0.
      activation: "silu", "gelu" (tanh form), "relu" or "relu2" (relu squared).
      b_in: [E, 2 or 1, F], or None.
      b_out: [E, D], or None.
      weights: w, float [R]; None: 1.
      weight_early: multiply a and b_out by w instead of y; the same result up to rounding.

    Returns:
      y [R, D] of the rows' dtype. Products accumulate in float32. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, an unknown activation, or weight_early without weights.

    Gradient: rows, w_in, w_out, b_in, b_out and weights, each in its own dtype; exact also where a weight is 0. An
    expert without rows gets zero. Kept for it: the arguments and h [R, P, F]. Source: semantics, section 6.

    >>> w_in, w_out = jnp.ones((1, 1, 1, 3)), jnp.ones((1, 3, 1))
    >>> expert_ffn(jnp.ones((2, 1)), w_in, w_out, jnp.array([1]), activation="relu").tolist()
    [[3.0], [0.0]]
    """
    rows = _rows("rows", rows)
    sizes = _group_sizes(group_sizes)
    (R, D), E, dtype = rows.shape, sizes.shape[0], (str(rows.dtype),)
    w_in = _check.array("w_in", w_in, dtype, (("E", E), ("D", D), "2 or 1", "F"))
    P, F = w_in.shape[2:]
    if P not in (1, 2):
        raise ValueError(f"w_in: got {_check.describe(w_in)}, expected [E, D, 2, F] (gate, up) or [E, D, 1, F]")
    operands = FfnOperands(
        x=rows,
        slot_of_row=None,
        group_sizes=sizes,
        w_in=w_in,
        w_out=_check.array("w_out", w_out, dtype, (("E", E), ("F", F), ("D", D))),
        b_in=_check.optional_array("b_in", b_in, dtype, (("E", E), ("P", P), ("F", F))),
        b_out=_check.optional_array("b_out", b_out, dtype, (("E", E), ("D", D))),
        weights=_check.optional_array("weights", weights, _check.FLOATS, (("R", R),)),
    )
    early = _check.boolean("weight_early", weight_early)
    if early and weights is None:
        raise ValueError("weight_early: got True without weights, expected weights [R]")
    config = FfnConfig(_check.choice("activation", activation, ACTIVATIONS), early)
    return _expert_ffn(config, FfnOperands(*vary_alike(*operands)))

"""The experts in numpy float64: grouped GEMMs and the feed-forward network, with their gradients.

`docs/semantics.md`, section 6, as code. Rows of one expert are contiguous, `group_sizes[e]` rows each. With
`fp8_scales`, "float32" or "power_of_two", GEMMs are those of section 11: exact GEMMs of quantised operands.
"""

from typing import NamedTuple

import numpy as np

from anabranch.activation import (
    activation,
    activation_gradient,
    as_activation,
    gated_activation,
    gated_activation_gradients,
)

from .fp8 import received, rows_operand, weights_operand
from .scores import as_float64


class ExpertGradients(NamedTuple):
    """The result of `expert_ffn_backward`; None for an argument that was not given."""

    d_rows: np.ndarray
    d_w_in: np.ndarray
    d_w_out: np.ndarray
    d_b_in: np.ndarray | None
    d_b_out: np.ndarray | None
    d_row_weights: np.ndarray | None


# ---------------------------------------------------------------- grouped matmul


def _groups(group_sizes, num_rows):
    """(expert, slice of its rows) for every expert, with slices clipped to num_rows."""
    offsets = np.minimum(np.concatenate([[0], np.cumsum(np.asarray(group_sizes, np.int64))]), num_rows)
    return [(e, slice(offsets[e], offsets[e + 1])) for e in range(len(offsets) - 1)]


def grouped_matmul(x, w, group_sizes, fp8_scales=None):
    """y = x w[e] on the rows of expert e; rows past the sum of the sizes are zero.

    Args: x [R, D], w [E, D, N], group_sizes int[E]. Returns: float64[R, N].
    """
    x, w = rows_operand(x, fp8_scales), weights_operand(w, fp8_scales)
    y = np.zeros((x.shape[0], w.shape[2]))
    for e, rows in _groups(group_sizes, x.shape[0]):
        y[rows] = x[rows] @ w[e]
    return y


def grouped_matmul_backward(d_y, x, w, group_sizes, fp8_scales=None):
    """(d_x float64[R, D] = d_y w[e]^T, d_w float64[E, D, N] = x^T d_y); zero past the sizes.

    With fp8_scales the operands of d_x are quantised; those of d_w are not.
    """
    d_y, x = as_float64(d_y, "d_y"), as_float64(x, "x")
    left, w = rows_operand(d_y, fp8_scales), weights_operand(w, fp8_scales)
    d_x, d_w = np.zeros_like(x), np.zeros_like(w)
    for e, rows in _groups(group_sizes, x.shape[0]):
        d_x[rows] = left[rows] @ w[e].T
        d_w[e] = x[rows].T @ d_y[rows]
    return d_x, d_w


def _bias_rows(bias, group_sizes, num_rows):
    """bias[e] on every row of expert e. [E, N] -> [R, N]."""
    out = np.zeros((num_rows, bias.shape[1]))
    for e, rows in _groups(group_sizes, num_rows):
        out[rows] = bias[e]
    return out


def _bias_gradient(d_rows, group_sizes):
    """Sums the rows of every expert. [R, N] -> [E, N]."""
    return np.stack([d_rows[rows].sum(axis=0) for _, rows in _groups(group_sizes, d_rows.shape[0])])


# ---------------------------------------------------------------- activations


def activate(h, act):
    """a from h [R, 2 or 1, F]: phi(gate, up), or act(h) for ungated experts."""
    act = as_activation(act, h.shape[1])
    return gated_activation(h[:, 0], h[:, 1], act) if h.shape[1] == 2 else activation(h[:, 0], act.name)


def activate_backward(d_a, h, act):
    """dh [R, 2 or 1, F] from da [R, F]."""
    act = as_activation(act, h.shape[1])
    if h.shape[1] == 1:
        return (activation_gradient(h[:, 0], act.name) * d_a)[:, None]
    by_gate, by_up = gated_activation_gradients(h[:, 0], h[:, 1], act)
    return np.stack([by_gate * d_a, by_up * d_a], axis=1)


# ---------------------------------------------------------------- feed-forward network


def _real_rows(num_rows, group_sizes, slot_of_row):
    """bool[R, 1], True for rows with an assignment."""
    real = np.arange(num_rows) < np.asarray(group_sizes, np.int64).sum()
    if slot_of_row is not None:
        real &= np.asarray(slot_of_row) >= 0
    return real[:, None]


def _up(rows, w_in, b_in, group_sizes, fp8_scales):
    """h [R, 2 or 1, F] = x W_in[e] + b_in[e]."""
    num_experts, width, parts, F = w_in.shape
    h = grouped_matmul(rows, w_in.reshape(num_experts, width, parts * F), group_sizes, fp8_scales)
    if b_in is not None:
        h += _bias_rows(as_float64(b_in, "b_in").reshape(num_experts, -1), group_sizes, rows.shape[0])
    return h.reshape(-1, parts, F)


def expert_ffn(
    rows,
    w_in,
    w_out,
    group_sizes,
    *,
    activation,
    b_in=None,
    b_out=None,
    row_weights=None,
    weight_early=False,
    slot_of_row=None,
    fp8_scales=None,
):
    """y = w (a W_out[e] + b_out[e]) on the rows of expert e, with a = phi(gate, up) and h = x W_in[e] + b_in[e].

    Args:
      rows: [R, D]. w_in: [E, D, 2, F] (gate, up) or [E, D, 1, F]. w_out: [E, F, D].
      group_sizes: int[E]. activation: a name or an `Activation`. b_in: [E, 2 or 1, F]. b_out: [E, D].
      row_weights: w [R]; 1 by default.
      weight_early: multiply a instead of y by w; the same result up to rounding and quantisation.
      slot_of_row: int[R]; rows with -1 are padding and zero in the result, even with biases.
      fp8_scales: quantises the operands x and W_in, a (or w a) and W_out; None: no quantisation.

    Returns: float64[R, D].
    """
    real = _real_rows(len(rows), group_sizes, slot_of_row)
    rows = np.where(real, as_float64(rows, "rows"), 0.0)
    w = 1.0 if row_weights is None else as_float64(row_weights, "row_weights")[:, None]
    a = activate(_up(rows, w_in, b_in, group_sizes, fp8_scales), activation)
    bias = 0.0 if b_out is None else _bias_rows(as_float64(b_out, "b_out"), group_sizes, len(rows))
    if weight_early:
        y = grouped_matmul(w * a, w_out, group_sizes, fp8_scales) + w * bias
    else:
        y = w * (grouped_matmul(a, w_out, group_sizes, fp8_scales) + bias)
    return np.where(real, y, 0.0)


def expert_ffn_backward(
    d_y,
    rows,
    w_in,
    w_out,
    group_sizes,
    *,
    activation,
    b_in=None,
    b_out=None,
    row_weights=None,
    slot_of_row=None,
    saved_dtype=None,
    fp8_scales=None,
    sent_dtype=None,
):
    """Gradients of `expert_ffn`, the same for early and late weights; d_y [R, D] is d_out of the row's token.

    da' = d_y W_out^T;  d_w = <da', a> + <d_y, b_out>;  da = w da';  dh = phi'(h) da;
    dW_out = (w a)^T d_y;  db_out = sum w d_y;  dW_in = x^T dh;  db_in = sum dh;  dx = dh W_in^T.

    saved_dtype: h is rounded to it, as in a forward pass that saves h in it, which matters where a slope jumps at a
      limit. dh is rounded to it before it is quantised.
    fp8_scales: da' = Q1(d_y) Q2(W_out)^T and dx = Q1(dh) Q2(W_in)^T; h is a GEMM of quantised operands too.
    sent_dtype: with fp8_scales, x and d_y were sent quantised (`fp8.received`); other reads are in this dtype.

    Returns: `ExpertGradients`. An expert without rows has gradients of exactly zero.
    """
    real = _real_rows(len(rows), group_sizes, slot_of_row)
    rows = np.where(real, as_float64(rows, "rows"), 0.0)
    d_y = np.where(real, as_float64(d_y, "d_y"), 0.0)
    w = np.ones((len(rows), 1))
    if row_weights is not None:
        w = np.where(real, as_float64(row_weights, "row_weights")[:, None], 0.0)
    h = _up(rows, w_in, b_in, group_sizes, fp8_scales)
    if saved_dtype is not None:
        h = h.astype(saved_dtype).astype(np.float64)
    a = activate(h, activation)

    d_weighted_a, _ = grouped_matmul_backward(d_y, w * a, w_out, group_sizes, fp8_scales)
    if sent_dtype is not None:
        rows, d_y = (received(sent, fp8_scales, sent_dtype) for sent in (rows, d_y))
    _, d_w_out = grouped_matmul_backward(d_y, w * a, w_out, group_sizes)
    d_row_weights = (d_weighted_a * a).sum(-1)
    if b_out is not None:
        d_row_weights += (d_y * _bias_rows(as_float64(b_out, "b_out"), group_sizes, len(rows))).sum(-1)
    flat_w_in = np.reshape(w_in, (*w_in.shape[:2], -1))
    d_h = activate_backward(w * d_weighted_a, h, activation).reshape(len(rows), flat_w_in.shape[2])
    _, d_w_in = grouped_matmul_backward(d_h, rows, flat_w_in, group_sizes)
    d_h_saved = d_h if fp8_scales is None or saved_dtype is None else d_h.astype(saved_dtype)
    d_rows, _ = grouped_matmul_backward(d_h_saved, rows, flat_w_in, group_sizes, fp8_scales)
    return ExpertGradients(
        d_rows,
        d_w_in.reshape(w_in.shape),
        d_w_out,
        None if b_in is None else _bias_gradient(d_h, group_sizes).reshape(np.shape(b_in)),
        None if b_out is None else _bias_gradient(w * d_y, group_sizes),
        None if row_weights is None else d_row_weights,
    )

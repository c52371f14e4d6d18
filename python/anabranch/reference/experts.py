"""The experts' feed-forward network in numpy float64, with its gradients.

`docs/semantics.md`, sections 6 and 12, as code. Rows of one expert are contiguous, `group_sizes[e]` rows each. With
`fp8_scales`, "float32" or "power_of_two", GEMMs with W are those of section 11: exact GEMMs of quantised operands.
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

from .fp8 import received
from .grouped_matmul import grouped_matmul, grouped_matmul_backward, groups
from .lora import Lora, adapters, low_rank, low_rank_backward
from .scores import as_float64


class ExpertGradients(NamedTuple):
    """The result of `expert_ffn_backward`; None for an argument that was not given."""

    d_rows: np.ndarray
    d_w_in: np.ndarray
    d_w_out: np.ndarray
    d_b_in: np.ndarray | None
    d_b_out: np.ndarray | None
    d_row_weights: np.ndarray | None
    d_lora: Lora | None


# ---------------------------------------------------------------- biases


def _bias_rows(bias, group_sizes, num_rows):
    """bias[e] on every row of expert e. [E, N] -> [R, N]."""
    out = np.zeros((num_rows, bias.shape[1]))
    for e, rows in groups(group_sizes, num_rows):
        out[rows] = bias[e]
    return out


def _bias_gradient(d_rows, group_sizes):
    """Sums the rows of every expert. [R, N] -> [E, N]."""
    return np.stack([d_rows[rows].sum(axis=0) for _, rows in groups(group_sizes, d_rows.shape[0])])


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


def _received(rows, fp8_scales, sent_dtype):
    """What GEMMs without quantised operands read of `rows`: `fp8.received` if they were sent quantised."""
    return rows if sent_dtype is None else received(rows, fp8_scales, sent_dtype)


def _up(rows, w_in, b_in, adapter, group_sizes, fp8_scales, sent_dtype):
    """h [R, 2 or 1, F] = x W_in[e] + b_in[e], plus the adapter's part."""
    num_experts, width, parts, F = w_in.shape
    h = grouped_matmul(rows, w_in.reshape(num_experts, width, parts * F), group_sizes, fp8_scales)
    if adapter is not None:
        h += low_rank(_received(rows, fp8_scales, sent_dtype), adapter, group_sizes)
    if b_in is not None:
        h += _bias_rows(as_float64(b_in, "b_in").reshape(num_experts, -1), group_sizes, rows.shape[0])
    return h.reshape(-1, parts, F)


def _down(a, w_out, adapter, group_sizes, fp8_scales):
    """a W_out[e], plus the adapter's part. [R, D]."""
    y = grouped_matmul(a, w_out, group_sizes, fp8_scales)
    return y if adapter is None else y + low_rank(a, adapter, group_sizes)


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
    sent_dtype=None,
    lora=None,
    lora_scale=1.0,
    lora_dtype=None,
):
    """y = w (a W_out[e] + b_out[e]) on the rows of expert e, with a = phi(gate, up) and h = x W_in[e] + b_in[e].

    Args:
      rows: [R, D]. w_in: [E, D, 2, F] (gate, up) or [E, D, 1, F]. w_out: [E, F, D].
      group_sizes: int[E]. activation: a name or an `Activation`. b_in: [E, 2 or 1, F]. b_out: [E, D].
      row_weights: w [R]; 1 by default.
      weight_early: multiply a instead of y by w; the same result up to rounding and quantisation.
      slot_of_row: int[R]; rows with -1 are padding and zero in the result, even with biases.
      fp8_scales: quantises the operands x and W_in, a (or w a) and W_out; None: no quantisation.
      sent_dtype: with fp8_scales, x was sent quantised (`fp8.received`); the adapter of W_in reads it in this dtype.
      lora, lora_scale: a `lora.Lora` and its scales (s_in, s_out), or one number for both. The weights are then
        W_in[e] + s_in A_in[e] B_in[e] and W_out[e] + s_out A_out[e] B_out[e].
      lora_dtype: the factors, u and z' are rounded to it; None: no rounding.

    Returns: float64[R, D].
    """
    real = _real_rows(len(rows), group_sizes, slot_of_row)
    rows = np.where(real, as_float64(rows, "rows"), 0.0)
    w = 1.0 if row_weights is None else as_float64(row_weights, "row_weights")[:, None]
    of_in, of_out = adapters(lora, lora_scale, w_in.shape, lora_dtype)
    a = activate(_up(rows, w_in, b_in, of_in, group_sizes, fp8_scales, sent_dtype), activation)
    bias = 0.0 if b_out is None else _bias_rows(as_float64(b_out, "b_out"), group_sizes, len(rows))
    if weight_early:
        y = _down(w * a, w_out, of_out, group_sizes, fp8_scales) + w * bias
    else:
        y = w * (_down(a, w_out, of_out, group_sizes, fp8_scales) + bias)
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
    lora=None,
    lora_scale=1.0,
    lora_dtype=None,
):
    """Gradients of `expert_ffn`, the same for early and late weights; d_y [R, D] is d_out of the row's token.

    da' = d_y W_out^T;  d_w = <da', a> + <d_y, b_out>;  da = w da';  dh = phi'(h) da;
    dW_out = (w a)^T d_y;  db_out = sum w d_y;  dW_in = x^T dh;  db_in = sum dh;  dx = dh W_in^T.
    An adapter adds its part to da' and dx, see `lora.low_rank_backward`.

    saved_dtype: h is rounded to it, as in a forward pass that saves h in it, which matters where a slope jumps at a
      limit. dh is rounded to it before it is quantised.
    fp8_scales: da' = Q1(d_y) Q2(W_out)^T and dx = Q1(dh) Q2(W_in)^T; h is a GEMM of quantised operands too.
    sent_dtype: with fp8_scales, x and d_y were sent quantised (`fp8.received`); other reads are in this dtype.
    lora, lora_scale: as in `expert_ffn`. lora_dtype: the factors, u, z and both v are rounded to it.

    Returns: `ExpertGradients`. An expert without rows has gradients of exactly zero.
    """
    real = _real_rows(len(rows), group_sizes, slot_of_row)
    rows = np.where(real, as_float64(rows, "rows"), 0.0)
    d_y = np.where(real, as_float64(d_y, "d_y"), 0.0)
    w = np.ones((len(rows), 1))
    if row_weights is not None:
        w = np.where(real, as_float64(row_weights, "row_weights")[:, None], 0.0)
    of_in, of_out = adapters(lora, lora_scale, w_in.shape, lora_dtype)
    h = _up(rows, w_in, b_in, of_in, group_sizes, fp8_scales, sent_dtype)
    if saved_dtype is not None:
        h = h.astype(saved_dtype).astype(np.float64)
    a = activate(h, activation)
    d_lora = Lora()

    d_weighted_a, _ = grouped_matmul_backward(d_y, w * a, w_out, group_sizes, fp8_scales)
    rows, d_y = (_received(sent, fp8_scales, sent_dtype) for sent in (rows, d_y))
    if of_out is not None:
        added, d_a_out, d_b_out = low_rank_backward(d_y, w * a, of_out, group_sizes)
        d_weighted_a += added
        d_lora = d_lora._replace(a_out=d_a_out, b_out=d_b_out)
    _, d_w_out = grouped_matmul_backward(d_y, w * a, w_out, group_sizes)
    d_row_weights = (d_weighted_a * a).sum(-1)
    if b_out is not None:
        d_row_weights += (d_y * _bias_rows(as_float64(b_out, "b_out"), group_sizes, len(rows))).sum(-1)
    flat_w_in = np.reshape(w_in, (*w_in.shape[:2], -1))
    d_h = activate_backward(w * d_weighted_a, h, activation).reshape(len(rows), flat_w_in.shape[2])
    _, d_w_in = grouped_matmul_backward(d_h, rows, flat_w_in, group_sizes)
    d_h_saved = d_h if fp8_scales is None or saved_dtype is None else d_h.astype(saved_dtype)
    d_rows, _ = grouped_matmul_backward(d_h_saved, rows, flat_w_in, group_sizes, fp8_scales)
    if of_in is not None:
        added, d_a_in, d_b_in = low_rank_backward(d_h, rows, of_in, group_sizes)
        d_rows += added
        d_lora = d_lora._replace(a_in=d_a_in, b_in=d_b_in.reshape(*d_b_in.shape[:2], *w_in.shape[2:]))
    return ExpertGradients(
        d_rows,
        d_w_in.reshape(w_in.shape),
        d_w_out,
        None if b_in is None else _bias_gradient(d_h, group_sizes).reshape(np.shape(b_in)),
        None if b_out is None else _bias_gradient(w * d_y, group_sizes),
        None if row_weights is None else d_row_weights,
        None if lora is None else d_lora,
    )

"""Low-rank adapters (LoRA) of the experts in numpy float64, with their gradients.

`docs/semantics.md`, section 12, as code. An adapter of a matrix W[e] computes s x A[e] B[e], which is added to x W[e].
"""

from typing import NamedTuple

import numpy as np

from .scores import as_float64


class Lora(NamedTuple):
    """The LoRA factors of both projections, or their gradients. Both factors of a pair are arrays or None.

    a_in: [E or 1, D, r]. b_in: [E or 1, r, 2 or 1, F]. a_out: [E or 1, F, q]. b_out: [E or 1, q, D].
    """

    a_in: np.ndarray | None = None
    b_in: np.ndarray | None = None
    a_out: np.ndarray | None = None
    b_out: np.ndarray | None = None


class Adapter(NamedTuple):
    """The factors of one projection as operands of GEMMs, in float64.

    a: [E or 1, C, r]. b: [E or 1, r, N]. scale: s. dtype: what multiplies b or a^T is rounded to it; None: no rounding.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    dtype: np.dtype | None

    def of_expert(self, e):
        """A[e] and B[e]."""
        return (factor[e if len(factor) > 1 else 0] for factor in (self.a, self.b))


def groups(group_sizes, num_rows):
    """(expert, slice of its rows) for every expert, with slices clipped to num_rows."""
    offsets = np.minimum(np.concatenate([[0], np.cumsum(np.asarray(group_sizes, np.int64))]), num_rows)
    return [(e, slice(offsets[e], offsets[e + 1])) for e in range(len(offsets) - 1)]


def _rounded(array, dtype):
    return array if dtype is None else array.astype(dtype).astype(np.float64)


def adapter(a, b, scale, shape, dtype=None, names=("lora.a", "lora.b")):
    """The `Adapter` of matrices of this shape, [E, C, N] or [E, C, P, F]. names: of the factors, for messages."""
    E, C, *columns = shape
    shapes = [None if factor is None else np.shape(factor) for factor in (a, b)]
    ranks = [shape[axis] for shape, axis in zip(shapes, (-1, 1), strict=True) if shape is not None and len(shape) > 2]
    rank = max(ranks, default=0)
    for name, got, want in zip(names, shapes, ((C, rank), (rank, *columns)), strict=True):
        if got is None or got[1:] != want or got[0] not in (1, E) or rank < 1:
            shown = "None" if got is None else list(got)
            raise ValueError(f"{name}: got {shown}, expected [{E} or 1, {', '.join(map(str, want))}] with a rank >= 1")
    if not abs(scale) <= float(np.finfo(np.float32).max):
        raise ValueError(f"lora_scale: got {scale}, expected a finite float32 number")
    a, b = (_rounded(as_float64(factor, name), dtype) for factor, name in zip((a, b), names, strict=True))
    return Adapter(a, b.reshape(*b.shape[:2], -1), float(scale), dtype)


def adapters(lora, lora_scale, w_in_shape, dtype=None):
    """The adapters of both projections, each None without factors. lora_scale: (s_in, s_out), or one number for both.

    w_in_shape: [E, D, P, F]. dtype: as in `Adapter`.
    """
    E, D, _, F = w_in_shape
    scales = lora_scale if isinstance(lora_scale, (tuple, list)) else (lora_scale, lora_scale)
    lora = Lora() if lora is None else Lora(*lora)
    pairs = zip(("in", "out"), (lora[:2], lora[2:]), scales, (w_in_shape, (E, F, D)), strict=True)
    return [
        None if a is None and b is None else adapter(a, b, s, shape, dtype, (f"lora.a_{name}", f"lora.b_{name}"))
        for name, (a, b), s, shape in pairs
    ]


def low_rank(x, adapter, group_sizes):
    """rd(s x A[e]) B[e] on the rows of expert e; rows past the sum of the sizes are zero. [R, C] -> [R, N]."""
    y = np.zeros((len(x), adapter.b.shape[2]))
    for e, rows in groups(group_sizes, len(x)):
        a, b = adapter.of_expert(e)
        y[rows] = _rounded(adapter.scale * (x[rows] @ a), adapter.dtype) @ b
    return y


def low_rank_backward(d_y, x, adapter, group_sizes):
    """(d_x, d_A, d_B) of `low_rank`, with v = rd(s d_y B[e]^T) and u = rd(s x A[e]).

    d_x = v A[e]^T;  dA[e] = x^T v;  dB[e] = u^T d_y; the gradient of a shared factor is the sum over all experts.
    """
    d_x, d_a, d_b = np.zeros_like(x), np.zeros_like(adapter.a), np.zeros_like(adapter.b)
    for e, rows in groups(group_sizes, len(x)):
        a, b = adapter.of_expert(e)
        u, v = (_rounded(adapter.scale * thin, adapter.dtype) for thin in (x[rows] @ a, d_y[rows] @ b.T))
        d_x[rows] = v @ a.T
        d_a[e if len(d_a) > 1 else 0] += x[rows].T @ v
        d_b[e if len(d_b) > 1 else 0] += u.T @ d_y[rows]
    return d_x, d_a, d_b

"""The grouped GEMM in numpy float64, with its gradients.

`docs/semantics.md`, sections 6, 11 and 12, as code. Rows of one expert are contiguous, `group_sizes[e]` rows each. With
`fp8_scales`, "float32" or "power_of_two", it is an exact GEMM of quantised operands.
"""

import numpy as np

from .fp8 import rows_operand, weights_operand
from .lora import adapter, groups, low_rank, low_rank_backward
from .scores import as_float64


def grouped_matmul(x, w, group_sizes, fp8_scales=None, *, lora=None, lora_scale=1.0, lora_dtype=None):
    """y = x w[e] on the rows of expert e; rows past the sum of the sizes are zero.

    Args:
      x: [R, D]. w: [E, D, N]. group_sizes: int[E]. fp8_scales: quantises x and w; None: no quantisation.
      lora: (A [E or 1, D, r], B [E or 1, r, N]); adds s x A[e] B[e] to y, with s = lora_scale.
      lora_dtype: the factors and s x A are rounded to it; None: no rounding.

    Returns: float64[R, N].
    """
    left, right = rows_operand(x, fp8_scales), weights_operand(w, fp8_scales)
    y = np.zeros((left.shape[0], right.shape[2]))
    for e, rows in groups(group_sizes, left.shape[0]):
        y[rows] = left[rows] @ right[e]
    if lora is not None:
        y += low_rank(as_float64(x, "x"), adapter(*lora, lora_scale, np.shape(w), lora_dtype), group_sizes)
    return y


def grouped_matmul_backward(d_y, x, w, group_sizes, fp8_scales=None, *, lora=None, lora_scale=1.0, lora_dtype=None):
    """Gradients of `grouped_matmul`: d_x float64[R, D] = d_y w[e]^T and d_w float64[E, D, N] = x^T d_y.

    Rows past the sizes have zero gradients. With fp8_scales the operands of d_x are quantised; those of d_w are not.

    Returns: (d_x, d_w), with lora (d_x, d_w, (d_A, d_B)).
    """
    d_y, x = as_float64(d_y, "d_y"), as_float64(x, "x")
    left, right = rows_operand(d_y, fp8_scales), weights_operand(w, fp8_scales)
    d_x, d_w = np.zeros_like(x), np.zeros_like(right)
    for e, rows in groups(group_sizes, x.shape[0]):
        d_x[rows] = left[rows] @ right[e].T
        d_w[e] = x[rows].T @ d_y[rows]
    if lora is None:
        return d_x, d_w
    added, d_a, d_b = low_rank_backward(d_y, x, adapter(*lora, lora_scale, np.shape(w), lora_dtype), group_sizes)
    return d_x + added, d_w, (d_a, d_b)

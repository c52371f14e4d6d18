"""Error bounds of precision="tf32": GEMMs whose float32 operands are rounded to TF32.

An operand rounded to TF32 has a relative error of at most u = 2^-10. So the error of an element of a GEMM, a sum of n
terms a b, is at most (2 u + u^2) sum |a| |b|, and its float32 sum adds n 2^-23 of that in any rounding direction.
Errors have random signs, so the relative error of a whole matrix is below 2 u.

In the experts a GEMM adds 2 u to the errors of its operands, and an activation's slope or value doubles the error of
its argument (relu2 exactly; silu and gelu less where values are large). In the worst case errors add, so a bound is a
count of u:

    gate, up   a GEMM                                   2
    a          gate (twice), up                         6
    y          a, a GEMM                                8
    da'        a GEMM                                   2
    dh         gate (twice), up, da'                    8
    rows       dh, a GEMM                              10
    w_in       dh, a GEMM                              10
    b_in       dh                                       8
    w_out      a, a GEMM                                8
    b_out      no GEMM                                  0
    weights    da', a                                   8
"""

import numpy as np

U = 2.0**-10
#: The additional error of float32 sums.
FLOAT32 = 2e-6
COUNTS = {"y": 8, "rows": 10, "w_in": 10, "b_in": 8, "w_out": 8, "b_out": 0, "weights": 8}


def bound(name):
    """Bound of the relative error of a result of the experts, or of a gradient by its operand's name."""
    return COUNTS[name] * U + FLOAT32


def element_bound(terms, exact=False):
    """Error bound of a GEMM element with n terms, in units of sum |a| |b|; exact: whether TF32 represents operands."""
    return (0 if exact else 2 * U + U**2) + terms * 2.0**-23


def exact(array):
    """A float32 array rounded to numbers that TF32 represents exactly."""
    return (np.asarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def rounds(platform, dtype="float32"):
    """Whether the kernels of a platform round this dtype to TF32: those of a GPU round float32."""
    return platform == "gpu" and dtype == "float32"

"""What precision="tf32" may change, and by how much: bounds for products whose float32 operands are rounded to TF32.

An operand that is rounded to TF32 has a relative error of at most u = 2^-10. So an element of a product, a sum of n
terms a b, is off by at most (2 u + u^2) sum |a| |b|, and its float32 sum by n 2^-23 of that, rounded in whatever
direction. Errors have random signs, so that the relative error of a whole matrix is below 2 u.

In the network a product adds 2 u to the errors of its operands, and an activation's slope or value passes on twice the
error of its argument (relu2: exactly twice; silu and gelu: less where it matters). Errors add at worst, so a bound is a
count of u:

    gate, up   a product                                2
    a          gate (twice), up                         6
    y          a, a product                             8
    da'        a product                                2
    dh         gate (twice), up, da'                    8
    rows       dh, a product                           10
    w_in       dh, a product                           10
    b_in       dh                                       8
    w_out      a, a product                             8
    b_out      no product                               0
    weights    da', a                                   8
"""

import numpy as np

U = 2.0**-10
#: What float32 sums add to it.
FLOAT32 = 2e-6
COUNTS = {"y": 8, "rows": 10, "w_in": 10, "b_in": 8, "w_out": 8, "b_out": 0, "weights": 8}


def bound(name):
    """Of the relative error of a result of the network, or of a gradient by its operand's name."""
    return COUNTS[name] * U + FLOAT32


def of_element(terms, held=False):
    """Of the error of an element of a product of so many terms, in units of sum |a| |b|; held: operands as of `held`."""
    return (0 if held else 2 * U + U**2) + terms * 2.0**-23


def held(array):
    """An array of float32 as one of numbers that TF32 holds as they are."""
    return (np.asarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def rounds(platform, dtype="float32"):
    """Whether the kernels there round to TF32: those of a GPU do for float32."""
    return platform == "gpu" and dtype == "float32"

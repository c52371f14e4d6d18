"""Error bounds of precision="fp8" against the oracle, which multiplies the same quantised operands exactly.

Two errors remain. First, a GEMM sums in float32, or in fewer bits where tensor cores sum a block of 128: the error of
an element is at most DELTA times the norm of its terms. Second, a and dh are quantised after a GEMM, so that error may
move them to the other side of a rounding threshold: they then change by one step of e4m3, which is at most an eighth of
the value. `moves` computes this per element: it is 0 where both ends of the element's interval round to the same
number. The bounds propagate through the derivatives of the later steps; nearly all of them are at the level of float32.

For 16-bit dtypes the bound counts roundings, each with a relative error of at most the unit roundoff. There are few:
the oracle also rounds h and the dh that is quantised, and no implementation rounds `a` or da'.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from anabranch.activation import as_activation
from anabranch.reference import experts as reference
from anabranch.reference.fp8 import BLOCK, e4m3, quantize_rows, quantize_weights, received, scales_of

#: A sum of n float32 products has an error of about sqrt(n) 2^-24 times the norm of its terms; n is a few hundred.
FLOAT32 = 2e-6
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
E4M3 = ml_dtypes.float8_e4m3fn
#: Error of one element of a GEMM in units of the norm of its terms. Tensor cores sum with at least 14 bits.
DELTA = {"cpu": FLOAT32, "gpu": 2.0**-12}
ROUNDINGS = {"y": 1, "rows": 1, "w_in": 2, "b_in": 2, "w_out": 2, "b_out": 1, "weights": 0}


def rows_dtype(platform, dtype="float32"):
    """The dtype of a case's rows on this platform: FP8 on a GPU supports 16-bit rows only."""
    return "bfloat16" if platform == "gpu" and dtype == "float32" else dtype


def moves(v, off, fp8_scales):
    """The largest change of Q1(v), per element, if v [R, D] has an error of at most `off`."""
    v, off = (np.asarray(array, np.float64).reshape(len(v), -1, BLOCK) for array in (v, off))
    largest = np.abs(v).max(axis=2, keepdims=True, initial=0.0)
    at_largest = np.where(np.abs(v) + off >= largest, off, 0.0).max(axis=2, keepdims=True, initial=0.0)
    least_largest = np.maximum(largest - at_largest, 1e-300)
    scale_error = (
        np.where(largest > 0, at_largest / least_largest, 0.0) + 2.0**-22
    )  # the rounding of the scale to float32
    scales = scales_of(largest, fp8_scales).astype(np.float64)
    # An error of the scale moves every quotient and every dequantised value.
    reach = off * (1 + scale_error) + scale_error * np.abs(v)
    low, high = (e4m3(np.clip((v + sign * reach) / scales, -448, 448)) for sign in (-1, 1))
    moved = np.abs(high - low) * scales + scale_error * np.maximum(np.abs(high), np.abs(low)) * scales
    if fp8_scales == "power_of_two":  # Another power of two may be chosen, which rounds every quotient anew.
        ends = [scales_of(largest * (1 + sign * scale_error), fp8_scales) for sign in (-1, 1)]
        moved += np.where(ends[0] != ends[1], reach + np.abs(v) / 8 + scales / 256, 0.0)
    return moved.reshape(len(v), -1)


def _norm_of_terms(x, w, group_sizes):
    return np.sqrt(reference.grouped_matmul(x**2, w**2, group_sizes))


def _rounded(v, off, dtype):
    """(v rounded to dtype, the error bound of that when v has an error of at most `off`), as float64."""
    low, value, high = ((v + sign * off).astype(dtype).astype(np.float64) for sign in (-1, 0, 1))
    return value, np.maximum(high - value, value - low)


def _over_rows(left, right, group_sizes):
    """left^T right over the rows of every expert."""
    ends = np.concatenate([[0], np.cumsum(group_sizes)])
    return np.stack([left[ends[e] : ends[e + 1]].T @ right[ends[e] : ends[e + 1]] for e in range(len(group_sizes))])


class Moved(NamedTuple):
    """The error bound of each result, per element, without roundings to its own dtype; None for absent results."""

    y: np.ndarray
    rows: np.ndarray
    w_in: np.ndarray
    w_out: np.ndarray
    b_in: np.ndarray | None
    b_out: np.ndarray | None
    weights: np.ndarray | None


def bounds(net, activation, fp8_scales, *, weight_early, delta, sent=False):
    """The `Moved` of an `expert_cases.Network` (or an object with its fields) whose arrays are in our own layout.

    sent: rows and d_y were exchanged in quantised form.
    """
    given = {name: np.asarray(array, np.float64) for name, array in net.arrays.items()}
    d_y, sizes, dtype = np.asarray(net.d_y, np.float64), net.group_sizes, net.rows.dtype
    E, D, P, F = given["w_in"].shape
    act = as_activation(activation, P)
    used = np.arange(len(d_y)) < np.sum(sizes)
    d_y = np.where(used[:, None], d_y, 0.0)
    expert = np.minimum(np.repeat(np.arange(E + 1), [*sizes, len(d_y) - np.sum(sizes)]), E - 1)
    w = np.where(used, given.get("weights", np.ones(len(d_y))), 0.0)[:, None]
    x, q_out = quantize_rows(given["rows"], fp8_scales).exact(), quantize_weights(given["w_out"], fp8_scales).exact()
    q_in = quantize_weights(given["w_in"], fp8_scales).exact().reshape(E, D, P * F)

    def activated(h):
        return reference.activate(h.reshape(-1, P, F), act)

    def intermediate_gradient(h, d_a):
        return reference.activate_backward(d_a, h.reshape(-1, P, F), act).reshape(h.shape)

    h = reference.grouped_matmul(x, q_in, sizes)
    if "b_in" in given:
        h = h + np.where(used[:, None], given["b_in"].reshape(E, -1)[expert], 0.0)
    off_h = delta * _norm_of_terms(x, q_in, sizes)

    def off_activated(h, off_h):
        slopes = np.abs(intermediate_gradient(h, np.ones((len(h), F)))) * off_h
        return slopes.reshape(-1, P, F).sum(axis=1) + delta * np.abs(activated(h))

    # y
    early = w if weight_early else 1.0
    a, off_a = activated(h) * early, off_activated(h, off_h) * np.abs(early)
    y = reference.grouped_matmul(moves(a, off_a, fp8_scales), np.abs(q_out), sizes)
    y += delta * _norm_of_terms(quantize_rows(a, fp8_scales).exact(), q_out, sizes)
    y = y if weight_early else np.abs(w) * y
    # da' and dh, from the h saved for backward
    h, off_h = _rounded(h, off_h, dtype)
    a, off_a = activated(h), off_activated(h, off_h)
    back = quantize_rows(d_y, fp8_scales).exact()
    d_a = reference.grouped_matmul(back, q_out.swapaxes(1, 2), sizes)
    off_d_a = delta * _norm_of_terms(back, q_out.swapaxes(1, 2), sizes)
    d_h = intermediate_gradient(h, w * d_a)
    off_d_h = np.abs(intermediate_gradient(h, np.abs(w) * off_d_a)) + delta * np.abs(d_h)
    for signs in ((1, 1), (1, -1)):
        step = off_h * np.repeat(signs[:P], F)
        off_d_h += np.abs(intermediate_gradient(h + step, w * d_a) - intermediate_gradient(h - step, w * d_a))
    kept, off_kept = _rounded(d_h, off_d_h, dtype)
    rows = reference.grouped_matmul(moves(kept, off_kept, fp8_scales), np.abs(q_in).swapaxes(1, 2), sizes)
    rows += delta * _norm_of_terms(quantize_rows(kept, fp8_scales).exact(), q_in.swapaxes(1, 2), sizes)
    inputs = np.where(used[:, None], given["rows"], 0.0)
    if sent:
        inputs, d_y = (received(rows_sent, fp8_scales, dtype) for rows_sent in (inputs, d_y))
    weights = (off_a * np.abs(d_a) + np.abs(a) * off_d_a).sum(1) + delta * np.linalg.norm(a * d_a, axis=1)
    if "b_out" in given:
        weights += delta * np.linalg.norm(d_y * given["b_out"][expert], axis=1)

    def weight_gradient_moved(left, right, off_left, off_right):
        linear = _over_rows(np.abs(left), off_right, sizes) + _over_rows(off_left, np.abs(right), sizes)
        return linear + delta * np.sqrt(_over_rows(left**2, right**2, sizes))

    ones = np.ones((len(d_y), 1))
    return Moved(
        y,
        rows,
        weight_gradient_moved(inputs, d_h, 0 * inputs, off_d_h).reshape(E, D, P, F),
        weight_gradient_moved(w * a, d_y, np.abs(w) * off_a, 0 * d_y),
        weight_gradient_moved(ones, d_h, 0 * ones, off_d_h).reshape(E, P, F) if "b_in" in given else None,
        weight_gradient_moved(ones, w * d_y, 0 * ones, 0 * d_y)[:, 0] if "b_out" in given else None,
        weights if "weights" in given else None,
    )


def assert_within(got, want, moved, dtype, roundings, name, groups):
    """Checks the norm of each group's error: at most the norm of `moved` plus `roundings` roundings to dtype.

    groups: slices of the first axis.
    """
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape, name
    assert np.array_equal(np.isfinite(got), np.isfinite(want)), f"{name}: not finite in other places"
    u = UNIT_ROUNDOFF.get(str(dtype), 0.0)
    for part in groups:
        error, size = np.linalg.norm(got[part] - want[part]), np.linalg.norm(want[part])
        limit = np.linalg.norm(moved[part]) + roundings * u * size
        assert error <= limit, f"{name} {part}: off by {error:.3e}, bound {limit:.3e}, norm {size:.3e}"


def assert_network(net, activation, fp8_scales, y, gradients, *, weight_early=False, platform="cpu"):
    """Compares y and every gradient with the oracle, per expert; each gradient has its operand's dtype."""
    options = dict(group_sizes=net.group_sizes, activation=activation, b_in=net.b_in, b_out=net.b_out)
    options |= dict(row_weights=net.weights, fp8_scales=fp8_scales)
    dtype, arrays = net.rows.dtype, (net.rows, net.w_in, net.w_out)
    want_y = reference.expert_ffn(*arrays, **options, weight_early=weight_early)
    want = reference.expert_ffn_backward(net.d_y, *arrays, **options, saved_dtype=dtype)
    names = ("rows", "w_in", "w_out", "b_in", "b_out", "weights", "lora")
    want = {name: value for name, value in zip(names, want, strict=True) if value is not None}
    moved = bounds(net, activation, fp8_scales, weight_early=weight_early, delta=DELTA[platform])._asdict()
    ends = np.concatenate([[0], np.cumsum(net.group_sizes)])
    row_groups = [slice(*ends[e : e + 2]) for e in range(len(ends) - 1)]
    expert_groups = [slice(e, e + 1) for e in range(len(ends) - 1)]
    assert str(y.dtype) == str(dtype)
    assert_within(y, want_y, moved["y"], dtype, ROUNDINGS["y"], "y", row_groups)
    assert not np.asarray(y[ends[-1] :]).astype(np.float64).any(), "y past the groups"
    assert gradients.keys() == want.keys()
    for name, got in gradients.items():
        given = net.arrays[name].dtype
        assert str(got.dtype) == str(given), name
        by_row = name in ("rows", "weights")
        # A float32 gradient beside a 16-bit x is not rounded itself, but its terms are.
        roundings = ROUNDINGS[name] if name != "weights" else int(str(given) != "float32")
        rounded = given if name == "weights" else dtype
        assert_within(got, want[name], moved[name], rounded, roundings, name, row_groups if by_row else expert_groups)
        if by_row:
            assert not np.asarray(got[ends[-1] :]).astype(np.float64).any(), f"{name} past the groups"

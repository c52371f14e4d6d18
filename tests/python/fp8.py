"""How far results of precision="fp8" may be from the oracle's, which multiplies the same quantised factors exactly.

Two things are left. A product sums in float32, or in fewer bits where tensor cores sum a block of 128: an element is off
by at most DELTA times the norm of its terms. And what is quantised after a product, a and dh, may fall on the other side
of a rounding for it: then it moves by a step of e4m3, an eighth of itself at most. Which elements are that near, the
oracle knows: `moves` is 0 where both ends of what an element may be are rounded to one number. So bounds are computed
with the data, element by element, by the derivative of what comes behind; nearly all of them are at float32's level.

For 16-bit dtypes roundings are counted, each of a relative error of the unit roundoff at most. There are few: h and the dh
that is quantised are rounded in the oracle too, neither `a` nor da' ever is.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from anabranch.activation import as_activation
from anabranch.reference import experts as reference
from anabranch.reference.fp8 import BLOCK, e4m3, quantize_rows, quantize_weights, received, scales_of

#: A sum of n float32 products is off by about sqrt(n) 2^-24 of the norm of its terms, with n of some hundreds.
FLOAT32 = 2e-6
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
E4M3 = ml_dtypes.float8_e4m3fn
#: Of an element of a product, in units of the norm of its terms. A GPU's tensor cores keep at least 14 bits of a sum.
DELTA = {"cpu": FLOAT32, "gpu": 2.0**-12}
ROUNDINGS = {"y": 1, "rows": 1, "w_in": 2, "b_in": 2, "w_out": 2, "b_out": 1, "weights": 0}


def rows_dtype(platform, dtype="float32"):
    """In which a case's rows come on this platform: GPUs take 16 bits alone."""
    return "bfloat16" if platform == "gpu" and dtype == "float32" else dtype


def moves(v, off, fp8_scales):
    """How far Q1(v) may move where v [R, D] is off by `off`, elementwise."""
    v, off = (np.asarray(array, np.float64).reshape(len(v), -1, BLOCK) for array in (v, off))
    largest = np.abs(v).max(axis=2, keepdims=True, initial=0.0)
    at_largest = np.where(np.abs(v) + off >= largest, off, 0.0).max(axis=2, keepdims=True, initial=0.0)
    rest = np.maximum(largest - at_largest, 1e-300)
    of_scale = np.where(largest > 0, at_largest / rest, 0.0) + 2.0**-22  # float32 rounds it, too
    scales = scales_of(largest, fp8_scales).astype(np.float64)
    # A scale that is off moves all quotients, and all that is multiplied with it.
    reach = off * (1 + of_scale) + of_scale * np.abs(v)
    low, high = (e4m3(np.clip((v + sign * reach) / scales, -448, 448)) for sign in (-1, 1))
    moved = np.abs(high - low) * scales + of_scale * np.maximum(np.abs(high), np.abs(low)) * scales
    if fp8_scales == "power_of_two":  # which may be another one, under which every quotient is rounded anew
        ends = [scales_of(largest * (1 + sign * of_scale), fp8_scales) for sign in (-1, 1)]
        moved += np.where(ends[0] != ends[1], reach + np.abs(v) / 8 + scales / 256, 0.0)
    return moved.reshape(len(v), -1)


def _norm_of_terms(x, w, group_sizes):
    return np.sqrt(reference.grouped_matmul(x**2, w**2, group_sizes))


def _rounded(v, off, dtype):
    """(v in this dtype, how far that may be off where v is off by `off`), as float64."""
    low, value, high = ((v + sign * off).astype(dtype).astype(np.float64) for sign in (-1, 0, 1))
    return value, np.maximum(high - value, value - low)


def _over_rows(left, right, group_sizes):
    """left^T right over the rows of every expert."""
    ends = np.concatenate([[0], np.cumsum(group_sizes)])
    return np.stack([left[ends[e] : ends[e + 1]].T @ right[ends[e] : ends[e + 1]] for e in range(len(group_sizes))])


class Moved(NamedTuple):
    """How far each result may be off, elementwise, roundings to its own dtype aside; None where it is not there."""

    y: np.ndarray
    rows: np.ndarray
    w_in: np.ndarray
    w_out: np.ndarray
    b_in: np.ndarray | None
    b_out: np.ndarray | None
    weights: np.ndarray | None


def bounds(net, activation, fp8_scales, *, weight_early, delta, sent=False):
    """The `Moved` of an `expert_cases.Network`, or what is like one, whose arrays are in our own layout.

    sent: rows and d_y travelled quantised.
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

    def hidden_gradient(h, d_a):
        return reference.activate_backward(d_a, h.reshape(-1, P, F), act).reshape(h.shape)

    h = reference.grouped_matmul(x, q_in, sizes)
    if "b_in" in given:
        h = h + np.where(used[:, None], given["b_in"].reshape(E, -1)[expert], 0.0)
    off_h = delta * _norm_of_terms(x, q_in, sizes)

    def off_activated(h, off_h):
        slopes = np.abs(hidden_gradient(h, np.ones((len(h), F)))) * off_h
        return slopes.reshape(-1, P, F).sum(axis=1) + delta * np.abs(activated(h))

    # y
    early = w if weight_early else 1.0
    a, off_a = activated(h) * early, off_activated(h, off_h) * np.abs(early)
    y = reference.grouped_matmul(moves(a, off_a, fp8_scales), np.abs(q_out), sizes)
    y += delta * _norm_of_terms(quantize_rows(a, fp8_scales).exact(), q_out, sizes)
    y = y if weight_early else np.abs(w) * y
    # da' and dh, from the h that is kept
    h, off_h = _rounded(h, off_h, dtype)
    a, off_a = activated(h), off_activated(h, off_h)
    back = quantize_rows(d_y, fp8_scales).exact()
    d_a = reference.grouped_matmul(back, q_out.swapaxes(1, 2), sizes)
    off_d_a = delta * _norm_of_terms(back, q_out.swapaxes(1, 2), sizes)
    d_h = hidden_gradient(h, w * d_a)
    off_d_h = np.abs(hidden_gradient(h, np.abs(w) * off_d_a)) + delta * np.abs(d_h)
    for of_parts in ((1, 1), (1, -1)):
        step = off_h * np.repeat(of_parts[:P], F)
        off_d_h += np.abs(hidden_gradient(h + step, w * d_a) - hidden_gradient(h - step, w * d_a))
    kept, off_kept = _rounded(d_h, off_d_h, dtype)
    rows = reference.grouped_matmul(moves(kept, off_kept, fp8_scales), np.abs(q_in).swapaxes(1, 2), sizes)
    rows += delta * _norm_of_terms(quantize_rows(kept, fp8_scales).exact(), q_in.swapaxes(1, 2), sizes)
    inputs = np.where(used[:, None], given["rows"], 0.0)
    if sent:
        inputs, d_y = (received(rows_sent, fp8_scales, dtype) for rows_sent in (inputs, d_y))
    weights = (off_a * np.abs(d_a) + np.abs(a) * off_d_a).sum(1) + delta * np.linalg.norm(a * d_a, axis=1)
    if "b_out" in given:
        weights += delta * np.linalg.norm(d_y * given["b_out"][expert], axis=1)

    def of_weights(left, right, off_left, off_right):
        linear = _over_rows(np.abs(left), off_right, sizes) + _over_rows(off_left, np.abs(right), sizes)
        return linear + delta * np.sqrt(_over_rows(left**2, right**2, sizes))

    ones = np.ones((len(d_y), 1))
    return Moved(
        y,
        rows,
        of_weights(inputs, d_h, 0 * inputs, off_d_h).reshape(E, D, P, F),
        of_weights(w * a, d_y, np.abs(w) * off_a, 0 * d_y),
        of_weights(ones, d_h, 0 * ones, off_d_h).reshape(E, P, F) if "b_in" in given else None,
        of_weights(ones, w * d_y, 0 * ones, 0 * d_y)[:, 0] if "b_out" in given else None,
        weights if "weights" in given else None,
    )


def assert_within(got, want, moved, dtype, roundings, name, groups):
    """Every group's part by itself, in norms: no further off than what may move, and the roundings of a dtype.

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
    """y and every gradient of a network against the oracle, a tensor and an expert, in the dtype of what it is of."""
    options = dict(group_sizes=net.group_sizes, activation=activation, b_in=net.b_in, b_out=net.b_out)
    options |= dict(row_weights=net.weights, fp8_scales=fp8_scales)
    dtype, arrays = net.rows.dtype, (net.rows, net.w_in, net.w_out)
    want_y = reference.expert_ffn(*arrays, **options, weight_early=weight_early)
    want = reference.expert_ffn_backward(net.d_y, *arrays, **options, saved_dtype=dtype)
    names = ("rows", "w_in", "w_out", "b_in", "b_out", "weights")
    want = {name: value for name, value in zip(names, want, strict=True) if value is not None}
    moved = bounds(net, activation, fp8_scales, weight_early=weight_early, delta=DELTA[platform])._asdict()
    ends = np.concatenate([[0], np.cumsum(net.group_sizes)])
    of_rows = [slice(*ends[e : e + 2]) for e in range(len(ends) - 1)]
    of_experts = [slice(e, e + 1) for e in range(len(ends) - 1)]
    assert str(y.dtype) == str(dtype)
    assert_within(y, want_y, moved["y"], dtype, ROUNDINGS["y"], "y", of_rows)
    assert not np.asarray(y[ends[-1] :]).astype(np.float64).any(), "y past the groups"
    assert gradients.keys() == want.keys()
    for name, got in gradients.items():
        given = net.arrays[name].dtype
        assert str(got.dtype) == str(given), name
        by_row = name in ("rows", "weights")
        # What is float32 beside a 16-bit x is not rounded, but what it is the sum of is.
        roundings = ROUNDINGS[name] if name != "weights" else int(str(given) != "float32")
        rounded = given if name == "weights" else dtype
        assert_within(got, want[name], moved[name], rounded, roundings, name, of_rows if by_row else of_experts)
        if by_row:
            assert not np.asarray(got[ends[-1] :]).astype(np.float64).any(), f"{name} past the groups"

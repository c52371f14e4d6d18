"""precision="fp8" of grouped_matmul and expert_ffn against the oracle's quantised GEMMs, with the bounds of `fp8`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import named, network, random_array

import fp8
from anabranch import torch
from anabranch.activation import Activation
from anabranch.jax import expert_ffn, grouped_matmul, quantize_experts
from anabranch.layouts import Layouts
from anabranch.reference import experts as reference
from anabranch.reference.fp8 import quantize_rows, quantize_weights
from frameworks import BOTH, call, in_torch, with_gradients

pytestmark = BOTH

#: Uneven groups: one without rows, one of a single row; three rows follow the groups.
SIZES = np.array([40, 0, 23, 1, 50], np.int32)
SPARE = 3
R = int(SIZES.sum()) + SPARE


def run(net, w_in_layout="dpf", w_out_layout="fd", quantized=None, **options):
    """(y, gradients by name) of expert_ffn with FP8 and with weights and gradients in these layouts."""
    of, laid_out = Layouts(w_in_layout, w_out_layout), ("w_in", "w_out", "b_in")
    options = dict(precision="fp8", quantized=quantized) | options
    options |= dict(w_in_layout=w_in_layout, w_out_layout=w_out_layout)
    operands = {name: np.asarray(array) for name, array in net.arrays.items()}
    operands |= {name: operands[name].transpose(of.from_ours(name)) for name in laid_out if name in operands}
    operands["group_sizes"] = np.asarray(net.group_sizes)
    functions = (partial(function, **options) for function in (expert_ffn, torch.expert_ffn))
    y, found = with_gradients(*functions, operands, np.asarray(net.d_y))
    return y, found | {name: found[name].transpose(of.order(name)) for name in laid_out if name in found}


def quantized_of(net, **options):
    """The experts of a network, quantised by the current framework."""
    given = np.asarray(net.w_in), np.asarray(net.w_out)
    if not in_torch():
        return jax.jit(partial(quantize_experts, **options))(*given)
    from in_torch import tensor

    return torch.quantize_experts(*map(tensor, given), **options)


@pytest.mark.parametrize(
    ("dtype", "D", "parts", "F", "activation", "fp8_scales", "weight_early", "layouts"),
    [
        ("float32", 384, 2, 128, "silu", "float32", False, ("dpf", "fd")),
        ("float32", 128, 1, 384, "relu2", "power_of_two", True, ("pfd", "df")),
        ("bfloat16", 256, 2, 256, "gelu", "power_of_two", False, ("pfd", "df")),
        ("bfloat16", 128, 2, 384, Activation.swiglu_oai(limit=0.9), "float32", True, ("dfp", "fd")),
        ("float16", 384, 2, 128, Activation.situ(a=0.7, b=1.1), "float32", False, ("fpd", "df")),
    ],
)
def test_the_network(platform, dtype, D, parts, F, activation, fp8_scales, weight_early, layouts):
    """Checks the output and every gradient per expert, with uneven groups and experts without rows."""
    dtype = fp8.rows_dtype(platform, dtype)
    net = network(np.random.default_rng(31), SIZES, D, parts, F, dtype=dtype, spare=SPARE)
    options = dict(activation=activation, weight_early=weight_early, fp8_scales=fp8_scales)
    y, gradients = run(net, *layouts, **options)
    fp8.assert_network(net, activation, fp8_scales, y, gradients, weight_early=weight_early, platform=platform)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("dtype", "D", "N"), [("float32", 384, 128), ("bfloat16", 128, 384)])
def test_grouped_matmul(platform, transpose_w, dtype, D, N):
    rng, sizes, dtype = np.random.default_rng(33), SIZES, fp8.rows_dtype(platform, dtype)
    x, d_y = random_array(rng, (R, D), dtype), random_array(rng, (R, N), dtype)
    w = random_array(rng, (len(sizes), N, D) if transpose_w else (len(sizes), D, N), dtype)
    options = dict(transpose_w=transpose_w, precision="fp8", fp8_scales="power_of_two")
    operands = {"x": np.asarray(x), "w": np.asarray(w), "group_sizes": sizes}
    functions = (partial(function, **options) for function in (grouped_matmul, torch.grouped_matmul))
    y, gradients = with_gradients(*functions, operands, np.asarray(d_y))
    got = {"y": y} | gradients
    w = np.asarray(w, np.float64).swapaxes(1, 2) if transpose_w else np.asarray(w, np.float64)
    want = {"y": reference.grouped_matmul(x, w, sizes, "power_of_two")}
    want["x"], want["w"] = reference.grouped_matmul_backward(d_y, x, w, sizes, "power_of_two")
    q = quantize_weights(w, "power_of_two").exact()
    terms = {
        "y": reference.grouped_matmul(quantize_rows(x).exact() ** 2, q**2, sizes),
        "x": reference.grouped_matmul(quantize_rows(d_y).exact() ** 2, (q**2).swapaxes(1, 2), sizes),
        "w": reference.grouped_matmul_backward(np.float64(d_y) ** 2, np.float64(x) ** 2, q, sizes)[1],
    }
    ends = np.concatenate([[0], np.cumsum(sizes)])
    row_groups, expert_groups = [slice(*ends[e : e + 2]) for e in range(5)], [slice(e, e + 1) for e in range(5)]
    for name, exact in want.items():
        found = np.asarray(got[name])
        found = found.swapaxes(1, 2) if name == "w" and transpose_w else found
        moved = fp8.DELTA[platform] * np.sqrt(terms[name])
        fp8.assert_within(found, exact, moved, dtype, 1, name, expert_groups if name == "w" else row_groups)
        if name != "w":
            assert not found[ends[-1] :].astype(np.float64).any()


def test_experts_that_are_quantised_before_give_the_same_bits():
    """With and without the tensors for the backward pass. The GEMMs read the quantised tensors, not the weights."""
    net = network(np.random.default_rng(34), SIZES, 128, 2, 256, dtype="bfloat16", spare=SPARE)
    other = network(np.random.default_rng(35), SIZES, 128, 2, 256, dtype="bfloat16")
    y, gradients = run(net, fp8_scales="power_of_two")
    for of in (dict(gradients=True), dict(gradients=False)):
        again, found = run(net, fp8_scales="power_of_two", quantized=quantized_of(net, fp8_scales="power_of_two", **of))
        np.testing.assert_array_equal(np.asarray(again), np.asarray(y))
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(gradient), err_msg=name)
    net.w_in, net.w_out, quantized = other.w_in, other.w_out, quantized_of(net, fp8_scales="power_of_two")
    again, found = run(net, fp8_scales="power_of_two", quantized=quantized)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(y))
    np.testing.assert_array_equal(np.asarray(found["rows"]), np.asarray(gradients["rows"]))


@pytest.mark.parametrize("layouts", [("dpf", "fd"), ("fpd", "df")])
def test_quantised_experts_are_the_oracles_to_the_bit(layouts):
    net = network(np.random.default_rng(36), SIZES, 256, 2, 384, dtype="float32")
    of = Layouts(*layouts)
    stored = [np.asarray(getattr(net, name)).transpose(of.from_ours(name)) for name in ("w_in", "w_out")]
    options = dict(w_in_layout=layouts[0], w_out_layout=layouts[1], fp8_scales="power_of_two")
    found = call(quantize_experts, _bytes_of_torch, *stored, **options)
    for name, axes in (("w_in", (0, 2, 3, 1)), ("w_out", (0, 2, 1))):
        want = quantize_weights(getattr(net, name), "power_of_two")
        q, transposed, scales = (np.asarray(a) for a in found[:3]) if name == "w_in" else map(np.asarray, found[3:])
        as_floats = [array.view(fp8.E4M3).astype(np.float32) for array in (q, transposed)]
        np.testing.assert_array_equal(as_floats[0], want.values)
        np.testing.assert_array_equal(as_floats[1], want.values.transpose(axes))
        np.testing.assert_array_equal(scales, want.scales)


def _bytes_of_torch(*arrays, **options):
    """quantize_experts in torch, with its e4m3 tensors as bytes for numpy."""
    import torch as pytorch

    found = torch.quantize_experts(*arrays, **options)
    return tuple(a.view(pytorch.uint8) if a.dtype == pytorch.float8_e4m3fn else a for a in found)


def test_zeros_outliers_and_tiny_numbers_have_blocks_of_their_own(platform):
    """A value of 1e4 reduces the precision of the other values of its block, and does not affect other blocks."""
    net = network(np.random.default_rng(37), SIZES, 256, 2, 128, dtype=fp8.rows_dtype(platform), spare=SPARE)
    rows, w_in, d_y = (np.array(a) for a in (net.rows, net.w_in, net.d_y))
    rows[3, :128], rows[5, 200], rows[8], d_y[42, 128:256], d_y[9, 5] = 0, 1e4, rows[8] * 1e-30, 0, -1e4
    w_in[2, 7, 1, 3], w_in[0, 128:256, 0] = 1e4, 0
    net.rows, net.w_in, net.d_y = map(jnp.asarray, (rows, w_in, d_y))
    fp8.assert_network(net, "silu", "float32", *run(net), platform=platform)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_make_their_block_nan(platform, bad):
    """NaN in a row affects that row's results, NaN in a matrix those of its expert, as in the oracle."""
    net = network(np.random.default_rng(38), SIZES, 256, 2, 128, dtype=fp8.rows_dtype(platform), spare=SPARE)
    clean = all_results(run(net))
    ends = np.concatenate([[0], np.cumsum(SIZES)])
    bad_row, bad_expert_rows = ends[2] + 5, np.arange(ends[4], ends[5])
    rows, w_out = np.array(net.rows), np.array(net.w_out)
    rows[bad_row, 9], w_out[4, 17, 200] = bad, bad
    net.rows, net.w_out = jnp.asarray(rows), jnp.asarray(w_out)
    found = all_results(run(net))
    given = dict(group_sizes=SIZES, activation="silu", b_in=net.b_in, b_out=net.b_out, row_weights=net.weights)
    given["fp8_scales"] = "float32"
    with np.errstate(invalid="ignore"):
        want = reference.expert_ffn_backward(net.d_y, net.rows, net.w_in, net.w_out, **given)
        y = reference.expert_ffn(net.rows, net.w_in, net.w_out, **given)
    want = named(want) | {"y": y}
    for name, array in found.items():
        np.testing.assert_array_equal(np.isnan(array), np.isnan(want[name]), err_msg=name)
        by_row = name in ("y", "rows", "weights")
        hit = [bad_row, *bad_expert_rows] if by_row else [2, 4]
        assert name == "b_out" or np.isnan(array[hit]).any()
        np.testing.assert_array_equal(np.delete(array, hit, 0), np.delete(clean[name], hit, 0), err_msg=name)


def all_results(run):
    y, gradients = run
    return {"y": np.asarray(y)} | {name: np.asarray(array) for name, array in gradients.items()}


def test_sizes_are_clipped_to_the_rows(platform):
    net = network(np.random.default_rng(39), [9, 0, 7], 128, 2, 128, dtype=fp8.rows_dtype(platform))
    y, gradients = run(net)
    net.group_sizes = np.array([9, -5, 2**31 - 1], np.int32)
    again, found = run(net)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(y))
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(gradient), err_msg=name)


def test_a_gpu_accepts_only_16_bit_rows(platform):
    net = network(np.random.default_rng(39), [9, 0, 7], 128, 2, 128)
    if platform == "cpu":
        run(net)
        return
    errors = NotImplementedError, jax.errors.JaxRuntimeError
    with pytest.raises(errors, match=r"precision: got AB_PRECISION_FP8, .* rows are float32"):
        np.asarray(run(net)[0])

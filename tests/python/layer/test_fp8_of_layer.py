"""precision="fp8" of the whole layer and of the layer after the router against the oracle; the router is unchanged."""

import numpy as np
import pytest

import fp8
from anabranch import torch
from anabranch.jax import QuantizedExperts, quantize_experts
from anabranch.reference import moe as reference
from fp8_layers import assert_layer, check_routed
from frameworks import BOTH, in_torch
from moe_cases import BOUND, gate_terms, operands, run_layer, selected
from oracle import assert_close_per_expert
from routed_cases import routed_operands, run_routed

pytestmark = BOTH


def quantized_of(arrays, **options):
    """The experts, quantised by the current framework."""
    given = arrays["w_in"], arrays["w_out"]
    if not in_torch():
        return quantize_experts(*given, **options)
    from in_torch import tensor

    return torch.quantize_experts(*map(tensor, given), **options)


@pytest.mark.parametrize(
    ("dtype", "fp8_scales", "weight_early", "layouts"),
    [
        ("float32", "power_of_two", False, {}),
        ("bfloat16", "float32", True, dict(w_in_layout="pfd", w_out_layout="df")),
        ("float16", "float32", False, dict(w_in_layout="dfp")),
    ],
)
def test_the_layer_after_the_router(platform, dtype, fp8_scales, weight_early, layouts):
    """The cases include repeated experts, -1 and an expert without tokens; 16-bit layers have float32 matrices."""
    arrays = routed_operands(60, 5, 2, 256, 128, dtype=fp8.rows_dtype(platform, dtype), bias=True)
    arrays["experts"] = np.where(arrays["experts"] == 3, 4, arrays["experts"])
    for name in ("w_in", "w_out"):
        arrays[name] = arrays[name].astype(np.float32)
    options = dict(activation="silu", weight_early=weight_early, fp8_scales=fp8_scales)
    _, gradients = check_routed(arrays, platform, **options, **layouts)
    assert not np.asarray(gradients["w_in"][3]).any() and not np.asarray(gradients["w_out"][3]).any()


def test_the_whole_layer(platform):
    """The router, its losses and its gradients equal those of "highest", except for gradients from the experts."""
    dtype = fp8.rows_dtype(platform)
    arrays = operands(48, 4, 2, 128, 256, bias=True, cold=1, dtype=dtype)
    options = dict(topk=2, aux_loss_coeff=0.1, z_loss_coeff=0.01)
    highest, _, _ = run_layer(arrays, **options)
    result, gradients, cotangents = run_layer(arrays, precision="fp8", **options)
    for name in ("aux_loss", "z_loss", "tokens_per_expert", "dropped", "experts", "weights"):
        np.testing.assert_array_equal(getattr(result, name), getattr(highest, name), err_msg=name)
    main = [arrays[name] for name in ("x", "gate", "w_in", "w_out")]
    settings = dict(experts=selected(arrays, options), **{n: arrays[n] for n in ("gate_bias", "b_in", "b_out")})
    settings["saved_dtype"] = arrays["x"].dtype
    want = reference.moe_backward(*main, *cotangents, **options, **settings, fp8_scales="float32")
    found = reference.moe(*main, **options, **settings, fp8_scales="float32")
    got = {name: np.asarray(array) for name, array in gradients.items()} | {"output": np.asarray(result.output)}
    experts_options = dict(activation="silu", fp8_scales="float32")
    d_output, weights = cotangents[0], np.asarray(result.weights, np.float32)
    assert_layer(
        arrays,
        np.asarray(result.experts),
        weights,
        d_output,
        got,
        want | {"output": found.output},
        experts_options,
        platform,
    )
    # The router's cotangent d_w = <da', a> does not pass through an e4m3 rounding that a sum could tip.
    terms = gate_terms(arrays, options | settings, want)
    limit = BOUND[dtype] + BOUND["float32"] * fp8.DELTA[platform] / fp8.DELTA["cpu"]
    for name, axis in (("gate", 1), ("gate_bias", 0)):
        assert_close_per_expert(got[name], want[name], 4 * limit, f"d_{name}", axis, terms[name])


@pytest.mark.parametrize("gradients", [True, False])
def test_experts_that_are_quantised_before_give_the_same_bits(gradients):
    arrays = routed_operands(40, 4, 2, 128, 128, dtype="bfloat16")
    for name in ("w_in", "w_out"):
        arrays[name] = arrays[name].astype(np.float32)
    want, found, _ = run_routed(arrays, precision="fp8")
    got, again, _ = run_routed(arrays, precision="fp8", quantized=quantized_of(arrays, gradients=gradients))
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
    for name, gradient in found.items():
        np.testing.assert_array_equal(np.asarray(again[name]), np.asarray(gradient), err_msg=name)


def test_bad_arguments_are_refused():
    arrays = operands(6, 2, 1, 128, 128)
    quantized, kind = quantized_of(arrays), torch.QuantizedExperts if in_torch() else QuantizedExperts
    assert type(quantized) is kind
    narrow = operands(6, 2, 1, 64, 128)
    for wrong, options, error, message in (
        (
            narrow,
            dict(),
            ValueError,
            r'w_in: got .*2, 64, 2, 128\], expected D a multiple of 128, since precision="fp8"',
        ),
        (arrays, dict(fp8_scales="mx"), ValueError, "fp8_scales: got 'mx', expected one of 'float32', 'power_of_two'"),
        (arrays, dict(precision="tf32", fp8_scales="power_of_two"), ValueError, "fp8_scales: got 'power_of_two' with"),
        (arrays, dict(precision="highest", quantized=quantized), ValueError, "quantized: got QuantizedExperts with"),
        (arrays, dict(quantized=tuple(quantized)), TypeError, "quantized: got tuple, expected a QuantizedExperts"),
        (
            arrays,
            dict(quantized=quantized._replace(w_in=quantized.w_out)),
            ValueError,
            r"quantized\.w_in: got float8_e4",
        ),
        (arrays, dict(quantized=quantized._replace(w_in_scales=None)), TypeError, r"quantized\.w_in_scales: got None"),
        (
            arrays,
            dict(quantized=quantized._replace(w_out=quantized.w_out_scales)),
            TypeError,
            r"quantized\.w_out: got f",
        ),
    ):
        with pytest.raises(error, match=message):
            run_layer(wrong, topk=1, **dict(precision="fp8") | options)
    with pytest.raises(ValueError, match=r"w_in: got .*, expected D a multiple of 128"):
        quantized_of(narrow)

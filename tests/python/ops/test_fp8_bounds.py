"""The bounds of precision="fp8": its results are within them, and results of other GEMMs are not."""

import numpy as np
import pytest
from expert_cases import named, network

import fp8
from anabranch.reference import experts as reference
from anabranch.reference.fp8 import FP8_SCALES, quantize_rows

SIZES = np.array([20, 0, 13, 1], np.int32)


@pytest.mark.parametrize("fp8_scales", FP8_SCALES)
def test_quantised_values_move_within_the_bound(fp8_scales):
    """Values with errors of up to `off`; many are near a rounding threshold, some are the largest of their block."""
    rng = np.random.default_rng(40)
    v = rng.standard_normal((40, 256)) * 10.0 ** rng.integers(-3, 3, (40, 1))
    v[::3, 5] = 448 * 2.0 ** rng.integers(-3, 3, 14)  # a block maximum near the next power-of-two scale
    for size in (1e-6, 1e-3):
        off = size * np.abs(rng.standard_normal(v.shape)) * np.abs(v)
        moved, before = fp8.moves(v, off, fp8_scales), quantize_rows(v, fp8_scales).exact()
        for _ in range(4):
            after = quantize_rows(v + rng.choice([-1, -0.5, 0.5, 1], v.shape) * off, fp8_scales).exact()
            assert (np.abs(after - before) <= moved * (1 + 1e-6)).all()
        # For most values `moves` is tiny: one step of e4m3 is at least 1/16 of the value.
        assert np.mean((moved > np.abs(v) / 32)[1::3]) < (0.01 if size < 1e-4 else 0.1)


def results(net, fp8_scales):
    """The oracle's results in float32."""
    given = dict(group_sizes=SIZES, activation="silu", b_in=net.b_in, b_out=net.b_out, row_weights=net.weights)
    arrays = net.rows, net.w_in, net.w_out
    y = reference.expert_ffn(*arrays, **given, fp8_scales=fp8_scales).astype(np.float32)
    gradients = reference.expert_ffn_backward(net.d_y, *arrays, **given, fp8_scales=fp8_scales)
    return y, {name: value.astype(np.float32) for name, value in named(gradients).items()}


def test_the_bounds_exclude_results_of_other_gemms():
    """One result is computed with other scales or by exact GEMMs."""
    net = network(np.random.default_rng(32), SIZES, 256, 2, 128)
    y, gradients = results(net, "float32")
    fp8.assert_network(net, "silu", "float32", y, gradients)
    for fp8_scales in ("power_of_two", None):
        other_y, others = results(net, fp8_scales)
        wrong = {"y": (other_y, gradients)}
        wrong |= {name: (y, gradients | {name: others[name]}) for name in ("rows", "w_in", "weights")}
        for name, mixed in wrong.items():
            for platform in fp8.DELTA if name == "rows" else ("cpu",):
                with pytest.raises(AssertionError, match=f"^{name} slice"):
                    fp8.assert_network(net, "silu", "float32", *mixed, platform=platform)

"""precision="tf32" of the whole layer and of the layer after the router, against "highest" and the oracle."""

import numpy as np
import pytest

import tf32
from anabranch.reference import moe as reference
from frameworks import BOTH
from moe_cases import EXPERT_AXIS, operands, run_layer
from oracle import assert_close, assert_close_per_expert
from routed_cases import routed_operands, run_routed

pytestmark = BOTH


@pytest.mark.parametrize("weight_early", [False, True])
def test_the_rounded_layer_is_within_its_bounds(weight_early):
    arrays = routed_operands(90, 6, 2, 40, 56, bias=True)
    arrays["experts"] = np.where(arrays["experts"] == 4, 5, arrays["experts"])  # an expert without tokens
    options = dict(activation="silu", weight_early=weight_early)
    (output, counts, _), gradients, d_output = run_routed(arrays, precision="tf32", **options)
    assert counts[4] == 0 < counts[5]
    want = reference.routed_experts_backward(**arrays, **options, d_output=d_output)
    assert_close(output, reference.routed_experts(**arrays, **options).output, tf32.bound("y"), "output")
    for name, got in gradients.items():
        limit = tf32.bound({"x": "rows"}.get(name, name))
        assert_close(got, want[name], limit, f"d_{name}")
        if name in EXPERT_AXIS:
            assert_close_per_expert(got, want[name], limit, f"d_{name}", EXPERT_AXIS[name])


def test_only_the_experts_of_a_gpu_round(platform):
    """The gate, its selection and the losses equal those of "highest"."""
    arrays = operands(40, 5, 2, 24, 32, bias=True, cold=1)
    options = dict(topk=2, aux_loss_coeff=0.1, z_loss_coeff=0.01)
    highest, gradients, _ = run_layer(arrays, **options)
    rounded, gradients_of_rounded, _ = run_layer(arrays, precision="tf32", **options)
    differ = tf32.rounds(platform)
    for name, value in highest._asdict().items():
        if value is not None:
            assert np.array_equal(value, getattr(rounded, name)) != (differ and name == "output"), name
    for name, value in gradients.items():
        assert np.array_equal(value, gradients_of_rounded[name]) != (differ and name != "b_out"), name

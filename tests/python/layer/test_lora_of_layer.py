"""LoRA in moe and routed_experts against the oracle: output, losses, counts and every gradient, per expert."""

import numpy as np
import pytest

from anabranch.lora import NAMES
from anabranch.reference import moe as reference
from frameworks import both, only_torch
from lora_cases import CASES, SCALES, lora_factors, oracle_options, with_factors
from moe_cases import check_layer, operands
from oracle import assert_close, assert_close_per_expert
from routed_cases import check_routed, routed_operands, run_routed

pytestmark = pytest.mark.usefixtures("platform")

T, E, K, D, F = 23, 6, 2, 12, 9


def options_of(name):
    """(options, operands, factors) of a case."""
    options, ranks, shared, projections, dtype, factor_dtype = CASES[name]
    factors = lora_factors(E, D, 2, F, ranks, shared=shared, projections=projections, dtype=factor_dtype)
    return options | {"lora_scale": SCALES}, dtype, factors


@both
@pytest.mark.parametrize("name", CASES)
def test_moe(name):
    options, dtype, factors = options_of(name)
    arrays = operands(T, E, K, D, F, dtype=dtype, bias=True, skew=2.0, cold=1) | factors
    check_layer(arrays, topk=K, aux_loss_coeff=0.1, align_size=4, **options)


@both
@pytest.mark.parametrize("name", CASES)
def test_routed_experts(name):
    options, dtype, factors = options_of(name)
    arrays = routed_operands(T, E, K, D, F, wrong=True, dtype=dtype, bias=True) | factors
    check_routed(arrays, **options)


@both
def test_fp8():
    check_fp8({}, None)


@only_torch
def test_fp8_exchange():
    """The exchange of a group quantises x."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_fp8({"group": dist.group.WORLD, "fp8_exchange": True, "transport": "all_to_all"}, np.float32)
    finally:
        dist.destroy_process_group()


def check_fp8(group, sent_dtype):
    """Products with W are quantised, those with the factors are not."""
    arrays = routed_operands(T, E, K, 128, 128) | lora_factors(E, 128, 2, 128, shared=("a_in",))
    options = {"lora_scale": SCALES}
    (output, *_), gradients, d_output = run_routed(arrays, precision="fp8", **options, **group)
    given = {name: array for name, array in arrays.items() if name not in NAMES}
    options |= oracle_options(arrays) | {"fp8_scales": "float32", "sent_dtype": sent_dtype}
    # A value near the middle of two e4m3 numbers may be rounded to either.
    assert_close(output, reference.routed_experts(**given, **options).output, 1e-3, "output")
    want = with_factors(reference.routed_experts_backward(**given, **options, d_output=d_output))
    for name, gradient in gradients.items():
        assert_close(gradient, want[name], 1e-3, name)
    for name in NAMES:
        assert_close_per_expert(gradients[name], want[name], 4e-3, name)

"""LoRA in moe and routed_experts against the oracle: output, losses, counts and every gradient, per expert."""

import pytest

from frameworks import BOTH
from lora_cases import CASES, SCALES, lora_factors
from moe_cases import check_layer, operands
from routed_cases import check_routed, routed_operands

pytestmark = BOTH

T, E, K, D, F = 23, 6, 2, 12, 9


def options_of(name):
    """(options, operands, factors) of a case."""
    options, ranks, shared, projections, dtype, factor_dtype = CASES[name]
    factors = lora_factors(E, D, 2, F, ranks, shared=shared, projections=projections, dtype=factor_dtype)
    return options | {"lora_scale": SCALES}, dtype, factors


@pytest.mark.parametrize("name", CASES)
def test_moe(name):
    options, dtype, factors = options_of(name)
    arrays = operands(T, E, K, D, F, dtype=dtype, bias=True, skew=2.0, cold=1) | factors
    check_layer(arrays, topk=K, aux_loss_coeff=0.1, align_size=4, **options)


@pytest.mark.parametrize("name", CASES)
def test_routed_experts(name):
    options, dtype, factors = options_of(name)
    arrays = routed_operands(T, E, K, D, F, wrong=True, dtype=dtype, bias=True) | factors
    check_routed(arrays, **options)

"""Tokens that travel to a group's ranks as FP8: results are the oracle's, and those of tokens that travel as they are."""

import dataclasses
import math

import numpy as np
import pytest
import torch.distributed as dist
from fp8_layers import assert_layer
from moe_cases import operands
from routed_cases import routed_operands
from test_group import kept_slots, run, whole

from anabranch.reference import moe as reference

T, E, K, D, F, RANKS = 48, 8, 3, 256, 128, 4
FP8 = {"precision": "fp8"}
SENT = FP8 | {"fp8_exchange": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """As those of test_group.py, wide enough for blocks of 128."""

    transport: str
    options: dict
    dtype: str = "bfloat16"
    bias: bool = True
    routed: bool = True
    wrong: bool = False  # an infinity and a NaN among the tokens
    capacity_factor: float | None = None
    compiled: bool = False
    module: bool = False
    data: int = 1
    own_stream: bool = False
    num_experts: int = E

    def arrays(self):
        if not self.routed:
            return operands(T, E, K, D, F, dtype=self.dtype, skew=3.0, cold=1)
        arrays = routed_operands(T, E, K, D, F, dtype=self.dtype, bias=self.bias)
        experts = np.where(arrays["experts"] == 5, 6, arrays["experts"])
        experts[::2, 0] = 3
        if self.wrong:
            arrays["x"][3, 130], arrays["x"][9, 7] = np.nan, -np.inf
        wide = {name: arrays[name].astype(np.float32) for name in ("w_in", "w_out")}
        return {name: array for name, array in (arrays | wide | {"experts": experts}).items() if array is not None}


def pair(**options):
    """Without and with tokens that travel as FP8."""
    given = {"bias": False, **options}
    return [Case(options=sent | given.get("options", {}), **{k: v for k, v in given.items() if k != "options"})
            for sent in (FP8, SENT)]  # fmt: skip


OF_ORACLE = [
    Case("ring", SENT),
    Case("all_to_all", SENT | {"weight_early": True, "fp8_scales": "power_of_two", "align_size": 8}),
    Case("ring", SENT | {"weight_early": True}, capacity_factor=0.6),
    Case("all_to_all", SENT, "float32", capacity_factor=0.6),
]
PAIRS = [
    *pair(transport="ring", wrong=True),
    *pair(transport="all_to_all", wrong=True, options={"fp8_scales": "power_of_two"}),
    *pair(transport="all_to_all", routed=False, options={"topk": K, "aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}),
]
OF_COMPILED = [
    dataclasses.replace(PAIRS[5], compiled=compiled, transport=transport)
    for transport in ("ring", "all_to_all")
    for compiled in (False, True)
]


def check_by_oracle(case, arrays, cotangents, found):
    kept, experts = None, arrays["experts"]
    if case.capacity_factor is not None:
        kept = kept_slots(experts, RANKS, math.ceil(case.capacity_factor * (T // RANKS) * K))
        assert ((experts >= 0) & ~kept).sum() > 10
        experts = np.where(kept, experts, -1)
    settings = dict(activation="silu", fp8_scales=case.options.get("fp8_scales", "float32"))
    settings["weight_early"] = case.options.get("weight_early", False)
    output = reference.routed_experts(**arrays, **settings, kept=kept).output
    of_backward = dict(kept=kept, kept_dtype=arrays["x"].dtype, sent_dtype=arrays["x"].dtype)
    want = reference.routed_experts_backward(**arrays, **settings, **of_backward, d_output=cotangents["d_output"])
    got = {name[2:]: whole(found, name, 1) for name in found[0] if name.startswith("d_")}
    got["output"] = whole(found, "output", 1)
    d_output, weights = cotangents["d_output"], np.asarray(arrays["weights"], np.float32)
    assert_layer(arrays, experts, weights, d_output, got, want | {"output": output}, settings, sent=True)


def check_pair(found_without, found_with):
    """To the bit, but for gradients of the experts' matrices; those are near."""
    for without, sent in zip(found_without, found_with, strict=True):
        for name, want in without.items():
            got, want = (np.asarray(array, np.float64) for array in (sent[name], want))
            if name not in ("d_w_in", "d_w_out"):
                np.testing.assert_array_equal(got, want, err_msg=name)
                continue
            finite = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=name)
            error, size = np.linalg.norm((got - want)[finite]), np.linalg.norm(want[finite])
            assert size == 0 or 2.0**-9 < error / size < 2.0**-4, f"{name}: {error / size}"


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")
def test_four_ranks(tmp_path):
    found = run(tmp_path, [*OF_ORACLE, *PAIRS, *OF_COMPILED], RANKS)
    of_pairs = [of_case[2] for of_case in found[len(OF_ORACLE) :]]
    for case, of_case in zip(OF_ORACLE, found, strict=False):
        check_by_oracle(case, *of_case)
    for i in range(0, len(PAIRS), 2):
        check_pair(*of_pairs[i : i + 2])
    assert any(np.isnan(rank["output"].astype(np.float32)).any() for rank in of_pairs[0])
    for i in range(len(PAIRS), len(of_pairs), 2):
        for eager, compiled in zip(of_pairs[i], of_pairs[i + 1], strict=True):
            for name, want in eager.items():
                np.testing.assert_array_equal(compiled[name], want, err_msg=name)

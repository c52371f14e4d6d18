"""FP8 exchange of tokens in a group: results are the oracle's, and those of an unquantised exchange."""

import dataclasses
import math

import numpy as np
import pytest
import test_group
import torch
import torch.distributed as dist
from test_group import kept_slots, run, whole

import anabranch.torch as ab
import in_torch
from anabranch.reference import moe as reference
from anabranch.reference.fp8 import received
from anabranch.torch.parallel.message import dequantize, pack, quantize_rows, unpack
from fp8_layers import assert_layer
from moe_cases import operands
from routed_cases import routed_operands

T, E, K, D, F, RANKS = 48, 8, 3, 256, 128, 4
FP8 = {"precision": "fp8"}
SENT = FP8 | {"fp8_exchange": True}


@dataclasses.dataclass(frozen=True)
class Case(test_group.Case):
    """Cases as in test_group.py, with D a multiple of 128; most have given experts."""

    dtype: str = "bfloat16"
    routed: bool = True
    bias: bool = True
    wrong: bool = False  # the tokens include an infinity and a NaN
    tokens: int = T
    options: dict = dataclasses.field(default_factory=lambda: SENT)

    def arrays(self):
        if not self.routed:
            return operands(self.tokens, E, K, D, F, dtype=self.dtype, bias=self.module, skew=3.0, cold=1)
        arrays = routed_operands(self.tokens, E, K, D, F, dtype=self.dtype, bias=self.bias)
        experts = np.where(arrays["experts"] == 5, 6, arrays["experts"])
        experts[::2, 0] = 3
        if self.wrong:
            arrays["x"][3, 130], arrays["x"][9, 7] = np.nan, -np.inf
        wide = {name: arrays[name].astype(np.float32) for name in ("w_in", "w_out")}
        return {name: array for name, array in (arrays | wide | {"experts": experts}).items() if array is not None}


def pair(transport, options=(), **fields):
    """Runs each case without and with FP8 exchange."""
    return [Case(transport, bias=False, options=sent | dict(options), **fields) for sent in (FP8, SENT)]


LOSSES = {"topk": K, "aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}
OF_ORACLE = [
    Case("ring"),
    Case("all_to_all", options=SENT | {"weight_early": True, "fp8_scales": "power_of_two", "align_size": 8}),
    Case("ring", capacity_factor=0.6, options=SENT | {"weight_early": True}),
    Case("all_to_all", "float32", capacity_factor=0.6),
]
PAIRS = [
    *pair("ring", wrong=True),
    *pair("all_to_all", {"fp8_scales": "power_of_two"}, wrong=True),
    *pair("all_to_all", LOSSES, routed=False),
    *pair("ring", LOSSES, routed=False, module=True),
]
OF_COMPILED = [
    Case(transport, routed=False, compiled=compiled, options=SENT | LOSSES)
    for transport in ("ring", "all_to_all")
    for compiled in (False, True)
]
OF_NOTHING = [Case("ring", tokens=0), Case("all_to_all", tokens=0)]
CASES = {"oracle": OF_ORACLE, "pairs": PAIRS, "nothing": OF_NOTHING}


def check_by_oracle(case, arrays, cotangents, found):
    kept, experts = None, arrays["experts"]
    if case.capacity_factor is not None:
        kept = kept_slots(experts, RANKS, math.ceil(case.capacity_factor * (T // RANKS) * K))
        assert ((experts >= 0) & ~kept).sum() > 10
        experts = np.where(kept, experts, -1)
    settings = dict(activation="silu", fp8_scales=case.options.get("fp8_scales", "float32"))
    settings["weight_early"] = case.options.get("weight_early", False)
    output = reference.routed_experts(**arrays, **settings, kept=kept).output
    backward_options = dict(kept=kept, saved_dtype=arrays["x"].dtype, sent_dtype=arrays["x"].dtype)
    want = reference.routed_experts_backward(**arrays, **settings, **backward_options, d_output=cotangents["d_output"])
    got = {name[2:]: whole(found, name, 1) for name in found[0] if name.startswith("d_")}
    got["output"] = whole(found, "output", 1)
    d_output, weights = cotangents["d_output"], np.asarray(arrays["weights"], np.float32)
    assert_layer(arrays, experts, weights, d_output, got, want | {"output": output}, settings, sent=True)


def check_pair(found_without, found_with):
    """All results have equal bits, except for gradients of the experts' matrices, which are near.

    With b_out, d_out itself enters the gradients of the weights, and through them those of the router.
    """
    matrices = ("d_w_in", "d_w_out")
    for without, sent in zip(found_without, found_with, strict=True):
        assert sent.keys() == without.keys()
        for name, want in without.items():
            got, want = (np.asarray(array, np.float64) for array in (sent[name], want))
            if name in matrices:
                finite = np.isfinite(want)
                np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=name)
                error, size = np.linalg.norm((got - want)[finite]), np.linalg.norm(want[finite])
                assert size == 0 or 2.0**-9 < error / size < 2.0**-4, f"{name}: {error / size}"
            elif "d_b_out" not in sent or not name.startswith("d_"):
                np.testing.assert_array_equal(got, want, err_msg=name)


def check_equal(found, others):
    for one, other in zip(found, others, strict=True):
        for name, want in one.items():
            np.testing.assert_array_equal(other[name], want, err_msg=name)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")
def test_four_ranks(tmp_path):
    cases = [case for some in CASES.values() for case in some]
    found = iter(run(tmp_path, cases, RANKS))
    of = {name: [next(found) for _ in some] for name, some in CASES.items()}
    for case, of_case in zip(OF_ORACLE, of["oracle"], strict=True):
        check_by_oracle(case, *of_case)
    of = {name: [of_ranks for *_, of_ranks in some] for name, some in of.items()}
    for without, sent in zip(of["pairs"][::2], of["pairs"][1::2], strict=True):
        check_pair(without, sent)
    assert any(np.isnan(rank["output"].astype(np.float32)).any() for rank in of["pairs"][0])
    for rank in [rank for some in of["nothing"] for rank in some]:
        assert rank["output"].shape == rank["d_x"].shape == (0, D) and not any(array.any() for array in rank.values())


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")
def test_compiled_cases_have_the_bits_of_eager_ones(tmp_path):
    """Two ranks, because each of them compiles."""
    found = [of_ranks for *_, of_ranks in run(tmp_path, OF_COMPILED, 2)]
    for eager, compiled in zip(found[::2], found[1::2], strict=True):
        check_equal(eager, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["ring", "p2p", "all_to_all"])
def test_two_ranks_of_a_gpu_each(tmp_path, transport):
    """With NCCL, or copies; a GPU sums in the same order with and without FP8 exchange."""
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FEWER THAN 2 HOPPER GPUS FOUND: the FP8 exchange between GPUs is not tested")
    (*_, without), (*_, sent) = run(tmp_path, pair(transport), 2, "nccl")
    check_pair(without, sent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fp8_scales", ["float32", "power_of_two"])
def test_a_message_preserves_every_bit(dtype, fp8_scales):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 384)) * np.exp2(rng.integers(-14, 1, (40, 384)))
    x[0, :5], x[1, 128:256], x[2, 300], x[3, 0] = 0.0, 0.0, np.nan, np.inf
    x[4, :2] = 65504.0, 65000.0  # the largest float16, whose power-of-two scale overflows it
    tensor = torch.tensor(x).to(getattr(torch, dtype))
    rows = quantize_rows(tensor, ["float32", "power_of_two"].index(fp8_scales))
    message = pack(rows)
    assert message.dtype == torch.int32 and message.nbytes == x.size * 33 // 32
    arrived = unpack(message, 384)
    for got, want in zip(arrived, rows, strict=True):
        assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    read = dequantize(arrived, tensor.dtype)
    assert read.dtype == tensor.dtype
    x = in_torch.array(tensor)
    np.testing.assert_array_equal(read.double(), received(x, fp8_scales, x.dtype))


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_fp8_exchange_without_fp8_or_an_exchange_is_refused(group_of_one):
    arrays = {n: in_torch.tensor(a) for n, a in operands(8, E, K, D, F).items() if a is not None}
    routed = {n: in_torch.tensor(a) for n, a in routed_operands(8, E, K, D, F).items() if a is not None}
    calls = (
        lambda **options: ab.moe(**arrays, topk=K, **options),
        lambda **options: ab.routed_experts(**routed, **options),
        lambda **options: ab.MoE(D, F, num_experts=E, topk=K, **options),
    )
    for call in calls:
        with pytest.raises(ValueError, match='fp8_exchange: got True without precision="fp8", expected False'):
            call(group=group_of_one, fp8_exchange=True)
        with pytest.raises(ValueError, match="fp8_exchange: got True without group, expected False"):
            call(**SENT)
        with pytest.raises(TypeError, match="fp8_exchange: got int 1, expected True or False"):
            call(group=group_of_one, precision="fp8", fp8_exchange=1)

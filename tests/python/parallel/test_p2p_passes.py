"""The C calls of the halves of a pass over the memory of peers, without running them."""

import ctypes

import pytest
import torch

from anabranch.lora import NAMES
from anabranch.options import ExpertsOptions
from anabranch.torch.binding.described import Described, Size
from anabranch.torch.ops.factors import factor_arguments
from anabranch.torch.ops.gradients import request
from anabranch.torch.parallel import p2p_passes
from anabranch.torch.parallel.p2p_passes import PASSES

T, D, F, E, K, P, RANK = 64, 128, 256, 8, 2, 4, 3
R = P * T * K
TOKENS, SMALL = 5, 6  # stand for the addresses of the exchanges
FINISH = 2  # part of a call


def described(*shape, dtype=torch.bfloat16):
    return Described(shape, dtype)


def network(adapters, precision):
    """The arguments NETWORK."""
    options = ExpertsOptions(precision=precision).experts(2, 0, None).network()
    factors = (None,) * 4
    if adapters:
        factors = [torch.zeros(E // P, *shape) for shape in ((D, 8), (8, 2, F), (F, 8), (8, D))]
    arguments = factor_arguments(factors)
    arguments = [described(*a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
    return (
        *(described(E // P, D, 2, F), None, described(E // P, F, D), None, None, None, None, None),
        *arguments,
        *options._replace(topk=K),
    )


def calls_of(name, *arguments):
    """(name, options) of the calls of a half; checks that their structs have all fields."""
    one = PASSES[name]
    results = one.allocate(*arguments)
    exchanges = p2p_passes._Exchanges(ctypes.c_void_p(TOKENS), ctypes.c_void_p(SMALL))
    found = []
    functions = {
        "experts": p2p_passes._experts_calls,
        "hidden": p2p_passes._hidden_calls,
        "inputs": p2p_passes._inputs_calls,
    }
    for call in functions[name](exchanges, results, *arguments):
        struct = call.operation.struct()
        for field in call.tensors:
            assert hasattr(struct, field), (call.operation.name, field)
        options = {}
        for field, value in call.options.items():
            if not isinstance(value, Size):
                setattr(struct, field, value)
            options[field] = value.value if isinstance(value, ctypes.c_void_p) else value
        found.append((call.operation.name, options))
    return found, results


def names_of(found):
    return [name for name, _ in found if not name.startswith("quantize")]


def only(found, name):
    (options,) = [options for known, options in found if known == name]
    return options


MAPS = described(P * T, K, dtype=torch.int32), described(R, dtype=torch.int32), described(E // P, dtype=torch.int32)


@pytest.mark.parametrize("precision", ["highest", "fp8"])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_forward_pass(adapters, precision):
    experts, weights = described(T, K, dtype=torch.int32), described(T, K, dtype=torch.float32)
    counts = described(1, E + P, dtype=torch.int32)
    given = network(adapters, precision)
    found, results = calls_of(
        "experts", described(T, D), described(P * T, D), experts, weights, counts, R, P, RANK, 0, *given
    )
    assert names_of(found) == [
        "exchange_all_gather", "plan", "expert_ffn_forward", "exchange_release", "grouped_matmul_combine", "exchange_sum",
    ]  # fmt: skip
    assert only(found, "exchange_all_gather")["exchange"] == SMALL
    plan = only(found, "plan")
    assert (plan["is_part"], plan["first_expert"], plan["num_experts"]) == (1, RANK * E // P, E // P)
    up, down = only(found, "expert_ffn_forward"), only(found, "grouped_matmul_combine")
    assert (up["arriving"], up["arriving_buffer"]) == (TOKENS, 0)
    assert (down["returning"], down["returning_buffer"]) == (TOKENS, 2)
    assert only(found, "exchange_release") == {"exchange": TOKENS, "buffer": 0}
    assert only(found, "exchange_sum") == {"exchange": TOKENS, "buffer": 2, "factor": 1.0}
    assert [result.shape for result in results[:2]] == [(T, D), (R, 2, F)] and results[5].shape == (P, E + P)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_first_half_of_the_backward_pass(adapters):
    names = ("x", "w_in", "w_out", "weights", *(NAMES if adapters else ()))
    w_in, b_in, w_out, b_out, *others = network(adapters, "highest")
    u = described(R, 8) if adapters else None
    requested = request(dict.fromkeys(names, True))
    found, results = calls_of(
        "hidden", described(T, D), described(T, D), described(P * T, D), described(R, 2, F), described(P * T, D),
        described(P * T, K, dtype=torch.float32), *MAPS[1:], w_in, b_in, w_out, b_out, u, torch.bfloat16, requested,
        *others,
    )  # fmt: skip
    # With adapters x is read here, so it must have arrived.
    waits = ["exchange_all_gather"] if adapters else []
    assert names_of(found) == [*waits, "expert_ffn_backward", "exchange_release", "exchange_all_to_all"]
    if adapters:
        assert only(found, "exchange_all_gather") == {"exchange": TOKENS, "buffer": 1, "part": FINISH}
    hidden = only(found, "expert_ffn_backward")
    assert (hidden["arriving"], hidden["arriving_buffer"]) == (TOKENS, 0)
    assert only(found, "exchange_release") == {"exchange": TOKENS, "buffer": 0}
    assert only(found, "exchange_all_to_all")["exchange"] == SMALL
    assert results[-1].shape == (P * T, K)


@pytest.mark.parametrize("needs_w_in", [False, True])
def test_the_second_half_of_the_backward_pass(needs_w_in):
    w_in, b_in, w_out, _, *others = network(False, "highest")
    empty = described(0)
    found, results = calls_of(
        "inputs", described(T, D), described(P * T, D), described(T, D), *MAPS, torch.float32, float(P),
        described(R, 2, F), empty, empty, empty, torch.bfloat16, request({"w_in": needs_w_in}), w_in, b_in, w_out,
        *others,
    )  # fmt: skip
    weights = ["expert_ffn_backward"] if needs_w_in else []
    assert names_of(found) == [
        "exchange_all_gather", "grouped_matmul_combine", *weights, "exchange_release", "exchange_sum",
    ]  # fmt: skip
    assert only(found, "exchange_all_gather") == {"exchange": TOKENS, "buffer": 1, "part": FINISH}
    combine = only(found, "grouped_matmul_combine")
    assert (combine["returning"], combine["returning_buffer"]) == (TOKENS, 2)
    assert only(found, "exchange_release") == {"exchange": TOKENS, "buffer": 1}
    assert only(found, "exchange_sum") == {"exchange": TOKENS, "buffer": 2, "factor": float(P)}
    assert results[0].shape == (T, D) and results[0].dtype == torch.float32
    assert results[1].shape == ((E // P, D, 2, F) if needs_w_in else (0,))

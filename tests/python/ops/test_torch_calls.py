"""The calls of the C functions on torch's tensors, and the operations as torch registers them."""

import concurrent.futures

import numpy as np
import pytest
import torch

from anabranch.options import Network, RouterOptions
from anabranch.precision import FP8, HIGHEST, TF32
from anabranch.torch.binding import calls, define
from anabranch.torch.binding.described import Sizes
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.factors import NO_FACTORS, factor_arguments, stored_factors
from anabranch.torch.ops.gradients import OPERANDS, request
from anabranch.torch.ops.layer_ops import layer_numbers


def test_a_status_raises_with_the_librarys_message():
    x, w = torch.zeros(4, 3), torch.zeros(2, 5, 6)
    with pytest.raises(ValueError, match=r"w: got .*\[2, 5, 6\], expected"):
        torch_ops.grouped_matmul(x, w, torch.zeros(2, dtype=torch.int32), False, HIGHEST, 0)


def test_an_integer_beyond_int32_is_an_error():
    """ctypes would wrap around."""
    with pytest.raises(ValueError, match="num_experts: got 4294967296, expected an integer that int32 holds"):
        torch_ops.plan(torch.zeros(4, 1, dtype=torch.int32), 2**32, 4, 0, 1)


@pytest.fixture
def prepared(monkeypatch):
    """An empty cache, and the list of the calls that are prepared."""
    made = []

    initialise = calls.PreparedCalls.__init__

    def recorded(self, *arguments):
        initialise(self, *arguments)
        made.append(self)

    monkeypatch.setattr(calls.PreparedCalls, "__init__", recorded)
    define.forget_prepared()
    return made


def test_calls_are_prepared_once_for_all_sizes_and_threads(prepared):
    """A backward pass on a GPU runs on another thread than its forward pass."""

    def call(n):
        sizes = torch.tensor([n], dtype=torch.int32)
        assert torch_ops.grouped_matmul(torch.ones(n, 2), torch.ones(1, 2, 1), sizes, False, HIGHEST, 0).sum() == 2 * n

    for n in (71, 72, 0, 71, 1):
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(call, n).result()
    assert len(prepared) == 1


def test_prepared_calls_are_used_by_one_thread_at_a_time_and_not_cached_for_ever(monkeypatch):
    class Fits:
        def fit(self, inputs):
            return inputs == [1]

    monkeypatch.setattr(define, "_MOST_PREPARED", 2)
    cache, kept = define._FreeCalls(), [Fits() for _ in range(4)]
    assert cache.take("a", [1]) is None
    cache.give_back("a", kept[0])
    assert cache.take("a", [2]) is None
    assert cache.take("a", [1]) is kept[0] and cache.take("a", [1]) is None
    cache.give_back("a", kept[0])
    cache.give_back("b", kept[2])
    cache.give_back("a", kept[1])
    cache.give_back("c", kept[3])  # removes b, which was used least recently
    assert cache.take("b", [1]) is None and cache.take("c", [1]) is kept[3]
    assert {cache.take("a", [1]), cache.take("a", [1])} == set(kept[:2]) and cache.take("a", [1]) is None


def test_numbers_follow_the_sizes_until_a_comparison_has_another_outcome():
    sizes = Sizes([10, 3])
    T, K = sizes.input(0), sizes.input(1)
    numbers = [2 * T * K - 1, -(-T // 4), (K + 1) % T, T.smaller(7), 5 - K]
    indices = [sizes.index(number) for number in numbers]
    assert K < T and not K >= T and bool(K) and T != K
    for inputs in ([10, 3], [5, 0], [6, 5], [2**40, 2]):
        values = sizes.evaluate(inputs)
        n, k = inputs
        if not k:
            assert values is None
        else:
            assert [values[i] for i in indices] == [2 * n * k - 1, -(-n // 4), (k + 1) % n, min(n, 7), 5 - k]
    assert sizes.evaluate([3, 3]) is None
    with pytest.raises(TypeError, match="no constant"):
        range(T)


def test_a_tensor_given_twice_is_two_tensors_of_the_prepared_calls():
    """Calls that were prepared for one tensor given twice also serve two different tensors."""
    x, sizes = torch.arange(8.0).view(4, 2), torch.tensor([1, 3], dtype=torch.int32)
    once = torch_ops.grouped_matmul_dw(x, x, sizes, torch.float32, HIGHEST, False)
    for left, right in ((x, x + 1), (x + 1, x), (x, x)):
        got = torch_ops.grouped_matmul_dw(left, right, sizes, torch.float32, HIGHEST, False)
        assert torch.equal(got, torch.stack([left[:1].T @ right[:1], left[1:].T @ right[1:]]))
    assert torch.equal(once, got)


T, E, K, D, F, R = 10, 4, 2, 6, 5, 24


def normal(*shape):
    return torch.tensor(np.random.default_rng(0).standard_normal(shape), dtype=torch.float32)


NO_QUANTIZED = (None,) * 4
ALL = request(dict.fromkeys(OPERANDS, True))
WITHOUT_LORA = request(dict.fromkeys(OPERANDS[:6], True))


def samples():
    """(operation, arguments) of every operation."""
    logits, bias, mask = normal(T, E), normal(E), torch.arange(T) % 3 > 0
    routing = (K, 1, True, 2.5, 0, 0, 0)
    weights, experts, _, score_sum, lse, _ = torch_ops.route(
        logits, None, mask, None, None, -1, 0, True, True, True, *routing
    )
    bounds = torch.tensor([-1.0, 1.0])
    yield torch_ops.route, (logits, bias, mask, None, bounds, -1, 7, True, False, True, *routing)
    yield torch_ops.route, (logits, None, None, experts, None, 2, 0, False, True, False, *routing)
    yield torch_ops.route_backward, (logits, experts, mask, lse, weights, score_sum, lse, *routing)
    for map_format, bins in (("bytemap", 7), ("bitmap_u8", 0), ("", 0)):
        of_bins = (bias, bounds) if bins else (None, None)
        yield torch_ops.route_dense, (logits, *of_bins, map_format, bins, *routing)
    yield torch_ops.route_dense_backward, (logits, experts, logits, *routing)
    yield torch_ops.aux_scores, (logits, K, 0, "bitmap_u8")
    yield torch_ops.aux_scores_backward, (logits.to(torch.bfloat16), logits, 2)
    loads, tokens, of_loss = torch.ones(E, dtype=torch.int64), torch.tensor(T), (K, E, 0.1)
    yield torch_ops.moe_aux_loss, (logits, loads, tokens, *of_loss)
    yield torch_ops.moe_aux_loss_backward, (torch.tensor(2.0), loads, tokens, T, torch.float16, *of_loss)
    routed = logits > 0
    yield torch_ops.plan_of_map, (routed, R, 2)
    row_id_map = torch_ops.plan_of_map(routed, R, 2)[3]
    yield torch_ops.expand_row_id_map, (row_id_map, torch.arange(E, dtype=torch.int32), R)
    yield torch_ops.expand_row_id_map, (row_id_map, None, 3)
    layout = torch_ops.plan(experts, E, R, 2, 1)
    yield torch_ops.plan, (experts, E, R, 2, 2)
    _, group_sizes, _, row_of_slot, slot_of_row, _ = layout
    x, rows = normal(T, D), normal(R, D)
    yield torch_ops.dispatch, (x, row_of_slot, slot_of_row, None)
    yield torch_ops.dispatch, (x, row_of_slot, slot_of_row, weights)
    yield torch_ops.combine, (rows, row_of_slot, weights, x, torch.bfloat16)
    yield torch_ops.combine_backward, (x, rows, row_of_slot, slot_of_row, weights, torch.float32, True)
    yield torch_ops.combine_backward, (x, None, row_of_slot, slot_of_row, None, torch.bfloat16, False)
    yield (
        torch_ops.sort_chunks,
        (rows, torch.tensor([5, 9, 10], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32), False),
    )
    yield torch_ops.grouped_matmul, (rows, normal(E, 3, D), group_sizes, True, TF32, 0)
    yield torch_ops.grouped_matmul_dw, (rows, normal(R, 3), group_sizes, torch.float32, TF32, True)
    network = (8, 1.702, 7.0, False, 0, "dfp", "df", TF32, 0, 0.0, 0.0)
    w_in, b_in, w_out, b_out = normal(E, D, F, 2), normal(E, F, 2), normal(E, D, F), normal(E, D)
    experts_of = (group_sizes, w_in, b_in, w_out, b_out)
    a_in, b_of_in, a_out, b_of_out = normal(1, D, 3), normal(E, 3, 2, F), normal(E, 2, F).mT, normal(E, 2, D)
    for needs_y in (True, False):
        of_matmul = stored_factors((a_in, normal(E, 5, 3).mT))
        matmul = (rows, normal(E, 5, D), group_sizes, *of_matmul, True, TF32, 0, 0.5, needs_y)
        yield torch_ops.grouped_matmul_lora, matmul
    factors = (*NO_QUANTIZED, *factor_arguments((a_in, b_of_in, a_out, b_of_out)))
    none = (*NO_QUANTIZED, *NO_FACTORS)
    scaled, dtypes = (*network[:-2], 0.5, -2.0), (torch.float32, torch.float32)
    for options in ((*none, *network), (*factors, *scaled)):
        yield torch_ops.ffn, (rows, None, *experts_of, normal(R), *options)
        _, h, u = torch_ops.ffn(rows, None, *experts_of, normal(R), *options)
        operands = (rows, h, rows, None, *experts_of, normal(R), u if u.numel() else None, *dtypes)
        yield torch_ops.ffn_backward, (*operands, ALL if u.numel() else WITHOUT_LORA, *options)
    operands = (rows, h, rows, None, group_sizes, w_in, None, w_out, None, None, None, *dtypes)
    yield torch_ops.ffn_backward, (*operands, request({"x": True, "w_out": True}), *none, *network)
    network, scaled = ((*options[:4], K, *options[5:]) for options in (network, scaled))
    for options, requested in (
        ((*none, *network), WITHOUT_LORA),
        ((*none, *network), request({"b_in": True})),
        ((*none, *network), request({"w_out": True})),
        ((*factors, *scaled), ALL),
        ((*factors, *scaled), request({"lora_b_in": True})),
    ):
        forward = (x, None, None, weights, row_of_slot, slot_of_row, *experts_of, *options)
        yield torch_ops.experts, forward
        _, h, u, _ = torch_ops.experts(*forward)
        hidden = (x, None, None, h, x, weights, slot_of_row, *experts_of, u, torch.float32, requested, *options)
        yield torch_ops.experts_hidden, hidden
        dh, _, _, _, dh_q, dh_scales, v_in, *_ = torch_ops.experts_hidden(*hidden)
        if not dh.numel():
            continue
        inputs = (dh, dh_q, dh_scales, x, x, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, v_in)
        yield torch_ops.experts_inputs, (*inputs, *dtypes, requested, *options)
    yield from samples_with_copies(row_of_slot, slot_of_row, group_sizes, weights)
    yield from samples_with_fp8(row_of_slot, slot_of_row, group_sizes, weights)
    yield from samples_with_packed(x, logits, row_of_slot, slot_of_row, group_sizes, weights)
    yield from samples_of_the_layer(x, logits, bias, mask, bounds, experts, weights, w_in, b_in, w_out, b_out, network)


def samples_with_copies(row_of_slot, slot_of_row, group_sizes, weights):
    """Float32 factors of a 16-bit layer. Experts share them and they have 64 elements: all of a copy is defined."""
    network, dtype = (0, 0.0, 0.0, False, K, "pfd", "fd", TF32, 0, 0.5, -2.0), torch.bfloat16
    x, w_in, w_out = (normal(*shape).to(dtype) for shape in ((T, 8), (E, 2, 8, 8), (E, 8, 8)))
    lora = normal(1, 8, 8), normal(1, 8, 2, 8), normal(1, 8, 8).to(dtype), normal(1, 8, 8)
    experts_of, maps = (group_sizes, w_in, None, w_out, None), (row_of_slot, slot_of_row)
    forward = (x, None, None, weights, *maps, *experts_of, *NO_QUANTIZED, *factor_arguments(lora), *network)
    yield torch_ops.experts, forward
    _, h, u, copies = torch_ops.experts(*forward)
    requested = ALL & ~request(dict(b_in=True, b_out=True))
    options = (requested, *NO_QUANTIZED, *factor_arguments(lora, copies), *network)
    hidden = (x, None, None, h, x, weights, slot_of_row, *experts_of, u, dtype, *options)
    yield torch_ops.experts_hidden, hidden
    dh, _, _, _, dh_q, dh_scales, v_in, *_ = torch_ops.experts_hidden(*hidden)
    inputs = (dh, dh_q, dh_scales, x, x, *maps, group_sizes, w_in, None, w_out, v_in, dtype, dtype)
    yield torch_ops.experts_inputs, (*inputs, *options)


def samples_with_fp8(row_of_slot, slot_of_row, group_sizes, weights):
    width, hidden, network = 256, 128, (0, 0.0, 0.0, True, K, "fpd", "df", FP8, 1, 0.0, 0.0)
    x, w_in, w_out = normal(T, width), normal(E, hidden, 2, width), normal(E, width, hidden)
    yield torch_ops.quantize_experts, (w_in, w_out, "fpd", "df", True, 1)
    yield torch_ops.quantize_experts, (w_in, w_out, "fpd", "df", False, 0)
    yield torch_ops.grouped_matmul, (normal(R, width), w_out, group_sizes, False, FP8, 0)
    q_in, q_in_transposed, in_scales, q_out, q_out_transposed, out_scales = torch_ops.quantize_experts(
        w_in, w_out, "fpd", "df", True, 1
    )
    forward, back = (q_in_transposed, in_scales, q_out_transposed, out_scales), (q_in, in_scales, q_out, out_scales)
    none, requested = (*NO_QUANTIZED, *NO_FACTORS), request(dict(x=True, w_in=True, w_out=True, weights=True))
    experts_of = (group_sizes, w_in, None, w_out, None)
    yield torch_ops.experts, (x, None, None, weights, row_of_slot, slot_of_row, *experts_of, *none, *network)
    lora = normal(E, width, 4), normal(E, 4, 2, hidden), normal(E, hidden, 2), normal(1, 2, width)
    factors, scaled = factor_arguments(lora), (*network[:-2], 0.5, 2.0)
    of_matmul = stored_factors((lora[0], normal(E, 4, 128)))
    matmul = (normal(R, width), normal(E, width, 128), group_sizes, *of_matmul, False, FP8, 0, 0.5, True)
    yield torch_ops.grouped_matmul_lora, matmul
    q, scales = torch_ops.quantize_rows(x, 1)
    yield torch_ops.quantize_rows, (x, 1)
    for options, given, is_requested in (
        ((*NO_FACTORS, *network), x[:1], requested),
        ((*factors, *scaled), x, ALL & ~request(dict(b_in=True, b_out=True))),
    ):
        maps = row_of_slot, slot_of_row
        yield torch_ops.experts, (given, q, scales, weights, *maps, *experts_of, *forward, *options)
        _, h, u, _ = torch_ops.experts(x, None, None, weights, *maps, *experts_of, *forward, *options)
        arguments = (h, x, weights, slot_of_row, *experts_of, u, torch.float32, is_requested, *back, *options)
        yield torch_ops.experts_hidden, (x, None, None, *arguments)
        yield torch_ops.experts_hidden, (x, q, scales, *arguments)
        dh, _, _, _, dh_q, dh_scales, v_in, *_ = torch_ops.experts_hidden(x, None, None, *arguments)
        inputs = (dh, dh_q, dh_scales, x, x, *maps, group_sizes, w_in, None, w_out, v_in, torch.float32)
        yield torch_ops.experts_inputs, (*inputs, torch.float32, is_requested, *back, *options)
        yield torch_ops.experts_inputs, (*inputs, torch.bfloat16, is_requested, *NO_QUANTIZED, *options)


def samples_with_packed(x, logits, row_of_slot, slot_of_row, group_sizes, weights):
    """MXFP4 codes of w_in, FP8 blocks of w_out: widths are fixed, since they are multiples of a block."""
    width, hidden, network = 256, 128, (0, 0.0, 0.0, True, K, "fpd", "df", TF32, 0, 0.0, 0.0)
    yield torch_ops.pack_mxfp4, (normal(E * width, hidden), 1)
    codes, scales = torch_ops.pack_mxfp4(normal(E * hidden * 2, width) / 16, 0)
    yield torch_ops.unpack, (codes[None], scales[None], torch.bfloat16)
    yield torch_ops.pack_fp8, (normal(E, width, hidden), 1)
    q, q_scales = torch_ops.pack_fp8(normal(E, width, hidden) / 16, 0)
    yield torch_ops.unpack, (q, q_scales, torch.float32)
    w_in, in_scales = codes.view(E, hidden, 2, width // 32, 16), scales.view(E, hidden, 2, width // 32)
    x, b_in, b_out = normal(T, width), normal(E, hidden, 2), normal(E, width)
    lora = normal(E, width, 4), normal(E, 4, 2, hidden), normal(E, hidden, 2), normal(1, 2, width)
    experts_of, of_packed = (group_sizes, w_in, b_in, q, b_out), (None, in_scales, None, q_scales)
    dtype, frozen = torch.float32, {"w_in": True, "w_out": True}
    for factors, scaled in ((NO_FACTORS, network), (factor_arguments(lora), (*network[:-2], 0.5, 2.0))):
        requested = (WITHOUT_LORA if factors is NO_FACTORS else ALL) & ~request(frozen)
        options, maps = (*of_packed, *factors, *scaled), (row_of_slot, slot_of_row)
        yield torch_ops.experts, (x, None, None, weights, *maps, *experts_of, *options)
        _, h, u, _ = torch_ops.experts(x, None, None, weights, *maps, *experts_of, *options)
        arguments = (x, None, None, h, x, weights, slot_of_row, *experts_of, u, dtype, requested, *options)
        yield torch_ops.experts_hidden, arguments
        dh, _, _, _, dh_q, dh_scales, v_in, *_ = torch_ops.experts_hidden(*arguments)
        inputs = (dh, dh_q, dh_scales, x, x, *maps, *experts_of[:4], v_in, dtype, dtype)
        yield torch_ops.experts_inputs, (*inputs, requested, *options)
        of_rows = (*scaled[:4], 0, *scaled[5:])
        rows = (normal(R, width), None, *experts_of, normal(R), *of_packed, *factors, *of_rows)
        yield torch_ops.ffn, rows
        _, h, u = torch_ops.ffn(*rows)
        back = (rows[0], h, rows[0], None, *experts_of, normal(R), u if u.numel() else None, dtype, dtype)
        yield torch_ops.ffn_backward, (*back, requested, *of_packed, *factors, *of_rows)
    router = RouterOptions(K)
    numbers = layer_numbers(router, Network(*network), E, 2, (False, True, True))
    routing, none = (logits, *[None] * 6), NO_FACTORS
    forward = (x, *routing, w_in, b_in, q, b_out, *of_packed, *none, *numbers)
    yield torch_ops.layer, forward
    _, _, _, selected, chosen, _, lse, _, h, *_, slot_of_row, group_sizes = torch_ops.layer(*forward)
    backward = (x, h, x, selected, slot_of_row, group_sizes, w_in, b_in, q, b_out)
    of_router = (None, logits, chosen, None, lse, None, None, dtype, request({"x": True}))
    yield torch_ops.layer_hidden, (*backward, *of_router, *of_packed, *none, *numbers)


def samples_of_the_layer(x, logits, bias, mask, bounds, experts, weights, w_in, b_in, w_out, b_out, network):
    of_network = Network(*network)
    for router in (RouterOptions(K, "sigmoid"), RouterOptions(K, qb_bins=7), None):
        options = layer_numbers(router, of_network, E, 2, (False, True, True))
        routing = (None, weights, experts, None, None, None, None)
        if router is not None:
            of_bins = (bias, mask, None, bounds) if router.qb_bins else (bias, None, None, None)
            routing = (logits, None, None, *of_bins)
        none = (*NO_QUANTIZED, *NO_FACTORS)
        forward = (x, *routing, w_in, b_in, w_out, b_out, *none, *options)
        yield torch_ops.layer, forward
        if router is None:
            continue
        _, _, _, selected, chosen, _, lse, _, h, *_, slot_of_row, group_sizes = torch_ops.layer(*forward)
        backward = (x, h, x, selected, slot_of_row, group_sizes, w_in, b_in, w_out, b_out)
        for of_losses in ((None, None), (bias, lse)):
            requested = request(dict(x=True, w_out=of_losses[0] is None))
            yield (
                torch_ops.layer_hidden,
                (*backward, None, logits, chosen, mask, lse, *of_losses, torch.float32, requested, *none, *options),
            )


SAMPLES = list(samples())


@pytest.mark.parametrize(("operation", "arguments"), SAMPLES, ids=[str(operation) for operation, _ in SAMPLES])
def test_every_operation_passes_opcheck(operation, arguments):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(getattr(argument, "dtype", None) == torch.float8_e4m3fn for argument in arguments):
        checks.remove("test_schema")  # this check multiplies arguments, which torch does not support for their dtypes
    torch.library.opcheck(operation, arguments, test_utils=checks)


def with_other_sizes():
    """Samples of the same operations, options and dtypes with other numbers of tokens, experts and features."""
    global T, E, D, F, R
    before = T, E, D, F, R
    try:
        T, E, D, F, R = 8, 6, 9, 3, 32
        return list(samples())
    finally:
        T, E, D, F, R = before


def bits(results):
    return [
        t.reshape(-1).view(torch.uint8)
        for t in (results if isinstance(results, tuple | list) else [results])
        if t.numel()
    ]


def test_calls_prepared_for_other_sizes_compute_the_same_bits(prepared):
    """Everything computed from sizes follows them: results, working memory, workspaces, integers of the calls."""
    wanted = [bits(operation(*arguments)) for operation, arguments in with_other_sizes()]
    for operation, arguments in SAMPLES:
        operation(*arguments)
    number = len(prepared)
    for (operation, arguments), want in zip(with_other_sizes(), wanted, strict=True):
        got = bits(operation(*arguments))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), operation
    assert len(prepared) == number


@pytest.mark.parametrize(("operation", "arguments"), SAMPLES, ids=[str(operation) for operation, _ in SAMPLES])
def test_results_of_strided_arguments_have_the_registered_strides(operation, arguments):
    def strided(value):
        return value.mT.contiguous().mT if isinstance(value, torch.Tensor) and value.dim() > 1 else value

    torch.library.opcheck(operation, tuple(map(strided, arguments)), test_utils="test_faketensor")


def test_every_operation_has_a_sample():
    ours = {name for name in dir(torch_ops) if isinstance(getattr(torch_ops, name), torch._ops.OpOverload)}
    assert {operation for operation, _ in SAMPLES} == {getattr(torch_ops, name) for name in ours}

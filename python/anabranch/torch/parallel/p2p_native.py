"""The passes over the memory of peers that only native code runs, with the C calls of p2p_passes.py.

Routing is part of the forward pass, and `counts` is this rank's part of what the ranks add up: int32 [1, n], tokens per
expert [E], dropped assignments by source rank [P], and the histogram of quantile balancing [E, bins]. Results that were
not requested are None.
"""

from typing import Any

import torch

from anabranch.torch.binding.described import Described
from anabranch.torch.binding.native import Native
from anabranch.torch.ops.experts_ops import QUANTIZED
from anabranch.torch.ops.layer_ops import LAYER_OPTIONS, layer_parts
from anabranch.torch.ops.packed_ops import requested_results
from anabranch.torch.ops.router_ops import allocate_route, route_backward_calls, route_calls
from anabranch.torch.parallel.p2p_passes import PASSES

#: Operands of `experts` besides the options: w_in, b_in, w_out, b_out, and the quantised experts.
_WEIGHTS = 8


def _layer_arguments(
    tokens, small, x, arriving, counts, logits, expert_bias, token_mask, forced_experts, qb_bin_bounds, rows, ranks,
    rank, *others,
):  # fmt: skip
    """(the arguments of `route`; those of the pass "experts" without the selection; the options) of `p2p_layer`."""
    weights, o = others[:_WEIGHTS], layer_parts(others[_WEIGHTS:])
    selection = -1, o.qb_bins, True, *o.requested[1:], *o.router
    route = logits, expert_bias, token_mask, forced_experts, qb_bin_bounds, *selection
    return route, (rows, ranks, rank, o.align_size, *weights, *o.of_experts), o


def _allocate_layer(*arguments):
    _, _, x, arriving, counts, *_ = arguments
    route, rest, _ = _layer_arguments(*arguments)
    weights, experts, _, score_sum, lse, _ = allocate_route(*route)
    passed = PASSES["experts"].allocate(x, arriving, experts, weights, counts, *rest)
    return requested_results((weights, experts, score_sum, lse, *passed))


def _layer_calls(results, *arguments):
    tokens, small, x, arriving, counts, logits, *_ = arguments
    route, rest, o = _layer_arguments(*arguments)
    (_, ranks, *_), E = rest, logits.shape[1]
    if counts.shape[1] != E + ranks + E * o.qb_bins:
        raise ValueError(f"counts: got {counts.shape[1]} numbers, expected {E + ranks + E * o.qb_bins}")
    weights, experts, score_sum, lse, *passed = results
    tokens_per_expert = Described((E,), torch.int32, counts.memory, counts.offset)
    histogram = Described(
        (E, o.qb_bins), torch.int32, counts.memory, counts.offset + torch.int32.itemsize * (E + ranks)
    )
    routing = route_calls((weights, experts, tokens_per_expert, score_sum, lse, histogram), *route)
    return [routing, *PASSES["experts"].calls(passed, tokens, small, x, arriving, experts, weights, counts, *rest)]


def _d_logits_calls(d_logits, logits, experts, token_mask, lse, d_weights, d_score_sum, d_lse, dtype, *options):
    router = layer_parts(options).router
    return route_backward_calls(d_logits, logits, experts, token_mask, lse, d_weights, d_score_sum, d_lse, *router)


def _add_half(native: Native, name: str) -> None:
    """Adds a half of the backward pass."""
    one = PASSES[name]
    arguments = one.arguments.replace("Tensor dh_q, Tensor dh_scales", "Tensor? dh_q, Tensor? dh_scales")

    def allocate(tokens: int, small: int, *given: Any) -> Any:
        return requested_results(one.allocate(*given))

    native.add_internal(f"p2p_{name}", f"(int tokens, int small, {arguments})", allocate, one.calls)


def add_p2p_operations(native: Native) -> None:
    """Adds the operations to the native library. They are no operations of torch.

    tokens, small: the addresses of the exchanges.
    """
    native.add_internal(
        "p2p_layer",
        "(int tokens, int small, Tensor x, Tensor arriving, Tensor counts, Tensor logits, Tensor? expert_bias, "
        "Tensor? token_mask, Tensor? forced_experts, Tensor? qb_bin_bounds, SymInt rows, int ranks, int rank, "
        f"Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, {QUANTIZED}, {LAYER_OPTIONS})",
        _allocate_layer,
        _layer_calls,
    )
    options = LAYER_OPTIONS[LAYER_OPTIONS.index("int[]") :]
    native.add_internal(
        "p2p_d_logits",
        "(Tensor logits, Tensor experts, Tensor? token_mask, Tensor? lse, Tensor d_weights, Tensor? d_score_sum, "
        f"Tensor? d_lse, ScalarType dtype, {options})",
        lambda logits, *others: logits.new_empty(logits.shape, others[6]),
        _d_logits_calls,
    )
    for name in ("hidden", "inputs"):
        _add_half(native, name)

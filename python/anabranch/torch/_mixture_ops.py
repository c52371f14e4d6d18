"""The layer's operations: those of routing, plan and experts in one, by the same calls.

What torch takes for an operation, beside the calls, is then paid three times a step: forward, and backward before and
after the gate's products.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.router_options import RouterOptions, attributes
from anabranch.rows import num_rows_needed
from anabranch.torch._calls import ALIGNMENT
from anabranch.torch._define import define
from anabranch.torch._dispatch_ops import calls_of_plan
from anabranch.torch._experts_ops import (
    allocate_experts,
    allocate_experts_hidden,
    allocate_experts_inputs,
    calls_of_experts,
    calls_of_experts_hidden,
    calls_of_experts_inputs,
)
from anabranch.torch._router_ops import allocate_route, calls_of_route, calls_of_route_backward

#: Lists, since torch takes as long for four numbers by themselves as for a list of twenty.
_OPTIONS = "int[] integers, float[] numbers, str w_in_layout, str w_out_layout"


class MixtureOptions(NamedTuple):
    """The options of the layer, as the operations take them."""

    integers: tuple[int, ...]
    numbers: tuple[float, ...]
    w_in_layout: str
    w_out_layout: str


class _Parts(NamedTuple):
    """The same for the calls."""

    num_experts: int
    align_size: int
    routing: tuple[Any, ...]
    """topk, score_function, normalize, scaling_factor."""
    selection: tuple[int, ...]
    """num_groups, group_topk, group_score_topk, sequences, qb_bins."""
    network: tuple[Any, ...]


def mixture_options(router: RouterOptions | None, network: Any, num_experts: int, align_size: int) -> MixtureOptions:
    """Of a layer with or without a router, with the options of an `experts.Network`."""
    if router is None:
        router = RouterOptions(network.topk)
    _, score_function, normalize, scaling_factor = attributes(router).values()
    of_router = (router.num_groups, router.group_topk, router.group_score_topk, router.qb_bins)
    of_network = (network.activation, int(network.weight_early), network.topk, network.precision)
    return MixtureOptions(
        (num_experts, align_size, score_function, normalize, *of_router, *of_network),
        (scaling_factor, network.activation_alpha, network.activation_limit),
        network.w_in_layout,
        network.w_out_layout,
    )


def _parts(integers: Any, numbers: Any, w_in_layout: str, w_out_layout: str) -> _Parts:
    num_experts, align_size, score_function, normalize, num_groups, group_topk, group_score_topk, qb_bins = integers[:8]
    activation, weight_early, topk, precision = integers[8:]
    scaling_factor, alpha, limit = numbers
    return _Parts(
        num_experts,
        align_size,
        (topk, score_function, normalize, scaling_factor),
        (num_groups, group_topk, group_score_topk, -1, qb_bins),
        (activation, alpha, limit, weight_early, topk, w_in_layout, w_out_layout, precision),
    )


class _Rows(NamedTuple):
    """The maps of a plan, which nobody but the layer reads: views of one int32 tensor."""

    row_of_slot: Tensor
    slot_of_row: Tensor
    group_sizes: Tensor


def _places(*sizes: int) -> list[int]:
    """Where int32 tensors begin that share an allocation, and where the last one ends."""
    unit, places = ALIGNMENT // 4, [0]
    for size in sizes:
        places.append(places[-1] + (size + unit - 1) // unit * unit)
    return places


def _rows(rows: Tensor, T: int, K: int, R: int, E: int) -> _Rows:
    slots, of_rows, groups, _ = _places(T * K, R, E)
    return _Rows(rows[slots : slots + T * K].view(T, K), rows[of_rows : of_rows + R], rows[groups : groups + E])


def _allocate_mixture(
    x, logits, weights, experts, expert_bias, token_mask, forced_experts, qb_bin_bounds, w_in, b_in, w_out, b_out,
    *options,
):  # fmt: skip
    o = _parts(*options)

    def integers(*shape):
        return x.new_empty(shape, dtype=torch.int32)

    if logits is None:
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int32)
        routing = tuple(x.new_empty((0,), dtype=dtype) for dtype in dtypes)
        T, K = experts.shape
    else:
        weights, experts, _, *statistics = allocate_route(
            logits, expert_bias, token_mask, forced_experts, qb_bin_bounds, *o.routing, *o.selection
        )
        routing = (weights, experts, *statistics)
        T, K = weights.shape
    R = num_rows_needed(T * K, o.num_experts, o.align_size)
    rows = integers(_places(T * K, R, o.num_experts)[-1])
    maps = _rows(rows, T, K, R, o.num_experts)
    output, h = allocate_experts(x, weights, *maps, w_in, b_in, w_out, b_out, *o.network)
    return output, integers(o.num_experts), integers(), *routing, h, rows


def _mixture(
    results, x, logits, weights, experts, expert_bias, token_mask, forced_experts, qb_bin_bounds, w_in, b_in, w_out,
    b_out, *options,
):  # fmt: skip
    o, calls = _parts(*options), []
    output, tokens_per_expert, dropped, *routing, h, rows = results
    if logits is not None:
        weights, experts, score_sum, lse, histogram = routing
        of_route = calls_of_route(
            (weights, experts, None, score_sum, lse, histogram),
            logits, expert_bias, token_mask, forced_experts, qb_bin_bounds, *o.routing, *o.selection,
        )  # fmt: skip
        calls.append(of_route)
    maps = _rows(rows, *experts.shape, h.shape[0], o.num_experts)
    of_plan = calls_of_plan(
        (tokens_per_expert, maps.group_sizes, None, maps.row_of_slot, maps.slot_of_row, dropped),
        experts, o.num_experts, h.shape[0], o.align_size, 1,
    )  # fmt: skip
    of_experts = calls_of_experts((output, h), x, weights, *maps, w_in, b_in, w_out, b_out, *o.network)
    return [*calls, of_plan, *of_experts]


#: The layer from logits [T, E], or without them from weights and experts [T, K] that are given; then the results of a
#: routing have no elements. `rows` is for the backward pass.
mixture = define(
    "mixture(Tensor x, Tensor? logits, Tensor? weights, Tensor? experts, Tensor? expert_bias, Tensor? token_mask, "
    "Tensor? forced_experts, Tensor? qb_bin_bounds, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"{_OPTIONS}) -> (Tensor output, Tensor tokens_per_expert, Tensor dropped, Tensor weights, Tensor experts, "
    "Tensor score_sum, Tensor lse, Tensor qb_histogram, Tensor h, Tensor rows)",
    _allocate_mixture,
    _mixture,
)


def _of_hidden(d_out, h, x, weights, rows, w_in, b_in, w_out, b_out, w_out_dtype, wants_w_out, o):
    """The arguments of `experts_hidden`."""
    maps = _rows(rows, *weights.shape, h.shape[0], o.num_experts)
    given = (d_out, h, x, weights, maps.slot_of_row, maps.group_sizes, w_in, b_in, w_out, b_out)
    return *given, w_out_dtype, wants_w_out, *o.network


def _allocate_mixture_hidden(
    d_out, h, x, weights, rows, w_in, b_in, w_out, b_out, logits, experts, token_mask, lse, d_score_sum, d_lse,
    w_out_dtype, wants_w_out, *options,
):  # fmt: skip
    of_hidden = _of_hidden(
        d_out, h, x, weights, rows, w_in, b_in, w_out, b_out, w_out_dtype, wants_w_out, _parts(*options)
    )
    d_logits = x.new_empty((0,)) if logits is None else torch.empty_like(logits)
    return *allocate_experts_hidden(*of_hidden), d_logits


def _mixture_hidden(
    results, d_out, h, x, weights, rows, w_in, b_in, w_out, b_out, logits, experts, token_mask, lse, d_score_sum, d_lse,
    w_out_dtype, wants_w_out, *options,
):  # fmt: skip
    o = _parts(*options)
    *of_experts, d_logits = results
    of_hidden = _of_hidden(d_out, h, x, weights, rows, w_in, b_in, w_out, b_out, w_out_dtype, wants_w_out, o)
    calls = [calls_of_experts_hidden(of_experts, *of_hidden)]
    if logits is not None:
        d_weights = of_experts[-1]
        of_route = calls_of_route_backward(
            d_logits, logits, experts, token_mask, lse, d_weights, d_score_sum, d_lse, *o.routing
        )
        calls.append(of_route)
    return calls


#: The first half of the backward pass: `experts_hidden`, and with logits `route_backward` of its gradient of weights.
mixture_hidden = define(
    "mixture_hidden(Tensor d_out, Tensor h, Tensor x, Tensor weights, Tensor rows, Tensor w_in, Tensor? b_in, "
    "Tensor w_out, Tensor? b_out, Tensor? logits, Tensor? experts, Tensor? token_mask, Tensor? lse, "
    f"Tensor? d_score_sum, Tensor? d_lse, ScalarType w_out_dtype, bool wants_w_out, {_OPTIONS}) -> "
    "(Tensor dh, Tensor d_w_out, Tensor d_b_out, Tensor d_weights, Tensor d_logits)",
    _allocate_mixture_hidden,
    _mixture_hidden,
)


def _of_inputs(dh, x, addend, rows, w_in, b_in, w_out, w_in_dtype, wants_x, wants_w_in, *options):
    """The arguments of `experts_inputs`."""
    o = _parts(*options)
    topk = o.routing[0]
    maps = _rows(rows, x.shape[0], topk, dh.shape[0], o.num_experts)
    return dh, x, addend, *maps, w_in, b_in, w_out, w_in_dtype, wants_x, wants_w_in, *o.network


#: The second half: `experts_inputs`.
mixture_inputs = define(
    "mixture_inputs(Tensor dh, Tensor x, Tensor? addend, Tensor rows, Tensor w_in, Tensor? b_in, Tensor w_out, "
    f"ScalarType w_in_dtype, bool wants_x, bool wants_w_in, {_OPTIONS}) -> (Tensor d_x, Tensor d_w_in, Tensor d_b_in)",
    lambda *arguments: allocate_experts_inputs(*_of_inputs(*arguments)),
    lambda results, *arguments: calls_of_experts_inputs(results, *_of_inputs(*arguments)),
)

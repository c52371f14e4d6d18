"""The layer's operations: routing, plan and experts in one operation, with the same C calls.

torch's overhead per operation is then paid once in the forward pass and twice in the backward pass, before and after
the gate's GEMMs.
"""

import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from anabranch.lora import NAMES
from anabranch.options import Network, Router, RouterOptions
from anabranch.rows import num_rows_needed
from anabranch.torch.binding.check import exceeds_int32, smaller
from anabranch.torch.binding.define import define
from anabranch.torch.ops.dispatch_ops import plan_calls
from anabranch.torch.ops.experts_ops import (
    QUANTIZED,
    allocate_experts,
    allocate_experts_hidden,
    experts_calls,
    experts_hidden_calls,
)
from anabranch.torch.ops.factors import FACTORS
from anabranch.torch.ops.gradients import request
from anabranch.torch.ops.router_ops import allocate_route, route_backward_calls, route_calls

#: Options are passed as two lists: four separate numbers cost torch as much time as a list of twenty.
LAYER_OPTIONS = f"{FACTORS}, int[] integers, float[] numbers, str w_in_layout, str w_out_layout"


class LayerNumbers(NamedTuple):
    """The options of the layer as arguments of the operations."""

    integers: tuple[int, ...]
    numbers: tuple[float, ...]
    w_in_layout: str
    w_out_layout: str


class _Parts(NamedTuple):
    """The factors and the options of the layer as arguments of the C calls."""

    num_experts: int
    align_size: int
    qb_bins: int
    requested: tuple[bool, ...]
    """The fields of `router.Requested`."""
    router: Router
    network: Network
    factors: tuple[Any, ...]
    """The arguments of `FACTORS`."""

    @property
    def of_experts(self) -> tuple[Any, ...]:
        """The last arguments of the experts' operations."""
        return *self.factors, *self.network

    @property
    def selection(self) -> tuple[Any, ...]:
        """The arguments of `route` after its tensors."""
        return -1, self.qb_bins, *self.requested, *self.router


_KINDS = {options: typing.get_type_hints(options) for options in (Router, Network)}


def layer_numbers(
    router: RouterOptions | None, network: Network, num_experts: int, align_size: int, requested: Sequence[bool]
) -> LayerNumbers:
    """The options of a layer with or without a router. requested: a `router.Requested`."""
    if router is None:
        router = RouterOptions(network.topk)
    fields: list[tuple[Any, Any]] = [
        (kind, value)
        for options in (router.numbers(), network)
        for kind, value in zip(_KINDS[type(options)].values(), options, strict=True)
    ]
    return LayerNumbers(
        (
            num_experts,
            align_size,
            router.qb_bins,
            *map(int, requested),
            *(int(v) for k, v in fields if k in (int, bool)),
        ),
        tuple(value for kind, value in fields if kind is float),
        network.w_in_layout,
        network.w_out_layout,
    )


def layer_parts(arguments: Any) -> _Parts:
    """`_Parts` from the arguments of LAYER_OPTIONS."""
    *factors, integers, numbers, w_in_layout, w_out_layout = arguments
    texts = {"w_in_layout": w_in_layout, "w_out_layout": w_out_layout}
    num_experts, align_size, qb_bins, *requested = integers[:6]
    remaining = iter(integers[6:])
    values = {int: remaining, bool: remaining, float: iter(numbers)}

    def read(options: Any) -> Any:
        kinds = _KINDS[options].items()
        return options(**{name: texts[name] if kind is str else kind(next(values[kind])) for name, kind in kinds})

    selected = tuple(map(bool, requested))
    return _Parts(num_experts, align_size, qb_bins, selected, read(Router), read(Network), tuple(factors))


def allocate_layer(
    x, logits, weights, experts, expert_bias, token_mask, forced_experts, qb_bin_bounds, w_in, b_in, w_out, b_out,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """Empty results of `layer`."""
    o = layer_parts(options)

    def integers(*shape):
        return x.new_empty(shape, dtype=torch.int32)

    if logits is None:
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int32)
        routing = tuple(x.new_empty((0,), dtype=dtype) for dtype in dtypes)
        T, K = experts.shape
    else:
        weights, experts, _, *statistics = allocate_route(
            logits, expert_bias, token_mask, forced_experts, qb_bin_bounds, *o.selection
        )
        routing = (weights, experts, *statistics)
        T, K = weights.shape
    R = num_rows_needed(T * K, o.num_experts, o.align_size, smaller)
    if exceeds_int32(R):
        raise ValueError(f"align_size: got {o.align_size}, which requires {R} rows, expected fewer than 2^31")
    rows = (integers(T, K), integers(R), integers(o.num_experts))
    quantized = (w_in_q, w_in_scales, w_out_q, w_out_scales)
    output, h, u, copies = allocate_experts(
        x, None, None, weights, *rows, w_in, b_in, w_out, b_out, *quantized, *o.of_experts
    )
    return output, integers(o.num_experts), integers(), *routing, h, u, copies, *rows


def layer_calls(
    results, x, logits, weights, experts, expert_bias, token_mask, forced_experts, qb_bin_bounds, w_in, b_in, w_out,
    b_out, w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """The C calls of `layer`."""
    o, calls = layer_parts(options), []
    output, tokens_per_expert, dropped, *routing, h, u, copies, row_of_slot, slot_of_row, group_sizes = results
    if logits is not None:
        weights, experts, score_sum, lse, histogram = routing
        routing_call = route_calls(
            (weights, experts, None, score_sum, lse, histogram),
            logits, expert_bias, token_mask, forced_experts, qb_bin_bounds, *o.selection,
        )  # fmt: skip
        calls.append(routing_call)
    plan_call = plan_calls(
        (tokens_per_expert, group_sizes, None, row_of_slot, slot_of_row, dropped),
        experts, o.num_experts, slot_of_row.shape[0], o.align_size, 1,
    )  # fmt: skip
    network_calls = experts_calls(
        (output, h, u, copies), x, None, None, weights, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, b_out,
        w_in_q, w_in_scales, w_out_q, w_out_scales, *o.of_experts,
    )  # fmt: skip
    return [*calls, plan_call, *network_calls]


#: The arguments of `layer`.
LAYER = (
    "(Tensor x, Tensor? logits, Tensor? weights, Tensor? experts, Tensor? expert_bias, Tensor? token_mask, "
    "Tensor? forced_experts, Tensor? qb_bin_bounds, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"{QUANTIZED}, {LAYER_OPTIONS})"
)
#: The layer from logits [T, E], or from given weights and experts [T, K]; then the results of routing have no elements.
layer = define(
    f"layer{LAYER} -> (Tensor output, Tensor tokens_per_expert, Tensor dropped, Tensor weights, "
    "Tensor experts, Tensor score_sum, Tensor lse, Tensor qb_histogram, Tensor h, Tensor lora_u, "
    "Tensor lora_copies, Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes)",
    allocate_layer,
    layer_calls,
)


#: Routing reads the gradient of the weights, so `layer_hidden` always computes it.
_WEIGHTS = request({"weights": True})


def allocate_layer_hidden(
    d_out, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, lora_u,
    logits, experts, token_mask, lse, d_score_sum, d_lse, w_out_dtype, requested,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """Empty results of `layer_hidden`."""
    results = allocate_experts_hidden(
        d_out, None, None, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, lora_u, w_out_dtype,
        requested | _WEIGHTS, w_in_q, w_in_scales, w_out_q, w_out_scales, *layer_parts(options).of_experts,
    )  # fmt: skip
    return *results, logits.new_empty(logits.shape)


def layer_hidden_calls(
    results, d_out, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, lora_u,
    logits, experts, token_mask, lse, d_score_sum, d_lse, w_out_dtype, requested,
    w_in_q, w_in_scales, w_out_q, w_out_scales, *options,
):  # fmt: skip
    """The C calls of `layer_hidden`."""
    o = layer_parts(options)
    *experts_results, d_logits = results
    hidden = experts_hidden_calls(
        experts_results, d_out, None, None, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, lora_u,
        w_out_dtype, requested | _WEIGHTS, w_in_q, w_in_scales, w_out_q, w_out_scales, *o.of_experts,
    )  # fmt: skip
    d_weights = experts_results[3]
    routing = route_backward_calls(d_logits, logits, experts, token_mask, lse, d_weights, d_score_sum, d_lse, *o.router)
    return *hidden, routing


#: The arguments of `layer_hidden`.
LAYER_HIDDEN = (
    "(Tensor d_out, Tensor h, Tensor x, Tensor weights, Tensor slot_of_row, Tensor group_sizes, "
    "Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor? lora_u, Tensor logits, Tensor experts, "
    "Tensor? token_mask, Tensor lse, Tensor? d_score_sum, Tensor? d_lse, ScalarType w_out_dtype, int requested, "
    f"{QUANTIZED}, {LAYER_OPTIONS})"
)
#: The first half of the backward pass: `experts_hidden`, and `route_backward` with its gradient of the weights.
layer_hidden = define(
    f"layer_hidden{LAYER_HIDDEN} -> (Tensor dh, Tensor d_w_out, Tensor d_b_out, Tensor d_weights, Tensor dh_q, "
    f"Tensor dh_scales, Tensor lora_v_in, {', '.join(f'Tensor d_{name}' for name in NAMES)}, Tensor d_logits)",
    allocate_layer_hidden,
    layer_hidden_calls,
)

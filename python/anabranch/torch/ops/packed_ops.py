"""Variants of the layer's operations with fewer tensors, which only native code runs. Their C calls are the same.

The three maps of the plan are one int32 tensor, `maps`: row_of_slot [T, K], slot_of_row [R] and group_sizes [E].
Results that were not requested are None. `dropped` is int32 [3]. Its last two elements are 0, which is also a float
zero: the losses of a layer without losses.
"""

from typing import Any

import torch

from anabranch.options import Network
from anabranch.torch.binding.described import Described
from anabranch.torch.binding.native import Native
from anabranch.torch.ops.experts_ops import (
    EXPERTS_HIDDEN,
    EXPERTS_INPUTS,
    allocate_experts_hidden,
    allocate_experts_inputs,
    experts_hidden_calls,
    experts_inputs_calls,
    sizes_of_w_in,
)
from anabranch.torch.ops.layer_ops import (
    LAYER,
    LAYER_HIDDEN,
    allocate_layer,
    allocate_layer_hidden,
    layer_calls,
    layer_hidden_calls,
)

#: The maps begin at multiples of this number of elements.
_ALIGNMENT = 64


def _starts(T: Any, K: Any, R: Any, E: Any) -> tuple[Any, Any, Any]:
    """Where slot_of_row and group_sizes begin, and the number of elements of all maps."""
    first = -(-T * K // _ALIGNMENT) * _ALIGNMENT
    second = first - (-R // _ALIGNMENT) * _ALIGNMENT
    return first, second, second + E


def unpacked(maps: torch.Tensor, T: int, K: int, R: int, E: int) -> tuple[torch.Tensor, ...]:
    """row_of_slot, slot_of_row and group_sizes as views."""
    first, second, _ = _starts(T, K, R, E)
    return maps[: T * K].view(T, K), maps[first : first + R], maps[second : second + E]


def _described_maps(maps: Described, T: Any, K: Any, R: Any, E: Any) -> tuple[Described, ...]:
    """Descriptions of row_of_slot, slot_of_row and group_sizes in `maps`."""
    first, second, total = _starts(T, K, R, E)
    if len(maps.shape) != 1 or maps.shape[0] != total:
        raise ValueError(f"maps: got {[*maps.shape]}, expected [{total}]")
    parts = ((T, K), 0), ((R,), first), ((E,), second)
    size = maps.dtype.itemsize
    return tuple(Described(shape, maps.dtype, maps.memory, maps.offset + size * start) for shape, start in parts)


def requested_results(results: Any) -> tuple[Any, ...]:
    """Results with None in the place of those that have no elements whatever the sizes of the arguments are."""
    return tuple(
        None if any(isinstance(size, int) and size == 0 for size in result.shape) else result for result in results
    )


def _allocate_layer(*arguments):
    output, counts, _, *others, row_of_slot, slot_of_row, group_sizes = allocate_layer(*arguments)
    (T, K), (R,), (E,) = row_of_slot.shape, slot_of_row.shape, group_sizes.shape
    dropped, maps = (row_of_slot.new_empty((size,)) for size in (3, _starts(T, K, R, E)[-1]))
    return output, counts, dropped, *requested_results(others), maps


def _layer(results, *arguments):
    *others, maps = results
    shapes = (t.shape for t in allocate_layer(*arguments)[-3:])
    (T, K), (R,), (E,) = shapes
    return layer_calls([*others, *_described_maps(maps, T, K, R, E)], *arguments)


def _hidden_arguments(
    d_out, h, x, weights, maps, w_in, b_in, w_out, b_out,
    lora_u, logits, experts, token_mask, lse, d_score_sum, d_lse, d_logits_dtype, *others,
):  # fmt: skip
    """The arguments of `layer_hidden`."""
    _, slot_of_row, group_sizes = _described_maps(maps, *experts.shape, h.shape[0], logits.shape[1])
    routing = (logits, experts, token_mask, lse, d_score_sum, d_lse)
    return d_out, h, x, weights, slot_of_row, group_sizes, w_in, b_in, w_out, b_out, lora_u, *routing, *others


#: The index of d_logits_dtype in the arguments of `packed_layer_hidden`.
_D_LOGITS_DTYPE = 16


def _allocate_layer_hidden(*arguments):
    dh, d_w_out, d_b_out, _, *others, d_logits = requested_results(
        allocate_layer_hidden(*_hidden_arguments(*arguments))
    )
    return dh, d_w_out, d_b_out, *others, d_logits.new_empty(d_logits.shape, arguments[_D_LOGITS_DTYPE])


def _layer_hidden(results, *arguments):
    dh, d_w_out, d_b_out, *others = results
    hidden = _hidden_arguments(*arguments)
    d_weights = allocate_layer_hidden(*hidden)[3]  # working memory
    return layer_hidden_calls([dh, d_w_out, d_b_out, d_weights, *others], *hidden)


def _experts_hidden_arguments(d_out, d_out_q, d_out_scales, h, x, weights, maps, w_in, b_in, w_out, b_out, *others):
    """The arguments of `experts_hidden`."""
    network = Network(*others[-len(Network._fields) :])
    E = sizes_of_w_in(w_in, network.w_in_layout)[0]
    _, slot_of_row, group_sizes = _described_maps(maps, *weights.shape, h.shape[0], E)
    rows = (slot_of_row, group_sizes)
    return d_out, d_out_q, d_out_scales, h, x, weights, *rows, w_in, b_in, w_out, b_out, *others


def _allocate_experts_hidden(*arguments):
    return requested_results(allocate_experts_hidden(*_experts_hidden_arguments(*arguments)))


def _experts_hidden(results, *arguments):
    return experts_hidden_calls(results, *_experts_hidden_arguments(*arguments))


def _inputs_arguments(dh, dh_q, dh_scales, x, addend, maps, w_in, *others):
    """The arguments of `experts_inputs`."""
    network = Network(*others[-len(Network._fields) :])
    E = sizes_of_w_in(w_in, network.w_in_layout)[0]
    of_maps = _described_maps(maps, x.shape[0], network.topk, dh.shape[0], E)
    return dh, dh_q, dh_scales, x, addend, *of_maps, w_in, *others


def _allocate_experts_inputs(*arguments):
    return requested_results(allocate_experts_inputs(*_inputs_arguments(*arguments)))


def _experts_inputs(results, *arguments):
    return experts_inputs_calls(results, *_inputs_arguments(*arguments))


def add_packed_operations(native: Native) -> None:
    """Adds the operations to the native library. They are no operations of torch."""
    maps = "Tensor maps"
    native.add_internal("packed_layer", LAYER, _allocate_layer, _layer)
    rows = "Tensor slot_of_row, Tensor group_sizes"
    hidden = LAYER_HIDDEN.replace(rows, maps).replace("Tensor lse", "Tensor? lse")
    hidden = hidden.replace("ScalarType w_out_dtype", "ScalarType d_logits_dtype, ScalarType w_out_dtype")
    native.add_internal("packed_layer_hidden", hidden, _allocate_layer_hidden, _layer_hidden)
    hidden = EXPERTS_HIDDEN.replace(rows, maps)
    native.add_internal("packed_experts_hidden", hidden, _allocate_experts_hidden, _experts_hidden)
    inputs = EXPERTS_INPUTS.replace(f"Tensor row_of_slot, {rows}", maps)
    inputs = inputs.replace("Tensor dh_q, Tensor dh_scales", "Tensor? dh_q, Tensor? dh_scales")
    native.add_internal("packed_experts_inputs", inputs, _allocate_experts_inputs, _experts_inputs)

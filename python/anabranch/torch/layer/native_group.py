"""The layer over the memory of peers in native operations, for plain tensors in eager mode.

They compute what `on_group.py` computes with several operations, with bitwise the same results: the forward pass is one
operation, and the backward pass is two, before and after the sum of the weights' gradients. Programs must not contain
these operations, because they take their options as a number and their exchanges as addresses of this process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.lora import NAMES
from anabranch.torch.binding.define import _ops, native_run
from anabranch.torch.binding.derivatives import reject_derivative
from anabranch.torch.binding.eager import is_plain_eager
from anabranch.torch.binding.native import native
from anabranch.torch.layer import native_passes
from anabranch.torch.layer.group_output import GroupConfig, GroupOutput
from anabranch.torch.layer.operands import Operands, requested_cotangents
from anabranch.torch.ops.experts import cast_weight
from anabranch.torch.ops.experts_ops import QUANTIZED
from anabranch.torch.ops.factors import FACTORS, factor_arguments
from anabranch.torch.ops.gradients import FROM_DH, OPERANDS, request
from anabranch.torch.ops.packed import oriented_backward
from anabranch.torch.ops.quantized import forward_operands
from anabranch.torch.parallel.alike import check_alike
from anabranch.torch.parallel.p2p_native import add_p2p_operations
from anabranch.torch.parallel.p2p_passes import padded
from anabranch.torch.parallel.peers import TOKENS, exchanges_of

#: The operands that may need a gradient.
DIFFERENTIABLE = ("x", "w_in", "w_out", "b_in", "b_out", "gate", *NAMES)
_OPTIONS = "int tokens, int small, int config"
_SCHEMAS = {
    "group_forward": "(Tensor x, Tensor arriving, Tensor gate, Tensor? expert_bias, Tensor? token_mask, "
    "Tensor? forced_experts, Tensor? qb_bin_bounds, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    f"{QUANTIZED}, {FACTORS}, int num_counts, int rows, int ranks, int rank, {_OPTIONS}) -> "
    "(Tensor weights, Tensor experts, Tensor score_sum, Tensor lse, Tensor output, Tensor h, Tensor lora_u, "
    "Tensor lora_copies, Tensor there, Tensor all_counts, Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes, "
    "Tensor counts, Tensor logits)",
    "group_hidden": "(Tensor d_output, Tensor d_arriving, Tensor x, Tensor x_arriving, Tensor h, Tensor there, "
    "Tensor slot_of_row, Tensor group_sizes, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, Tensor? lora_u, "
    f"{QUANTIZED}, {FACTORS}, ScalarType w_out_dtype, int requested, {_OPTIONS}) -> "
    "(Tensor dh, Tensor d_w_out, Tensor d_b_out, Tensor d_there, Tensor dh_q, Tensor dh_scales, Tensor lora_v_in, "
    f"{', '.join(f'Tensor d_{name}' for name in NAMES)}, Tensor received)",
    "group_inputs": "(Tensor d_weights, Tensor? d_score_sum, Tensor? d_lse, Tensor gate, Tensor logits, "
    "Tensor experts, Tensor? token_mask, Tensor? lse, Tensor masked_x, Tensor x, Tensor x_arriving, "
    "Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes, Tensor dh, Tensor? dh_q, Tensor? dh_scales, "
    f"Tensor? lora_v_in, Tensor w_in, Tensor? b_in, Tensor w_out, {QUANTIZED}, {FACTORS}, int ranks, "
    f"ScalarType w_in_dtype, int requested, bool needs_x, bool needs_gate, {_OPTIONS}) -> "
    "(Tensor d_x, Tensor d_w_in, Tensor d_b_in, Tensor d_gate)",
}
_runs: dict[str, Any] = {}
if native is not None:
    add_p2p_operations(native)
    for _name, _schema in _SCHEMAS.items():
        _ops.define(_name + _schema)
        _runs[_name] = native_run(getattr(torch.ops.anabranch, _name).default)
    native.register_group_layer()
    for _name, _run in _runs.items():
        _operation = getattr(torch.ops.anabranch, _name).default
        _ops.impl(_name, reject_derivative(_operation, _run), "Autograd", with_keyset=True)


def applies(config: GroupConfig, o: Operands) -> bool:
    """Whether the native operations compute the layer for these operands: over p2p, in the plain eager case."""
    layer = config.layer
    return (
        config.transport == "p2p"
        and not config.fp8_exchange
        and config.ranks.capacity is None
        and layer.router is not None
        and native_passes.applies(layer, o)
        and o.x.numel() > 0
        and is_plain_eager(o.x.device, o)
    )


def forward(config: GroupConfig, o: Operands, group: Any) -> GroupOutput:
    """The results of the layer."""
    layer, ranks, x = config.layer, config.ranks, o.x
    assert layer.router is not None
    check_alike(config, x, group)
    P, E, bins = ranks.ranks, layer.num_experts, layer.router.qb_bins
    num_counts, x = E + P + E * bins, x.contiguous()
    exchanges = exchanges_of(group)
    arriving = exchanges.start(x, TOKENS[0])
    pointers = exchanges.pointers(2 * padded(4 * P * ranks.tokens * ranks.topk) + padded(4 * P * num_counts))
    (
        weights, experts, score_sum, lse, output, h, u, copies, there, all_counts, *maps, counts, logits,
    ) = _runs["group_forward"](
        x, arriving, o.gate, o.expert_bias, o.token_mask, o.replay_experts, o.qb_bin_bounds,
        cast_weight(layer.network, o.w_in, x.dtype), o.b_in, cast_weight(layer.network, o.w_out, x.dtype), o.b_out,
        *forward_operands(o.quantized()), *factor_arguments(o.factors()), num_counts, ranks.rows("p2p"), P, ranks.rank,
        *pointers, layer.number,
    )  # fmt: skip
    exchanges.released(TOKENS[0])
    of_all, by_source, histogram = all_counts.sum(0, dtype=torch.int32).split([E, P, E * bins])
    # Without a capacity nothing is dropped, so counts has zeros after the first E numbers, and so has by_source.
    zero = counts.view(torch.float32)[0, E]
    saved = h, u, copies, there, logits, None, *maps, None, None
    own = counts[0, :E]
    return GroupOutput(
        *(output, own, of_all, by_source, histogram.view(E, bins), weights, experts, score_sum, lse),
        *(*saved, by_source[0], zero),
    )


def backward(
    config: GroupConfig,
    needs: Mapping[str, bool],
    saved: Sequence[Any],
    group: Any,
    d_output: Tensor | None,
    d_weights: Tensor | None,
    d_score_sum: Tensor | None,
    d_lse: Tensor | None,
) -> dict[str, Tensor | None]:
    """Gradients by operand name. saved: see `on_group`."""
    (
        x, w_in, w_out, b_in, b_out, gate, _, mask, _, experts, h, logits, lse, *quantized_and_u, copies,
        a_in, b_factor_in, a_out, b_factor_out, there, row_of_slot, slot_of_row, group_sizes, _, _,
    ) = saved  # fmt: skip
    *quantized, u = quantized_and_u
    layer, ranks = config.layer, config.ranks
    factors = factor_arguments((a_in, b_factor_in, a_out, b_factor_out), copies)
    network = layer.network
    up, down = cast_weight(network, w_in, x.dtype), cast_weight(network, w_out, x.dtype)
    others = *oriented_backward(network, w_in, w_out, quantized), *factors
    # Every rank sends the gradient of x, and of the weights, back to the tokens.
    requested = request({name: needs[name] for name in OPERANDS} | {"x": True, "weights": True})
    x = x.contiguous()
    d_output = torch.zeros_like(x) if d_output is None else d_output.contiguous()
    exchanges = exchanges_of(group)
    d_arriving = exchanges.start(d_output, TOKENS[0])
    x_arriving = exchanges.start(x, TOKENS[1])
    pointers = exchanges.pointers(there.nbytes)
    dh, d_w_out, d_b_out, _, dh_q, dh_scales, v_in, *d_factors, received = _runs["group_hidden"](
        d_output, d_arriving, x, x_arriving, h, there / ranks.ranks, slot_of_row, group_sizes, up, b_in, down, b_out, u,
        *others, w_out.dtype, requested, *pointers, layer.number,
    )  # fmt: skip
    exchanges.released(TOKENS[0])
    d_w = received.view(ranks.ranks, ranks.tokens, -1).sum(0)
    if d_weights is not None:
        d_w = d_w + d_weights
    tokens = x if mask is None else torch.where(mask[:, None], x, 0)  # 0 * NaN would be NaN
    d_x, d_w_in, d_b_in, d_gate = _runs["group_inputs"](
        d_w, *requested_cotangents(layer, d_score_sum, d_lse), gate, logits, experts, mask, lse, tokens, x, x_arriving,
        row_of_slot, slot_of_row, group_sizes, dh, dh_q, dh_scales, v_in, up, b_in, down, *others, ranks.ranks,
        w_in.dtype, request({name: needs[name] for name in FROM_DH - {"x"}}), needs["x"], needs["gate"], *pointers,
        layer.number,
    )  # fmt: skip
    exchanges.released(TOKENS[1])
    names = ("x", "w_in", "b_in", "w_out", "b_out", "gate", *NAMES)
    gradients = (d_x, d_w_in, d_b_in, d_w_out, d_b_out, d_gate, *d_factors)
    return {name: d if needs[name] else None for name, d in zip(names, gradients, strict=True)}

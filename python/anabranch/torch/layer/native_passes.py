"""The layer's forward and backward pass as one native operation each, for plain tensors in eager mode.

They compute what `forward.py` computes with several operations, with bitwise the same results: the gate's GEMMs, then
the same calls. Results that were not requested are None. Programs must not contain these operations, because they take
their options as a number of this process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.lora import NAMES
from anabranch.torch.binding.define import _ops, native_run
from anabranch.torch.binding.derivatives import reject_derivative
from anabranch.torch.binding.native import native
from anabranch.torch.layer.operands import LayerConfig, LayerOutput, Operands
from anabranch.torch.ops.experts import cast_weight
from anabranch.torch.ops.experts_ops import QUANTIZED
from anabranch.torch.ops.factors import FACTORS, factor_arguments
from anabranch.torch.ops.gradients import request
from anabranch.torch.ops.packed import oriented_backward
from anabranch.torch.ops.packed_ops import add_packed_operations, unpacked
from anabranch.torch.ops.quantized import forward_operands

if native is not None:
    _ops.define(
        "layer_forward(Tensor x, Tensor? gate, Tensor? weights, Tensor? experts, Tensor? expert_bias, "
        "Tensor? token_mask, Tensor? forced_experts, Tensor? qb_bin_bounds, Tensor w_in, Tensor? b_in, Tensor w_out, "
        f"Tensor? b_out, {QUANTIZED}, {FACTORS}, int config) -> "
        "(Tensor output, Tensor tokens_per_expert, Tensor dropped, Tensor weights, Tensor experts, Tensor score_sum, "
        "Tensor lse, Tensor qb_histogram, Tensor h, Tensor lora_u, Tensor lora_copies, Tensor maps, Tensor logits, "
        "Tensor dropped_by_source, Tensor zero, Tensor another_zero)"
    )
    _ops.define(
        "layer_backward(Tensor d_output, Tensor? d_score_sum, Tensor? d_lse, Tensor? tokens, Tensor? gate, Tensor x, "
        "Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out, Tensor? token_mask, Tensor weights, Tensor? experts, "
        f"Tensor? lse, Tensor h, Tensor? logits, Tensor maps, Tensor? lora_u, {QUANTIZED}, {FACTORS}, "
        "ScalarType w_in_dtype, ScalarType w_out_dtype, int requested, bool needs_x, bool needs_gate, int config) -> "
        "(Tensor d_x, Tensor d_w_in, Tensor d_b_in, Tensor d_w_out, Tensor d_b_out, Tensor d_gate, Tensor d_weights, "
        f"{', '.join(f'Tensor d_{name}' for name in NAMES)})"
    )
    add_packed_operations(native)
    native.register_layer()
    _layer_forward = native_run(torch.ops.anabranch.layer_forward.default)
    _layer_backward = native_run(torch.ops.anabranch.layer_backward.default)
    for _name, _run in (("layer_forward", _layer_forward), ("layer_backward", _layer_backward)):
        _operation = getattr(torch.ops.anabranch, _name).default
        _ops.impl(_name, reject_derivative(_operation, _run), "Autograd", with_keyset=True)


def _multiplies_natively(x: Tensor, gate: Tensor) -> bool:
    """Whether the native operations have the gate's GEMMs for these operands."""
    if x.is_cpu:
        return 1 not in gate.shape and x.shape[1] != 1
    return x.dtype == gate.dtype and x.dtype in (torch.float32, torch.bfloat16)


def applies(config: LayerConfig, o: Operands) -> bool:
    """Whether the native operations compute the layer for these operands, in the plain eager case."""
    if config.number < 0 or config.router is None:
        return config.number >= 0
    return o.gate is not None and o.gate_bias is None and o.port is None and _multiplies_natively(o.x, o.gate)


def forward(config: LayerConfig, o: Operands) -> LayerOutput:
    """The results of the layer."""
    dtype = o.x.dtype
    results = _layer_forward(
        o.x, o.gate, o.weights, o.experts, o.expert_bias, o.token_mask, o.replay_experts, o.qb_bin_bounds,
        cast_weight(config.network, o.w_in, dtype), o.b_in, cast_weight(config.network, o.w_out, dtype), o.b_out,
        *forward_operands(o.quantized()),
        *factor_arguments(o.factors()), config.number,
    )  # fmt: skip
    *of_caller, h, u, copies, maps, logits, dropped_by_source, zero, another_zero = results
    saved = (h, u, copies, None, None, None, logits, None, maps)
    return LayerOutput(*(*of_caller, *saved, dropped_by_source, zero, another_zero))


def unpacked_maps(config: LayerConfig, maps: Tensor, experts: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """row_of_slot, slot_of_row and group_sizes of the forward pass."""
    T, K = experts.shape
    return unpacked(maps, T, K, h.shape[0], config.num_experts)


def backward(
    config: LayerConfig,
    needs: Mapping[str, bool],
    saved: Any,
    quantized: Sequence[Tensor | None],
    d_output: Tensor | None,
    d_sums: Sequence[Tensor | None],
) -> dict[str, Tensor | None]:
    """Gradients by operand name, for a router whose weights have no cotangent. saved: see `forward._Saved`."""
    s, mask, x = saved, saved.token_mask, saved.x
    tokens = x if mask is None else torch.where(mask[:, None], x, 0)  # 0 * NaN would be NaN
    quantized = oriented_backward(config.network, s.w_in, s.w_out, quantized)
    gradients = _layer_backward(
        torch.zeros_like(x) if d_output is None else d_output, *d_sums, tokens, s.gate, x,
        cast_weight(config.network, s.w_in, x.dtype), cast_weight(config.network, s.w_out, x.dtype), s.b_in, s.b_out,
        mask, s.weights, s.experts, s.lse, s.h, s.logits, s.maps, s.lora_u, *quantized,
        *factor_arguments(s.factors(), s.lora_copies), s.w_in.dtype, s.w_out.dtype, request(needs), needs["x"],
        needs.get("gate", False), config.number,
    )  # fmt: skip
    names = ("x", "w_in", "b_in", "w_out", "b_out", "gate", "weights", *NAMES)
    found = dict(zip(names, gradients, strict=True))
    if (d_weights := found["weights"]) is not None:
        found["weights"] = d_weights.to(s.weights.dtype)
    return found

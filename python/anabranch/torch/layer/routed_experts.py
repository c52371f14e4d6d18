"""The layer after the router, for given experts and weights."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from anabranch.lora import Lora, operand_fields
from anabranch.options import ROUTED_NAMES, RoutedKeywords, RoutedOptions, check_names, takes_options
from anabranch.packed import parts_of
from anabranch.precision import precision_number
from anabranch.rows import check_num_slots
from anabranch.torch.binding import check
from anabranch.torch.binding.autocast import as_autocast, match_autocast
from anabranch.torch.layer.forward import fused_layer
from anabranch.torch.layer.group_output import GroupConfig
from anabranch.torch.layer.moe import flat, unflat
from anabranch.torch.layer.on_group import group_layer
from anabranch.torch.layer.operands import (
    LayerConfig,
    Operands,
    cached_options,
    factors_of,
    layer_config,
    quantized_fields,
    with_shared_gradients,
)
from anabranch.torch.ops.experts import check_experts, check_network_lora
from anabranch.torch.ops.packed import Packed, check_frozen, describe_weight, packed_operands
from anabranch.torch.ops.quantized import QuantizedExperts, check_current, check_fp8_operands
from anabranch.torch.parallel.parallel import check_parallel, place

if TYPE_CHECKING:  # some builds of torch lack it
    from torch.distributed import ProcessGroup


class RoutedExpertsOutput(NamedTuple):
    """The result of `routed_experts`.

    Attributes:
      output: [..., D], dtype of x.
      tokens_per_expert: int32 [E], slots of each expert, before dropping.
      dropped: int32 scalar, dropped slots and indices outside [-1, E) of all ranks.
    """

    output: Tensor
    tokens_per_expert: Tensor
    dropped: Tensor


@takes_options(RoutedKeywords)
def routed_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: Tensor | Packed,
    w_out: Tensor | Packed,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
    group: "ProcessGroup | None" = None,
    transport: str = "auto",
    capacity_factor: float | None = None,
    fp8_exchange: bool = False,
    **options: Unpack[RoutedKeywords],
) -> RoutedExpertsOutput:
    """Applies K given experts to every token and returns the weighted sum of their outputs.

        output[t] = sum_k weights[t, k] * (phi(x[t] W_gate[e], x[t] W_up[e]) W_out[e]),   e = experts[t, k]

    This is `moe` without its router, for example for a custom router or one with other inputs than the experts. Fusion,
    memory and dropping are those of `moe`.

    Args:
      x: [..., D] float32, bfloat16 or float16.
      experts: int16, int32 or int64 [..., K], K >= 1. An index outside [0, E) is no expert. An index may repeat.
      weights: float32, bfloat16 or float16 [..., K]; any numbers.
      w_in: [E, D, 2, F] (gate and up columns), or [E, D, 1, F] for ungated experts; dtype of x, or float32.
      w_out: [E, F, D]; dtype of x, or float32, as in `moe`. Both may be packed, as in `moe`.
      b_in: [E, 2 or 1, F], b_out: [E, D]; dtype of x.
      quantized: with precision "fp8", the result of `quantize_experts` for w_in and w_out; None: as in `moe`.
      lora: low-rank adapters of w_in and w_out, or None, as in `moe`; see `Lora`.
      group, transport, capacity_factor, fp8_exchange: expert parallelism, as in `moe`; experts are numbered over all
        ranks. Buffers hold K rows per token on each of P ranks, since an index may repeat; those of `moe` hold
        min(K, E/P).
      {options}

    Returns:
      RoutedExpertsOutput(output, tokens_per_expert, dropped). Indices outside [-1, E) count as dropped.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has a wrong shape or value, or a combination is not allowed.

    Gradients: of x, weights, w_in, w_out, b_in, b_out and the LoRA factors, each in its operand's dtype; GEMMs
    accumulate in float32. Operands without requires_grad cost nothing. No double backward. Under torch.autocast a
    float32 x is rounded to the autocast dtype first.
    With a group, gradients of the experts are those of the mean of the ranks' losses, as in `moe`.
    The gradient of a weight is exact also where the weight is 0, and 0 without an expert or for a dropped slot.
    Saved for backward: the operands, h [R, 2 or 1, F], [T, K]-sized integers, and u [R, r] of an adapter of w_in.

    Source: semantics, sections 9, 11 and 12.

    >>> experts, weights = torch.tensor([[0, 1], [1, -1]]), torch.tensor([[0.5, -0.5], [2.0, 0.0]])
    >>> w_in, w_out = torch.ones(2, 4, 1, 8), torch.ones(2, 8, 4) * torch.tensor([1.0, 2.0])[:, None, None]
    >>> result = routed_experts(torch.ones(2, 4), experts, weights, w_in, w_out, activation="relu")
    >>> result.output[:, 0].tolist(), result.tokens_per_expert.tolist()
    ([-16.0, 128.0], [1, 2])
    """
    x = as_autocast(x)
    b_in, b_out = match_autocast(x, b_in), match_autocast(x, b_out)
    check_names("routed_experts", ROUTED_NAMES, options)
    given = cached_options(RoutedOptions, **options)
    parallel = check_parallel(group, transport, capacity_factor, fp8_exchange, precision_number(given.precision))
    ranks = 1 if parallel is None else parallel.ranks
    arrays = (*parts_of(w_in), *parts_of(w_out))
    config: LayerConfig = _check_cache.check(
        (x, experts, weights),
        (*arrays, b_in, b_out, *factors_of(lora), *quantized_fields(quantized).values()),
        (ranks, type(quantized), type(lora), type(w_in), type(w_out)),
        lambda: _checked(given, ranks, (x, w_in, w_out, b_in, b_out, experts, weights, lora), quantized),
        given,
    )
    check_current(quantized, w_in, w_out)
    check_frozen("w_in", w_in)
    check_frozen("w_out", w_out)
    w_in, w_out, quantized = packed_operands(config.network, w_in, w_out, quantized)
    leading, K = x.shape[:-1], experts.shape[-1]
    tokens = flat(x)
    assert tokens is not None
    if group is not None:  # ranks exchange int32 and float32
        experts, weights = check.as_indices(experts), weights.float()
        lora = with_shared_gradients(group, lora, w_in.shape[0])
    operands = Operands(
        x=tokens,
        w_in=w_in,
        w_out=w_out,
        b_in=b_in,
        b_out=b_out,
        weights=flat(weights),
        experts=flat(experts),
        **operand_fields(lora),
        **quantized_fields(quantized),
    )
    if parallel is None:
        result = fused_layer(config, operands)
        return RoutedExpertsOutput(unflat(result.output, leading), result.tokens_per_expert, result.dropped)
    placement = place(
        parallel, x, tokens.shape[0], K, config.num_experts, w_in.shape[0], config.align_size, repeats=True
    )
    own = group_layer(GroupConfig(config, *placement, parallel.fp8_exchange), operands, parallel.group)
    dropped = own.all_dropped.sum(dtype=torch.int32)
    return RoutedExpertsOutput(unflat(own.output, leading), own.all_tokens_per_expert, dropped)


def _checked(options: RoutedOptions, ranks: int, tensors: tuple[Any, ...], quantized: Any) -> LayerConfig:
    """Checks tensors and options of `routed_experts`; x and biases are already rounded for autocast."""
    x, w_in, w_out, b_in, b_out, experts, weights, lora = tensors
    x = check.tensor("x", x, check.FLOATS, (..., "D"))
    *leading, _ = x.shape
    layouts = options.layouts()
    dtypes = tuple(dict.fromkeys((x.dtype, torch.float32)))
    sizes = check_experts(layouts, x, dtypes, w_in, w_out, b_in, b_out)
    local, _, parts, _ = sizes
    if local < 1:
        raise ValueError(f"w_in: got {describe_weight(w_in)}, expected at least one expert")
    experts = check.tensor("experts", experts, check.INDICES, (*leading, "K"))
    K = experts.shape[-1]
    if K < 1:
        raise ValueError(f"experts: got {check.describe(experts)}, expected [..., K] with K >= 1")
    check_num_slots("experts", math.prod(leading), K)
    check.tensor("weights", weights, check.FLOATS, (*leading, ("K", K)))
    check.same_device("x", x, experts=experts, weights=weights)
    checked = options.experts(parts, K, check_network_lora(lora, x, sizes))
    check_fp8_operands(checked.precision, layouts, "x", x, w_in, w_out, quantized)
    return layer_config(None, checked, local * ranks, options.checked_align_size())


_check_cache = check.CheckCache()

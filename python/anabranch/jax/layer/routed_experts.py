"""The layer after the router, for experts and weights from any source."""

import math
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check
from anabranch.jax.binding.eager import compiled
from anabranch.jax.layer.fused_layer import (
    check_parallel,
    experts_operands,
    ffn_config,
    fused_layer,
    lora_factors,
    quantized_arrays,
    unreduced_axes,
)
from anabranch.jax.layer.operands import LayerConfig, Operands
from anabranch.jax.ops.packed import Packed
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.parallel.parallel import Parallel
from anabranch.lora import Lora, operand_fields
from anabranch.options import ROUTED_NAMES, RoutedKeywords, RoutedOptions, check_names, takes_options
from anabranch.rows import check_num_slots


class RoutedExpertsOutput(NamedTuple):
    """The result of `routed_experts`.

    Attributes:
      output: [..., D], dtype of x.
      tokens_per_expert: int32 [E], assignments to each expert, before any dropping.
      dropped: int32 scalar, the number of assignments that a capacity limit drops, and of indices outside [-1, E).
    """

    output: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array


@takes_options(RoutedKeywords)
def routed_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    w_in: jax.Array | Packed,
    w_out: jax.Array | Packed,
    *,
    b_in: jax.Array | None = None,
    b_out: jax.Array | None = None,
    parallel: Parallel | None = None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
    **options: Unpack[RoutedKeywords],
) -> RoutedExpertsOutput:
    """Applies the K given experts to every token, and sums their outputs by weight.

        output[t] = sum_k weights[t, k] * (phi(x[t] W_gate[e], x[t] W_up[e]) W_out[e]),   e = experts[t, k]

    This is `moe` after its router, for a selection and weights from any source: a router of your own, or one with
    another input than the experts'. Fusion, memory, parallelism and dropping are as in `moe`.

    Args:
      x: [..., D] float32, bfloat16 or float16.
      experts: int16, int32 or int64 [..., K], K >= 1. An index outside [0, E) is no expert; experts may repeat.
      weights: float32, bfloat16 or float16 [..., K]; they may be any numbers, with any sum.
      w_in: [E, D, 2, F] (gate and up columns), or [E, D, 1, F] for ungated experts; dtype of x, or float32.
      w_out: [E, F, D]; dtype of x, or float32, as in `moe`. Both may be packed, as in `moe`.
      b_in: [E, 2 or 1, F], b_out: [E, D]; dtype of x.
      parallel: a `Parallel`, which spreads the layer over a mesh; None: see `moe`. Experts and weights are sharded like
        x. Buffers have K rows per token for each of P ranks, since an expert may repeat; those of `moe` have
        min(K, E/P).
      quantized: with precision "fp8", w_in and w_out as returned by `quantize_experts`; None: quantised here.
      lora: the factors of low-rank adapters, as in `moe`; None: no adapters.
      {options}

    Returns:
      RoutedExpertsOutput(output, tokens_per_expert, dropped). Counts cover all tokens, on any number of devices. Inside
      a jax.shard_map they cover the shard, except that with `parallel=Parallel(data_axes=...)` tokens_per_expert covers
      all shards along these axes. Every invalid index other than -1 counts as dropped.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: a wrong shape, range or combination. Messages name the argument, the value and what was expected.

    Gradients: for x, weights, w_in, w_out, b_in and b_out, in the dtype of each operand. GEMMs accumulate in float32.
    The gradient of a weight is exact even if the weight is 0, and 0 if there is no expert or no row.
    Saved for the backward pass: the operands, h [R, 2 or 1, F], and [T, K]-sized integers.

    Source: semantics, sections 9 and 11.

    Example:
      >>> import jax.numpy as jnp
      >>> from anabranch.jax import routed_experts
      >>> experts, weights = jnp.array([[0, 1], [1, -1]]), jnp.array([[0.5, -0.5], [2.0, 0.0]])
      >>> w_in, w_out = jnp.ones([2, 4, 1, 8]), jnp.ones([2, 8, 4]) * jnp.array([1.0, 2.0])[:, None, None]
      >>> result = routed_experts(jnp.ones([2, 4]), experts, weights, w_in, w_out, activation="relu")
      >>> result.output[:, 0].tolist(), result.tokens_per_expert.tolist()
      ([-16.0, 128.0], [1, 2])
    """
    x = check.array("x", x, check.FLOATS, (..., "D"))
    *leading, _ = x.shape
    check_names("routed_experts", ROUTED_NAMES, options)
    given = RoutedOptions(**options)
    experts_by_name, _, parts = experts_operands(given.layouts(), x, w_in, w_out, b_in, b_out)
    experts = check.indices("experts", experts, (*leading, "K"))
    K = experts.shape[-1]
    if K < 1:
        raise ValueError(f"experts: got {check.describe(experts)}, expected [..., K] with K >= 1")
    check_num_slots("experts", math.prod(leading), K)
    weights = check.array("weights", weights, check.FLOATS, (*leading, ("K", K)))
    lora = lora_factors(given.layouts(), x, experts_by_name["w_in"], lora)
    ffn = ffn_config(given, parts, K, lora)
    check_parallel(parallel, ffn)
    config = LayerConfig(router=None, ffn=ffn, align_size=given.checked_align_size())
    quantized_by_name = quantized_arrays(ffn, experts_by_name, quantized)
    operands = Operands(
        x=x,
        gate=None,
        gate_bias=None,
        experts=experts,
        weights=weights,
        **experts_by_name,
        **quantized_by_name,
        **operand_fields(lora),
    )
    return (
        _compiled_routed_experts(config, operands) if parallel is None else _routed_experts(config, operands, parallel)
    )


def _routed_experts(config: LayerConfig, operands: Operands, parallel: Parallel | None = None) -> RoutedExpertsOutput:
    """`routed_experts` on checked operands."""
    assert operands.weights is not None
    operands = operands._replace(weights=operands.weights.astype(jnp.float32))
    shards = unreduced_axes(parallel, operands.x, config.ffn.topk)
    result = fused_layer(config, operands, parallel)
    counts = jax.lax.psum(result.tokens_per_expert, shards) if shards else result.tokens_per_expert
    return RoutedExpertsOutput(result.output, counts, jnp.sum(result.dropped, dtype=jnp.int32))


_compiled_routed_experts = compiled(static_argnums=(0,))(_routed_experts)

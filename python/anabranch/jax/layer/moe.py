"""The whole Mixture-of-Experts layer: one differentiable function from x to the output.

`moe` checks its arguments, runs the layer (`fused_layer`), and computes the losses from the sums in its result.
"""

import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check
from anabranch.jax.binding.eager import compiled
from anabranch.jax.binding.sharding import Axes
from anabranch.jax.layer.fused_layer import (
    check_parallel,
    experts_operands,
    ffn_config,
    fused_layer,
    lora_factors,
    quantized_arrays,
    unreduced_axes,
)
from anabranch.jax.layer.operands import LayerConfig, LayerOutput, Operands
from anabranch.jax.ops.balance import load_balance_loss, mean_of_squares
from anabranch.jax.ops.packed import Packed
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.ops.router import quantile_operand, router_operands
from anabranch.jax.parallel.parallel import Parallel
from anabranch.lora import Lora, operand_fields
from anabranch.options import LAYER_NAMES, LayerKeywords, LayerOptions, check_names, takes_options
from anabranch.replay import Replay, check_replay
from anabranch.replay import operand_fields as replay_fields


class MoEOutput(NamedTuple):
    """The result of `moe`.

    Attributes:
      output: [..., D], dtype of x.
      aux_loss: float32 scalar, the load-balance loss; 0 if its coefficient is 0.
      z_loss: float32 scalar; 0 if its coefficient is 0.
      tokens_per_expert: int32 [E], assignments to each expert, before any dropping.
      dropped: int32 scalar, the number of assignments to experts that a capacity limit drops.
      dropped_by_source: int32 [S], `dropped` by the device that the tokens came from, for the S shards of the tokens
        over (*data_axes, expert_axis) of `parallel`; S = 1 without `parallel`.
      experts: int32 [..., K], the selection, best first; before any dropping; -1: no expert.
      weights: float32 [..., K], 0 where the expert is -1. A loss may use them: their gradient reaches the gate and x.
      qb_histogram: int32 [E, bins] with quantile balancing, else None.
    """

    output: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array
    dropped_by_source: jax.Array
    experts: jax.Array
    weights: jax.Array
    qb_histogram: jax.Array | None = None

    @property
    def routing(self) -> Replay:
        """The experts and weights as a record, for the argument `replay`.

        On the same inputs, its replay returns the same bits.
        """
        return Replay(self.experts, self.weights)


def layer_config(
    options: LayerOptions, num_experts: int, parts: int, parallel: Parallel | None = None, lora: Lora | None = None
) -> LayerConfig:
    """Checks the options of a layer; modules call it in their constructors. parts: P of w_in; lora: checked."""
    router = options.router(num_experts)
    ffn = ffn_config(options, parts, router.topk, lora)
    check_parallel(parallel, ffn)
    aux_loss, z_loss = map(bool, options.loss_coefficients())
    return LayerConfig(router, ffn, options.checked_align_size(), aux_loss, z_loss)


@takes_options(LayerKeywords)
def moe(
    x: jax.Array,
    gate: jax.Array,
    w_in: jax.Array | Packed,
    w_out: jax.Array | Packed,
    *,
    topk: int,
    gate_bias: jax.Array | None = None,
    expert_bias: jax.Array | None = None,
    b_in: jax.Array | None = None,
    b_out: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    forced_experts: jax.Array | None = None,
    replay: Replay | None = None,
    qb_bin_bounds: jax.Array | tuple[float, float] | None = None,
    qb_bins: int | None = None,
    parallel: Parallel | None = None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
    **options: Unpack[LayerKeywords],
) -> MoEOutput:
    """Routes every token to its K best experts, applies them, and sums their outputs by weight.

        logits = x gate + gate_bias;  (w, e) = top-K routing of the logits
        output[t] = sum_k w[t, k] * (phi(x[t] W_gate[e], x[t] W_up[e]) W_out[e]),   e = e[t, k]

    Args:
      x: [..., D] float32, bfloat16 or float16.
      gate: [D, E] float; logits are float32.
      w_in: [E, D, 2, F] (gate and up columns), or [E, D, 1, F] for ungated experts; dtype of x, or float32.
      w_out: [E, F, D]; dtype of x, or float32. In a 16-bit layer the GEMMs round float32 weights to the dtype of x;
        the weights' gradients are the float32 sums without rounding. w_in and w_out, each by itself, may be packed: an
        `Mxfp4` or an `Fp8Blocks`. The layer then computes with `unpack(w, x.dtype)`. Packed weights have no gradient.
      topk: K, experts per token, 1 <= K <= E.
      gate_bias: [E] float, added to the logits; None: 0.
      expert_bias: [E] float, added to the scores for the selection only; has no gradient.
      b_in: [E, 2 or 1, F], b_out: [E, D]; dtype of x.
      token_mask: bool [...]; False marks padding, which has zero output and gradients and is not counted.
      forced_experts: int [..., K]; gives the selection. -1: no expert. See `route` for -inf. Equals
        `replay=Replay(forced_experts)`, except that expert_bias and groups are errors.
      replay: a recorded routing, such as `routing` of a result; see `Replay`. expert_bias and groups select for tokens
        that are not replayed. `qb_histogram` counts replayed tokens too.
      qb_bin_bounds, qb_bins: quantile balancing, see `route`; pass the result's `qb_histogram` to `quantile_bias`.
      parallel: a `Parallel`, which spreads the layer over a mesh. None: every device has all experts, x may be sharded
        over its leading dimensions in any way, and the rows of a sharded x are not padded.
      quantized: with precision "fp8", w_in and w_out as returned by `quantize_experts`, used in their place; None: the
        forward pass and the backward pass each quantise the weights. `quantized` gets no gradient; w_in and w_out do.
      lora: the factors of low-rank adapters of the experts, which add s_in A_in[e] B_in[e] to W_in[e] and s_out
        A_out[e] B_out[e] to W_out[e] without forming these sums; None: no adapters.
      {options}

    Returns:
      MoEOutput(output, aux_loss, z_loss, tokens_per_expert, dropped, dropped_by_source, experts, weights,
      qb_histogram). Losses and counts cover all tokens, on any number of devices. Inside a jax.shard_map they cover
      the shard, or with `parallel=Parallel(data_axes=...)` all shards along these axes.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: a wrong shape, range or combination. Messages name the argument, the value and what was expected.

    Gradients: for x, gate, gate_bias, w_in, w_out, b_in, b_out and the factors of lora, in the dtype of each operand.
    Gradients of operands that are not differentiated (an argument that `jax.grad` does not name, or that is under
    `jax.lax.stop_gradient`) are not computed: frozen weights cost nothing. GEMMs accumulate in float32. If x and the
    gate are bfloat16, a GPU rounds the logits' gradient to bfloat16 before its GEMMs; with a float32 gate or a float16
    x it keeps more bits.
    Saved for the backward pass: the operands, h [R, 2 or 1, F], u [R, r] with an adapter of w_in, the float32 logits,
    and [T, K]-sized routing.
    `jax.export` must be told to allow the `custom_calls` of this package (docs/jax.md).

    Source: Shazeer et al. 2017 (arXiv:1701.06538), Fedus et al. 2021 (arXiv:2101.03961) for the load-balance loss,
    Zoph et al. 2022 (arXiv:2202.08906) for the z-loss.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from anabranch.jax import moe
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> x = jax.random.normal(keys[0], [6, 8])
      >>> gate, w_in, w_out = (jax.random.normal(k, s) for k, s in zip(keys[1:], ([8, 4], [4, 8, 2, 16], [4, 16, 8])))
      >>> moe(x, gate, w_in, w_out, topk=2).output.shape
      (6, 8)
    """
    check_names("moe", LAYER_NAMES, options)
    arrays = dict(
        x=x, gate=gate, w_in=w_in, w_out=w_out, gate_bias=gate_bias, expert_bias=expert_bias, b_in=b_in, b_out=b_out,
        token_mask=token_mask, forced_experts=forced_experts, replay=replay, qb_bin_bounds=qb_bin_bounds,
    )  # fmt: skip
    return run_layer(LayerOptions(topk=topk, qb_bins=qb_bins, **options), arrays, parallel, quantized, lora)


def run_layer(
    options: LayerOptions,
    arrays: dict[str, Any],
    parallel: Parallel | None = None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
) -> MoEOutput:
    """`moe` with its options as one object. arrays: its other arguments by name; missing ones are None."""
    given = dict.fromkeys(
        ("gate_bias", "expert_bias", "b_in", "b_out", "token_mask", "forced_experts", "replay", "qb_bin_bounds")
    )
    given |= arrays
    x = check.array("x", given["x"], check.FLOATS, (..., "D"))
    *leading, D = x.shape
    experts_by_name, E, parts = experts_operands(
        options.layouts(), x, given["w_in"], given["w_out"], given["b_in"], given["b_out"]
    )
    gate = check.array("gate", given["gate"], check.FLOATS, (("D", D), ("E", E)))
    lora = lora_factors(options.layouts(), x, experts_by_name["w_in"], lora)
    config = layer_config(options, E, parts, parallel, lora)
    router = config.router
    assert router is not None
    quantized_by_name = quantized_arrays(config.ffn, experts_by_name, quantized)
    expert_bias, token_mask, forced_experts = router_operands(
        router, E, tuple(leading), given["expert_bias"], given["token_mask"], given["forced_experts"]
    )
    shape = (*leading, router.topk)
    replay = check_replay(
        check.indices, check.optional_array, ("float32", "bool"), given["replay"], forced_experts, shape
    )
    operands = Operands(
        x=x,
        gate=gate,
        gate_bias=check.optional_array("gate_bias", given["gate_bias"], check.FLOATS, (("E", E),)),
        expert_bias=expert_bias,
        token_mask=token_mask,
        qb_bin_bounds=quantile_operand(router, expert_bias, given["qb_bin_bounds"]),
        **replay_fields(replay),
        **experts_by_name,
        **quantized_by_name,
        **operand_fields(lora),
    )
    coefficients = options.loss_coefficients()
    if parallel is None:
        return _compiled_moe(config, coefficients, operands)
    return _moe(config, coefficients, operands, parallel)


def _moe(
    config: LayerConfig, coefficients: tuple[float, float], operands: Operands, parallel: Parallel | None = None
) -> MoEOutput:
    """`run_layer` on checked operands."""
    x, router = operands.x, config.router
    assert router is not None
    shards = unreduced_axes(parallel, x, router.topk)
    result = fused_layer(config, operands, parallel)
    tokens = math.prod(x.shape[:-1])
    aux, z, counts = _losses(router.topk, coefficients, result, operands.token_mask, tokens, shards)
    assert result.experts is not None and result.weights is not None
    histogram = result.qb_histogram
    if shards and histogram is not None:
        histogram = jax.lax.psum(histogram, shards)
    dropped = jnp.sum(result.dropped, dtype=jnp.int32)
    return MoEOutput(result.output, aux, z, counts, dropped, result.dropped, result.experts, result.weights, histogram)


_compiled_moe = compiled(static_argnums=(0, 1))(_moe)


def _losses(
    topk: int,
    coefficients: tuple[float, float],
    result: LayerOutput,
    token_mask: jax.Array | None,
    num_tokens: int,
    shards: Axes,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(aux_loss, z_loss, tokens_per_expert) from the sums, which are first summed over the mesh axes `shards`."""
    tokens = jnp.float32(num_tokens) if token_mask is None else jnp.sum(token_mask, dtype=jnp.float32)
    score_sum, squares, counts = result.score_sum, result.lse_squares, result.tokens_per_expert
    assert score_sum is not None and squares is not None
    if shards:
        score_sum, squares, counts, tokens = jax.lax.psum((score_sum, squares, counts, tokens), shards)
    aux = z = jnp.zeros((), jnp.float32)
    aux_coeff, z_coeff = coefficients
    if aux_coeff:
        aux = load_balance_loss(score_sum, counts, topk, aux_coeff, tokens)
    if z_coeff:
        z = mean_of_squares(squares, z_coeff, tokens)
    return aux, z, counts

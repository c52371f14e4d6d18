"""The whole Mixture-of-Experts layer: one differentiable function from x to the output.

`moe` checks its arguments, runs the layer's rules (`_mixture`), and computes the losses from the sums that
these return.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from anabranch.activation import Activation
from anabranch.jax.binding import check
from anabranch.jax.binding.sharding import Axes
from anabranch.jax.layer.fused_layer import (
    axes_of_sums,
    check_align_size,
    check_parallel,
    experts_operands,
    mixture,
    network_config,
    with_quantized,
)
from anabranch.jax.layer.operands import LayerConfig, LayerOutput, Operands
from anabranch.jax.ops.balance import load_balance_loss, mean_of_squares
from anabranch.jax.ops.experts import check_layouts
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.ops.router import quantile_operand, router_operands, router_options
from anabranch.jax.parallel.parallel import Parallel


class MoEOutput(NamedTuple):
    """What `moe` returns.

    Attributes:
      output: [..., D], dtype of x.
      aux_loss: float32 scalar, the load-balance loss; 0 where its coefficient is 0.
      z_loss: float32 scalar; 0 where its coefficient is 0.
      tokens_per_expert: int32 [E], slots routed to each expert, before any dropping.
      dropped: int32 scalar, slots that found no row.
      dropped_by_source: int32 [S], the same by the device that the tokens came from, for the S shards of the tokens
        over (*data_axes, expert_axis) of `parallel`; else S = 1.
      experts: int32 [..., K], the selection, the best first; -1: no expert. As `forced_experts` it is replayed.
      weights: float32 [..., K], 0 where the expert is -1. A loss may use them: their gradient goes to the gate and x.
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


def layer_config(
    num_experts: int,
    parts: int,
    *,
    topk: int,
    score_function: str = "softmax",
    normalize: bool = True,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    scaling_factor: float = 1.0,
    activation: str | Activation = "silu",
    weight_early: bool = False,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    align_size: int = 0,
    parallel: Parallel | None = None,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
    qb_bins: int | None = None,
    precision: str = "highest",
    fp8_scales: str = "float32",
) -> LayerConfig:
    """Checks those arguments of `moe` that are options; the layers do it when they are made. parts: P of w_in."""
    options = router_options(
        num_experts,
        topk,
        score_function=score_function,
        normalize=normalize,
        num_groups=num_groups,
        group_topk=group_topk,
        group_score_topk=group_score_topk,
        scaling_factor=scaling_factor,
        qb_bins=qb_bins,
    )
    layouts = check_layouts(w_in_layout, w_out_layout)
    ffn = network_config(activation, parts, options.topk, weight_early, layouts, precision, fp8_scales)
    check_parallel(parallel, ffn)
    return LayerConfig(
        router=options,
        ffn=ffn,
        aux_loss=check.number("aux_loss_coeff", aux_loss_coeff) != 0,
        z_loss=check.number("z_loss_coeff", z_loss_coeff) != 0,
        align_size=check_align_size(align_size),
    )


def moe(
    x: jax.Array,
    gate: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    topk: int,
    score_function: str = "softmax",
    normalize: bool = True,
    expert_bias: jax.Array | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    scaling_factor: float = 1.0,
    gate_bias: jax.Array | None = None,
    activation: str | Activation = "silu",
    b_in: jax.Array | None = None,
    b_out: jax.Array | None = None,
    weight_early: bool = False,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    token_mask: jax.Array | None = None,
    forced_experts: jax.Array | None = None,
    align_size: int = 0,
    parallel: Parallel | None = None,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
    qb_bin_bounds: jax.Array | tuple[float, float] | None = None,
    qb_bins: int | None = None,
    precision: str = "highest",
    fp8_scales: str = "float32",
    quantized: QuantizedExperts | None = None,
) -> MoEOutput:
    """Routes every token to its K best experts, applies them, and adds their outputs by weight.

        logits = x gate + gate_bias;  (w, e) = top-K routing of the logits
        output[t] = sum_k w[t, k] * (phi(x[t] W_gate[e], x[t] W_up[e]) W_out[e]),   e = e[t, k]

    Args:
      x: [..., D] float32, bfloat16 or float16.
      gate: [D, E] float; the product with x accumulates and stays in float32.
      w_in: [E, D, 2, F] (gate and up columns), or [E, D, 1, F] for ungated experts; dtype of x, or float32.
      w_out: [E, F, D]; dtype of x, or float32. Float32 weights of a 16-bit layer are rounded to its dtype where they
        multiply; their gradients are the float32 sums, not rounded.
      topk: K, 1 <= K <= E.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus".
      normalize: weights of a token sum to `scaling_factor`; False: raw scores.
      expert_bias: [E] float, added to the scores for the selection only; gets no gradient.
      num_groups, group_topk, group_score_topk: choose `group_topk` of `num_groups` contiguous expert groups first, by
        the sum of a group's `group_score_topk` best scores; see `route`.
      scaling_factor: finite number that multiplies the weights.
      gate_bias: [E] float, added to the logits; None: 0.
      activation: a name, "silu" (or "swish"), "gelu" (tanh form), "gelu_erf", "quick_gelu", "relu", "relu2" or
        "linear", for act(h_gate) h_up, or an `Activation` of two inputs and with parameters.
      b_in: [E, 2 or 1, F], b_out: [E, D]; dtype of x.
      weight_early: weights multiply before W_out instead of at the combine; same result.
      aux_loss_coeff: coefficient of the load-balance loss coeff E / (K N^2) sum_e score_sum[e] tokens_per_expert[e].
      z_loss_coeff: coefficient of the mean squared logsumexp of the logits.
      token_mask: bool [...]; False marks padding, which gets zero output and gradient and counts nowhere.
      forced_experts: int [..., K]; the selection is given (replay). -1: no expert. See `route` for -inf.
      align_size: rows of an expert are padded to a multiple of this; 0: not padded. The result does not change.
      parallel: how the layer is spread over a mesh, a `Parallel`. None: x may be sharded over its leading dimensions
        in any way, and every device has all experts; then rows are not padded.
      w_in_layout, w_out_layout: the axes of w_in and w_out behind E, "dpf" and "fd" as above; "pfd" and "df" as
        PyTorch's Linear has them, [E, 2, F, D] and [E, D, F]; "dfp" and "fpd": gate and up interleaved, with b_in
        [E, F, 2 or 1]. Nothing is copied or transposed, and gradients lie as their weights do.
      qb_bin_bounds, qb_bins: quantile balancing, see `route`; the histogram that `quantile_bias` takes is a result.
      precision: how float32 operands of the experts' products multiply, forward and backward. "highest": as float32, on
        a GPU's tensor cores by products of their parts, with an error at float32's level. "tf32": a GPU may round them
        to TF32, each to within 2^-10 of its size; sums stay float32, and a CPU computes as with "highest". No effect
        on bfloat16 and float16, nor on the logits. "fp8": x, w_in, w_out, and what the experts compute of them, are
        quantised to float8_e4m3fn where they multiply, whatever their dtype, with a scale for every 128 elements of a
        row and every 128 x 128 of a matrix; so are the factors of the gradient of x. Gradients of the experts'
        matrices, the gate and all sums are as without. D and F are multiples of 128; on
        a GPU, of compute capability 9.0, x is bfloat16 or float16, else jax.errors.JaxRuntimeError. See docs/jax.md.
        "auto": "fp8" where it can be had and is predicted to be faster, else "highest"; the numbers are those of what
        is chosen.
      fp8_scales: with "fp8", a block's scale: "float32", its largest absolute value / 448, or "power_of_two", that
        rounded up to one.
      quantized: with "fp8" or "auto", w_in and w_out as `quantize_experts` gave them, which are multiplied with in
        their place; None: they are quantised here, forward and again backward. No gradient runs through it; w_in and
        w_out get theirs.

    Returns:
      MoEOutput(output, aux_loss, z_loss, tokens_per_expert, dropped, dropped_by_source, experts, weights,
      qb_histogram). Losses and counts are those of all tokens, on however many devices; inside a jax.shard_map those of
      the shard, or with `parallel=Parallel(data_axes=...)` of all shards along these axes.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: a wrong shape, range or combination. Messages name the argument, what came and what was expected.

    Gradients: of x, gate, gate_bias, w_in, w_out, b_in and b_out, each of its operand's dtype; products accumulate in
    float32.
    Where x and the gate are bfloat16, a GPU rounds the logits' gradient to bfloat16 before it multiplies; a float32
    gate keeps more of it, and so does a float16 x: float16 has no room for gradients of logits.
    Kept for the backward pass: the operands, h [R, 2 or 1, F], the float32 logits, and [T, K]-sized routing.
    `jax.export` needs the custom calls listed in docs/jax.md allowed.

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
    x = check.array("x", x, check.FLOATS, (..., "D"))
    *leading, D = x.shape
    layouts = check_layouts(w_in_layout, w_out_layout)
    of_experts, E, parts = experts_operands(layouts, x, w_in, w_out, b_in, b_out)
    gate = check.array("gate", gate, check.FLOATS, (("D", D), ("E", E)))
    config = layer_config(
        E,
        parts,
        topk=topk,
        score_function=score_function,
        normalize=normalize,
        num_groups=num_groups,
        group_topk=group_topk,
        group_score_topk=group_score_topk,
        scaling_factor=scaling_factor,
        activation=activation,
        weight_early=weight_early,
        aux_loss_coeff=aux_loss_coeff,
        z_loss_coeff=z_loss_coeff,
        align_size=align_size,
        parallel=parallel,
        w_in_layout=w_in_layout,
        w_out_layout=w_out_layout,
        qb_bins=qb_bins,
        precision=precision,
        fp8_scales=fp8_scales,
    )
    config, of_quantized = with_quantized(config, x, of_experts, quantized, parallel)
    assert config.router is not None
    expert_bias, token_mask, forced_experts = router_operands(
        config.router, E, tuple(leading), expert_bias, token_mask, forced_experts
    )
    operands = Operands(
        x=x,
        gate=gate,
        gate_bias=check.optional_array("gate_bias", gate_bias, check.FLOATS, (("E", E),)),
        expert_bias=expert_bias,
        token_mask=token_mask,
        forced_experts=forced_experts,
        qb_bin_bounds=quantile_operand(config.router, expert_bias, qb_bin_bounds),
        **of_experts,
        **of_quantized,
    )
    shards = axes_of_sums(parallel, x, topk)
    result = mixture(config, operands, parallel)
    coefficients = float(aux_loss_coeff), float(z_loss_coeff)
    aux, z, counts = _losses(topk, coefficients, result, token_mask, math.prod(leading), shards)
    assert result.experts is not None and result.weights is not None
    histogram = result.qb_histogram
    if shards and histogram is not None:
        histogram = jax.lax.psum(histogram, shards)
    dropped = jnp.sum(result.dropped, dtype=jnp.int32)
    return MoEOutput(result.output, aux, z, counts, dropped, result.dropped, result.experts, result.weights, histogram)


def _losses(
    topk: int,
    coefficients: tuple[float, float],
    result: LayerOutput,
    token_mask: jax.Array | None,
    num_tokens: int,
    shards: Axes,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(aux_loss, z_loss, tokens_per_expert) of the sums; `shards`: mesh axes over which the sums are still parts."""
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

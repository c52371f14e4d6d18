"""The whole Mixture-of-Experts layer: one differentiable function from x to the output.

`moe` is one `jax.custom_vjp`. Its forward and backward rules are the operations' own rules in the order in which data
flows; nothing is differentiated through.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax import _check
from anabranch.jax.balance import load_balance_loss, z_loss
from anabranch.jax.dispatch import Plan, combine_forward, dispatch_backward, plan
from anabranch.jax.experts import ACTIVATIONS, FfnConfig, FfnOperands, activate, ffn_backward, ffn_forward
from anabranch.jax.router import (
    RouterOptions,
    RouterResiduals,
    Routing,
    route_backward,
    route_forward,
    router_operands,
    router_options,
)


class MoEOutput(NamedTuple):
    """What `moe` returns.

    Attributes:
      output: [..., D], dtype of x.
      aux_loss: float32 scalar, the load-balance loss; 0 where its coefficient is 0.
      z_loss: float32 scalar; 0 where its coefficient is 0.
      tokens_per_expert: int32 [E], slots routed to each expert, before any dropping.
      dropped: int32 scalar, slots that found no row.
    """

    output: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The options of `moe` that are part of the program."""

    router: RouterOptions
    ffn: FfnConfig
    aux_loss_coeff: float
    z_loss_coeff: float
    align_size: int


class Operands(NamedTuple):
    """The arrays of `moe`; x is [T, D]. None: not given."""

    x: jax.Array
    gate: jax.Array
    w_in: jax.Array
    w_out: jax.Array
    b_in: jax.Array | None
    b_out: jax.Array | None
    expert_bias: jax.Array | None
    token_mask: jax.Array | None
    forced_experts: jax.Array | None


class Residuals(NamedTuple):
    """What the forward pass keeps: its operands, h, the logits, and [T, K]- and [E]-sized routing."""

    operands: Operands
    routing: Routing
    router: RouterResiduals
    layout: Plan
    h: jax.Array | None


def _matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Float32 product of two matrices over one axis of each: of equal dtypes as they are, of mixed ones in float32."""
    precision = None
    if a.dtype != b.dtype or a.dtype == jnp.float32:
        a, b, precision = a.astype(jnp.float32), b.astype(jnp.float32), jax.lax.Precision.HIGHEST
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _losses(config: MoEConfig, operands: Operands, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """(aux_loss, z_loss) of the statistics, differentiable in score_sum and lse."""
    mask = operands.token_mask
    num_tokens = jnp.float32(operands.x.shape[0]) if mask is None else jnp.sum(mask, dtype=jnp.float32)
    aux = z = jnp.zeros((), jnp.float32)
    if config.aux_loss_coeff:
        aux = load_balance_loss(
            routing.score_sum, routing.tokens_per_expert, config.router.topk, config.aux_loss_coeff, num_tokens
        )
    if config.z_loss_coeff:
        z = z_loss(routing.lse, config.z_loss_coeff, token_mask=mask)
    return aux, z


def _ffn_operands(operands: Operands, layout: Plan, weights: jax.Array | None) -> FfnOperands:
    """The experts' view of the layer's operands: tokens, gathered by the plan."""
    return FfnOperands(
        x=operands.x,
        slot_of_row=layout.slot_of_row,
        group_sizes=layout.group_sizes,
        w_in=operands.w_in,
        w_out=operands.w_out,
        b_in=operands.b_in,
        b_out=operands.b_out,
        weights=weights,
    )


def moe_forward(config: MoEConfig, operands: Operands, *, keep_h: bool) -> tuple[MoEOutput, Residuals]:
    """The forward rule; `keep_h`: a gradient is wanted."""
    logits = _matmul(operands.x, operands.gate, (1, 0))
    routing, router_residuals = route_forward(
        config.router, logits, operands.expert_bias, operands.token_mask, operands.forced_experts
    )
    layout = plan(routing.experts, logits.shape[1], align_size=config.align_size)
    early, late = (routing.weights, None) if config.ffn.weight_early else (None, routing.weights)
    y, h = ffn_forward(config.ffn, _ffn_operands(operands, layout, early), keep_h=keep_h)
    output = combine_forward(y, layout, late)
    losses = _losses(config, operands, routing)
    result = MoEOutput(output, *losses, routing.tokens_per_expert, layout.dropped)
    return result, Residuals(operands, routing, router_residuals, layout, h)


def moe_backward(config: MoEConfig, residuals: Residuals, cotangents: MoEOutput) -> Operands:
    """The backward rule: gradients of the float operands, None for the others."""
    operands, routing, router_residuals, layout, h = residuals
    assert h is not None  # the forward rule was run with keep_h
    ffn_operands = _ffn_operands(operands, layout, routing.weights)
    gradients = ffn_backward(config.ffn, ffn_operands, h, cotangents.output)
    d_x = dispatch_backward(gradients.rows, layout, jnp.float32)

    def losses(score_sum: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _losses(config, operands, routing._replace(score_sum=score_sum, lse=lse))

    d_score_sum, d_lse = jax.vjp(losses, routing.score_sum, routing.lse)[1]((cotangents.aux_loss, cotangents.z_loss))
    d_logits = route_backward(
        config.router,
        router_residuals,
        gradients.weights,
        d_score_sum if config.aux_loss_coeff else None,
        d_lse if config.z_loss_coeff else None,
    )
    x = operands.x
    if operands.token_mask is not None:  # a masked token counts nowhere, whatever it holds: 0 * NaN would be NaN
        x = jnp.where(operands.token_mask[:, None], x, 0)
    d_x += _matmul(d_logits, operands.gate, (1, 1))
    return Operands(
        x=d_x.astype(operands.x.dtype),
        gate=_matmul(x, d_logits, (0, 0)).astype(operands.gate.dtype),
        w_in=gradients.w_in,
        w_out=gradients.w_out,
        b_in=gradients.b_in,
        b_out=gradients.b_out,
        expert_bias=None,
        token_mask=None,
        forced_experts=None,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(config: MoEConfig, operands: Operands) -> MoEOutput:
    return moe_forward(config, operands, keep_h=False)[0]


def _moe_fwd(config: MoEConfig, operands: Operands) -> tuple[MoEOutput, Residuals]:
    return moe_forward(config, operands, keep_h=True)


def _moe_bwd(config: MoEConfig, residuals: Residuals, cotangents: MoEOutput) -> tuple[Operands]:
    return (moe_backward(config, residuals, cotangents),)


_moe.defvjp(_moe_fwd, _moe_bwd)


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
    scaling_factor: float = 1.0,
    activation: str = "silu",
    b_in: jax.Array | None = None,
    b_out: jax.Array | None = None,
    weight_early: bool = False,
    aux_loss_coeff: float = 0.0,
    z_loss_coeff: float = 0.0,
    token_mask: jax.Array | None = None,
    forced_experts: jax.Array | None = None,
    align_size: int = 0,
) -> MoEOutput:
    """Routes every token to its K best experts, applies them, and adds their outputs by weight.

        logits = x gate;  (w, e) = top-K routing of the logits
        output[t] = sum_k w[t, k] * (act(x[t] W_gate[e]) * (x[t] W_up[e]) W_out[e]),   e = e[t, k]

    Args:
      x: [..., D] float32 or bfloat16.
      gate: [D, E] float; the product with x accumulates and stays in float32.
      w_in: [E, D, 2, F] (gate and up columns), or [E, D, 1, F] for ungated experts; dtype of x.
      w_out: [E, F, D]; dtype of x.
      topk: K, 1 <= K <= E.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus".
      normalize: weights of a token sum to `scaling_factor`; False: raw scores.
      expert_bias: [E] float, added to the scores for the selection only; gets no gradient.
      num_groups, group_topk: choose `group_topk` of `num_groups` contiguous expert groups first.
      scaling_factor: finite number that multiplies the weights.
      activation: "silu", "gelu" (tanh form), "relu" or "relu2".
      b_in: [E, 2 or 1, F], b_out: [E, D]; dtype of x.
      weight_early: weights multiply before W_out instead of at the combine; same result.
      aux_loss_coeff: coefficient of the load-balance loss coeff E / (K N^2) sum_e score_sum[e] tokens_per_expert[e].
      z_loss_coeff: coefficient of the mean squared logsumexp of the logits.
      token_mask: bool [...]; False marks padding, which gets zero output and gradient and counts nowhere.
      forced_experts: int [..., K]; the selection is given (replay). -1: no expert.
      align_size: rows of an expert are padded to a multiple of this; 0: not padded. The result does not change.

    Returns:
      MoEOutput(output, aux_loss, z_loss, tokens_per_expert, dropped).

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: a wrong shape, range or combination. Messages name the argument, what came and what was expected.

    Gradients: of x, gate, w_in, w_out, b_in and b_out, each of its operand's dtype; products accumulate in float32.
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
    x = _check.array("x", x, ("float32", "bfloat16"), (..., "D"))
    *leading, D = x.shape
    dtype = (str(x.dtype),)
    gate = _check.array("gate", gate, _check.FLOATS, (("D", D), "E"))
    E = gate.shape[1]
    w_in = _check.array("w_in", w_in, dtype, (("E", E), ("D", D), "2 or 1", "F"))
    P, F = w_in.shape[2:]
    if P not in (1, 2):
        raise ValueError(f"w_in: got {_check.describe(w_in)}, expected [E, D, 2, F] (gate, up) or [E, D, 1, F]")
    options = router_options(
        E,
        topk,
        score_function=score_function,
        normalize=normalize,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
    )
    config = MoEConfig(
        router=options,
        ffn=FfnConfig(
            activation=_check.choice("activation", activation, ACTIVATIONS),
            weight_early=_check.boolean("weight_early", weight_early),
            topk=options.topk,
        ),
        aux_loss_coeff=_check.number("aux_loss_coeff", aux_loss_coeff),
        z_loss_coeff=_check.number("z_loss_coeff", z_loss_coeff),
        align_size=_check.integer("align_size", align_size, 0),
    )
    expert_bias, token_mask, forced_experts = router_operands(
        options, E, tuple(leading), expert_bias, token_mask, forced_experts
    )
    T = math.prod(leading)
    operands = Operands(
        x=x.reshape(T, D),
        gate=gate,
        w_in=w_in,
        w_out=_check.array("w_out", w_out, dtype, (("E", E), ("F", F), ("D", D))),
        b_in=_check.optional_array("b_in", b_in, dtype, (("E", E), ("P", P), ("F", F))),
        b_out=_check.optional_array("b_out", b_out, dtype, (("E", E), ("D", D))),
        expert_bias=expert_bias,
        token_mask=None if token_mask is None else token_mask.reshape(T),
        forced_experts=None if forced_experts is None else forced_experts.reshape(T, options.topk),
    )
    result = _moe(config, operands)
    return result._replace(output=result.output.reshape(x.shape))


def shared_expert(x: jax.Array, w_in: jax.Array, w_out: jax.Array, activation: str) -> jax.Array:
    """A dense expert that every token passes through: act(x W_gate) * (x W_up) W_out, or act(x W_in) W_out.

    Args:
      x: [..., D]; w_in: [D, 2 or 1, S]; w_out: [S, D], all of one dtype.
      activation: as in `moe`.

    Returns:
      [..., D], dtype of x. Differentiable by JAX itself; products accumulate in float32.
    """
    D, parts, S = w_in.shape
    h = jnp.matmul(x, w_in.reshape(D, parts * S), preferred_element_type=jnp.float32)
    h = h.reshape(*x.shape[:-1], parts, S)
    a = activate(h[..., 0, :], activation)
    if parts == 2:
        a = a * h[..., 1, :]
    return jnp.matmul(a.astype(x.dtype), w_out, preferred_element_type=jnp.float32).astype(x.dtype)

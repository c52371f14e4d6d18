"""The whole Mixture-of-Experts layer as a differentiable function.

`moe` checks its arguments, runs the layer (forward.py, or on_group.py on a process group), and computes the losses from
the sums that it returns.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from anabranch.lora import Lora
from anabranch.options import LAYER_NAMES, LayerKeywords, LayerOptions, RouterOptions, check_names, takes_options
from anabranch.packed import parts_of
from anabranch.precision import precision_number
from anabranch.replay import Replay, check_replay, fields_of
from anabranch.torch.binding import check, private
from anabranch.torch.binding.autocast import as_autocast, match_autocast
from anabranch.torch.binding.group import check_group, sum_over_ranks
from anabranch.torch.layer.forward import fused_layer
from anabranch.torch.layer.group_output import GroupConfig, GroupOutput
from anabranch.torch.layer.on_group import group_layer
from anabranch.torch.layer.operands import (
    LayerConfig,
    LayerOutput,
    Operands,
    cached_options,
    factors_of,
    layer_config,
    quantized_fields,
    view_parameters,
    with_shared_gradients,
)
from anabranch.torch.layer.replay import needs_two_calls
from anabranch.torch.ops.balance import load_balance_loss, mean_of_squares
from anabranch.torch.ops.experts import check_experts, check_network_lora
from anabranch.torch.ops.packed import Packed, check_frozen, describe_weight, packed_operands
from anabranch.torch.ops.quantized import QuantizedExperts, check_current, check_fp8_operands
from anabranch.torch.ops.router import quantile_operand, router_operands
from anabranch.torch.parallel.parallel import check_parallel, place

if TYPE_CHECKING:  # some builds of torch lack it
    from torch.distributed import ProcessGroup


class MoEOutput(NamedTuple):
    """The result of `moe`.

    Attributes:
      output: [..., D], dtype of x.
      aux_loss: float32 scalar, the load-balancing loss; 0 if its coefficient is 0.
      z_loss: float32 scalar; 0 if its coefficient is 0.
      tokens_per_expert: int32 [E], slots routed to each expert, before dropping.
      dropped: int32 scalar, dropped slots of all ranks.
      dropped_by_source: int32 [P], dropped slots by the source rank of their tokens; without a group P = 1.
      experts: int32 [..., K], the selection, best first; before any dropping; -1: no expert.
      weights: float32 [..., K], 0 where the expert is -1; differentiable with respect to gate and x.
      qb_histogram: int32 [E, bins] with quantile balancing, else None.
    """

    output: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    tokens_per_expert: Tensor
    dropped: Tensor
    dropped_by_source: Tensor
    experts: Tensor
    weights: Tensor
    qb_histogram: Tensor | None = None

    @property
    def routing(self) -> Replay:
        """The experts and weights as a record, for the argument `replay`. The weights are detached from the graph.

        On the same inputs, its replay returns the same bits.
        """
        return Replay(self.experts, self.weights.detach())


def flat(tensor: Tensor | None, axes: int = 1) -> Tensor | None:
    """Flattens all dimensions but the last `axes`."""
    if tensor is None or tensor.dim() == axes + 1:
        return tensor
    leading = tensor.dim() - axes
    return tensor.reshape(math.prod(tensor.shape[:leading]), *tensor.shape[leading:])


def unflat(tensor: Tensor, leading: Sequence[int]) -> Tensor:
    """Restores leading dimensions of an unshared tensor [T, N], without a view, about which FSDP would warn."""
    if len(leading) == 1:
        return tensor
    whole: Tensor = private.unsafe_view(tensor, [*leading, tensor.shape[-1]])
    return whole


def checked_config(
    options: LayerOptions, num_experts: int, parts: int, loss_group: Any = None, lora: Lora | None = None
) -> LayerConfig:
    """Checks the options of a layer; also used by the constructor of `MoE`. parts: P of w_in. lora: checked factors."""
    router = options.router(num_experts)
    coefficients = options.loss_coefficients()
    if check_group("loss_group", loss_group) is not None and not any(coefficients):
        raise ValueError("loss_group: got one without losses, expected aux_loss_coeff or z_loss_coeff, or None")
    experts = options.experts(parts, router.topk, lora)
    return layer_config(router, experts, num_experts, options.checked_align_size(), *map(bool, coefficients))


@takes_options(LayerKeywords)
def moe(
    x: Tensor,
    gate: Tensor,
    w_in: Tensor | Packed,
    w_out: Tensor | Packed,
    *,
    topk: int,
    gate_bias: Tensor | None = None,
    expert_bias: Tensor | None = None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    token_mask: Tensor | None = None,
    forced_experts: Tensor | None = None,
    replay: Replay | None = None,
    qb_bin_bounds: Tensor | tuple[float, float] | None = None,
    qb_bins: int | None = None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
    loss_group: "ProcessGroup | None" = None,
    group: "ProcessGroup | None" = None,
    transport: str = "auto",
    capacity_factor: float | None = None,
    fp8_exchange: bool = False,
    **options: Unpack[LayerKeywords],
) -> MoEOutput:
    """Routes every token to its K best experts and returns the weighted sum of their outputs.

        logits = x gate + gate_bias;  (w, e) = top-K routing of the logits
        output[t] = sum_k w[t, k] * (phi(x[t] W_gate[e], x[t] W_up[e]) W_out[e]),   e = e[t, k]

    Args:
      x: [..., D] float32, bfloat16 or float16.
      gate: [D, E] float; logits are accumulated and kept in float32.
      w_in: [E, D, 2, F] (gate and up columns), or [E, D, 1, F] for ungated experts; dtype of x, or float32.
      w_out: [E, F, D]; dtype of x, or float32. In a 16-bit layer, float32 weights are rounded for the GEMMs; their
        gradients are the float32 sums, not rounded. w_in and w_out, each by itself, may be packed: an `Mxfp4` or an
        `Fp8Blocks`. The layer then computes with `unpack(w, x.dtype)`. Packed weights have no gradient.
      topk: K, experts per token, 1 <= K <= E.
      gate_bias: [E] float, added to the logits; None: 0.
      expert_bias: [E] float, added to the scores for selection only; has no gradient.
      b_in: [E, 2 or 1, F], b_out: [E, D]; dtype of x.
      token_mask: bool [...]; False marks padding, which gets zero output and gradient and is not counted.
      forced_experts: int [..., K]; a given selection; -1: no expert. See `route` for logits of -inf. Equals
        `replay=Replay(forced_experts)`, except that expert_bias and groups are errors.
      replay: a recorded routing, such as `routing` of a result; see `Replay`. expert_bias and groups select for tokens
        that are not replayed. `qb_histogram` counts replayed tokens too.
      qb_bin_bounds, qb_bins: quantile balancing, see `route`. Pass `qb_histogram` of the result to `quantile_bias`.
      quantized: with precision "fp8", the result of `quantize_experts` for w_in and w_out, used in their place. None:
        they are quantised in the forward pass and again in the backward pass. Gradients are those of w_in and w_out.
      lora: low-rank adapters of w_in and w_out, or None; see `Lora`. With a group, factors of E experts are divided
        like w_in; a shared factor is the same on every rank. A rank with one expert passes that expert's factor.
      loss_group: a process group that shares a batch and contains this rank. The losses are those of the whole batch,
        the same on every rank, with one all-reduce of 2 E + 2 numbers. None: those of the tokens of `group`, or without
        `group` of this call's tokens.
      group: the P ranks that share the experts. Each rank passes its own tokens, the same number on every rank, the
        whole gate, and its E/P experts in w_in and w_out: rank r holds the experts from r E/P on. None: this process
        holds all experts.
      transport: "ring", "p2p", "all_to_all", or "auto", which compares time estimates; see docs/scaling.md.
      capacity_factor: None: nothing is dropped, and buffers hold the worst case. Otherwise a rank accepts at most
        ceil(capacity_factor T K) slots, where T is the tokens of one rank. Slots that come last in the order (source,
        token, k) are dropped, deterministically.
      fp8_exchange: with a group and precision "fp8", tokens and cotangents of outputs are sent to the experts as e4m3
        numbers with their scales, 33/32 bytes per element; results are returned as without it. Outputs are bitwise the
        same. Gradients of w_in, w_out and b_out, and the contribution of b_out to gradients of the weights, are
        computed from quantised x and cotangents; docs/scaling.md states the error bound.
      {options}
        torch.set_float32_matmul_precision sets the precision of the logits' GEMM on a GPU, which is torch's, and does
        not affect the experts.

    Returns:
      MoEOutput(output, aux_loss, z_loss, tokens_per_expert, dropped, dropped_by_source, experts, weights,
      qb_histogram). With a group, output, experts and weights are those of this rank's tokens; counts, drops and the
      histogram are those of all its ranks.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has a wrong shape or value, or a combination is not allowed.

    Gradients: of x, gate, gate_bias, w_in, w_out, b_in, b_out and the LoRA factors, each in its operand's dtype; GEMMs
    accumulate in float32. Operands without requires_grad cost nothing. No double backward. Under
    torch.autocast a float32 x is rounded to the autocast dtype first.
    If ranks share a batch, each rank differentiates its own loss, and the objective is the mean of these losses, as in
    DDP and FSDP. With `group`, gradients of the gate, its bias and this rank's experts are those of the mean over its
    ranks and need no further division. Gradients of x, and without `group` of the gate, are this rank's part, which DDP
    and FSDP average; a loss over all ranks' tokens is counted there once per rank. Either all ranks run the backward
    pass, with gradients for the same weights, or none does.
    If x and gate are bfloat16, a GPU rounds the gradient of the logits to bfloat16. With a float32 gate or a float16 x
    it keeps more bits.
    Saved for backward: the operands, h [R, 2 or 1, F], the float32 logits, [T, K]-sized routing, and u [R, r] of an
    adapter of w_in.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), Fedus et al. 2021 (arXiv:2101.03961) for the load-balancing loss,
    Zoph et al. 2022 (arXiv:2202.08906) for the z-loss.

    >>> x, gate = torch.randn(6, 8), torch.randn(8, 4)
    >>> moe(x, gate, torch.randn(4, 8, 2, 16), torch.randn(4, 16, 8), topk=2).output.shape
    torch.Size([6, 8])
    """
    check_names("moe", LAYER_NAMES, options)
    x = as_autocast(x)
    return run_layer(
        cached_options(LayerOptions, topk=topk, qb_bins=qb_bins, **options),
        LayerTensors(
            x, w_in, w_out, match_autocast(x, b_in), match_autocast(x, b_out), gate, gate_bias, expert_bias, token_mask,
            forced_experts, replay, lora=lora,
        ),
        group=group,
        transport=transport,
        capacity_factor=capacity_factor,
        fp8_exchange=fp8_exchange,
        loss_group=loss_group,
        quantized=quantized,
        qb_bin_bounds=qb_bin_bounds,
    )  # fmt: skip


class LayerTensors(NamedTuple):
    """The tensor arguments of `moe`, as a caller gives them; x and biases are already rounded for autocast.

    `logits` float32 [..., E] and `port` float32 [..., D] may replace the gate. Then x has no gradient, see
    `called_gate`.
    """

    x: Any
    w_in: Any
    w_out: Any
    b_in: Any = None
    b_out: Any = None
    gate: Any = None
    gate_bias: Any = None
    expert_bias: Any = None
    token_mask: Any = None
    forced_experts: Any = None
    replay: Any = None
    logits: Any = None
    port: Any = None
    lora: Any = None


class _Checked(NamedTuple):
    """The result of the checks of `moe`."""

    config: LayerConfig
    router: RouterOptions
    coefficients: tuple[float, float]


def run_layer(
    options: LayerOptions,
    tensors: LayerTensors,
    *,
    are_parameters: bool = False,
    group: Any = None,
    transport: str = "auto",
    capacity_factor: float | None = None,
    fp8_exchange: bool = False,
    loss_group: Any = None,
    quantized: QuantizedExperts | None = None,
    qb_bin_bounds: Tensor | tuple[float, float] | None = None,
) -> MoEOutput:
    """`moe` with its options and its tensors as one object each. Other arguments: as in `moe`.

    Args:
      options, tensors: of `moe`.
      are_parameters: whether w_in, b_in and gate are parameters in the form of `view_parameters`. Allowed in the plain
        eager case.
      others: as in `moe`.
    """
    (
        x, given_in, given_out, b_in, b_out, gate, gate_bias, expert_bias, token_mask, forced_experts, replay, logits,
        port, lora,
    ) = tensors  # fmt: skip
    (w_in, scales_in), (w_out, scales_out) = parts_of(given_in), parts_of(given_out)
    parallel = check_parallel(group, transport, capacity_factor, fp8_exchange, precision_number(options.precision))
    ranks = 1 if parallel is None else parallel.ranks
    has_loss_group = check_group("loss_group", loss_group) is not None
    per_token = (x, token_mask, forced_experts, logits, port)
    matrices = (w_in, w_out, b_in, b_out, gate, gate_bias, expert_bias, *factors_of(lora), scales_in, scales_out)
    config, router, coefficients = _check_cache.check(
        per_token if replay is None else (*per_token, *fields_of(replay)),
        matrices if quantized is None else (*matrices, *quantized_fields(quantized).values()),
        (
            *(ranks, has_loss_group, type(quantized), type(lora), type(replay), are_parameters),
            *(type(given_in), type(given_out)),
        ),
        lambda: _checked(
            options,
            ranks,
            view_parameters(tensors, options.w_in_layout) if are_parameters else tensors,
            quantized,
            loss_group,
        ),
        options,
    )
    if quantized is not None:
        check_current(quantized, w_in, w_out)
    if scales_in is not None or scales_out is not None:
        check_frozen("w_in", given_in)
        check_frozen("w_out", given_out)
        w_in, w_out, quantized = packed_operands(config.network, given_in, given_out, quantized)
    leading, tokens = x.shape[:-1], flat(x)
    assert tokens is not None
    bounds = quantile_operand(router, x, expert_bias, qb_bin_bounds)
    if bounds is not None:
        check.same_device("x", x, qb_bin_bounds=bounds)
    if forced_experts is not None:
        replay = Replay(forced_experts)
    if group is not None:
        lora = with_shared_gradients(group, lora, w_in.shape[0])
    operands = Operands(
        tokens, w_in, w_out, b_in, b_out, gate, gate_bias, None, expert_bias, flat(token_mask, 0),
        *_flat_replay(replay), None, bounds, flat(logits), flat(port), *(() if lora is None else lora),
    )  # fmt: skip
    if quantized is not None:
        operands = operands._replace(**quantized_fields(quantized))
    result: LayerOutput | GroupOutput
    zero = another_zero = None
    if parallel is None:
        result = fused_layer(config, operands, are_parameters=are_parameters)
        counts, by_source, histogram = result.tokens_per_expert, result.dropped_by_source, result.qb_histogram
        zero, another_zero, dropped = result.zero, result.another_zero, result.dropped
        if by_source is None:
            by_source = result.dropped.view(1)
    else:
        T, repeats = tokens.shape[0], replay is not None
        E, local = config.num_experts, w_in.shape[0]
        placement = place(parallel, x, T, router.topk, E, local, config.align_size, repeats=repeats)
        result = group_layer(GroupConfig(config, *placement, parallel.fp8_exchange), operands, parallel.group)
        counts, by_source, histogram = result.all_tokens_per_expert, result.all_dropped, result.all_qb_histogram
        zero = result.zero
        dropped = by_source.sum(dtype=torch.int32) if result.dropped is None else result.dropped
    # Two tensors: callers add other losses to them in place.
    aux = _zero(x) if zero is None else zero
    z = _zero(x) if another_zero is None else another_zero
    if config.aux_loss or config.z_loss:
        number = torch.full_like(aux, tokens.shape[0]) if token_mask is None else token_mask.sum().float()
        sums = _sums(config, result, number, group if loss_group is None else loss_group)
        aux, z = _losses(router.topk, coefficients, *sums)
    output, weights, experts = result.output, result.weights, result.experts
    if len(leading) != 1:
        if weights.requires_grad:  # they are saved for the backward pass, which must not see changes of the result
            weights = weights.clone()
        output, weights = unflat(output, leading), unflat(weights, leading)
        experts = experts.reshape(*leading, router.topk)
    return MoEOutput(
        output,
        aux,
        z,
        counts,
        dropped,
        by_source,
        experts,
        weights,
        histogram if router.qb_bins else None,
    )


def _flat_replay(replay: Replay | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The fields of Operands for a checked replay."""
    if replay is None:
        return None, None, None
    return flat(check.as_indices(replay.experts)), flat(replay.weights), flat(replay.mask, 0)


def _checked(options: LayerOptions, ranks: int, tensors: LayerTensors, quantized: Any, loss_group: Any) -> _Checked:
    """Checks tensors and options of `moe`."""
    t = tensors
    *leading, D = check.tensor("x", t.x, check.FLOATS, (..., "D")).shape
    layouts = options.layouts()
    dtypes = tuple(dict.fromkeys((t.x.dtype, torch.float32)))
    sizes = check_experts(layouts, t.x, dtypes, t.w_in, t.w_out, t.b_in, t.b_out)
    local, _, parts, _ = sizes
    if local < 1:
        raise ValueError(f"w_in: got {describe_weight(t.w_in)}, expected at least one expert")
    E = local * ranks
    if t.logits is None:
        check.tensor("gate", t.gate, check.FLOATS, (("D", D), ("E", E)))
    router = options.router(E)
    _, _, forced = router_operands(router, E, tuple(leading), t.expert_bias, t.token_mask, t.forced_experts)
    dtypes, shape = (torch.float32, torch.bool), (*leading, router.topk)
    replay = check_replay(check.indices, check.optional_tensor, dtypes, t.replay, forced, shape)
    config = checked_config(options, E, parts, loss_group, check_network_lora(t.lora, t.x, sizes))
    assert config.router is not None
    if replay is not None and needs_two_calls(router, replay, t.expert_bias):
        config = config._replace(number=-1)  # native operations call the router once
    check_fp8_operands(config.network.precision, layouts, "x", t.x, t.w_in, t.w_out, quantized)
    check.optional_tensor("gate_bias", t.gate_bias, check.FLOATS, (("E", E),))
    names = ("gate", "gate_bias", "expert_bias", "token_mask", "forced_experts")
    check.same_device("x", t.x, **{name: getattr(t, name) for name in names})
    if t.replay is not None:
        check.same_device("x", t.x, **{f"replay.{name}": field for name, field in t.replay._asdict().items()})
    return _Checked(config, router, options.loss_coefficients())


_check_cache = check.CheckCache()


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=like.device)


def _sums(config: LayerConfig, result: LayerOutput | GroupOutput, number: Tensor, group: Any) -> Sequence[Tensor]:
    """The arguments of `_losses` for a result of `number` tokens, summed over the ranks of a group, if it is given."""
    squares = number
    if config.z_loss:
        assert result.lse is not None
        squares = result.lse.square().sum()  # lse is 0 for a masked token
    scores = number.new_empty((0,)) if result.score_sum is None else result.score_sum
    sums = (scores, result.tokens_per_expert, squares, number)
    return sums if group is None else sum_over_ranks(group, *sums)


def _losses(
    topk: int, coefficients: tuple[float, float], score_sum: Tensor, counts: Tensor, squares: Tensor, number: Tensor
) -> tuple[Tensor, Tensor]:
    """(aux_loss, z_loss) from sums over `number` tokens. squares: the sum of lse^2."""
    aux_coeff, z_coeff = coefficients
    aux = load_balance_loss(score_sum, counts, topk, aux_coeff, number) if aux_coeff else _zero(score_sum)
    z = mean_of_squares(squares, z_coeff, number) if z_coeff else _zero(score_sum)
    return aux, z

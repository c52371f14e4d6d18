"""The layer as one differentiable function: its rules are the operations' own, in the order in which data flows.

With a router they are those of `moe`, with a selection that is given those of `routed_experts`. Losses are computed
outside, from the sums that come out of here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.options import ExpertsConfig, Network, RouterOptions
from anabranch.torch.binding.autocast import without_autocast
from anabranch.torch.binding.autograd import Function
from anabranch.torch.layer.gate import biased_logits_of, gate_backward
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.experts import as_multiplied
from anabranch.torch.ops.layer_ops import LayerNumbers, layer_numbers
from anabranch.torch.ops.quantized import QuantizedExperts, of_backward, of_forward, quantized_of
from anabranch.torch.ops.router import Wanted, logits_gradient


class LayerConfig(NamedTuple):
    """The options of the layer that are part of a program."""

    router: RouterOptions | None
    """None: experts and weights are given, there is no gate."""
    network: Network
    num_experts: int
    align_size: int
    options: LayerNumbers
    """All of these, as the operations take them."""
    wanted: Wanted
    """What losses and the backward pass need of the router, counts aside."""
    aux_loss: bool
    z_loss: bool


def layer_config(
    router: RouterOptions | None,
    experts: ExpertsConfig,
    num_experts: int,
    align_size: int,
    aux_loss: bool = False,
    z_loss: bool = False,
) -> LayerConfig:
    """Makes a LayerConfig of options that have been checked."""
    network = experts.network()
    wanted = Wanted(False, aux_loss, z_loss or (router is not None and router.reads_lse))
    options = layer_numbers(router, network, num_experts, align_size, wanted)
    return LayerConfig(router, network, num_experts, align_size, options, wanted, aux_loss, z_loss)


def wanted_cotangents(
    config: LayerConfig, d_score_sum: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Of score_sum and lse, without those of what no loss reads: compiled programs make zeros for them."""
    return d_score_sum if config.aux_loss else None, d_lse if config.z_loss else None


class Operands(NamedTuple):
    """The tensors of the layer, flat: x is [T, D]. None: not given.

    A router has either a gate or logits that were computed outside. With logits x has no gradient; `port` has it.
    """

    x: Tensor
    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    gate: Tensor | None = None
    gate_bias: Tensor | None = None
    weights: Tensor | None = None
    """float32 [T, K]."""
    expert_bias: Tensor | None = None
    token_mask: Tensor | None = None
    forced_experts: Tensor | None = None
    experts: Tensor | None = None
    """int32 [T, K]; an index outside [0, E) is no expert."""
    qb_bin_bounds: Tensor | None = None
    logits: Tensor | None = None
    """float32 [T, E]."""
    port: Tensor | None = None
    """Float32 [T, D], never read; its gradient is the experts' part of the gradient of x. See `_called_gate`."""
    quantized_w_in: Tensor | None = None
    """This and those below: the fields of a QuantizedExperts."""
    quantized_w_in_transposed: Tensor | None = None
    quantized_w_in_scales: Tensor | None = None
    quantized_w_out: Tensor | None = None
    quantized_w_out_transposed: Tensor | None = None
    quantized_w_out_scales: Tensor | None = None

    def quantized(self) -> QuantizedExperts | None:
        """The operand of that name; None: it was not given.

        This is a method because Dynamo of torch 2.9 and 2.10 does not follow properties of a NamedTuple.
        """
        return quantized_of(self[-len(QuantizedExperts._fields) :])


def quantized_fields(quantized: QuantizedExperts | None) -> dict[str, Tensor | None]:
    """The fields of Operands of a QuantizedExperts."""
    if not isinstance(quantized, QuantizedExperts):  # None, or what the checks refuse
        return {}
    return {f"quantized_{name}": tensor for name, tensor in quantized._asdict().items()}


class LayerOutput(NamedTuple):
    """What the layer computes, flat. Without a router some have no elements: the last four."""

    output: Tensor
    """[T, D], dtype of x."""
    tokens_per_expert: Tensor
    """int32 [E]: before any dropping."""
    dropped: Tensor
    """int32 []."""
    weights: Tensor
    """float32 [T, K]."""
    experts: Tensor
    """int32 [T, K]."""
    score_sum: Tensor
    """float32 [E]; without a load-balance loss no elements."""
    lse: Tensor
    """float32 [T]; of a masked token 0; no elements where neither a loss nor the backward pass reads it."""
    qb_histogram: Tensor
    """int32 [E, bins]."""
    h: Tensor
    """Kept for the backward pass, as are the next four."""
    row_of_slot: Tensor
    slot_of_row: Tensor
    group_sizes: Tensor
    logits: Tensor


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _forward(config: LayerConfig, operands: Operands) -> tuple[Tensor, ...]:
    """A LayerOutput."""
    o, x = operands, operands.x
    logits = o.logits if o.gate is None else biased_logits_of(x, o.gate, o.gate_bias)
    results: tuple[Tensor, ...] = torch_ops.layer(
        x, logits, o.weights, o.experts, o.expert_bias, o.token_mask, o.forced_experts, o.qb_bin_bounds,
        as_multiplied(config.network, o.w_in, x.dtype), o.b_in,
        as_multiplied(config.network, o.w_out, x.dtype), o.b_out, *of_forward(o.quantized()), *config.options,
    )  # fmt: skip
    # A function must not return its operand, so given logits are not a result.
    return *results, logits if o.logits is None and logits is not None else x.new_empty((0,), dtype=torch.float32)


class _FusedLayer(Function):
    tensors = Operands._fields

    @staticmethod
    def forward(config, *tensors):
        with without_autocast(tensors[0].device):
            return _forward(config, Operands(*tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.config, *tensors = inputs
        o, result = Operands(*tensors), LayerOutput(*output)
        differentiable = ("output",) if ctx.config.router is None else ("output", "weights", "score_sum", "lse")
        ctx.mark_non_differentiable(
            *(o for name, o in zip(LayerOutput._fields, output, strict=True) if name not in differentiable)
        )
        ctx.set_materialize_grads(False)
        ctx.device = o.x.device
        selection = o if ctx.config.router is None else result
        ctx.save_for_backward(
            *(o.x, o.w_in, o.w_out, o.b_in, o.b_out, o.gate, o.gate_bias, o.token_mask),
            *(selection.weights, selection.experts, result.lse),
            *(result.h, result.logits if o.logits is None else o.logits),
            *(result.row_of_slot, result.slot_of_row, result.group_sizes),
            *of_backward(o.quantized()),
        )

    @staticmethod
    def backward(ctx, d_output, _counts, _dropped, d_weights, _experts, d_score_sum, d_lse, *_):
        with without_autocast(ctx.device):
            found = _backward(ctx, d_output, d_weights, d_score_sum, d_lse)
        return None, *(found.get(name) for name in Operands._fields)


def _backward(ctx, d_output, d_weights, d_score_sum, d_lse):
    """The gradients by the names of their operands."""
    (
        x, w_in, w_out, b_in, b_out, gate, gate_bias, token_mask, weights, experts, lse,
        h, logits, row_of_slot, slot_of_row, group_sizes, *quantized,
    ) = ctx.saved_tensors  # fmt: skip
    config, dtype = ctx.config, x.dtype
    wants = dict(zip(Operands._fields, ctx.needs_input_grad[1:], strict=True))
    through_gate = gate is not None and (wants["x"] or wants["gate"] or wants["gate_bias"])
    wants_logits = through_gate or wants["logits"]
    if d_output is None:
        d_output = torch.zeros_like(x)
    up, down = (as_multiplied(config.network, w, dtype) for w in (w_in, w_out))
    of_experts = (h, x, weights, slot_of_row, group_sizes, up, b_in, down, b_out)
    d_sums = wanted_cotangents(config, d_score_sum, d_lse)
    # A cotangent of the weights is added to what the experts give: then routing has to wait for it.
    if at_once := wants_logits and d_weights is None:
        dh, d_w_out, d_b_out, d_w, *of_dh, d_logits = torch_ops.layer_hidden(
            d_output, *of_experts, logits, experts, token_mask, lse, *d_sums, w_out.dtype, wants["w_out"],
            *quantized, *config.options,
        )  # fmt: skip
    else:
        dh, d_w_out, d_b_out, d_w, *of_dh = torch_ops.experts_hidden(
            d_output, None, None, *of_experts, w_out.dtype, wants["w_out"], *quantized, *config.network
        )
    found = {"w_out": d_w_out if wants["w_out"] else None, "b_out": None if b_out is None else d_b_out}
    addend = None
    if config.router is None:
        found["weights"] = d_w
    elif wants_logits:
        if not at_once:
            d_w = d_w + d_weights
            d_logits = logits_gradient(config.router, logits, experts, token_mask, lse, d_w, *d_sums)
        if wants["logits"]:
            found["logits"] = d_logits
    if through_gate:
        tokens = x if token_mask is None else torch.where(token_mask[:, None], x, 0)  # 0 * NaN would be NaN
        through = gate_backward(tokens, gate, d_logits)
        addend, found["gate"] = through.x, _as(through.gate, gate.dtype)
        if gate_bias is not None:
            found["gate_bias"] = _as(d_logits.sum(0), gate_bias.dtype)
    d_x_dtype = dtype if wants["x"] else torch.float32 if wants["port"] else None
    d_x, d_w_in, d_b_in = torch_ops.experts_inputs(
        dh, *of_dh, x, addend, row_of_slot, slot_of_row, group_sizes, up, b_in, down, w_in.dtype, d_x_dtype,
        wants["w_in"], *quantized, *config.network,
    )  # fmt: skip
    if d_x_dtype is not None:
        found["x" if wants["x"] else "port"] = d_x
    return found | {"w_in": d_w_in if wants["w_in"] else None, "b_in": None if b_in is None else d_b_in}


def fused_layer(config: LayerConfig, operands: Operands) -> LayerOutput:
    """The layer on checked, flat operands."""
    return LayerOutput(*_FusedLayer.call(config, *operands))

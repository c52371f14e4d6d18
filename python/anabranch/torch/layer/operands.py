"""The static options, the operands and the results of the layer."""

import functools
import typing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.lora import Lora
from anabranch.options import ExpertsConfig, Network, RouterOptions
from anabranch.torch.binding.group import with_summed_gradients
from anabranch.torch.binding.native import native
from anabranch.torch.ops.layer_ops import LayerNumbers, layer_numbers
from anabranch.torch.ops.quantized import QuantizedExperts, as_quantized_experts
from anabranch.torch.ops.router import Requested


class LayerConfig(NamedTuple):
    """Static options of the layer."""

    router: RouterOptions | None
    """None: experts and weights are given."""
    network: Network
    num_experts: int
    align_size: int
    options: LayerNumbers
    """All options as arguments of the operations."""
    requested: Requested
    """Router results that losses and the backward pass need, besides counts."""
    aux_loss: bool
    z_loss: bool
    number: int
    """The number of the options for native operations; -1: none."""


@functools.lru_cache(maxsize=256, typed=True)
def _cached_options(kind: Any, **options: Any) -> Any:
    return kind(**options)


def cached_options(kind: Any, **options: Any) -> Any:
    """Options of a kind, such as LayerOptions; the same object for the same options, if they are hashable."""
    if torch.compiler.is_compiling():
        return kind(**options)
    try:
        return _cached_options(kind, **options)
    except TypeError:
        return kind(**options)


_LETTERS = {int: "i", float: "f", bool: "b", str: "s"}
_NETWORK_LETTERS = [_LETTERS[kind] for kind in typing.get_type_hints(Network).values()]


@functools.cache
def _number(options: LayerNumbers, network: Network) -> int:
    assert native is not None
    of_layer, of_network = zip("IFss", options, strict=True), zip(_NETWORK_LETTERS, network, strict=True)
    return native.config(list(of_layer), list(of_network), parts_first=network.w_in_layout == "pfd")


def _number_of(options: LayerNumbers, network: Network) -> int:
    """The number of a layer's options for native operations; -1: there are none, or the program is traced."""
    return -1 if native is None or torch.compiler.is_compiling() else _number(options, network)


def layer_config(
    router: RouterOptions | None,
    experts: ExpertsConfig,
    num_experts: int,
    align_size: int,
    aux_loss: bool = False,
    z_loss: bool = False,
) -> LayerConfig:
    """A LayerConfig from checked options."""
    network = experts.network()
    requested = Requested(False, aux_loss, z_loss or (router is not None and router.reads_lse))
    options = layer_numbers(router, network, num_experts, align_size, requested)
    number = _number_of(options, network)
    return LayerConfig(router, network, num_experts, align_size, options, requested, aux_loss, z_loss, number)


def requested_cotangents(
    config: LayerConfig, d_score_sum: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The cotangents of score_sum and lse that a loss has. For the others, compiled programs pass zeros."""
    return d_score_sum if config.aux_loss else None, d_lse if config.z_loss else None


class Operands(NamedTuple):
    """The tensors of the layer, flattened: x is [T, D]. None: not given.

    A router has either a gate or given logits. With given logits x has no gradient; `port` has it.
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
    replay_experts: Tensor | None = None
    """int32 [T, K]. This field and the next two are the fields of a Replay."""
    replay_weights: Tensor | None = None
    replay_mask: Tensor | None = None
    experts: Tensor | None = None
    """int32 [T, K]; an index outside [0, E) is no expert."""
    qb_bin_bounds: Tensor | None = None
    logits: Tensor | None = None
    """float32 [T, E]."""
    port: Tensor | None = None
    """float32 [T, D], never read. Its gradient is the experts' part of the gradient of x, see `called_gate`."""
    lora_a_in: Tensor | None = None
    """This field and the next three are the fields of a Lora."""
    lora_b_in: Tensor | None = None
    lora_a_out: Tensor | None = None
    lora_b_out: Tensor | None = None
    quantized_w_in: Tensor | None = None
    """This field and those below are the fields of a QuantizedExperts, or the scales of packed weights."""
    quantized_w_in_transposed: Tensor | None = None
    quantized_w_in_scales: Tensor | None = None
    quantized_w_out: Tensor | None = None
    quantized_w_out_transposed: Tensor | None = None
    quantized_w_out_scales: Tensor | None = None

    def quantized(self) -> QuantizedExperts | None:
        """The quantised experts, or None.

        This is a method because Dynamo of torch 2.9 and 2.10 does not follow properties of a NamedTuple.
        """
        return as_quantized_experts(self[-len(QuantizedExperts._fields) :])

    def replay(self) -> tuple[Tensor | None, ...]:
        """The fields of a Replay."""
        return self.replay_experts, self.replay_weights, self.replay_mask

    def factors(self) -> tuple[Tensor | None, ...]:
        """The fields of a Lora."""
        return self.lora_a_in, self.lora_b_in, self.lora_a_out, self.lora_b_out


def view_parameters(operands: Any, w_in_layout: str, *, differentiable: bool = False) -> Any:
    """Operands of `moe` as views of a module's parameters: w_in [E, P F, D], b_in [E, P F], gate [E, D].

    In the plain eager case a module passes its parameters themselves: native operations need no views, and autograd
    records none. A call is in this form if w_in has three dimensions.

    Args:
      operands: a named tuple with these fields and w_out [E, D, F].
      w_in_layout: "pfd" or "fpd".
      differentiable: whether autograd records the views.
    """
    w_in, b_in, gate = operands.w_in, operands.b_in, operands.gate
    if not differentiable:
        w_in, b_in, gate = w_in.detach(), b_in if b_in is None else b_in.detach(), gate.detach()
    (E, columns, D), F = w_in.shape, operands.w_out.shape[2]
    w_in = w_in.view((E, columns // F, F, D) if w_in_layout == "pfd" else (E, F, columns // F, D))
    b_in = b_in if b_in is None else b_in.view(w_in.shape[:-1])
    return operands._replace(w_in=w_in, b_in=b_in, gate=gate.T)


def view_gradients(gradients: dict[str, Any], w_in: Tensor, b_in: Tensor | None) -> dict[str, Any]:
    """Gradients of a module's parameters w_in, b_in and gate from those of the operands of `view_parameters`."""
    found = dict(gradients)
    for name, parameter in (("w_in", w_in), ("b_in", b_in)):
        if parameter is not None and (gradient := found.get(name)) is not None:
            found[name] = gradient.view(parameter.shape)
    if (d_gate := found.get("gate")) is not None:
        found["gate"] = d_gate.T
    return found


def quantized_fields(quantized: QuantizedExperts | None) -> dict[str, Any]:
    """The fields of Operands from a QuantizedExperts."""
    if not isinstance(quantized, QuantizedExperts):  # None, or a value that the checks reject
        return {}
    return {f"quantized_{name}": tensor for name, tensor in quantized._asdict().items()}


def factors_of(lora: Any) -> tuple[Any, ...]:
    """The factors of a Lora; () for None, and for a value that the checks reject."""
    return tuple(lora) if isinstance(lora, Lora) else ()


def with_shared_gradients(group: Any, lora: Lora | None, num_experts: int) -> Lora | None:
    """Adapters of a rank with this number of experts. Gradients of shared factors are summed over the ranks."""
    if lora is None or num_experts == 1:
        return lora
    shared = [factor if factor is not None and factor.shape[0] == 1 else None for factor in lora]
    summed = with_summed_gradients(group, *shared)
    return Lora(*(factor if s is None else s for factor, s in zip(lora, summed, strict=True)))


class LayerOutput(NamedTuple):
    """The results of the layer, flattened.

    Without a router, the results of routing have no elements. Native operations return None for those that were not
    requested, and `maps` in the place of the three maps of the plan.
    """

    output: Tensor
    """[T, D], dtype of x."""
    tokens_per_expert: Tensor
    """int32 [E], before dropping."""
    dropped: Tensor
    """int32 []."""
    weights: Tensor
    """float32 [T, K]."""
    experts: Tensor
    """int32 [T, K]."""
    score_sum: Tensor | None
    """float32 [E]; no elements without a load-balancing loss."""
    lse: Tensor | None
    """float32 [T], 0 for a masked token; no elements if neither a loss nor the backward pass reads it."""
    qb_histogram: Tensor | None
    """int32 [E, bins]."""
    h: Tensor
    """Saved for backward, as are the next six."""
    lora_u: Tensor | None
    """[R, r], of the adapter of w_in; no elements without it."""
    lora_copies: Tensor | None
    """[n], the copies of factors of another dtype than x, see `factors`; no elements without them."""
    row_of_slot: Tensor | None
    slot_of_row: Tensor | None
    group_sizes: Tensor | None
    logits: Tensor
    experts_weighed_by_router: Tensor | None = None
    """int32 [T, K], see `replay`; only with recorded weights."""
    maps: Tensor | None = None
    """The three maps in one tensor, see `packed_ops`. Only native operations return this field and those below."""
    dropped_by_source: Tensor | None = None
    """int32 [1], a view of `dropped`."""
    zero: Tensor | None = None
    """float32 []: 0, for a loss that is not requested."""
    another_zero: Tensor | None = None
    """The same with memory of its own."""

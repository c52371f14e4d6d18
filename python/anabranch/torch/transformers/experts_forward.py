"""The forward pass of an experts module of Hugging Face Transformers, computed by `routed_experts`."""

from typing import Any

from torch import Tensor, nn

from anabranch._text import shown
from anabranch.lora import Lora
from anabranch.packed import is_packed, parts_of
from anabranch.torch.binding.autocast import as_autocast
from anabranch.torch.binding.group import local_part
from anabranch.torch.layer.routed_experts import routed_experts
from anabranch.torch.ops.dispatch import combine, dispatch
from anabranch.torch.ops.experts import expert_ffn
from anabranch.torch.ops.packed import Packed
from anabranch.torch.ops.plan import plan
from anabranch.torch.transformers import peft_adapters
from anabranch.torch.transformers.expert_group import group_of
from anabranch.torch.transformers.experts_module import described, flag, model_name


def _parameter(module: nn.Module, name: str) -> Tensor:
    try:
        value = getattr(module, name)  # without a default, see attributes.py
    except AttributeError:
        value = None
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {shown(value)}, expected a tensor of {model_name(module)}")
    if group_of(module) is not None:
        value = local_part(value)
    if hasattr(type(value), "__tensor_flatten__"):
        raise TypeError(
            f"{name}: got a {type(value).__name__}, expected a dense tensor of {model_name(module)}, neither sharded "
            "nor quantised"
        )
    return value


def _parts_first(layout: str) -> bool:
    return layout.index("p") < layout.index("f")


def split_parts(weight: Tensor, axis: int, layout: str, parts: int) -> Tensor:
    """Splits the axis P F of W_in, of its scales or of b_in."""
    return weight.unflatten(axis, (parts, -1) if _parts_first(layout) else (-1, parts))


def up_name(module: nn.Module) -> str:
    """The name of the parameter that is w_in."""
    return "gate_up_proj" if flag(module, "has_gate", True) else "up_proj"


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward pass of an experts module with plain weights, as registered with Transformers.

    Args:
      module: has gate_up_proj (ungated experts: up_proj), down_proj, and optional biases.
      hidden_states: [T, D].
      top_k_index: [T, K]; an index outside [0, E) is no expert of this rank.
      top_k_weights: [T, K].

    Returns:
      [T, D], dtype of hidden_states.

    Raises:
      NotImplementedError: the module computes something that `Experts` cannot express.
      TypeError, ValueError: a tensor has a wrong type, dtype or shape.
    """
    layout, parts = described(module).w_in_layout, 2 if flag(module, "has_gate", True) else 1
    w_in = split_parts(_parameter(module, up_name(module)), -2 if layout.endswith("d") else -1, layout, parts)
    return apply_experts(module, w_in, _parameter(module, "down_proj"), hidden_states, top_k_index, top_k_weights)


def apply_experts(
    module: nn.Module,
    w_in: Tensor | Packed,
    w_out: Tensor | Packed,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: tuple[Lora, float] | None = None,
) -> Tensor:
    """`experts_forward` with given weights in the module's layouts, and with adapters of the module and their scale."""
    experts = described(module)
    parts = 2 if flag(module, "has_gate", True) else 1
    name = up_name(module)
    b_in = b_out = None
    if experts.has_bias:
        b_in = split_parts(_parameter(module, f"{name}_bias"), -1, experts.w_in_layout, parts)
        b_out = _parameter(module, "down_proj_bias")
    options: dict[str, Any] = dict(
        activation=experts.activation,
        b_in=b_in,
        b_out=b_out,
        w_in_layout=experts.w_in_layout,
        w_out_layout=experts.w_out_layout,
    )
    if lora is not None:
        options["lora"], options["lora_scale"] = lora
    if factors := peft_adapters.factors_of(module):
        if lora is not None:
            raise ValueError(
                f"lora: got adapters of PEFT and of add_lora for {model_name(module)}, expected one of both"
            )
        dtype = as_autocast(hidden_states).dtype
        options["lora"], options["lora_scale"] = peft_adapters.as_lora(
            factors, name, parts, _parts_first(experts.w_in_layout), dtype
        )
    if (group := group_of(module)) is not None:
        dtype = hidden_states.dtype
        biases = {name: bias if bias is None else bias.to(dtype) for name, bias in (("b_in", b_in), ("b_out", b_out))}
        output = group.routed(hidden_states, top_k_index, top_k_weights, w_in, w_out, **options | biases)
        return output.to(dtype)
    if not experts.post_expert_norm:
        output = routed_experts(hidden_states, top_k_index, top_k_weights, w_in, w_out, **options).output
        return output.to(hidden_states.dtype)
    x = as_autocast(hidden_states)
    w_in, w_out = (w if is_packed(w) else w.to(x.dtype) for w in (w_in, w_out))
    layout = plan(top_k_index, parts_of(w_in)[0].shape[0])
    rows = expert_ffn(dispatch(x, layout), w_in, w_out, layout.group_sizes, **options)
    norm: Any = module.post_expert_norm
    return combine(norm(rows).to(x.dtype), layout, top_k_weights).to(hidden_states.dtype)

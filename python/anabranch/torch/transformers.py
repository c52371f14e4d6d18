"""Hugging Face Transformers: the experts of its models, computed by `routed_experts`.

After `register()` any model whose experts follow the library's interface takes `experts_implementation="anabranch"`:
its parameters stay where and as they are, its router stays its own. What an experts module computes is found by
evaluating its gate function; one that is not an activation of ours is an error, never replaced by a similar one.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anabranch._text import shown
from anabranch.activation import Activation
from anabranch.torch import _check
from anabranch.torch._activation_of import Found, gated_activation_of, plain_activation_of
from anabranch.torch.balance import load_balance_loss
from anabranch.torch.dispatch import combine, dispatch
from anabranch.torch.experts import expert_ffn
from anabranch.torch.moe import as_autocast
from anabranch.torch.plan import plan
from anabranch.torch.routed_experts import routed_experts
from anabranch.torch.router import route

__all__ = ["NAME", "Experts", "check", "load_balancing_loss_func", "register"]

NAME = "anabranch"
"""What `experts_implementation` calls it."""
OLDEST = "5.9"
"""The oldest transformers that is meant to work."""


class Experts(NamedTuple):
    """What an experts module of the library computes, in our terms.

    Attributes:
      activation: of the gate and the up product, or of the one product of an ungated expert.
      w_in_layout, w_out_layout: as in `routed_experts`, of the parameters as they lie.
      has_bias: of both products.
      post_expert_norm: whether a norm of the module's follows every expert; it runs between experts and sum, unfused.
    """

    activation: Activation
    w_in_layout: str
    w_out_layout: str
    has_bias: bool
    post_expert_norm: bool


#: By module; beside it the numbers and functions that it was found with.
_FOUND: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Experts]]" = weakref.WeakKeyDictionary()


def _model(module: nn.Module) -> str:
    """The module's class, and the type of model that it belongs to."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    name = type(module).__name__
    return f"{name} of {kind}" if kind else name


def _numbers(module: nn.Module) -> Iterator[float]:
    """The numbers that it and the modules in it hold."""
    for part in module.modules():
        yield from (float(value) for value in vars(part).values() if type(value) in (int, float))


def _flag(module: nn.Module, name: str, otherwise: bool) -> bool:
    """A flag that the library sets on experts; versions before it had none."""
    return bool(getattr(module, name, otherwise))


def _find(module: nn.Module) -> Experts:
    gated = _flag(module, "has_gate", True)
    act = getattr(module, "act_fn", None)
    tensors = (*act.parameters(), *act.buffers()) if isinstance(act, nn.Module) else ()
    device = tensors[0].device if tensors else torch.device("cpu")
    function = "_apply_gate" if gated else "act_fn"
    found: Found | None = None
    cause: Exception | None = None
    try:
        computed: Any = getattr(module, function)
        found = (
            gated_activation_of(computed, _numbers(module), device) if gated else plain_activation_of(computed, device)
        )
    except Exception as error:  # whatever a function that expects something else raises
        cause = error
    if found is None:
        raise NotImplementedError(
            f"experts_implementation={NAME!r}: got {_model(module)}, whose {function} (act_fn: {shown(act)}) is no "
            "activation of anabranch.torch.Activation, expected one that is; use another implementation for this model"
        ) from cause
    transposed = _flag(module, "is_transposed", False)
    part = ("dfp" if found.interleaved else "dpf") if transposed else ("fpd" if found.interleaved else "pfd")
    return Experts(
        found.activation,
        part,
        "fd" if transposed else "df",
        _flag(module, "has_bias", False),
        _flag(module, "has_post_expert_norm", False),
    )


def _described(module: nn.Module) -> Experts:
    """What the module computes, found once, and again where a number or a function of it was replaced."""
    numbers = [v for v in vars(module).values() if type(v) in (int, float)]
    act = getattr(module, "act_fn", None)
    key = (None if act is None else weakref.ref(act), numbers)
    known = _FOUND.get(module)
    if known is None or known[0] != key:
        _FOUND[module] = known = key, _find(module)
    return known[1]


@torch.compiler.assume_constant_result
def _constants(module: nn.Module) -> tuple[str, float, float, str, str, bool, bool]:
    """`_described` as torch.compile can take it: computed when it traces, and part of the program from then on."""
    (name, alpha, limit), *rest = dataclasses.astuple(_described(module).activation), *_described(module)[1:]
    return (name, alpha, limit, *rest)


def _parameter(module: nn.Module, name: str) -> Tensor:
    value = getattr(module, name, None)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {shown(value)}, expected a tensor of {_model(module)}")
    if is_traceable_wrapper_subclass(value):
        raise TypeError(
            f"{name}: got a {type(value).__name__}, expected a dense tensor of {_model(module)}, neither sharded nor "
            "quantised"
        )
    return value


def _parted(weight: Tensor, layout: str, parts: int) -> Tensor:
    """W_in or b_in, whose last axes are P and F together or D behind them, with P and F apart."""
    axis = weight.dim() - (2 if layout.endswith("d") and weight.dim() == 3 else 1)
    P_first = layout.index("p") < layout.index("f")
    return weight.unflatten(axis, (parts, -1) if P_first else (-1, parts))


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward pass of an experts module: what stands in the library's table of implementations.

    Args:
      module: with gate_up_proj, or up_proj of ungated experts, down_proj, and the biases of both.
      hidden_states: [T, D].
      top_k_index: [T, K]; an index outside [0, E) is an expert of another rank, or none.
      top_k_weights: [T, K].

    Returns:
      [T, D], dtype of hidden_states.

    Raises:
      NotImplementedError: the module computes what we can't express; the message names it.
      TypeError, ValueError: a tensor is wrong; the message names it.
    """
    *activation, w_in_layout, w_out_layout, has_bias, post_expert_norm = _constants(module)
    experts = Experts(Activation(*activation), w_in_layout, w_out_layout, has_bias, post_expert_norm)
    parts = 2 if _flag(module, "has_gate", True) else 1
    name = "gate_up_proj" if parts == 2 else "up_proj"
    w_in = _parted(_parameter(module, name), experts.w_in_layout, parts)
    w_out = _parameter(module, "down_proj")
    b_in = b_out = None
    if experts.has_bias:
        b_in = _parted(_parameter(module, f"{name}_bias"), experts.w_in_layout, parts)
        b_out = _parameter(module, "down_proj_bias")
    options: dict[str, Any] = dict(
        activation=experts.activation,
        b_in=b_in,
        b_out=b_out,
        w_in_layout=experts.w_in_layout,
        w_out_layout=experts.w_out_layout,
    )
    if not experts.post_expert_norm:
        output = routed_experts(hidden_states, top_k_index, top_k_weights, w_in, w_out, **options).output
        return output.to(hidden_states.dtype)
    x = as_autocast(hidden_states)
    w_in, w_out = (w.to(x.dtype) for w in (w_in, w_out))
    layout = plan(top_k_index, w_in.shape[0])
    rows = expert_ffn(dispatch(x, layout), w_in, w_out, layout.group_sizes, **options)
    norm: Any = module.post_expert_norm
    return combine(norm(rows).to(x.dtype), layout, top_k_weights).to(hidden_states.dtype)


#: Fields of a configuration that say that a model has experts.
_SAY_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "output_router_logits")


def _refuses_where_unused(original: Callable[..., str]) -> Callable[..., str]:
    """PreTrainedModel.get_correct_experts_implementation, which takes any name for any model, used there or not."""

    @functools.wraps(original)
    def checked(self: Any, requested_experts: str | None, *args: Any, **kwargs: Any) -> str:
        has_experts = any(hasattr(self.config, field) for field in _SAY_EXPERTS)
        if requested_experts == NAME and has_experts and not self._can_set_experts_implementation():
            raise NotImplementedError(_unused(self))
        return original(self, requested_experts, *args, **kwargs)

    return checked


def _unused(model: nn.Module) -> str:
    return (
        f"experts_implementation={NAME!r}: got {_model(model)}, which has no experts that follow the interface of "
        "transformers.integrations.moe, expected a model that has: transformers computes them in one way alone"
    )


def register() -> None:
    """Makes "anabranch" an experts implementation of the installed transformers; once more does nothing.

    Then `AutoModel....from_pretrained(..., experts_implementation="anabranch")` or
    `model.set_experts_implementation("anabranch")`. Expert parallelism of the library works as it does: experts of
    other ranks are indices past the last local one. The library takes any name for any model, and leaves it unused
    where the experts do not follow its interface: for this name that becomes an error.

    Raises:
      ImportError: transformers is missing, or older than its table of experts implementations.

    Gradients: of the hidden states, the weights of the experts and every parameter, as of `routed_experts`; not
    differentiable twice. Source: the interface of transformers.integrations.moe.
    """
    try:
        from transformers import PreTrainedModel
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(f"anabranch.torch.transformers: expected transformers >= {OLDEST} ({error})") from error
    if NAME in ALL_EXPERTS_FUNCTIONS:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    base: Any = PreTrainedModel
    base.get_correct_experts_implementation = _refuses_where_unused(base.get_correct_experts_implementation)


def _experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those whose forward goes through the library's table: the decorator leaves these attributes."""
    marks = ("is_transposed", "has_bias", "down_proj")
    return {path: part for path, part in model.named_modules() if all(hasattr(part, mark) for mark in marks)}


def check(model: nn.Module) -> dict[str, Experts]:
    """Says what every experts module of a model computes, before it runs.

    A module that would be an error when it runs is one here.

    Args:
      model: of transformers.

    Returns:
      By the module's name in the model: its `Experts`.

    Raises:
      TypeError: model is no module.
      NotImplementedError: a module's activation is none of ours, or no module follows the interface.

    Gradients: none. Source: the interface of transformers.integrations.moe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {_check.describe(model)}, expected a torch.nn.Module")
    modules = _experts_modules(model)
    if not modules:
        raise NotImplementedError(_unused(model))
    return {path: _described(module) for path, module in modules.items()}


def _token_mask(attention_mask: Any, tokens: int) -> Tensor:
    if not isinstance(attention_mask, Tensor) or attention_mask.numel() != tokens:
        got = _check.describe(attention_mask)
        raise ValueError(f"attention_mask: got {got}, expected a tensor of as many elements as tokens, {tokens}")
    return attention_mask.reshape(-1) != 0


def load_balancing_loss_func(
    gate_logits: Sequence[Tensor], num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    """The load-balancing loss of transformers' models, which is another formula than `load_balance_loss`.

        E / N^2 sum_e (sum_l tokens_per_expert[l, e]) (sum_l score_sum[l, e]),   N = L T tokens of all L layers

    Scores are the softmax over all experts, whatever the model's router is, sums run over all layers before the
    product, and there is no 1 / K: times K the other loss of one layer.

    Args:
      gate_logits: of L layers, float32, bfloat16 or float16 [T, E] each.
      num_experts: E.
      top_k: K.
      attention_mask: [...] of T elements, not 0 for a token, 0 for padding; None: all are tokens.

    Returns:
      float32 scalar; 0 without a token.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradients: of gate_logits, through the scores. Not differentiable twice.
    Source: the function of this name in transformers.models; Fedus et al. 2021 (arXiv:2101.03961), equations 4 to 6.

    >>> float(load_balancing_loss_func([torch.zeros(4, 2)], 2, 1))
    1.0
    """
    E = _check.integer("num_experts", num_experts, 1, _check.INDEX_LIMIT - 1)
    top_k = _check.integer("top_k", top_k, 1, E)
    if not isinstance(gate_logits, (tuple, list)) or not gate_logits:
        raise TypeError(f"gate_logits: got {_check.describe(gate_logits)}, expected the logits of one layer or more")
    layers = [
        _check.tensor(f"gate_logits[{number}]", logits, _check.FLOATS, ("T", ("E", E)))
        for number, logits in enumerate(gate_logits)
    ]
    T = layers[0].shape[0]
    for number, logits in enumerate(layers):
        _check.tensor(f"gate_logits[{number}]", logits, _check.FLOATS, (("T", T), ("E", E)))
    mask = None if attention_mask is None else _token_mask(attention_mask, T).to(layers[0].device)
    routings = [route(logits, top_k, token_mask=mask) for logits in layers]
    score_sum = torch.stack([routing.score_sum for routing in routings]).sum(0)
    counts = torch.stack([routing.tokens_per_expert for routing in routings]).sum(0)
    tokens = len(layers) * (T if mask is None else mask.sum())
    return load_balance_loss(score_sum, counts, top_k, float(top_k), tokens)

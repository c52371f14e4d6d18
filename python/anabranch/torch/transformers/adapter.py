"""Experts of Hugging Face Transformers models computed by `routed_experts`.

`register()` adds the experts implementation "anabranch" for every model whose experts follow the interface of
Transformers. Parameters and router do not change. The activation of an experts module is recognised by evaluating its
gate function. A function that is no `Activation` is an error; it is never replaced by a similar one.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch._packages import needed_by
from anabranch.torch.binding import check as argument_check
from anabranch.torch.ops.balance import load_balance_loss
from anabranch.torch.ops.router import route
from anabranch.torch.transformers import peft_adapters
from anabranch.torch.transformers.experts_forward import experts_forward
from anabranch.torch.transformers.experts_module import Experts, described, experts_modules, model_name

__all__ = ["NAME", "Experts", "check", "load_balancing_loss_func", "register"]

NAME = "anabranch"
"""Value of `experts_implementation`."""
OLDEST = "5.9"
"""The oldest supported version of Transformers."""


#: A configuration with one of these fields belongs to a model with experts.
_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "output_router_logits")


def _describe_all(model: nn.Module, *, again: bool = False) -> dict[str, Experts]:
    modules = experts_modules(model)
    if not modules:
        raise NotImplementedError(
            f'experts_implementation="{NAME}": got {model_name(model)}, which has no experts that follow the interface '
            "of transformers.integrations.moe, expected a model that has: Transformers would ignore this implementation"
        )
    return {path: described(module, again=again) for path, module in modules.items()}


def _is_selected(config: Any) -> bool:
    return bool(getattr(config, "_experts_implementation", None) == NAME)


def _after_init(post_init: Callable[..., None]) -> Callable[..., None]:
    """Wraps PreTrainedModel.post_init, which every model calls at the end of its constructor."""

    @functools.wraps(post_init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        if _is_selected(self.config) and any(hasattr(self.config, field) for field in _EXPERTS_FIELDS):
            _describe_all(self)

    return wrapped


def _after_choice(choose: Callable[..., None]) -> Callable[..., None]:
    """Wraps PreTrainedModel.set_experts_implementation."""

    @functools.wraps(choose)
    def wrapped(self: Any, experts_implementation: Any, *args: Any, **kwargs: Any) -> None:
        named = (
            experts_implementation.values() if isinstance(experts_implementation, dict) else [experts_implementation]
        )
        if NAME in named:
            _describe_all(self)
        choose(self, experts_implementation, *args, **kwargs)

    return wrapped


def register(*, peft: bool = True) -> None:
    """Registers "anabranch" as an experts implementation of Transformers. Further calls only apply `peft`.

    It also registers the packed formats of `packed_config`, which `anabranch.checkpoints.convert` writes.

    Select it with `AutoModel....from_pretrained(..., experts_implementation="anabranch")` or
    `model.set_experts_implementation("anabranch")`. Expert parallelism of Transformers works: indices past the last
    local expert belong to other ranks. Transformers accepts a registered name for every model, and ignores it silently
    if the model's experts do not follow the interface. So two methods of PreTrainedModel are wrapped. For this name
    they run `check` when a model is constructed and when the name is set.

    Args:
      peft: compute PEFT's LoRA adapters of experts (`target_parameters`) in the layer. PEFT's own way forms W + s B A
        for all experts in each pass. One method of PEFT's ParamWrapper is wrapped for this, when PEFT is imported. It
        applies to models with "anabranch" and calls PEFT's own code for all others, for disabled and merged adapters,
        and if two adapters are active (docs/lora.md). False: PEFT's own code always runs.

    Raises:
      ImportError: Transformers is missing, or too old to have experts implementations.
      TypeError: peft is no bool.

    Gradients: of the hidden states, the routing weights and every parameter, as in `routed_experts`; no double
    backward. Source: the interface of transformers.integrations.moe.
    """
    peft = argument_check.boolean("peft", peft)
    with needed_by("anabranch.torch.transformers"):
        from transformers import PreTrainedModel
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(f"anabranch.torch.transformers: expected transformers >= {OLDEST} ({error})") from error
    try:
        from anabranch.torch.transformers import quantizers

        quantizers.install()
    except ImportError as error:
        message = f"transformers: got no support for packed checkpoints ({error}), expected a release like 5.24"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    if peft:
        peft_adapters.install(_is_selected)
    else:
        peft_adapters.uninstall()
    if NAME in ALL_EXPERTS_FUNCTIONS:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    base: Any = PreTrainedModel
    base.post_init = _after_init(base.post_init)
    base.set_experts_implementation = _after_choice(base.set_experts_implementation)


def check(model: nn.Module) -> dict[str, Experts]:
    """Evaluates every experts module of a model and returns what it computes.

    With "anabranch" selected, the model's constructor and `set_experts_implementation` do this too. Call it after a
    change of an experts module that is followed by torch.compile, and after changes that the adapter does not notice
    (docs/torch.md).

    Args:
      model: a model of Transformers.

    Returns:
      `Experts` by the name of the experts module.

    Raises:
      TypeError: model is no module.
      NotImplementedError: a function is no `Activation`, or no module follows the interface.

    Gradients: none. Source: the interface of transformers.integrations.moe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {argument_check.describe(model)}, expected a torch.nn.Module")
    return _describe_all(model, again=True)


def _token_mask(attention_mask: Any, tokens: int) -> Tensor:
    if not isinstance(attention_mask, Tensor) or attention_mask.numel() != tokens:
        got = argument_check.describe(attention_mask)
        raise ValueError(f"attention_mask: got {got}, expected a tensor with one element per token, {tokens}")
    return attention_mask.reshape(-1) != 0


def load_balancing_loss_func(
    gate_logits: Sequence[Tensor], num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    """The load-balancing loss of Transformers models. The formula differs from `load_balance_loss`.

        E / N^2 sum_e (sum_l tokens_per_expert[l, e]) (sum_l score_sum[l, e]),   N = L T tokens of all L layers

    Scores are the softmax over all experts for every kind of router. Sums run over all layers before the
    multiplication. There is no factor 1 / K: for one layer the loss is K times `load_balance_loss`.

    Args:
      gate_logits: of L layers, float32, bfloat16 or float16 [T, E] each.
      num_experts: E.
      top_k: K.
      attention_mask: T elements of any shape, 0 for padding; None: no padding.

    Returns:
      float32 scalar; 0 if there is no token.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: of gate_logits, through the scores. No double backward.
    Source: the function of this name in transformers.models; Fedus et al. 2021 (arXiv:2101.03961), equations 4 to 6.

    >>> float(load_balancing_loss_func([torch.zeros(4, 2)], 2, 1))
    1.0
    """
    E = argument_check.integer("num_experts", num_experts, 1, argument_check.INDEX_LIMIT - 1)
    top_k = argument_check.integer("top_k", top_k, 1, E)
    if not isinstance(gate_logits, (tuple, list)) or not gate_logits:
        raise TypeError(
            f"gate_logits: got {argument_check.describe(gate_logits)}, expected the logits of one layer or more"
        )
    layers = [
        argument_check.tensor(f"gate_logits[{number}]", logits, argument_check.FLOATS, ("T", ("E", E)))
        for number, logits in enumerate(gate_logits)
    ]
    T = layers[0].shape[0]
    for number, logits in enumerate(layers):
        argument_check.tensor(f"gate_logits[{number}]", logits, argument_check.FLOATS, (("T", T), ("E", E)))
    mask = None if attention_mask is None else _token_mask(attention_mask, T).to(layers[0].device)
    routings = [route(logits, top_k, token_mask=mask) for logits in layers]
    score_sum = torch.stack([routing.score_sum for routing in routings]).sum(0)
    counts = torch.stack([routing.tokens_per_expert for routing in routings]).sum(0)
    tokens = len(layers) * (T if mask is None else mask.sum())
    return load_balance_loss(score_sum, counts, top_k, float(top_k), tokens)

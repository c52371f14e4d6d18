"""What an experts module of Hugging Face Transformers computes, in our terms."""

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from anabranch._text import shown
from anabranch.activation import Activation
from anabranch.torch._activation_of import Found, gated_activation_of, plain_activation_of


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


class _Known(NamedTuple):
    """What stands on a described module; of constants alone, so that torch.compile can read and guard it."""

    act: Any
    """Its act_fn, a function, or the class of it."""
    numbers: tuple[tuple[str, float], ...]
    """Those of its attributes that the activation may depend on."""
    activation: tuple[str, float, float]
    rest: tuple[str, str, bool, bool]


_ATTRIBUTE = "_anabranch_experts"


def model_name(module: nn.Module) -> str:
    """The module's class, and the type of model that it belongs to."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    name = type(module).__name__
    return f"{name} of {kind}" if kind else name


def flag(module: nn.Module, name: str, otherwise: bool) -> bool:
    """A flag that the library sets on experts; versions before it had none."""
    return bool(getattr(module, name, otherwise))


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """By their names, those whose forward goes through the library's table: its decorator leaves these attributes."""
    marks = ("is_transposed", "has_bias", "down_proj")
    return {path: part for path, part in model.named_modules() if all(hasattr(part, mark) for mark in marks)}


def _act(module: nn.Module) -> Any:
    act = getattr(module, "act_fn", None)
    return act if isinstance(act, types.FunctionType) else type(act)


def _numbers(module: nn.Module) -> Iterator[float]:
    """The numbers that it and the modules in it hold."""
    for part in module.modules():
        yield from (float(value) for value in vars(part).values() if type(value) in (int, float))


def _find(module: nn.Module) -> Experts:
    gated = flag(module, "has_gate", True)
    act = getattr(module, "act_fn", None)
    tensors = (*act.parameters(), *act.buffers()) if isinstance(act, nn.Module) else ()
    device = tensors[0].device if tensors else torch.device("cpu")
    function = "_apply_gate" if gated else "act_fn"
    found: Found | None = None
    cause: Exception | None = None
    try:
        computed: Any = getattr(module, function)
        if gated:
            found = gated_activation_of(computed, _numbers(module), device)
        else:
            found = plain_activation_of(computed, device)
    except Exception as error:  # whatever a function that expects something else raises
        cause = error
    if found is None:
        raise NotImplementedError(
            f'experts_implementation="anabranch": got {model_name(module)}, whose {function} (act_fn: {shown(act)}) is '
            "no activation of anabranch.torch.Activation, expected one that is; use another implementation for this "
            "model"
        ) from cause
    transposed = flag(module, "is_transposed", False)
    part = ("dfp" if found.interleaved else "dpf") if transposed else ("fpd" if found.interleaved else "pfd")
    return Experts(
        found.activation,
        part,
        "fd" if transposed else "df",
        flag(module, "has_bias", False),
        flag(module, "has_post_expert_norm", False),
    )


def _describe(module: nn.Module) -> _Known:
    """Finds what the module computes, and writes it on it."""
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            f'experts_implementation="anabranch": got {model_name(module)} to compile, of which is not known yet what '
            "it computes, expected anabranch.torch.transformers.check(model) before"
        )
    found = _find(module)
    activation = found.activation
    parameters = (activation.alpha, activation.limit)
    numbers = tuple(
        (name, value)
        for name, value in vars(module).items()
        if type(value) is float or (type(value) is int and value in parameters)
    )
    known = _Known(_act(module), numbers, (activation.name, *parameters), found[1:])
    setattr(module, _ATTRIBUTE, known)
    return known


def described(module: nn.Module) -> Experts:
    """What the module computes, found once, and again where a number of its or its function was replaced.

    Raises:
      NotImplementedError: nothing that we can express; or it is to be found while torch.compile traces, which knows no
        values.
    """
    known = getattr(module, _ATTRIBUTE, None)
    if (
        known is None
        or _act(module) is not known.act
        or any(getattr(module, name) != value for name, value in known.numbers)
    ):
        known = _describe(module)
    return Experts(Activation(*known.activation), *known.rest)

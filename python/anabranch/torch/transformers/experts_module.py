"""Describes an experts module of Hugging Face Transformers: activation, weight layouts, biases."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from anabranch._text import shown
from anabranch.activation import Activation
from anabranch.torch.transformers.attributes import Attributes, attributes, unchanged
from anabranch.torch.transformers.recognition import Found, NotAnActivation, recognise_gated, recognise_plain


class Experts(NamedTuple):
    """Description of an experts module of Transformers.

    Attributes:
      activation: of gate and up, or of h of an ungated expert.
      w_in_layout, w_out_layout: layouts of the parameters, as in `routed_experts`.
      has_bias: whether both projections have a bias.
      post_expert_norm: whether the module normalises every expert's output. The norm runs unfused between
        `expert_ffn` and `combine`.
    """

    activation: Activation
    w_in_layout: str
    w_out_layout: str
    has_bias: bool
    post_expert_norm: bool


class _Description(NamedTuple):
    """`Experts` as constants that torch.compile can read and guard; stored on the module.

    Attributes:
      attributes: the state of the module that it describes.
      activation: name, alpha, limit.
      others: the other fields of `Experts`.
    """

    attributes: Attributes
    activation: tuple[str, float, float]
    others: tuple[str, str, bool, bool]


_cached_activation = functools.lru_cache(Activation)
_ATTRIBUTE = "_anabranch_experts"
_PACKED = "packed"
_GATE = "_apply_gate"
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def model_name(module: nn.Module) -> str:
    """The module's class and its model type."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    name = type(module).__name__
    return f"{name} of {kind}" if kind else name


def flag(module: nn.Module, name: str, otherwise: bool) -> bool:
    """A flag that Transformers sets on experts modules; older versions lack some."""
    return bool(getattr(module, name, otherwise))


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by name, found by the attributes that `use_experts_implementation` sets, and packed ones."""
    marks = ("is_transposed", "has_bias", "down_proj")
    return {
        path: part
        for path, part in model.named_modules()
        if is_packed_experts(part) or all(hasattr(part, mark) for mark in marks)
    }


def is_packed_experts(module: nn.Module) -> bool:
    """Whether a module is a `PackedExperts`."""
    return _PACKED in vars(module) and _ATTRIBUTE in vars(module)


def take_description(module: nn.Module, source: nn.Module) -> Experts:
    """Gives a module with packed weights the description of the module it replaces, in the layouts of packed weights.

    Raises:
      NotImplementedError: see `described`.
    """
    described(source)
    description: _Description = getattr(source, _ATTRIBUTE)
    layout, _, bias, norm = description.others
    others = (layout.replace("d", "") + "d", "df", bias, norm)
    setattr(module, _ATTRIBUTE, _Description((), description.activation, others))
    return described(module)


def _refuse(module: nn.Module, what: str, expected: str, cause: Exception | None = None) -> NoReturn:
    raise NotImplementedError(
        f'experts_implementation="anabranch": got {model_name(module)}, {what}, expected {expected}; use another '
        "implementation for this model"
    ) from cause


def _check_parameters(module: nn.Module) -> None:
    """Refuses parameters other than those of both projections and of the norm that the module applies itself."""
    with_norm = ("post_expert_norm.",) if flag(module, "has_post_expert_norm", False) else ()
    allowed = (*with_norm, *(f"parametrizations.{name}." for name in _PARAMETERS))
    others = (name for name, _ in module.named_parameters() if name not in _PARAMETERS and not name.startswith(allowed))
    if name := next(others, None):
        _refuse(module, f"which has a parameter of its own, {name}", f"no other than {', '.join(_PARAMETERS)}")


def _numbers(module: nn.Module) -> Iterator[float]:
    """Candidates for limits: the numbers that the module and its submodules hold."""
    values = (value for part in module.modules() for value in vars(part).values())
    yield from (float(value) for value in values if type(value) in (int, float))


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in before:
            part.training = training
        yield
    finally:
        for part, mode in before:
            part.training = mode


def _evaluate(module: nn.Module, name: str) -> Found | None:
    computed: Any = getattr(module, name)
    return recognise_gated(computed, _numbers(module)) if name == _GATE else recognise_plain(computed)


def _recognise(module: nn.Module, name: str) -> Found | None:
    """The activation that the function `name` computes, in training mode and in evaluation mode."""
    found = []
    for training in (True, False):
        with _mode(module, training):
            found.append(_evaluate(module, name))
    if found[0] != found[1]:
        raise NotAnActivation("differs between training and evaluation mode")
    return found[0]


def _describe(module: nn.Module) -> _Description:
    """Evaluates the module's functions and stores the description on the module."""
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            f'experts_implementation="anabranch": got {model_name(module)}, whose functions cannot be evaluated while '
            "torch.compile traces, expected a call of anabranch.torch.transformers.check(model) before"
        )
    _check_parameters(module)
    function = _GATE if flag(module, "has_gate", True) else "act_fn"
    found: Found | None = None
    cause: Exception | None = None
    try:
        found = _recognise(module, function)
    except Exception as error:  # a function that expects other arguments may raise anything
        cause = error
    if found is None:
        what = str(cause) if isinstance(cause, NotAnActivation) else "is no activation of anabranch.torch.Activation"
        act = shown(getattr(module, "act_fn", None))
        _refuse(module, f"whose {function} (act_fn: {act}) {what}", "one that is an activation", cause)
    transposed = flag(module, "is_transposed", False)
    part = ("dfp" if found.interleaved else "dpf") if transposed else ("fpd" if found.interleaved else "pfd")
    bias, norm = flag(module, "has_bias", False), flag(module, "has_post_expert_norm", False)
    activation = found.activation
    description = _Description(
        attributes(module),
        (activation.name, activation.alpha, activation.limit),
        (part, "fd" if transposed else "df", bias, norm),
    )
    setattr(module, _ATTRIBUTE, description)
    return description


def described(module: nn.Module, *, again: bool = False) -> Experts:
    """Describes the module. Its functions are evaluated once, after a change of a listed attribute, and on request.

    Raises:
      NotImplementedError: the module computes something that `Experts` cannot express, or has to be evaluated while
        torch.compile traces.
    """
    description = getattr(module, _ATTRIBUTE, None)
    again = again and not is_packed_experts(module)
    if again or description is None or not unchanged(module, description.attributes):
        description = _describe(module)
    make_activation = Activation if torch.compiler.is_dynamo_compiling() else _cached_activation
    return Experts(make_activation(*description.activation), *description.others)

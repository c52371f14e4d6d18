"""What an experts module of Hugging Face Transformers computes, in our terms."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from anabranch._text import shown
from anabranch.activation import Activation
from anabranch.torch.transformers.activation_of import Found, NotAnActivation, gated_activation_of, plain_activation_of
from anabranch.torch.transformers.attributes_read import Reads, reads_of, unchanged


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

    reads: Reads
    """What it was found from."""
    activation: tuple[str, float, float]
    rest: tuple[str, str, bool, bool]


_made = functools.lru_cache(Activation)
_ATTRIBUTE = "_anabranch_experts"
_GATE = "_apply_gate"
_FLAGS = ("has_gate", "is_transposed", "has_bias", "has_post_expert_norm")
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


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


def _refuse(module: nn.Module, what: str, expected: str, cause: Exception | None = None) -> NoReturn:
    raise NotImplementedError(
        f'experts_implementation="anabranch": got {model_name(module)}, {what}, expected {expected}; use another '
        "implementation for this model"
    ) from cause


def _check_parameters(module: nn.Module) -> None:
    """Others than those of both products, and of a norm that stays the module's, would be left out."""
    with_norm = ("post_expert_norm.",) if flag(module, "has_post_expert_norm", False) else ()
    allowed = (*with_norm, *(f"parametrizations.{name}." for name in _PARAMETERS))
    others = (name for name, _ in module.named_parameters() if name not in _PARAMETERS and not name.startswith(allowed))
    if name := next(others, None):
        _refuse(module, f"which has a parameter of its own, {name}", f"no other than {', '.join(_PARAMETERS)}")


def _numbers(module: nn.Module, reads: Reads) -> Iterator[float]:
    """The numbers that it, the modules in it and what its function reads hold."""
    of_modules = (value for part in module.modules() for value in vars(part).values())
    of_reads = (value for _, attributes in reads.of_owners for _, value in attributes)
    yield from (float(value) for value in itertools.chain(of_modules, of_reads) if type(value) in (int, float))


def _find(module: nn.Module, function: str, reads: Reads) -> Experts:
    _check_parameters(module)
    found: Found | None = None
    cause: Exception | None = None
    try:
        computed: Any = getattr(module, function)
        if function == _GATE:
            found = gated_activation_of(computed, _numbers(module, reads))
        else:
            found = plain_activation_of(computed)
    except Exception as error:  # whatever a function that expects something else raises
        cause = error
    if found is None:
        what = str(cause) if isinstance(cause, NotAnActivation) else "is no activation of anabranch.torch.Activation"
        act = shown(getattr(module, "act_fn", None))
        _refuse(module, f"whose {function} (act_fn: {act}) {what}", "one that is an activation", cause)
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
    function = _GATE if flag(module, "has_gate", True) else "act_fn"
    reads = reads_of(module, function, others=_FLAGS)
    found = _find(module, function, reads)
    activation = found.activation
    known = _Known(reads, (activation.name, activation.alpha, activation.limit), found[1:])
    setattr(module, _ATTRIBUTE, known)
    return known


def described(module: nn.Module) -> Experts:
    """What the module computes, found once, and again where something changed that its function reads.

    Raises:
      NotImplementedError: nothing that we can express; or it is to be found while torch.compile traces, which knows no
        values.
    """
    known = getattr(module, _ATTRIBUTE, None)
    if known is None or not unchanged(module, known.reads):
        known = _describe(module)
    made = Activation if torch.compiler.is_dynamo_compiling() else _made
    return Experts(made(*known.activation), *known.rest)

"""PEFT's LoRA adapters of experts (`target_parameters`), computed by the layer instead of folded into the weights.

PEFT wraps an experts module in one `ParamWrapper` for each adapted parameter. A wrapper's forward pass forms W + s B A
for all experts, several times. `install()` wraps that function: where the innermost module has the implementation
"anabranch", it calls this module with the factors beside it, and `experts_forward` passes them to the layer. In all
other cases, which `_found` lists, PEFT's own function runs. PEFT's modules, parameters and files do not change.

PEFT does not find weights in MXFP4 experts, and would skip them with a warning: an error is raised instead. FP8 experts
have codes where PEFT expects weights, and experts of `parallelize` have those of one rank: a sum with them is wrong.
There PEFT's own function runs only if the adapters are disabled; else an error is raised, also by `merge`.
"""

import functools
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from anabranch.lora import Lora
from anabranch.torch.binding import private
from anabranch.torch.transformers.expert_group import group_of
from anabranch.torch.transformers.experts_module import is_packed_experts, model_name

_MODULE = "peft.tuners.lora.layer"
_TUNER_MODULE = "peft.tuners.tuners_utils"
_FACTORS = "_anabranch_factors"
#: What the hook reads of a ParamWrapper; without one of these, PEFT's own function runs.
_CLASS_NAMES = ("forward", "merge", "get_base_layer", "disable_adapters", "merged", "active_adapters")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INSTANCE_NAMES = ("parameter_name", "num_experts", "scaling", "lora_A", "lora_B", "base_layer")


class Factors(NamedTuple):
    """The weights of an adapter of one parameter as PEFT stores them, and its scale."""

    a: Tensor
    """[r E, inputs]; row e r + i belongs to expert e."""
    b: Tensor
    """[outputs, r E]; column i E + e belongs to expert e."""
    num_experts: int
    scale: float


def factors_of(module: nn.Module) -> dict[str, Factors]:
    """The adapters of the present call of an experts module, by the name of the parameter."""
    found: dict[str, Factors] = vars(module).get(_FACTORS, {})
    return found


def as_lora(
    factors: dict[str, Factors], up_name: str, parts: int, parts_first: bool, dtype: torch.dtype
) -> tuple[Lora | None, tuple[float, float]]:
    """The adapters as arguments of the layer: views of PEFT's weights, through which gradients reach them.

    Args:
      factors: see `factors_of`.
      up_name: the name of the parameter that is w_in.
      parts: P.
      parts_first: whether the parameter's columns have P before F.
      dtype: that of x; a factor of another 16-bit dtype is rounded to it.

    Returns:
      (lora, lora_scale).
    """
    fields: dict[str, Tensor] = {}
    scales = {"in": 1.0, "out": 1.0}
    for name, projection in ((up_name, "in"), ("down_proj", "out")):
        if name not in factors:
            continue
        a, b, num_experts, scales[projection] = factors[name]
        a, b = (f if f.dtype in (dtype, torch.float32) else f.to(dtype) for f in (a, b))
        b = b.unflatten(1, (-1, num_experts)).permute(2, 1, 0)
        if projection == "in":
            b = b.unflatten(2, (parts, -1)) if parts_first else b.unflatten(2, (-1, parts)).transpose(2, 3)
        fields |= {f"a_{projection}": a.unflatten(0, (num_experts, -1)).mT, f"b_{projection}": b}
    return Lora(**fields) if fields else None, (scales["in"], scales["out"])


def _adapter_of(wrapper: Any, parameters: Sequence[str]) -> tuple[bool, Factors | None]:
    """(whether the layer can compute the wrapper's adapter, its factors or None if no adapter is active)."""
    if wrapper.disable_adapters or wrapper.merged or wrapper.parameter_name not in parameters:
        return False, None
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not active:
        return True, None
    if len(active) > 1 or getattr(wrapper, "lora_variant", {}).get(active[0]) is not None:
        return False, None
    a, b = wrapper.lora_A[active[0]], wrapper.lora_B[active[0]]
    plain = all(
        type(linear) is nn.Linear and linear.bias is None and not private.has_hooks(linear) for linear in (a, b)
    )
    if not plain or not all(type(linear.weight) in (Tensor, nn.Parameter) for linear in (a, b)):
        return False, None
    return True, Factors(a.weight, b.weight, wrapper.num_experts, float(wrapper.scaling[active[0]]))


def _found(wrapper: Any, is_selected: Callable[[Any], bool], is_wrapper: Callable[[Any], bool]) -> Any:
    """(experts module, factors by parameter) of a chain of wrappers, or None if PEFT's own function has to run.

    That is where the innermost module has another implementation; an adapter is disabled or merged, two are active, or
    one adapts another parameter than the projections; a weight is no plain 3-D tensor of a float dtype; or a wrapper
    inside the chain has hooks or a forward function of its own.
    """
    base: nn.Module = wrapper.get_base_layer()
    packed = is_packed_experts(base)
    if not (packed or is_selected(getattr(base, "config", None))) or not hasattr(base, "is_transposed"):
        return None
    up_name = "gate_up_proj" if getattr(base, "has_gate", True) else "up_proj"
    parameters = up_name, "down_proj"
    factors: dict[str, Factors] = {}
    layer = wrapper
    while layer is not base:
        if not is_wrapper(layer) or (layer is not wrapper and (private.has_hooks(layer) or "forward" in vars(layer))):
            return None
        known, adapter = _adapter_of(layer, parameters)
        if not known or layer.parameter_name in factors:
            return None
        weight = getattr(base, layer.parameter_name)
        if weight.dim() != 3 or not (packed or weight.dtype in _FLOATS):
            return None
        if adapter is not None:
            factors[layer.parameter_name] = adapter
        layer = layer.base_layer
    return base, factors


def _with_factors(forward: Callable[..., Any], is_selected: Callable[[Any], bool], wrapper_type: type) -> Any:
    def is_wrapper(layer: Any) -> bool:
        return isinstance(layer, wrapper_type) and all(hasattr(layer, name) for name in _INSTANCE_NAMES)

    @functools.wraps(forward)
    def wrapped(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        found = None
        if kwargs.get("adapter_names") is None and is_wrapper(self):
            found = _found(self, is_selected, is_wrapper)
        if found is None:
            if _is_partial(self.get_base_layer()) and (self.merged or not self.disable_adapters):
                _refuse(self, "adapters that the layer cannot compute")
            return forward(self, x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        base, factors = found
        before = vars(base).get(_FACTORS)
        setattr(base, _FACTORS, factors)
        try:
            return base(x, *args, **kwargs)
        finally:
            if before is None:
                delattr(base, _FACTORS)
            else:
                setattr(base, _FACTORS, before)

    return wrapped


def _is_partial(base: nn.Module) -> bool:
    """Whether an experts module lacks the whole float weights that PEFT's own function needs."""
    return is_packed_experts(base) or group_of(base) is not None


def _refuse(wrapper: Any, what: str) -> NoReturn:
    base = wrapper.get_base_layer()
    weights, otherwise = "packed weights", "to the codes"
    if group_of(base) is not None:
        weights, otherwise = "sharded experts", "to the weights of one rank"
    raise NotImplementedError(
        f"{wrapper.parameter_name}: got {what} of {model_name(base)} with {weights}, expected one active adapter per "
        "parameter, not merged, without variants such as DoRA and without hooks, added before the experts were "
        f"sharded: PEFT would add it {otherwise}"
    )


def _refuse_codes(model: nn.Module, targets: Sequence[str]) -> None:
    """Raises NotImplementedError if `target_parameters` name MXFP4 experts, which PEFT would skip with a warning."""
    for path, module in model.named_modules():
        if not is_packed_experts(module) or module.packed != "mxfp4":
            continue
        packed: Any = module
        keys = {f".{path}.{n}" for name in packed.packed_names() for n in (name, name.removesuffix("_blocks"))}
        for target in targets:
            if any(key.endswith(f".{target}") for key in keys):
                raise NotImplementedError(
                    f"target_parameters: got {target!r}, the MXFP4 weights of {model_name(module)}, expected no "
                    "parameters of these experts: anabranch.torch.add_lora adapts them"
                )


def _checked(inject: Callable[..., None]) -> Any:
    """Refuses new adapters of MXFP4 experts and of a sharded model.

    With the latter their parameters would differ between ranks after the first step.
    """

    @functools.wraps(inject)
    def wrapped(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        _refuse_codes(model, getattr(self.peft_config[adapter_name], "target_parameters", None) or ())
        if any(group_of(module) is not None for module in model.modules()):
            raise NotImplementedError(
                f"model: got a new adapter for {model_name(model)}, which parallelize has sharded, expected "
                "get_peft_model before parallelize, and no peft_config of a trainer"
            )
        inject(self, model, adapter_name, *args, **kwargs)

    return wrapped


def _without_packed(merge: Callable[..., None]) -> Any:
    @functools.wraps(merge)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if _is_partial(self.get_base_layer()):
            _refuse(self, "a merge")
        merge(self, *args, **kwargs)

    return wrapped


# ---------------------------------------------------------------- installation


def _wrap(module: Any, is_selected: Callable[[Any], bool]) -> None:
    """Wraps two functions of ParamWrapper and one of BaseTuner; warns if this PEFT lacks a name."""
    wrapper_type = getattr(module, "ParamWrapper", None)
    tuner: Any = getattr(importlib.import_module(_TUNER_MODULE), "BaseTuner", None)
    missing = [name for name in _CLASS_NAMES if not hasattr(wrapper_type, name)]
    missing += [] if hasattr(tuner, "inject_adapter") else ["BaseTuner.inject_adapter"]
    if wrapper_type is None or missing:
        lacking = ", ".join(missing) if wrapper_type is not None else "ParamWrapper"
        warnings.warn(
            f"anabranch.torch.transformers: got a PEFT without {lacking}, expected one like 0.21: adapters of experts "
            "take PEFT's own way, which is slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    original = wrapper_type.forward
    if not hasattr(original, "__wrapped__"):
        wrapper_type.forward = _with_factors(original, is_selected, wrapper_type)
        wrapper_type.merge = _without_packed(wrapper_type.merge)
        tuner.inject_adapter = _checked(tuner.inject_adapter)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps PEFT's module when it is imported."""

    def __init__(self, is_selected: Callable[[Any], bool]):
        self.is_selected = is_selected

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Finds PEFT's module with the other finders, and wraps its loader."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _wrap(module, self.is_selected)

        loader.exec_module = exec_module
        return spec


def _finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


def install(is_selected: Callable[[Any], bool]) -> None:
    """Lets the layer compute adapters, now if PEFT is imported, else when it will be. Further calls have no effect.

    is_selected: whether a model's configuration has the implementation "anabranch".
    """
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE], is_selected)
    elif not _finders():
        sys.meta_path.insert(0, _Finder(is_selected))


def uninstall() -> None:
    """Restores PEFT's own functions."""
    for finder in _finders():
        sys.meta_path.remove(finder)
    wrapper_type: Any = getattr(sys.modules.get(_MODULE), "ParamWrapper", None)
    tuner: Any = getattr(sys.modules.get(_TUNER_MODULE), "BaseTuner", None)
    for owner, name in ((wrapper_type, "forward"), (wrapper_type, "merge"), (tuner, "inject_adapter")):
        original = getattr(getattr(owner, name, None), "__wrapped__", None)
        if original is not None:
            setattr(owner, name, original)

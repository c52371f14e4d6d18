"""Records the attributes of an experts module on which its recognised activation depends, and detects their changes.

The list is fixed: the functions `_apply_gate` and `act_fn` (a module counts as its class), flags, and plain values in
`vars` of the module and of `act_fn`. All are constants, functions or classes, which torch.compile can guard.
"""

import types
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType)
_FLAGS = ("has_gate", "is_transposed", "has_bias", "has_post_expert_norm")
_ABSENT = "<absent>"

Attributes = tuple[tuple[str, str, Any], ...]
"""(owner, name, value); the owner is "" for the module, or "act_fn"."""


def _attribute(owner: Any, name: str) -> Any:
    # hasattr, and getattr with a default, would make torch.compile evaluate a property outside the program, which
    # fills the cache of a parametrised tensor that the program is guarded on.
    try:
        value = getattr(owner, name)
    except AttributeError:
        return _ABSENT
    if isinstance(value, nn.Module):
        return type(value)
    return value.__func__ if isinstance(value, types.MethodType) else value


def attributes(module: nn.Module) -> Attributes:
    """The listed attributes with their present values, without `training` and private names."""
    listed = [("", name) for name in ("_apply_gate", "act_fn", *_FLAGS)]
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module):
        listed.append(("act_fn", "forward"))
    for path, owner in (("", module), ("act_fn", act_fn)):
        plain = (name for name, value in getattr(owner, "__dict__", {}).items() if type(value) in _PLAIN)
        listed += [(path, name) for name in sorted(plain) if name[0] != "_" and name != "training"]
    owners = {"": module, "act_fn": act_fn}
    return tuple((path, name, _attribute(owners[path], name)) for path, name in dict.fromkeys(listed))


def unchanged(module: nn.Module, before: Attributes) -> bool:
    """Whether all attributes of `before` have the same values. Under torch.compile these are guards of the program."""
    compiling = torch.compiler.is_dynamo_compiling()
    for path, name, value in before:
        owner = module if path == "" else getattr(module, path)
        now = _attribute(owner, name)
        if now is not value and not (type(now) is type(value) and now == value):
            return False
        if compiling and isinstance(value, types.FunctionType):
            _ = getattr(type(owner), name, None) is None  # from torch 2.15 on, only this guards a method
    return True

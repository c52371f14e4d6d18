"""How an operation of ours becomes one that torch knows: `torch.ops.anabranch.*`, functional, of fixed arity.

An operation is an allocation of its results, from shapes and options alone, and a call that fills them. The allocation
by itself is what torch.compile traces. What differentiates stands outside, in autograd functions that call these.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ops = torch.library.Library("anabranch", "DEF")


def define(schema: str, allocate: Callable[..., Any], fill: Callable[..., None]) -> Any:
    """Registers an operation: `allocate(*arguments)` makes its results, `fill(results, *arguments)` computes them."""
    name = schema.split("(")[0]

    def run(*arguments: Any) -> Any:
        inputs = [a.contiguous() if isinstance(a, Tensor) else a for a in arguments]
        results = allocate(*inputs)
        fill(results, *inputs)
        return results

    _ops.define(schema)
    for key in ("CPU", "CUDA"):
        _ops.impl(name, run, key)
    torch.library.register_fake(f"anabranch::{name}", allocate, lib=_ops)
    return getattr(torch.ops.anabranch, name).default

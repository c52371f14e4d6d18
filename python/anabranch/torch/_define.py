"""How an operation of ours becomes one that torch knows: `torch.ops.anabranch.*`, functional, of fixed arity.

An operation is an allocation of its results, from shapes and options alone, and a call that fills them. The allocation
by itself is what torch.compile traces. torch.vmap runs it on one slice after the other. What differentiates stands
outside, in autograd functions that call these.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anabranch.torch._autograd import in_slices

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
    operation = getattr(torch.ops.anabranch, name).default

    def of_slices(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return in_slices(operation, info, in_dims, arguments)

    torch.library.register_vmap(f"anabranch::{name}", of_slices, lib=_ops)
    return operation

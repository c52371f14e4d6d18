"""How an operation of ours becomes one that torch knows: `torch.ops.anabranch.*`, functional, of fixed arity.

An operation is an allocation of its results, from shapes and options alone, and calls that fill them. The allocation
by itself is what torch.compile traces. torch.vmap runs it on one slice after the other. What differentiates stands
outside, in autograd functions that call these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding.autograd import in_slices
from anabranch.torch.binding.calls import Call, Layout
from anabranch.torch.binding.derivatives import undifferentiable

_ops = torch.library.Library("anabranch", "DEF")
#: Layouts that are kept: when there are more, all are forgotten.
_MOST_LAYOUTS = 4096


class _Layouts:
    """Those that no call is using: a call writes to its layout, so that calls at the same time need one each.

    They belong to no thread. A backward pass on a GPU runs on a thread of torch's, which would not find what the
    forward pass's has laid out.
    """

    def __init__(self) -> None:
        self.free: dict[Any, list[Layout]] = {}

    def take(self, key: Any) -> Layout | None:
        """One for a key, None: there is none; to be given back."""
        try:
            return self.free[key].pop()
        except (KeyError, IndexError):
            return None

    def give_back(self, key: Any, layout: Layout) -> None:
        """Keeps one for the next call."""
        if len(self.free) >= _MOST_LAYOUTS and key not in self.free:
            self.free.clear()
        self.free.setdefault(key, []).append(layout)


_layouts = _Layouts()


def _laid_out(
    allocate: Callable[..., Any],
    calls: Callable[..., Any],
    arguments: Sequence[Any],
    device: torch.device,
    threads: int,
) -> Layout:
    """What an operation does with such arguments: both functions are asked with tensors that have no memory."""
    described = [torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in arguments]
    results = allocate(*described)
    of_calls = calls(results, *described)
    given = [d for d, a in zip(described, arguments, strict=True) if isinstance(a, Tensor)]
    return Layout(
        given,
        (results,) if isinstance(results, Tensor) else results,
        (of_calls,) if isinstance(of_calls, Call) else of_calls,
        device,
        threads,
    )


def define(schema: str, allocate: Callable[..., Any], calls: Callable[..., Call | Sequence[Call]]) -> Any:
    """Registers an operation.

    Args:
      schema: its signature, a tensor that is no option first.
      allocate: of its arguments, makes its results.
      calls: of these and of its arguments, what computes them, in order.
    """
    name = schema.split("(")[0]
    _ops.define(schema)
    operation = getattr(torch.ops.anabranch, name).default
    arity, single = len(operation._schema.arguments), len(operation._schema.returns) == 1
    tensors = [i for i, a in enumerate(operation._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]
    options = [i for i in range(arity) if i not in tensors]

    def run(*arguments: Any) -> Any:
        given = [t if t.is_contiguous() else t.contiguous() for i in tensors if (t := arguments[i]) is not None]
        device = given[0].device
        threads = 0 if given[0].is_cuda else torch.get_num_threads()
        key = (
            name,
            device,
            threads,
            *[tuple(o) if isinstance(o := arguments[i], list) else o for i in options],
            *[t if (t := arguments[i]) is None else (t.dtype, t.shape) for i in tensors],
        )
        layout = _layouts.take(key)
        if layout is None:
            layout = _laid_out(allocate, calls, arguments, device, threads)
        results = layout.run(given)
        _layouts.give_back(key, layout)
        return results[0] if single else results

    def fake(*arguments: Any) -> Any:
        # Results lie as those of contiguous arguments do, whatever these are.
        return allocate(*[a.contiguous() if isinstance(a, Tensor) else a for a in arguments])

    def of_slices(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return in_slices(operation, info, in_dims, arguments)

    for key in ("CPU", "CUDA"):
        _ops.impl(name, run, key)
    torch.library.register_fake(f"anabranch::{name}", fake, lib=_ops)
    torch.library.register_vmap(f"anabranch::{name}", of_slices, lib=_ops)
    _ops.impl(name, undifferentiable(operation, run), "Autograd", with_keyset=True)
    return operation

"""Registration of operations with torch, as `torch.ops.anabranch.*`: functional, with a fixed number of arguments.

An operation consists of a function that allocates its results from shapes and options, and of C calls that fill them.
torch.compile traces the allocation only. torch.vmap loops over the batch. Autograd functions call operations; the
operations themselves have no derivative.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding.autograd import loop_batch
from anabranch.torch.binding.calls import Call, PreparedCalls
from anabranch.torch.binding.derivatives import reject_derivative

_ops = torch.library.Library("anabranch", "DEF")
#: Upper bound on the prepared calls that are cached; one more empties the cache.
_MOST_PREPARED = 4096


class _FreeCalls:
    """A cache of prepared calls that no thread is running. A run writes to its prepared calls, so each needs its own.

    The cache is not per thread: a backward pass on a GPU runs on a thread of torch's, which would find nothing there.
    """

    def __init__(self) -> None:
        self.free: dict[Any, list[PreparedCalls]] = {}

    def take(self, key: Any) -> PreparedCalls | None:
        """Removes and returns calls for a key; None: there are none."""
        try:
            return self.free[key].pop()
        except (KeyError, IndexError):
            return None

    def give_back(self, key: Any, prepared: PreparedCalls) -> None:
        """Adds calls for the next run with this key."""
        if len(self.free) >= _MOST_PREPARED and key not in self.free:
            self.free.clear()
        self.free.setdefault(key, []).append(prepared)


_free_calls = _FreeCalls()


def _prepare(
    allocate: Callable[..., Any],
    calls: Callable[..., Any],
    arguments: Sequence[Any],
    device: torch.device,
    threads: int,
) -> PreparedCalls:
    """Prepares the calls for arguments of these shapes, with meta tensors in their place."""
    described = [torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in arguments]
    results = allocate(*described)
    c_calls = calls(results, *described)
    given = [d for d, a in zip(described, arguments, strict=True) if isinstance(a, Tensor)]
    return PreparedCalls(
        given,
        (results,) if isinstance(results, Tensor) else results,
        (c_calls,) if isinstance(c_calls, Call) else c_calls,
        device,
        threads,
    )


def define(schema: str, allocate: Callable[..., Any], calls: Callable[..., Call | Sequence[Call]]) -> Any:
    """Registers an operation.

    Args:
      schema: its signature; the first argument is a required tensor.
      allocate: allocates the results, given the arguments.
      calls: returns the C calls that compute the results, in order, given results and arguments.
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
        prepared = _free_calls.take(key)
        if prepared is None:
            prepared = _prepare(allocate, calls, arguments, device, threads)
        results = prepared.run(given)
        _free_calls.give_back(key, prepared)
        return results[0] if single else results

    def fake(*arguments: Any) -> Any:
        # `run` makes its arguments contiguous, so results have the strides of contiguous arguments.
        return allocate(*[a.contiguous() if isinstance(a, Tensor) else a for a in arguments])

    def batched(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return loop_batch(operation, info, in_dims, arguments)

    for key in ("CPU", "CUDA"):
        _ops.impl(name, run, key)
    torch.library.register_fake(f"anabranch::{name}", fake, lib=_ops)
    torch.library.register_vmap(f"anabranch::{name}", batched, lib=_ops)
    _ops.impl(name, reject_derivative(operation, run), "Autograd", with_keyset=True)
    return operation

"""Registration of operations with torch, as `torch.ops.anabranch.*`: functional, with a fixed number of arguments.

An operation consists of a function that allocates its results from shapes and options, and of C calls that fill them.
torch.compile traces the allocation only. torch.vmap loops over the batch. Autograd functions call operations; the
operations themselves have no derivative.
"""

import collections
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import native as _native
from anabranch.torch.binding import private
from anabranch.torch.binding.autograd import loop_batch
from anabranch.torch.binding.calls import Call, PreparedCalls, flat_sizes, prepare
from anabranch.torch.binding.derivatives import reject_derivative
from anabranch.torch.binding.described import Described, Sizes
from anabranch.torch.binding.keys import kinds_of

_ops = torch.library.Library("anabranch", "DEF")
#: Upper bound on the keys with cached prepared calls; one more removes the key that was used least recently.
_MOST_PREPARED = 4096


class _FreeCalls:
    """A cache of prepared calls that no thread is running. A run writes to its prepared calls, so each needs its own.

    The cache is not per thread: a backward pass on a GPU runs on a thread of torch's, which would find nothing there.
    """

    def __init__(self) -> None:
        self.free: collections.OrderedDict[Any, list[PreparedCalls]] = collections.OrderedDict()
        self.lock = threading.Lock()
        self.num_runs = 0

    def take(self, key: Any, inputs: Sequence[Any]) -> PreparedCalls | None:
        """Removes and returns calls for a key and for sizes; None: there are none."""
        with self.lock:
            self.num_runs += 1
            free = self.free.get(key, [])
            for i in range(len(free) - 1, -1, -1):
                if free[i].fit(inputs):
                    return free.pop(i)
        return None

    def give_back(self, key: Any, prepared: PreparedCalls) -> None:
        """Adds calls for the next run with this key."""
        with self.lock:
            self.free.setdefault(key, []).append(prepared)
            self.free.move_to_end(key)
            if len(self.free) > _MOST_PREPARED:
                self.free.popitem(last=False)


_free_calls = _FreeCalls()


def _prepare(
    allocate: Callable[..., Any],
    calls: Callable[..., Any],
    arguments: Sequence[Any],
    sizes_at: Collection[int],
    device: torch.device,
    threads: int,
) -> PreparedCalls:
    """Prepares the calls for arguments of these dtypes and ranks. sizes_at: indices of integers that are sizes."""
    inputs = [a.shape for a in arguments if isinstance(a, Tensor)]
    inputs += [arguments[i] for i in sizes_at]
    sizes = Sizes(flat_sizes(inputs))
    numbers = iter([sizes.input(i) for i in range(sizes.num_inputs)])
    described = [
        Described([next(numbers) for _ in a.shape], a.dtype) if isinstance(a, Tensor) else a for a in arguments
    ]
    for i in sizes_at:
        described[i] = next(numbers)
    prepared = prepare(allocate, calls, described, sizes, device, threads)
    assert prepared.fit(inputs)
    return prepared


def python_run(schema: str, allocate: Callable[..., Any], calls: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs the C calls of an operation; see `define`. The operation need not be registered."""
    name, single = schema.split("(")[0], not schema.endswith(")")
    kinds = kinds_of(schema)
    tensors = [i for i, kind in enumerate(kinds) if kind in "Tt"]
    sizes_at = [i for i, kind in enumerate(kinds) if kind == "n"]
    options = [i for i, kind in enumerate(kinds) if kind not in "Ttn"]

    def run(*arguments: Any) -> Any:
        given = [t if t.is_contiguous() else t.contiguous() for i in tensors if (t := arguments[i]) is not None]
        device = given[0].device
        threads = 0 if given[0].is_cuda else torch.get_num_threads()
        key = (
            name,
            device,
            threads,
            *[tuple(o) if isinstance(o := arguments[i], list) else o for i in options],
            *[t if (t := arguments[i]) is None else (t.dtype, t.dim()) for i in tensors],
        )
        inputs = [t.shape for t in given]
        inputs += [arguments[i] for i in sizes_at]
        prepared = _free_calls.take(key, inputs)
        if prepared is None:
            prepared = _prepare(allocate, calls, arguments, sizes_at, device, threads)
        results = prepared.run(given)
        _free_calls.give_back(key, prepared)
        return results[0] if single else results

    return run


def native_run(operation: Any) -> Callable[..., Any]:
    """A function that calls the native kernel of an operation below autograd, with errors of Python's types."""

    def run(*arguments: Any) -> Any:
        with _native.python_errors(), private.below_autograd():
            return operation(*arguments)

    return run


def num_runs() -> int:
    """How many operations have run, for tests."""
    return _free_calls.num_runs + (0 if _native.native is None else _native.native.counts()[1])


def forget_prepared() -> None:
    """Removes all prepared calls, for tests."""
    global _free_calls
    _free_calls = _FreeCalls()
    if _native.native is not None:
        _native.native.forget()


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
    in_python, native = python_run(schema, allocate, calls), _native.native
    if native is not None and native.register(schema, allocate, calls):
        run, keys = native_run(operation), [key for key in ("CPU", "CUDA") if key not in native.dispatch_keys]
    else:
        run, keys = in_python, ["CPU", "CUDA"]

    def fake(*arguments: Any) -> Any:
        # `run` makes its arguments contiguous, so results have the strides of contiguous arguments.
        return allocate(*[a.contiguous() if isinstance(a, Tensor) else a for a in arguments])

    def batched(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return loop_batch(operation, info, in_dims, arguments)

    for key in keys:
        _ops.impl(name, in_python, key)
    torch.library.register_fake(f"anabranch::{name}", fake, lib=_ops)
    torch.library.register_vmap(f"anabranch::{name}", batched, lib=_ops)
    _ops.impl(name, reject_derivative(operation, run), "Autograd", with_keyset=True)
    return operation

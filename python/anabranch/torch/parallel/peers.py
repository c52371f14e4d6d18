"""Exchanges of a process group whose ranks are GPUs of one host.

An exchange is made when it is first needed and replaced by a larger one when a call needs more. Both are collective:
all ranks of a group make the same calls. A rank that makes another call gets an error, by the words that the library
compares on the device.
"""

import contextlib
import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch._library import STATUS_ERRORS
from anabranch.peer_exchange import ALL_BUFFERS, FINISH, MAX_RANKS, START, PeerExchange
from anabranch.torch.binding import calls, private
from anabranch.torch.binding.calls import array_of
from anabranch.torch.binding.define import define
from anabranch.torch.binding.native import call

_FIRST_BYTES = 1 << 20
_STEPS = 8
_MOST_VIEWS = 64


def _rounded(size: int) -> int:
    """A size rounded up to an eighth of a power of two, so that growing sizes replace few exchanges."""
    step = max(1 << max(size.bit_length() - 1, 0), _FIRST_BYTES) // _STEPS
    return -(-size // step) * step


class _Memory:
    """Memory of an exchange, for torch.as_tensor."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _memory_of(exchange: PeerExchange) -> list[Tensor]:
    """The buffers of an exchange, each uint8 [size]."""
    device = torch.device("cuda", exchange.device)
    memories = [_Memory(exchange.address(buffer), size) for buffer, size in enumerate(exchange.sizes)]
    return [torch.as_tensor(memory, device=device) for memory in memories]


#: Starts to send tokens x [T, D] to a buffer of the exchange with this address.
_send = define(
    "p2p_send(Tensor x, int exchange, int buffer) -> ()",
    lambda *_: (),
    lambda results, x, exchange, buffer: calls.exchange_all_gather(
        {"x": x}, exchange=ctypes.c_void_p(exchange), buffer=buffer, part=START
    ),
)

#: The buffers of the exchange for tokens, all of one size. A backward pass sends twice before it collects.
TOKENS, SUMS = (0, 1), 2


@dataclasses.dataclass
class _Use:
    exchange: PeerExchange
    memory: list[Tensor]
    """The buffers of this rank."""
    held: set[int] = dataclasses.field(default_factory=set)
    """The buffers with a result that has not been released."""
    is_captured: bool = False
    """Whether a CUDA graph may contain calls on it. It is then kept until its group ends."""
    stream: Any = None
    """The stream of the last call."""
    stream_address: int | None = None
    views: dict[Any, Tensor] = dataclasses.field(default_factory=dict)
    """Views of the buffers, by what `arriving` takes."""

    @property
    def address(self) -> int:
        """The address of the exchange."""
        return self.exchange.pointer.value or 0

    def arriving(self, buffer: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Where tokens [rows, columns] arrive."""
        key = buffer, rows, columns, dtype
        view = self.views.get(key)
        if view is None:
            size = rows * columns * dtype.itemsize
            view = self.memory[buffer][:size].view(dtype).view(rows, columns)
            if len(self.views) == _MOST_VIEWS:
                self.views.clear()
            self.views[key] = view
        return view


class GroupExchanges:
    """The exchanges of a process group on this rank's device: one for tokens and their sums, one for small tensors."""

    _BUFFERS: ClassVar = {"tokens": 3, "small": 1}

    def __init__(self, group: Any, device: int):
        self.ranks, self.rank, self.device = dist.get_world_size(group), dist.get_rank(group), device
        self._group = weakref.ref(group)
        self._uses: dict[str, _Use] = {}
        self._kept: list[_Use] = []

    def gather(self, x: Tensor) -> Tensor:
        """All-gathers a small x [n, m] to [P n, m]."""
        return self._copy("all_gather", x, (self.ranks * x.shape[0], x.shape[1]))

    def exchange(self, x: Tensor) -> Tensor:
        """All-to-all of P regions in a small x [P n, m]: region d of rank s becomes region s of rank d."""
        return self._copy("all_to_all", x, (*x.shape,))

    def _copy(self, name: str, x: Tensor, shape: tuple[int, int]) -> Tensor:
        out = x.new_empty(shape)
        known = self.ready("small", out.nbytes)
        known.exchange.run(name, private.current_stream(self.device), x=array_of(x), out=array_of(out))
        return out

    def start(self, x: Tensor, buffer: int) -> Tensor:
        """Starts an all-gather of tokens x [T, D]; returns the memory [P T, D] that they arrive in, until `release`.

        A call of the library, or `finish`, has to wait for them.
        """
        known = self.ready("tokens", self.ranks * x.nbytes)
        call(_send, x, known.address, buffer)
        known.held.add(buffer)
        return known.arriving(buffer, self.ranks * x.shape[0], x.shape[1], x.dtype)

    def finish(self, x: Tensor, buffer: int) -> None:
        """Waits on the stream for the tokens of all ranks."""
        stream = private.current_stream(self.device)
        self._uses["tokens"].exchange.run("all_gather", stream, buffer, FINISH, x=array_of(x), out=None)

    def start_return(self, sums: Tensor) -> Tensor:
        """Starts an all-to-all of sums [P T, D]; returns the memory that they arrive in, until `release`."""
        known = self.ready("tokens", sums.nbytes)
        stream = private.current_stream(self.device)
        known.exchange.run("all_to_all", stream, SUMS, START, x=array_of(sums), out=None)
        known.held.add(SUMS)
        return known.memory[SUMS][: sums.nbytes].view(sums.dtype).view(sums.shape)

    def finish_return(self, sums: Tensor) -> None:
        """Waits on the stream for the sums of all ranks."""
        stream = private.current_stream(self.device)
        self._uses["tokens"].exchange.run("all_to_all", stream, SUMS, FINISH, x=array_of(sums), out=None)

    def release(self, *buffers: int) -> None:
        """Allows the other ranks to overwrite buffers for tokens; nothing where there is no result."""
        known = self._uses.get("tokens")
        if known is None or not known.held:
            return
        for buffer in known.held.intersection(buffers):
            known.exchange.run("release", private.current_stream(self.device), buffer)
            known.held.discard(buffer)

    def abandon(self) -> None:
        """Abandons a pass that an exception ends: what it has sent may be freed, and the next pass can begin."""
        if "tokens" not in self._uses:
            return
        known = self.ready("tokens", 0)
        known.held.clear()
        with contextlib.suppress(*STATUS_ERRORS):  # the next call reports a broken exchange
            known.exchange.run("release", private.current_stream(self.device), ALL_BUFFERS)

    def pointers(self, small_bytes: int) -> tuple[int, int]:
        """The addresses of the exchanges for tokens, with calls in progress, and for small tensors of this size."""
        small = self.ready("small", small_bytes) if small_bytes > 0 else self._uses["small"]
        return self._uses["tokens"].address, small.address

    def released(self, *buffers: int) -> None:
        """Notes that a call of the library has released buffers."""
        self._uses["tokens"].held.difference_update(buffers)

    def ready(self, use: str, size: int) -> _Use:
        """An exchange with buffers of at least `size` bytes, ordered after its last call."""
        known = self._uses.get(use)
        capturing = torch.cuda.is_current_stream_capturing()
        if known is None or not self.has(use, size):
            if capturing:
                raise RuntimeError(
                    f"transport: got the first call with {size} bytes in the capture of a CUDA graph, expected an "
                    "earlier one: it makes the exchange, together with the other ranks"
                )
            self._uses.pop(use, None)  # a failure leaves no closed exchange behind
            known = self._uses[use] = self._replaced(known, use, size)
        address = private.current_stream(self.device)
        if address != known.stream_address:
            stream = torch.cuda.current_stream(self.device)
            if known.stream is not None and not capturing:
                stream.wait_stream(known.stream)
            known.stream, known.stream_address = stream, address
        known.is_captured = known.is_captured or capturing
        return known

    def _replaced(self, known: _Use | None, use: str, size: int) -> _Use:
        if known is not None and known.is_captured:
            self._kept.append(known)
        elif known is not None:
            known.exchange.close()
        made, reason = self._outside_modes(self._make, [_rounded(size)] * self._BUFFERS[use])
        if made is None:
            raise RuntimeError(f"transport: got 'p2p', whose buffers cannot be made: {reason}; 'ring' needs none")
        return made

    def probe(self) -> str:
        """Makes the exchange for small tensors; returns the reason if a rank cannot have it, else ""."""
        made, reason = self._outside_modes(self._make, [_FIRST_BYTES])
        if made is not None:
            self._uses["small"] = made
        return reason

    def has(self, use: str, size: int) -> bool:
        """Whether there is an exchange with buffers of at least `size` bytes."""
        known = self._uses.get(use)
        return known is not None and known.exchange.sizes[0] >= size

    def _outside_modes(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function outside of the dispatch modes of this thread, which could fake, or keep, its tensors."""
        if private.num_dispatch_modes() == 0:
            return function(*arguments)

        def call_on_device() -> Any:
            torch.cuda.set_device(self.device)
            return function(*arguments)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call_on_device).result()

    def _make(self, sizes: Sequence[int]) -> tuple[_Use | None, str]:
        exchange, handle, reason = None, b"", ""
        try:
            exchange = PeerExchange(self.device, self.rank, self.ranks, sizes)
            handle = exchange.handle()
        except STATUS_ERRORS as error:
            reason = str(error)
        handles = self._gathered((handle, reason))
        reason = _first([reason for _, reason in handles])
        if exchange is not None and not reason:
            own = ""
            try:
                exchange.connect([handle for handle, _ in handles])
            except STATUS_ERRORS as error:
                own = str(error)
            reason = _first(self._gathered(own))
        if exchange is not None and reason:
            exchange.close()
        if exchange is None or reason:
            return None, reason
        return _Use(exchange, _memory_of(exchange)), ""

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group())
        return values

    def close(self) -> None:
        """Destroys all exchanges."""
        for use in (*self._uses.values(), *self._kept):
            use.exchange.close()
        self._uses, self._kept = {}, []


def _first(reasons: list[str]) -> str:
    """The first reason, with its rank."""
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


_by_group: weakref.WeakKeyDictionary[Any, GroupExchanges] = weakref.WeakKeyDictionary()
_reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def exchanges_of(group: Any) -> GroupExchanges:
    """The exchanges of a process group on the current device."""
    found = _by_group.get(group)
    if found is None:
        found = _by_group[group] = GroupExchanges(group, torch.cuda.current_device())
        weakref.finalize(group, found.close).atexit = False
    return found


def has_made(group: str, size: int) -> bool:
    """Whether the ranks of the group with this name have exchanges for tokens of `size` bytes."""
    found = _by_group.get(private.resolve_group(group))
    return found is not None and found.has("tokens", size)


@private.constant_when_compiled
def unavailable_reason(group: str) -> str:
    """Why the ranks of the group with this name cannot reach each other's memory; "" if they can.

    Collective in the first call for a group.
    """
    process_group = private.resolve_group(group)
    reason = _reasons.get(process_group)
    if reason is None:
        ranks = dist.get_world_size(process_group)
        if dist.get_backend(process_group) == "fake":
            reason = "got the backend 'fake', which has no peers"
        elif ranks > MAX_RANKS:
            reason = f"got {ranks} ranks, expected at most {MAX_RANKS}"
        else:
            reason = exchanges_of(process_group).probe()
        _reasons[process_group] = reason
    return reason

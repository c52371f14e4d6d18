"""Exchanges of a process group whose ranks are GPUs of one host.

A group has an exchange for each use, made when it is first needed and replaced by a larger one when a call needs more.
Both are collective: all ranks of a group make the same calls. A rank that makes another call gets an error, by the
words that the library compares on the device.
"""

import dataclasses
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch._library import STATUS_ERRORS
from anabranch.peer_exchange import FINISH, MAX_RANKS, WHOLE, PeerExchange
from anabranch.torch.binding import private
from anabranch.torch.binding.calls import array_of

_FIRST_BYTES = 1 << 20
_STEPS = 8


def _rounded(size: int) -> int:
    """A size rounded up to an eighth of a power of two, so that growing sizes replace few exchanges."""
    step = max(1 << max(size.bit_length() - 1, 0), _FIRST_BYTES) // _STEPS
    return -(-size // step) * step


class _Memory:
    """Memory of an exchange, for torch.as_tensor."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _memory_of(exchange: PeerExchange) -> Tensor:
    """The buffer of an exchange, uint8 [size]."""
    memory = _Memory(exchange.address(), exchange.size)
    return torch.as_tensor(memory, device=torch.device("cuda", exchange.device))


@dataclasses.dataclass
class _Use:
    exchange: PeerExchange
    memory: Tensor
    """uint8: the buffer of this rank."""
    is_held: bool = False
    """Whether the buffer contains a result that has not been released."""
    is_captured: bool = False
    """Whether a CUDA graph may contain calls on it. It is then kept until its group ends."""
    stream: Any = None
    """The stream of the last call."""


class GroupExchanges:
    """The exchanges of a process group on this rank's device, by use."""

    def __init__(self, group: Any, device: int):
        self.ranks, self.rank, self.device = dist.get_world_size(group), dist.get_rank(group), device
        self._group = weakref.ref(group)
        self._uses: dict[str, _Use] = {}
        self._kept: list[_Use] = []

    # Results of the following are copies, or with in_place the memory of the buffer, until `release`. A call in parts
    # has to be in place.

    def gather(self, use: str, x: Tensor, *, in_place: bool = False, part: int = WHOLE) -> Tensor:
        """All-gathers x [n, m] to [P n, m]."""
        shape = (self.ranks * x.shape[0], x.shape[1])
        return self._run("all_gather", use, x, shape, in_place, part)

    def exchange(self, use: str, x: Tensor, *, in_place: bool = False, part: int = WHOLE) -> Tensor:
        """All-to-all of P regions in x [P n, m]: region d of rank s becomes region s of rank d."""
        return self._run("all_to_all", use, x, (*x.shape,), in_place, part)

    def release(self, use: str) -> None:
        """Allows the other ranks to overwrite the result of a call in place; nothing if there is none."""
        known = self._uses.get(use)
        if known is not None and known.is_held:
            known.exchange.run("release", private.current_stream(self.device))
            known.is_held = False

    def _run(self, name: str, use: str, x: Tensor, shape: tuple[int, int], in_place: bool, part: int) -> Tensor:
        size = shape[0] * shape[1] * x.dtype.itemsize
        known = self._uses[use] if part == FINISH else self._ready(use, size)
        out = known.memory[:size].view(x.dtype).view(shape) if in_place else x.new_empty(shape)
        arrays = {"x": array_of(x), "out": None if in_place else array_of(out)}
        known.exchange.run(name, private.current_stream(self.device), part, **arrays)
        known.is_held = in_place
        return out

    def _ready(self, use: str, size: int) -> _Use:
        """A use with a buffer of at least `size` bytes, ordered after its last call."""
        known = self._uses.get(use)
        capturing = torch.cuda.is_current_stream_capturing()
        if known is None or known.exchange.size < size:
            if capturing:
                raise RuntimeError(
                    f"transport: got the first call with {size} bytes in the capture of a CUDA graph, expected an "
                    "earlier one: it makes the exchange, together with the other ranks"
                )
            self._uses.pop(use, None)  # a failure leaves no closed exchange behind
            known = self._uses[use] = self._replaced(known, size)
        stream = torch.cuda.current_stream(self.device)
        if known.stream is not None and known.stream != stream and not capturing:
            stream.wait_stream(known.stream)
        known.is_captured, known.stream = known.is_captured or capturing, stream
        return known

    def _replaced(self, known: _Use | None, size: int) -> _Use:
        if known is not None and known.is_captured:
            self._kept.append(known)
        elif known is not None:
            known.exchange.close()
        made, reason = self._make(_rounded(size))
        if made is None:
            raise RuntimeError(f"transport: {reason}")
        return made

    def probe(self, use: str) -> str:
        """Makes the first exchange; returns the reason if a rank cannot have it, else ""."""
        made, reason = self._make(_FIRST_BYTES)
        if made is not None:
            self._uses[use] = made
        return reason

    def _make(self, size: int) -> tuple[_Use | None, str]:
        exchange, handle, reason = None, b"", ""
        try:
            exchange = PeerExchange(self.device, self.rank, self.ranks, size)
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

    def describe(self) -> dict[str, str]:
        """Facts about each exchange by its use."""
        return {name: use.exchange.describe() for name, use in self._uses.items()}


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


@torch.compiler.assume_constant_result
def unavailable_reason(group: str, use: str) -> str:
    """Why the ranks of the group with this name cannot reach each other's memory; "" if they can.

    Collective in the first call for a group, in which it makes the exchange of a use.
    """
    process_group = private.resolve_group(group)
    reason = _reasons.get(process_group)
    if reason is None:
        ranks = dist.get_world_size(process_group)
        if ranks > MAX_RANKS:
            reason = f"got {ranks} ranks, expected at most {MAX_RANKS}"
        else:
            reason = exchanges_of(process_group).probe(use)
        _reasons[process_group] = reason
    return reason

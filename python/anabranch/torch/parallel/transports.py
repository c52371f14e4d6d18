"""The transports by name, and the choice between them."""

from collections.abc import Callable
from typing import Any

import torch

from anabranch.exchange_sizes import ExchangeSizes, traffic
from anabranch.torch.parallel.exchange import Padded, Ranks, Ring, Transport
from anabranch.torch.parallel.p2p import PeerToPeer, abandon

TRANSPORTS: dict[str, type[Transport]] = {"ring": Ring, "p2p": PeerToPeer, "all_to_all": Padded}

#: Bandwidth in bytes/s per rank, for the transports that "auto" considers. GPU: over NVLink, of NCCL measured through
#: XLA and of copies between peers (docs/notes/expert_parallel.md). CPU: only the ratio matters.
_RATES = {"cuda": {"p2p": 305e9, "ring": 220e9, "all_to_all": 240e9}, "cpu": {"ring": 1e10, "all_to_all": 1e10}}


def choose(device: str, sizes: ExchangeSizes, itemsize: int, fp8_exchange: bool = False, p2p: bool = False) -> str:
    """The transport for transport="auto": the one with the smallest estimate bytes / bandwidth.

    p2p: whether the group can use this transport.
    """
    rates, bytes_sent = _RATES.get(device, _RATES["cuda"]), traffic(sizes, itemsize, fp8_exchange)
    names = [name for name in rates if p2p or name != "p2p"]
    return min(names, key=lambda name: bytes_sent[name] / rates[name])


def transport(name: str, ranks: Ranks) -> Any:
    """The transport with this name in TRANSPORTS."""
    return TRANSPORTS[name](ranks)


def run_pass(name: str, ranks: Ranks, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function, a pass over the transport with this name. An exception abandons what it has sent."""
    if name != "p2p" or torch.compiler.is_compiling():  # operations of a graph handle their exceptions
        return function(*arguments)
    try:
        return function(*arguments)
    except BaseException:
        abandon(ranks.group)
        raise

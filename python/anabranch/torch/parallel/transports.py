"""The transports by name, and the choice between them."""

from collections.abc import Callable
from typing import Any

import torch

from anabranch.exchange_sizes import GPU_RATES, ExchangeSizes, fastest, traffic
from anabranch.torch.parallel.exchange import Padded, Ranks, Ring, Transport
from anabranch.torch.parallel.p2p import PeerToPeer, abandon

TRANSPORTS: dict[str, type[Transport]] = {"ring": Ring, "p2p": PeerToPeer, "all_to_all": Padded}

#: Bytes per second and rank, by device type. CPU: only the ratio matters.
_RATES = {"cuda": GPU_RATES, "cpu": {"ring": 1e10, "all_to_all": 1e10}}


def choose(device: str, sizes: ExchangeSizes, itemsize: int, fp8_exchange: bool = False, p2p: bool = False) -> str:
    """The transport for transport="auto".

    Args:
      device: "cuda" or "cpu"; the rates of any other type are those of "cuda".
      sizes: the sizes of the exchange.
      itemsize: bytes per element of x.
      fp8_exchange: as in `moe`.
      p2p: whether the group can use this transport.

    Returns:
      A key of `TRANSPORTS`.
    """
    return fastest(_RATES.get(device, GPU_RATES), traffic(sizes, itemsize, fp8_exchange), p2p)


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

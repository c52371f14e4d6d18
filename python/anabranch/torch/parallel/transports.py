"""The transports by name, and the choice between them."""

from typing import Any

from anabranch.exchange_sizes import traffic
from anabranch.torch.parallel.exchange import Padded, Ranks, Ring, Transport
from anabranch.torch.parallel.p2p import PeerToPeer, reason_against

TRANSPORTS: dict[str, type[Transport]] = {"ring": Ring, "p2p": PeerToPeer, "all_to_all": Padded}

#: Bandwidth in bytes/s per rank. GPU: over NVLink, measured (docs/notes/expert_parallel.md). CPU: only the ratio
#: matters.
_RATES = {
    "cuda": {"ring": 220e9, "p2p": 330e9, "all_to_all": 240e9},
    "cpu": {"ring": 1e10, "all_to_all": 1e10},
}


def choose(device: str, ranks: Ranks, itemsize: int, fp8_exchange: bool = False) -> str:
    """The transport for transport="auto": the one with the smallest estimate bytes / bandwidth of those that can run.

    Collective in the first call for a group of GPUs.
    """
    rates, bytes_sent = _RATES.get(device, _RATES["cuda"]), traffic(ranks, itemsize, fp8_exchange)
    usable = [name for name in rates if name != "p2p" or (ranks.ranks > 1 and not reason_against(ranks, device))]
    return min(usable, key=lambda name: bytes_sent[name] / rates[name])


def transport(name: str, ranks: Ranks) -> Any:
    """The transport with this name in TRANSPORTS."""
    return TRANSPORTS[name](ranks)

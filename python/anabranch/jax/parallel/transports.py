"""The transports by name, and the choice between them."""

from collections.abc import Callable
from typing import Any

from anabranch.exchange_sizes import traffic
from anabranch.jax.parallel.exchange import Bounds, Padded, Ragged, Ring, Transport
from anabranch.jax.parallel.p2p import PeerToPeer

TRANSPORTS: dict[str, Callable[[Bounds], Any]] = {
    "ring": Ring,
    "p2p": PeerToPeer,
    "all_to_all": Padded,
    "ragged": Ragged,
}

#: Bytes per second and rank of XLA's collectives, by platform. GPU values were measured on two and four H200s over
#: NVLink (docs/notes/expert_parallel.md). For other platforms only the ratios matter; on the CPU the emulation of the
#: ragged exchange gathers everything, so it is never chosen.
_RATES = {
    "gpu": {"p2p": 305e9, "ring": 220e9, "all_to_all": 240e9, "ragged": 4.5e9},
    "tpu": {"ring": 1e11, "all_to_all": 1e11, "ragged": 1e11},
    "cpu": {"ring": 1e10, "all_to_all": 1e10},
}


def choose(platform: str, bounds: Bounds, itemsize: int, fp8_exchange: bool = False, p2p: bool = False) -> str:
    """The transport for `transport="auto"`: the one with the shortest estimated time, bytes / rate.

    Args:
      platform: "gpu", "tpu" or "cpu"; the rates of any other platform are those of "gpu".
      bounds: the sizes of the exchange.
      itemsize: bytes per element of x.
      fp8_exchange: as in `Parallel`.
      p2p: whether the devices can use this transport.

    Returns:
      A key of `TRANSPORTS`.

    >>> tokens = dict(tokens=8192, topk=8, slots_per_token=8, align_size=0, capacity=None)
    >>> choose("gpu", Bounds(8, 128, **tokens), 2), choose("gpu", Bounds(512, 512, **tokens), 2)
    ('ring', 'ragged')
    """
    rates = _RATES.get(platform, _RATES["gpu"])
    bytes_sent = traffic(bounds, itemsize, fp8_exchange)
    names = [name for name in rates if p2p or name != "p2p"]
    return min(names, key=lambda name: bytes_sent[name] / rates[name])


def transport(name: str, bounds: Bounds) -> Transport:
    """The transport with a name in TRANSPORTS."""
    chosen: Transport = TRANSPORTS[name](bounds)
    return chosen

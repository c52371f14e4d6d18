"""The transports by name, and the choice between them."""

from collections.abc import Callable
from typing import Any

from anabranch.exchange_sizes import GPU_RATES, fastest, traffic
from anabranch.jax.parallel.exchange import Bounds, Padded, Ragged, Ring, Transport
from anabranch.jax.parallel.p2p import PeerToPeer

TRANSPORTS: dict[str, Callable[[Bounds], Any]] = {
    "ring": Ring,
    "p2p": PeerToPeer,
    "all_to_all": Padded,
    "ragged": Ragged,
}

#: Bytes per second and rank by platform; on GPUs all are measured. For other platforms only the ratios matter; on the
#: CPU the emulation of the ragged exchange gathers everything, so it is never chosen.
_RATES = {
    "gpu": {**GPU_RATES, "ragged": 4.5e9},
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
    return fastest(rates, traffic(bounds, itemsize, fp8_exchange), p2p)


def transport(name: str, bounds: Bounds) -> Transport:
    """The transport with a name in TRANSPORTS."""
    chosen: Transport = TRANSPORTS[name](bounds)
    return chosen

"""Buffer sizes and traffic of an exchange of tokens between devices."""

from anabranch.exchange_sizes import traffic
from anabranch.jax.parallel.exchange import Bounds
from anabranch.jax.parallel.transports import choose

__all__ = ["Bounds", "choose", "traffic"]

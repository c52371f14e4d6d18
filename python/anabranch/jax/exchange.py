"""Buffer sizes and traffic of an exchange of tokens between devices."""

from anabranch.jax.parallel.exchange import Bounds, choose, traffic

__all__ = ["Bounds", "choose", "traffic"]

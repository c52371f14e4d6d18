"""Flax Linen: the layer with the interface of TransformerEngine's `MoEBlock`."""

from anabranch.jax.te.linen import MoEBlock

__all__ = ["MoEBlock"]

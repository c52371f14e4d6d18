"""Flax Linen: the layer as TransformerEngine's `MoEBlock`."""

from anabranch.jax.te.linen import MoEBlock

__all__ = ["MoEBlock"]

"""Flax NNX: the layer as a module."""

from anabranch.jax.layer.nnx import MoE, PackedWeights, RouterState, sharding

__all__ = ["MoE", "PackedWeights", "RouterState", "sharding"]

"""Flax NNX: the layer as a module."""

from anabranch.jax.layer.nnx import MoE, RouterState, sharding

__all__ = ["MoE", "RouterState", "sharding"]

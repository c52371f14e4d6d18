"""Anabranch: a Mixture-of-Experts layer for JAX and PyTorch.

`anabranch.jax` and `anabranch.torch` are the front ends, `anabranch.reference` is a float64 reference in numpy.
"""

from anabranch.precision_choice import LayerSize, choose_precision

__all__ = ["LayerSize", "choose_precision"]

__version__ = "0.2.0"

"""Anabranch: the Mixture-of-Experts layer for people who train models.

`anabranch.jax` holds the operations for JAX, `anabranch.reference` the numpy float64 oracle.
"""

__version__ = "0.2.0"

"""Peers that compute what our layer computes: plain JAX, eager torch, transformers, SonicMoE."""

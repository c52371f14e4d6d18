"""The same computation by others: plain JAX, eager torch, transformers, SonicMoE."""

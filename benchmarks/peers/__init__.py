"""What others write for the same computation: plain JAX, eager torch, transformers, SonicMoE."""

"""Level 1: how JAX calls the C library (custom calls, sharding, argument checks)."""

"""Level 1: how PyTorch calls the C library (prepared calls, operations, autograd, argument checks)."""

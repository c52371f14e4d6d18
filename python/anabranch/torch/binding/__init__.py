"""Level 1: calls of the C library from PyTorch (prepared calls, operations, autograd, argument checks)."""

"""Benchmarks of every operation beside its peers: `python -m benchmarks --help`, in the root of the repository."""

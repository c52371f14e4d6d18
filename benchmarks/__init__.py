"""Benchmarks of every operation and its peers. Run `python -m benchmarks --help` in the root of the repository."""

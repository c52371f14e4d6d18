"""Excludes the checks of `on_devices/`: they run in processes of their own, whose conftest.py sets JAX's environment."""

collect_ignore = ["on_devices"]

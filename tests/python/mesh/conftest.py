"""The checks of `on_devices/` run in processes of their own: their conftest.py sets JAX's environment."""

collect_ignore = ["on_devices"]

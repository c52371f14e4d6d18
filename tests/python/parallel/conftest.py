"""Excludes the checks of `on_devices/`: they run in processes of their own, whose conftest.py sets JAX's environment."""

import os

# JAX's transport p2p requires it with several GPUs in one process. CUDA reads it when it is initialised.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

collect_ignore = ["on_devices"]

"""Peak memory of one training step of the layer, compared with the size of its tensors."""

import ctypes
import gc
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.jax import moe


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: got no field {field}, expected one")


def step_peak(T: int, E: int, K: int, D: int, F: int, dtype: str) -> tuple[int, int]:
    """Runs one gradient step of a layer in this process.

    Returns:
      (peak, bound) in bytes: the peak of the resident memory, less that of the process without the operands, and the
      sum of weights, x, their gradients, h and two row buffers. The peak includes some MiB of scratch per thread.
    """
    size = jnp.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    shapes = {"x": (T, D), "w_in": (E, D, 2, F), "w_out": (E, F, D)}
    gate = jnp.asarray(rng.standard_normal((D, E), np.float32) / np.sqrt(D), jnp.float32)

    def step(arrays):
        def loss(arrays):
            output = moe(arrays["x"], gate, arrays["w_in"], arrays["w_out"], topk=K).output
            return jnp.sum(jnp.square(output.astype(jnp.float32)))

        return jax.grad(loss)(arrays)

    compiled = jax.jit(step).lower({n: jax.ShapeDtypeStruct(s, dtype) for n, s in shapes.items()}).compile()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the step must not use memory that compilation left on the heap
    before = _status("VmRSS")
    arrays = {n: jnp.asarray(rng.standard_normal(s, np.float32) / np.sqrt(s[-1]), dtype) for n, s in shapes.items()}
    jax.block_until_ready(arrays)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # resets the peak
    jax.block_until_ready(compiled(arrays))
    peak = _status("VmHWM") - before

    weights = size * E * 3 * D * F
    rows = T * K
    bound = 2 * (weights + size * T * D) + size * rows * (2 * F + 2 * max(D, F))
    return peak, bound


def measure(T: int, E: int, K: int, D: int, F: int, dtype: str) -> tuple[int, int]:
    """`step_peak` on two threads in a process of its own, whose heap contains nothing else."""
    # With a larger threshold glibc retains freed memory, a varying amount per run: up to 20 MiB with 4 MiB.
    environment = os.environ | {"OMP_NUM_THREADS": "2", "MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
    command = [sys.executable, __file__, *map(str, (T, E, K, D, F)), dtype]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peak, bound = json.loads(result.stdout)
    return peak, bound


if __name__ == "__main__":
    print(list(step_peak(*map(int, sys.argv[1:6]), sys.argv[6])))

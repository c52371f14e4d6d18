"""The peak memory of a training step is its tensors and two row buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_memory import measure

from anabranch.jax import moe

MIB = 2**20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4096, 8, 2, 1024, 1024), (8192, 16, 8, 512, 256)])
def test_peak_of_a_training_step(shape, dtype):
    peak, bound = measure(*shape, dtype)
    assert peak > bound / 2, "the measurement has missed the step"
    # Scratch memory of two threads and oneDNN, for any layer size: up to 20 MiB, depending on the instruction set.
    assert peak <= bound + 32 * MIB, f"peak {peak / MIB:.0f} MiB, bound {bound / MIB:.0f} MiB"


def test_only_h_has_a_buffer_of_its_own():
    """XLA's memory analysis shows a buffer for h; a and w a share buffers with gradients."""
    T, E, K, D, F = 1024, 8, 2, 256, 256
    gate = jnp.asarray(np.random.default_rng(0).standard_normal((D, E)), jnp.float32)

    def step(x, w_in, w_out):
        return jax.grad(lambda *a: jnp.sum(moe(a[0], gate, *a[1:], topk=K).output ** 2), argnums=(0, 1, 2))(
            x, w_in, w_out
        )

    operands = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((T, D), (E, D, 2, F), (E, F, D))]
    analysis = jax.jit(step).lower(*operands).compile().memory_analysis()
    h = T * K * 2 * F * 4
    assert h <= analysis.temp_size_in_bytes <= 1.05 * h

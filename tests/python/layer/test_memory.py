"""The peak memory of a training step is its tensors and two row buffers."""

import functools

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


@pytest.mark.parametrize("x_dtype, copied", [("float32", 2), ("bfloat16", 0)])
def test_layouts_of_trainers_in_a_forward_pass(x_dtype, copied):
    """wi [E, D, 2 F] is read in place. wi_0 and wi_1 [E, D, F] are copied, unless the rounding to bfloat16 does it."""
    T, E, K, D, F = 32, 8, 2, 64, 128
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    x, gate, wi_0, wo = jax.ShapeDtypeStruct((T, D), x_dtype), float32((D, E)), float32((E, D, F)), float32((E, F, D))

    def temporary(w_in, *weights):
        compiled = jax.jit(lambda x, gate, wo, *w: moe(x, gate, w_in(*w), wo, topk=K).output)
        return compiled.lower(x, gate, wo, *weights).compile().memory_analysis().temp_size_in_bytes

    plain = temporary(lambda w_in: w_in, float32((E, D, 2, F)))
    assert temporary(lambda wi: wi.reshape(E, D, 2, F), float32((E, D, 2 * F))) == plain
    stacked = temporary(lambda *wi: jnp.stack(wi, axis=2), wi_0, wi_0)
    assert stacked - plain == copied * E * D * F * 4


def test_a_policy_of_names_does_not_save_stacked_matrices(capsys):
    x, gate, wi, wo = jnp.ones((16, 8)), jnp.ones((8, 4)), jnp.ones((4, 8, 6)), jnp.ones((4, 6, 8))

    def layer(wi_0, wi_1):
        return moe(x, gate, jnp.stack([wi_0, wi_1], axis=2), wo, topk=2).output

    policy = jax.checkpoint_policies.save_only_these_names("moe_x", "moe_logits", "moe_routing", "moe_h")
    saved = []
    for function in (layer, jax.checkpoint(layer, policy=policy)):
        jax.ad_checkpoint.print_saved_residuals(function, wi, wi)
        saved.append("f32[4,8,2,6]" in capsys.readouterr().out)
    assert saved == [True, False]

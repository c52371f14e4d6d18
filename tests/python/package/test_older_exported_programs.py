"""Programs exported before an option existed call the library without it, and still run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.jax import moe
from anabranch.jax.binding import ffi

#: Attributes that calls of version 0.1.0 lack.
LATER = {"activation_alpha", "activation_limit", "group_score_topk", "backward", "precision"}


def test_calls_without_the_options_that_came_later(monkeypatch):
    rng = np.random.default_rng(0)
    shapes = [(33, 16), (16, 6), (6, 16, 2, 24), (6, 24, 16)]
    arguments = [jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for shape in shapes]

    def step(*arguments):
        def loss(*arguments):
            result = moe(*arguments, topk=2, num_groups=3, group_topk=2, aux_loss_coeff=0.1)
            return jnp.sum(jnp.sin(result.output)) + result.aux_loss

        return jax.value_and_grad(loss, (0, 1, 2, 3))(*arguments)

    want = jax.jit(step)(*arguments)
    run, left_out = ffi._run, set()

    def run_as_before(static, *arrays, workspace):
        left_out.update(name for name, _ in static.attributes if name in LATER)
        attributes = tuple(item for item in static.attributes if item[0] not in LATER)
        return run(dataclasses.replace(static, attributes=attributes), *arrays, workspace=workspace)

    jax.clear_caches()
    monkeypatch.setattr(ffi, "_run", run_as_before)
    got = jax.jit(lambda *arguments: step(*arguments))(*arguments)
    jax.clear_caches()
    assert left_out == LATER
    jax.tree.map(np.testing.assert_array_equal, got, want)

"""dispatch() and combine() give the same bits on every instruction set."""

import hashlib
import os
import subprocess
import sys

DIGEST = """
import jax, jax.numpy as jnp, hashlib, numpy as np
from anabranch.jax import combine, dispatch, plan
from anabranch.jax.ops.dispatch import gather_sum
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for dtype in ("float32", "bfloat16", "float16"):
    experts = rng.integers(-1, 9, (2000, 4)).astype(np.int32)
    layout = plan(experts, 9, align_size=8)
    x, d = (jnp.asarray(rng.standard_normal((2000, 131)), dtype) for _ in range(2))
    weights = jnp.asarray(rng.standard_normal((2000, 4)), "float32")
    out, pull = jax.vjp(lambda x, w: combine(dispatch(x, layout), layout, w), x, weights)
    rows, addend = dispatch(x, layout), jnp.asarray(rng.standard_normal((2000, 131)), "float32")
    sums = [gather_sum(rows, layout.row_of_slot, None, dtype, a) for a in (addend, addend.astype("bfloat16"), d)]
    for array in (*layout, out, *pull(d), *sums):
        digest.update(np.asarray(array).tobytes())
print(digest.hexdigest())
"""


def test_bits_are_equal_for_every_instruction_set_thread_count_and_run():
    def digest(isa, threads):
        environment = os.environ | {"ANABRANCH_ISA": isa, "OMP_NUM_THREADS": threads, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    first = digest("avx512", "1")
    assert len(first) == hashlib.sha256().digest_size * 2
    assert {digest("avx2", "2"), digest("baseline", "3"), digest("avx512", "2")} == {first}

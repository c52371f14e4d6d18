"""Every instruction set agrees with the oracle, and those with fused multiply-add return equal bits."""

import os
import subprocess
import sys

import numpy as np
import pytest

from anabranch import _library
from anabranch.reference import router as reference
from oracle import assert_close
from router_cases import BOUND

SETS = ["baseline", "avx2", "avx512"]
SHAPES = [
    (64, 8, "softmax", False),
    (130, 33, "sigmoid", True),
    (512, 10, "sqrtsoftplus", True),
    (9, 2, "softmax", True),
]

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from anabranch.jax import route
arrays = np.load(sys.argv[1])
out = {}
for i, (K, score_function, normalize) in enumerate(%r):
    z = jnp.asarray(arrays[f"z{i}"])
    for dtype in ("float32", "bfloat16"):
        def f(z):
            r = route(z, K, score_function=score_function, normalize=normalize)
            return (r.weights, r.score_sum, r.lse), r.experts
        results, pull, experts = jax.vjp(f, z.astype(dtype), has_aux=True)
        (d,) = pull(tuple(jnp.asarray(arrays[f"{n}{i}"]) for n in "wsl"))
        for name, array in zip(("weights", "score_sum", "lse", "experts", "d"), (*results, experts, d)):
            out[f"{name}{i}{dtype}"] = np.asarray(array.astype("float32"))
np.savez(sys.argv[2], **out)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    rng = np.random.default_rng(0)
    arrays = {}
    for i, (E, K, _, _) in enumerate(SHAPES):
        arrays[f"z{i}"] = 2 * rng.standard_normal((300, E)).astype(np.float32)
        arrays[f"z{i}"][5] = 1.0
        arrays[f"z{i}"][6] = rng.integers(0, 3, E)
        arrays[f"z{i}"][7, E // 2 :] = -np.inf
        arrays[f"z{i}"][8].sort()
        arrays[f"w{i}"] = rng.standard_normal((300, K)).astype(np.float32)
        arrays[f"s{i}"] = rng.standard_normal(E).astype(np.float32)
        arrays[f"l{i}"] = rng.standard_normal(300).astype(np.float32)
    path = tmp_path_factory.mktemp("isa") / "inputs.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def results(inputs):
    """The results of each instruction set that this machine supports, by name."""
    best = SETS.index(_library.describe()["isa"])
    script = SCRIPT % [shape[1:] for shape in SHAPES]
    found = {}
    for name in SETS[: best + 1]:
        output = inputs.with_name(f"{name}.npz")
        subprocess.run(
            [sys.executable, "-c", script, str(inputs), str(output)],
            env={**os.environ, "ANABRANCH_ISA": name},
            check=True,
        )
        found[name] = dict(np.load(output))
    return found


def test_each_is_right(inputs, results):
    arrays = np.load(inputs)
    for name, got in results.items():
        for i, (_, K, score_function, normalize) in enumerate(SHAPES):
            options = {"score_function": score_function, "normalize": normalize}
            z = arrays[f"z{i}"]
            want = reference.route(z, K, **options)
            np.testing.assert_array_equal(got[f"experts{i}float32"], want.experts)
            for field in ("weights", "score_sum", "lse"):
                assert_close(got[f"{field}{i}float32"], getattr(want, field), BOUND, f"{name} {field}")
            d_want = reference.route_backward(z, K, *(arrays[f"{n}{i}"] for n in "wsl"), **options)
            assert_close(got[f"d{i}float32"], d_want, BOUND, f"{name} d_logits")


def test_avx2_and_avx512_give_the_same_bits(results):
    if "avx512" not in results:
        pytest.skip("this machine has no AVX-512")
    for name, array in results["avx512"].items():
        np.testing.assert_array_equal(results["avx2"][name], array, err_msg=name)

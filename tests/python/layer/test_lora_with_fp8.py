"""LoRA beside FP8: operands of GEMMs with W are quantised, those of GEMMs with the factors are not."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch.distributed as dist

import fp8
from anabranch import torch
from anabranch.lora import NAMES
from anabranch.reference import moe as reference
from anabranch.reference.grouped_matmul import grouped_matmul, grouped_matmul_backward
from frameworks import both, only_torch, vjp
from lora_cases import lora_factors, oracle_options, with_factors
from oracle import assert_close, assert_close_per_expert
from routed_cases import routed_operands, run_routed

T, E, K, D, F = 23, 6, 2, 128, 128


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def check(platform, *, sent=False, **given_options):
    dtype = fp8.rows_dtype(platform)
    arrays = routed_operands(T, E, K, D, F, dtype=dtype) | lora_factors(E, D, 2, F, shared=("a_in",), dtype=dtype)
    options = {"lora_scale": (0.7, -1.3)}
    (output, *_), gradients, d_output = run_routed(arrays, precision="fp8", **options, **given_options)
    given = {name: array for name, array in arrays.items() if name not in NAMES}
    options |= oracle_options(arrays) | {"fp8_scales": "float32", "sent_dtype": arrays["x"].dtype if sent else None}
    # A value near the middle of two e4m3 numbers may be rounded to either. On a GPU tensor cores sum with fewer bits,
    # and rows are bfloat16.
    bound, factor_bound = (1e-3, 4e-3) if dtype == "float32" else (2e-2, 2e-2)
    assert_close(output, reference.routed_experts(**given, **options).output, bound, "output")
    want = with_factors(reference.routed_experts_backward(**given, **options, d_output=d_output))
    for name, gradient in gradients.items():
        assert_close(gradient, want[name], bound, name)
    for name in NAMES:
        assert_close_per_expert(gradients[name], want[name], factor_bound, name)


@both
def test_fp8(platform):
    check(platform)


@only_torch
def test_fp8_with_an_exchange(platform, group_of_one):
    """The exchange of a group quantises x, which the adapter of w_in then reads."""
    check(platform, sent=True, group=group_of_one, fp8_exchange=True, transport="all_to_all")


@only_torch
@pytest.mark.parametrize("transpose_w", [False, True])
def test_fp8_of_grouped_matmul(platform, transpose_w):
    dtype = fp8.rows_dtype(platform)
    bound = 1e-5 if dtype == "float32" else 1e-2
    rng, sizes = np.random.default_rng(0), np.array([5, 0, 11], np.int32)
    x, w, a, b, d_y = (
        rng.standard_normal(shape).astype(jnp.dtype(dtype))
        for shape in ((18, D), (3, D, 256), (3, D, 4), (1, 4, 256), (18, 256))
    )

    def function(x, w, a, b, group_sizes):
        options = dict(transpose_w=transpose_w, precision="fp8", lora=(a, b), lora_scale=0.5)
        return torch.grouped_matmul(x, w, group_sizes, **options)

    stored = w.swapaxes(1, 2) if transpose_w else w
    y, pull = vjp(None, function, {"x": x, "w": stored, "a": a, "b": b, "group_sizes": sizes})
    options = dict(fp8_scales="float32", lora=(a, b), lora_scale=0.5)
    options["lora_dtype"] = None if dtype == "float32" else x.dtype
    assert_close(y, grouped_matmul(x, w, sizes, **options), bound, "y")
    d_x, d_w, (d_a, d_b) = grouped_matmul_backward(d_y, x, w, sizes, **options)
    want = {"x": d_x, "w": d_w.swapaxes(1, 2) if transpose_w else d_w, "a": d_a, "b": d_b}
    for name, gradient in pull(d_y).items():
        assert_close(gradient, want[name], bound, name)

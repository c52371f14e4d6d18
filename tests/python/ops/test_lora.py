"""LoRA in expert_ffn and grouped_matmul against the oracle: forward and every gradient, per expert."""

from functools import partial

import numpy as np
import pytest
from expert_cases import UNIT_ROUNDOFF, network

from anabranch import jax, torch
from anabranch.layouts import Layouts
from anabranch.lora import NAMES
from anabranch.reference import experts as reference
from anabranch.reference.grouped_matmul import grouped_matmul, grouped_matmul_backward
from frameworks import BOTH, vjp
from lora_cases import CASES, SCALES, as_lora, lora_factors, takes_factors
from moe_cases import DTYPES
from oracle import assert_close, assert_close_per_expert, assert_rows_close

pytestmark = BOTH

SIZES = [7, 0, 1, 20]
SPARE = 2
#: Five roundings in sequence and the sums over rounded operands; float32: as in expert_cases.
BOUND = {"float32": 4e-6} | {name: 6 * unit for name, unit in UNIT_ROUNDOFF.items()}


def rounding(dtype):
    return None if dtype == "float32" else DTYPES[dtype]


def assert_gradients_close(got, want, bound, sizes):
    for name, gradient in got.items():
        expected = want[name]
        if name == "rows":
            assert_rows_close(gradient, expected, sizes, bound, name)
        elif name == "weights":
            assert_close(gradient, expected, 3 * bound, name)  # sums of terms of either sign
        else:
            assert_close_per_expert(gradient, expected, bound, name)


@pytest.mark.parametrize("name", CASES)
def test_expert_ffn(name):
    options, ranks, shared, projections, dtype, factor_dtype = CASES[name]
    net = network(np.random.default_rng(0), SIZES, 13, 2, 10, dtype=dtype, spare=SPARE)
    factors = lora_factors(4, 13, 2, 10, ranks, shared=shared, projections=projections, dtype=factor_dtype)
    arrays = {key: np.asarray(array) for key, array in net.arrays.items()} | factors
    of = Layouts(options.get("w_in_layout", "dpf"), options.get("w_out_layout", "fd"))
    laid_out = ("w_in", "w_out", "b_in")
    operands = {key: a.transpose(of.from_ours(key)) if key in laid_out else a for key, a in arrays.items()}
    given = dict(lora_scale=SCALES, activation="gelu", **options)
    functions = (takes_factors(partial(module.expert_ffn, **given)) for module in (jax, torch))
    y, pull = vjp(*functions, operands | {"group_sizes": net.group_sizes})
    gradients = pull(np.asarray(net.d_y))
    gradients = {key: g.transpose(of.order(key)) if key in laid_out else g for key, g in gradients.items()}
    given = dict(activation="gelu", b_in=net.b_in, b_out=net.b_out, row_weights=net.weights)
    given |= dict(lora=as_lora(factors), lora_scale=SCALES, lora_dtype=rounding(dtype))
    want = reference.expert_ffn(net.rows, net.w_in, net.w_out, net.group_sizes, **given)
    assert y.dtype == DTYPES[dtype]
    assert_rows_close(y, want, SIZES, BOUND[dtype], "y")
    found = reference.expert_ffn_backward(net.d_y, net.rows, net.w_in, net.w_out, net.group_sizes, **given)
    expected = dict(zip(("rows", "w_in", "w_out", "b_in", "b_out", "weights"), found[:6], strict=True))
    expected |= dict(zip(NAMES, found[6], strict=True))
    assert all(gradients[key].dtype == a.dtype for key, a in arrays.items())
    assert_gradients_close(gradients, expected, BOUND[dtype], SIZES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("shared", [(), (0,), (1,)])
def test_grouped_matmul(transpose_w, shared, dtype):
    rng, (D, N, r) = np.random.default_rng(1), (11, 9, 5)

    def normal(*shape):
        return rng.standard_normal(shape).astype(DTYPES[dtype])

    x, w, d_y = normal(sum(SIZES) + SPARE, D), normal(4, D, N), normal(sum(SIZES) + SPARE, N)
    lora = normal(1 if 0 in shared else 4, D, r), normal(1 if 1 in shared else 4, r, N)
    stored = w.swapaxes(1, 2) if transpose_w else w

    def function(module, x, w, a, b, group_sizes):
        return module.grouped_matmul(x, w, group_sizes, transpose_w=transpose_w, lora=(a, b), lora_scale=-0.4)

    operands = {"x": x, "w": stored, "a": lora[0], "b": lora[1]}
    functions = (partial(function, module) for module in (jax, torch))
    y, pull = vjp(*functions, operands | {"group_sizes": np.array(SIZES, np.int32)})
    options = dict(lora=lora, lora_scale=-0.4, lora_dtype=rounding(dtype))
    assert_rows_close(y, grouped_matmul(x, w, SIZES, **options), SIZES, BOUND[dtype], "y")
    d_x, d_w, (d_a, d_b) = grouped_matmul_backward(d_y, x, w, SIZES, **options)
    want = {"rows": d_x, "w": d_w.swapaxes(1, 2) if transpose_w else d_w, "a": d_a, "b": d_b}
    got = pull(d_y)
    assert_gradients_close({"rows": got.pop("x"), **got}, want, BOUND[dtype], SIZES)

"""The oracle's e4m3 quantiser against ml_dtypes, and its GEMMs of quantised operands against the formulas."""

import ml_dtypes
import numpy as np
import pytest

from anabranch.reference.dispatch import plan
from anabranch.reference.experts import (
    activate,
    activate_backward,
    expert_ffn,
    expert_ffn_backward,
    grouped_matmul,
    grouped_matmul_backward,
)
from anabranch.reference.fp8 import BLOCK, FP8_SCALES, e4m3, quantize_rows, quantize_weights
from anabranch.reference.lora import Lora
from anabranch.reference.moe import moe, moe_backward, routed_experts, routed_experts_backward

equal = np.testing.assert_array_equal


def bits(values):
    """The bits of e4m3 numbers; all NaNs count as the same number."""
    return np.where(np.isnan(values), 0x7F, np.asarray(values).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_every_number_and_every_midpoint_is_rounded_as_by_ml_dtypes():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.unique(every[np.isfinite(every)])
    middle = (numbers[1:] + numbers[:-1]) / 2
    values = [numbers, middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf), [-0.0, np.nan, 463.9]]
    values = np.concatenate(values).astype(np.float32)
    equal(bits(e4m3(values)), bits(values))


@pytest.mark.parametrize("fp8_scales", FP8_SCALES)
def test_every_block_has_the_scale_of_the_formula_and_the_bits_of_ml_dtypes(fp8_scales):
    """Outliers, zeros and tiny numbers are in blocks of their own."""
    x, w = normal(5, 384), normal(2, 256, 2, 384, seed=1)
    x[1, 128:256], x[2, :128], x[3, 7], x[4, 256:] = 0, x[2, :128] * np.float32(1e-30), 1e4, 3.5
    x[2, 128:256] *= np.float32(1e-38)  # The largest value / 448 is subnormal.
    w[0, :128, 0, :128], w[1, 3, 1, 5] = 0, -1e4
    for array, found in ((x, quantize_rows(x, fp8_scales)), (w, quantize_weights(w, fp8_scales))):
        assert found.values.shape == array.shape and found.scales.dtype == np.float32
        assert found.scales.shape == ((5, 3) if array is x else (2, 2, 2, 3))
        for index in np.ndindex(found.scales.shape):
            block = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, found.block, strict=True))
            largest = np.abs(array[block]).max()
            scale = max(largest / np.float32(448), np.float32(2.0**-126)) if largest else np.float32(1)
            if fp8_scales == "power_of_two" and largest:
                scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
            assert found.scales[index] == scale
            equal(bits(found.values[block]), bits(array[block] / scale))


def test_powers_of_two_round_up_and_what_is_not_finite_makes_its_block_nan():
    exact, x = np.float32(448 * 2.0**-3), np.zeros((3, BLOCK), np.float32)
    x[:, 0] = exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))
    equal(quantize_rows(x, "power_of_two").scales[:, 0], [2.0**-3, 2.0**-2, 2.0**-3])
    for bad in (np.nan, np.inf, -np.inf):
        x = normal(2, 256)
        x[1, 130] = bad
        found = quantize_rows(x).exact()
        assert np.isnan(found[1, 128:]).all() and np.isfinite(found[0]).all() and np.isfinite(found[1, :128]).all()
    with pytest.raises(ValueError, match="multiples of"):
        quantize_rows(normal(2, 130))
    with pytest.raises(ValueError, match="fp8_scales: got 'fine'"):
        quantize_rows(normal(2, 128), "fine")


# ---------------------------------------------------------------- GEMMs

SIZES, R = np.array([3, 0, 4]), 9  # an expert without rows; two rows past the groups


def rounded(array):
    return np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float64)


def adapters(parts=2, D=256, F=128):
    """The options of LoRA; experts share B_out."""
    shapes = {"a_in": (3, D, 5), "b_in": (3, 5, parts, F), "a_out": (3, F, 2), "b_out": (1, 2, D)}
    lora = Lora(**{name: normal(*shape, seed=40 + i) / 8 for i, (name, shape) in enumerate(shapes.items())})
    return dict(lora=lora, lora_scale=(0.75, -1.5), lora_dtype=ml_dtypes.bfloat16)


def network(parts=2, D=256, F=128):
    E = len(SIZES)
    shapes = {"rows": (R, D), "w_in": (E, D, parts, F), "w_out": (E, F, D), "b_in": (E, parts, F), "b_out": (E, D)}
    arrays = {name: normal(*shape, seed=2 + i) for i, (name, shape) in enumerate(shapes.items())}
    arrays["w_in"], arrays["w_out"] = arrays["w_in"] / np.float32(16), arrays["w_out"] / np.float32(11)
    return arrays | {"row_weights": normal(R, seed=20)}, normal(R, D, seed=21)


def test_grouped_matmul_multiplies_quantised_operands():
    x, w, d_y = normal(R, 256), normal(3, 256, 384, seed=1), normal(R, 384, seed=2)
    q_x, q_w, q_d_y = quantize_rows(x).exact(), quantize_weights(w).exact(), quantize_rows(d_y).exact()
    equal(grouped_matmul(x, w, SIZES, "float32"), grouped_matmul(q_x, q_w, SIZES))
    d_x, d_w = grouped_matmul_backward(d_y, x, w, SIZES, "float32")
    equal(d_x, grouped_matmul_backward(q_d_y, x, q_w, SIZES)[0])
    equal(d_w, grouped_matmul_backward(d_y, x, w, SIZES)[1])

    a, b = normal(3, 256, 5, seed=3) / 16, normal(1, 5, 384, seed=4)
    how = dict(lora=(a, b), lora_scale=0.5, lora_dtype=ml_dtypes.bfloat16)
    a, b = rounded(a), np.repeat(rounded(b), 3, 0)
    u = rounded(0.5 * grouped_matmul(x, a, SIZES))
    v = rounded(0.5 * grouped_matmul(d_y, b.swapaxes(1, 2), SIZES))
    y = grouped_matmul(q_x, q_w, SIZES) + grouped_matmul(u, b, SIZES)
    equal(grouped_matmul(x, w, SIZES, "float32", **how), y)
    found = grouped_matmul_backward(d_y, x, w, SIZES, "float32", **how)
    equal(found[0], d_x + grouped_matmul(v, a.swapaxes(1, 2), SIZES))
    equal(found[1], d_w)
    equal(found[2][0], grouped_matmul_backward(v, x, a, SIZES)[1])
    equal(found[2][1], grouped_matmul_backward(d_y, u, b, SIZES)[1].sum(0, keepdims=True))


@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize("parts, sent", [(1, None), (2, None), (2, ml_dtypes.bfloat16)])
def test_experts_are_the_formulas_row_by_row(parts, sent, weight_early):
    """With adapters, whose operands are rounded to bfloat16 and never quantised."""
    arrays, d_y = network(parts=parts)
    options = dict(group_sizes=SIZES, activation="silu", fp8_scales="power_of_two", sent_dtype=sent) | adapters(parts)
    lora = options["lora"]
    y = expert_ffn(**arrays, **options, weight_early=weight_early)
    found = expert_ffn_backward(d_y, **arrays, **options)
    d_lora = Lora(*(np.zeros(factor.shape) for factor in lora))

    def q1(row):
        return quantize_rows(np.asarray(row)[None], "power_of_two").exact()[0]

    def q2(w):
        return quantize_weights(w[None], "power_of_two").exact()[0]

    want = {name: np.zeros(array.shape) for name, array in arrays.items()}
    for r in range(R - 2):
        e = 0 if r < 3 else 2
        w_in, w_out = [q2(arrays["w_in"][e, :, p]) for p in range(parts)], q2(arrays["w_out"][e])
        a_in, b_in, a_out, b_out = (rounded(factor[min(e, len(factor) - 1)]) for factor in lora)
        w, bias = arrays["row_weights"][r].astype(np.float64), arrays["b_out"][e].astype(np.float64)
        # Operands that are not quantised: what was sent, or the rows themselves.
        x, d = (v[r].astype(np.float64) if sent is None else rounded(q1(v[r])) for v in (arrays["rows"], d_y))
        u = rounded(0.75 * (x @ a_in))
        h = np.stack([q1(arrays["rows"][r]) @ w_in[p] + u @ b_in[:, p] for p in range(parts)]) + arrays["b_in"][e]
        a = activate(h[None], "silu")[0]
        z = rounded(-1.5 * (w * a @ a_out))
        late = w * (q1(a) @ w_out + rounded(-1.5 * (a @ a_out)) @ b_out + bias)
        want_y = q1(w * a) @ w_out + z @ b_out + w * bias if weight_early else late
        np.testing.assert_allclose(y[r], want_y, rtol=1e-12, atol=1e-12)
        v_out = rounded(-1.5 * (b_out @ d))
        d_a = q1(d_y[r]) @ w_out.T + a_out @ v_out
        d_h = activate_backward(w * d_a[None], h[None], "silu")[0]
        v_in = rounded(0.75 * np.einsum("rpf,pf->r", b_in, d_h))
        want["row_weights"][r] = d_a @ a + d @ bias
        want["rows"][r] = sum(q1(d_h[p]) @ w_in[p].T for p in range(parts)) + a_in @ v_in
        want["w_in"][e] += x[:, None, None] * d_h
        want["b_in"][e] += d_h
        want["w_out"][e] += np.outer(w * a, d)
        want["b_out"][e] += w * d
        d_lora.a_in[e] += np.outer(x, v_in)
        d_lora.b_in[e] += u[:, None, None] * d_h
        d_lora.a_out[e] += np.outer(w * a, v_out)
        d_lora.b_out[0] += np.outer(z, d)
    pairs = [(name, gradient, want[name]) for name, gradient in zip(arrays, found[:6], strict=True)]
    for name, gradient, expected in (*pairs, *zip(Lora._fields, found.d_lora, d_lora, strict=True)):
        np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-10, err_msg=name)
    assert not y[R - 2 :].any()


def test_the_layer_runs_its_experts_on_quantised_operands():
    """With adapters, an FP8 exchange, and padding rows, which may be NaN; a row's experts are checked above."""
    arrays, _ = network()
    T, K, fp8 = 6, 2, {"fp8_scales": "float32", "sent_dtype": ml_dtypes.bfloat16} | adapters()
    x, d_out, gate = normal(T, 256, seed=30), normal(T, 256, seed=31), normal(256, 3, seed=33)
    matrices = [arrays[name] for name in ("w_in", "w_out")]
    whole = moe(x, gate, *matrices, topk=K, **fp8)
    after_router = (x, whole.experts, whole.weights, *matrices)
    layout = plan(whole.experts, 3, 4)
    row, slot = layout.row_of_slot, layout.slot_of_row
    padding, token = slot < 0, np.maximum(slot, 0) // K
    row_weights = np.where(padding, np.nan, whole.weights.reshape(-1)[slot])
    rows, d_y = (np.where(padding[:, None], np.nan, of[token]) for of in (x, d_out))
    given = dict(group_sizes=layout.group_sizes, activation="silu", row_weights=row_weights, slot_of_row=slot) | fp8
    y, by_row = expert_ffn(rows, *matrices, **given), expert_ffn_backward(d_y, rows, *matrices, **given)
    assert not y[padding].any() and not by_row.d_rows[padding].any() and not by_row.d_row_weights[padding].any()
    of_experts = routed_experts_backward(*after_router, d_out, **fp8)
    np.testing.assert_allclose(whole.output, y[row].sum(1), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(of_experts["x"], by_row.d_rows[row].sum(1), rtol=1e-12, atol=1e-12)
    equal(whole.output, routed_experts(*after_router, **fp8).output)
    of_layer = moe_backward(x, gate, *matrices, d_out, topk=K, **fp8)
    for name in ("w_in", "w_out", "weights"):
        equal(of_layer[name], of_experts[name])
    adapter_gradients = (of_layer["lora"], of_experts["lora"], by_row.d_lora)
    pairs = [(of_experts["w_in"], by_row.d_w_in), (of_experts["w_out"], by_row.d_w_out)]
    for by_layer, by_experts, gradient in zip(*adapter_gradients, strict=True):
        equal(by_layer, by_experts)
        pairs.append((by_experts, gradient))
    for got, gradient in pairs:
        np.testing.assert_allclose(got, gradient, rtol=1e-12, atol=1e-12)

"""The oracle's quantiser against ml_dtypes, and its products of quantised factors: section 11."""

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
from anabranch.reference.moe import moe, moe_backward, routed_experts, routed_experts_backward

EVERY = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
NUMBERS = np.unique(EVERY[np.isfinite(EVERY)])


def bits(values):
    """Of e4m3 numbers; every NaN as one."""
    return np.where(np.isnan(values), 0x7F, np.asarray(values).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_every_number_and_every_place_between_two_is_rounded_as_by_ml_dtypes():
    middle = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    places = [NUMBERS, middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf), [-0.0, np.nan, 463.9]]
    values = np.concatenate(places).astype(np.float32)
    np.testing.assert_array_equal(bits(e4m3(values)), bits(values))


@pytest.mark.parametrize("fp8_scales", FP8_SCALES)
def test_rows_and_weights_are_quantised_block_by_block(fp8_scales):
    """A loop over blocks, by ml_dtypes, has the same bits; outliers, zeros and tiny numbers in blocks of their own."""
    x, w = normal(5, 384), normal(2, 256, 2, 384, seed=1)
    x[1, 128:256], x[2, :128], x[3, 7], x[4, 256:] = 0, x[2, :128] * np.float32(1e-30), 1e4, 3.5
    x[2, 128:256] *= np.float32(1e-38)  # its largest / 448 is no normal number
    w[0, :128, 0, :128], w[1, 3, 1, 5] = 0, -1e4
    for array, found in ((x, quantize_rows(x, fp8_scales)), (w, quantize_weights(w, fp8_scales))):
        assert found.values.shape == array.shape and found.scales.dtype == np.float32
        assert found.scales.shape == ((5, 3) if array is x else (2, 2, 2, 3))
        for index in np.ndindex(found.scales.shape):
            block = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, found.block, strict=True))
            largest = np.abs(array[block]).max()
            scale = max(largest / np.float32(448), np.float32(2.0**-126)) if largest else np.float32(1)
            if fp8_scales == "power_of_two" and array[block].any():
                exponent = np.ceil(np.log2(np.float64(scale)))
                scale = np.float32(2.0**exponent)
            assert found.scales[index] == scale
            np.testing.assert_array_equal(bits(found.values[block]), bits(array[block] / scale))


def test_the_largest_of_a_block_is_448_and_an_error_is_at_most_half_a_step():
    x = normal(64, 256)
    q = quantize_rows(x)
    assert (np.abs(q.values).reshape(64, 2, BLOCK).max(axis=2) == 448).all()
    scale = np.repeat(q.scales, BLOCK, axis=1)
    error, u = np.abs(q.exact() - x), 2.0**-4
    assert (error <= np.maximum(u * np.abs(x), scale * 2.0**-10) * (1 + 1e-6)).all()


def test_scales_of_powers_of_two_round_up():
    exact = np.float32(448 * 2.0**-3)
    largest = [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))]
    x = np.zeros((3, BLOCK), np.float32)
    x[:, 0] = largest
    np.testing.assert_array_equal(quantize_rows(x, "power_of_two").scales[:, 0], [2.0**-3, 2.0**-2, 2.0**-3])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_what_is_no_number_is_none(bad):
    x = normal(2, 256)
    x[1, 130] = bad
    exact = quantize_rows(x).exact()
    assert np.isnan(exact[1, 128:]).all() and np.isfinite(exact[0]).all() and np.isfinite(exact[1, :128]).all()


def test_widths_are_multiples_of_a_block():
    with pytest.raises(ValueError, match="multiples of"):
        quantize_rows(normal(2, 130))
    with pytest.raises(ValueError, match="fp8_scales: got 'fine'"):
        quantize_rows(normal(2, 128), "fine")


# ---------------------------------------------------------------- products

SIZES = np.array([3, 0, 4])  # an expert without rows
R = 9  # two rows past the groups


def network(seed=2, parts=2, D=256, F=128):
    E = len(SIZES)
    shapes = {"rows": (R, D), "w_in": (E, D, parts, F), "w_out": (E, F, D), "b_in": (E, parts, F), "b_out": (E, D)}
    arrays = {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
    arrays["w_in"], arrays["w_out"] = arrays["w_in"] / np.float32(16), arrays["w_out"] / np.float32(11)
    return arrays | {"row_weights": normal(R, seed=20)}, normal(R, D, seed=21)


def test_grouped_products_are_those_of_quantised_factors():
    x, w, d_y = normal(R, 256), normal(3, 256, 384, seed=1), normal(R, 384, seed=2)
    q = [quantize_rows(x).exact(), quantize_weights(w).exact(), quantize_rows(d_y).exact()]
    np.testing.assert_array_equal(grouped_matmul(x, w, SIZES, "float32"), grouped_matmul(*q[:2], SIZES))
    d_x, d_w = grouped_matmul_backward(d_y, x, w, SIZES, "float32")
    np.testing.assert_array_equal(d_x, grouped_matmul_backward(q[2], x, q[1], SIZES)[0])
    np.testing.assert_array_equal(d_w, grouped_matmul_backward(d_y, x, w, SIZES)[1])


@pytest.mark.parametrize("weight_early", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_network_is_the_formulas_with_quantised_products(parts, weight_early):
    """Row by row, with products of factors that are quantised one matrix at a time."""
    arrays, d_y = network(parts=parts)
    options = dict(group_sizes=SIZES, activation="silu", fp8_scales="power_of_two")
    y = expert_ffn(**arrays, **options, weight_early=weight_early)
    found = expert_ffn_backward(d_y, **arrays, **options)

    def q1(row):
        return quantize_rows(np.asarray(row)[None], "power_of_two").exact()[0]

    def q2(w):
        return quantize_weights(w[None], "power_of_two").exact()[0]

    want = {name: np.zeros(array.shape) for name, array in arrays.items()}
    for r in range(R - 2):
        e = 0 if r < 3 else 2
        w_in = [q2(arrays["w_in"][e, :, p]) for p in range(parts)]
        w_out, w, x = q2(arrays["w_out"][e]), arrays["row_weights"][r].astype(np.float64), arrays["rows"][r]
        h = np.stack([q1(x) @ w_in[p] for p in range(parts)]) + arrays["b_in"][e]
        a = activate(h[None], "silu")[0]
        of_row = (
            q1(w * a) @ w_out + w * arrays["b_out"][e] if weight_early else w * (q1(a) @ w_out + arrays["b_out"][e])
        )
        np.testing.assert_allclose(y[r], of_row, rtol=1e-12, atol=1e-12)
        d_a = q1(d_y[r]) @ w_out.T
        want["row_weights"][r] = d_a @ a + d_y[r].astype(np.float64) @ arrays["b_out"][e]
        d_h = activate_backward(w * d_a[None], h[None], "silu")[0]
        want["rows"][r] = sum(q1(d_h[p]) @ w_in[p].T for p in range(parts))
        want["w_in"][e] += x[:, None, None] * d_h
        want["b_in"][e] += d_h
        want["w_out"][e] += np.outer(w * a, d_y[r])
        want["b_out"][e] += w * d_y[r]
    for name, gradient in zip(arrays, found, strict=True):
        np.testing.assert_allclose(gradient, want[name], rtol=1e-10, atol=1e-10, err_msg=name)
    assert not y[R - 2 :].any()


def one_each(rng, *shape):
    """Matrices whose every row and column has one number that a block holds as it is, the others 0."""
    rows, columns = shape[-2:]
    out = np.zeros(shape, np.float32)
    for index in np.ndindex(shape[:-2]):
        place = rng.permutation(max(rows, columns))[: min(rows, columns)]
        taken = (np.arange(rows), place) if rows <= columns else (place, np.arange(columns))
        out[(*index, *taken)] = rng.choice([-2, -1, 1, 2], min(rows, columns))
    return out


def test_numbers_that_e4m3_holds_have_the_results_and_gradients_of_exact_products():
    rng = np.random.default_rng(6)
    arrays = {
        "rows": rng.choice([-1, 0, 1], (R, 256)).astype(np.float32),
        "w_in": one_each(rng, 3, 1, 256, 128).transpose(0, 2, 1, 3),
        "w_out": one_each(rng, 3, 128, 256),
        "row_weights": rng.choice([-1, 0.5, 2], R).astype(np.float32),
    }
    d_y = rng.choice([-4, 0, 1], (R, 256)).astype(np.float32)
    options = dict(group_sizes=SIZES, activation="relu2")
    quantised = expert_ffn(**arrays, **options, fp8_scales="power_of_two")
    np.testing.assert_array_equal(quantised, expert_ffn(**arrays, **options))
    assert quantised.any()
    found = expert_ffn_backward(d_y, **arrays, **options, fp8_scales="power_of_two")
    for name, got, want in zip(found._fields, found, expert_ffn_backward(d_y, **arrays, **options), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_the_layer_takes_the_network_of_quantised_factors():
    arrays, _ = network()
    T, E, K = 6, 3, 2
    x, d_out = normal(T, 256, seed=30), normal(T, 256, seed=31)
    experts, weights = np.array([[0, 2], [2, 0], [0, -1], [2, 2], [0, 2], [-1, 0]]), normal(T, K, seed=32)
    matrices = [arrays[name] for name in ("w_in", "w_out")]
    output = routed_experts(x, experts, weights, *matrices, fp8_scales="float32").output
    gradients = routed_experts_backward(x, experts, weights, *matrices, d_out, fp8_scales="float32")
    layout = plan(experts, E)
    row, slot = layout.row_of_slot, layout.slot_of_row
    token, of_rows = np.maximum(slot, 0) // K, np.where(slot < 0, 0, weights.reshape(-1)[np.maximum(slot, 0)])
    given = dict(group_sizes=layout.group_sizes, activation="silu", row_weights=of_rows, slot_of_row=slot)
    y = expert_ffn(x[token], *matrices, **given, fp8_scales="float32")
    by_row = expert_ffn_backward(d_out[token], x[token], *matrices, **given, fp8_scales="float32")
    for t in range(T):
        rows = row[t][row[t] >= 0]
        np.testing.assert_allclose(output[t], y[rows].sum(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gradients["x"][t], by_row.d_rows[rows].sum(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(gradients["w_in"], by_row.d_w_in)
    np.testing.assert_array_equal(gradients["w_out"], by_row.d_w_out)

    gate = normal(256, E, seed=33)
    whole = moe(x, gate, *matrices, topk=K, fp8_scales="float32")
    np.testing.assert_array_equal(
        whole.output, routed_experts(x, whole.experts, whole.weights, *matrices, fp8_scales="float32").output
    )
    of_layer = moe_backward(x, gate, *matrices, d_out, topk=K, fp8_scales="float32")
    of_experts = routed_experts_backward(x, whole.experts, whole.weights, *matrices, d_out, fp8_scales="float32")
    for name in ("w_in", "w_out", "weights"):
        np.testing.assert_array_equal(of_layer[name], of_experts[name])

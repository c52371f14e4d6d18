"""The oracle's packed weights against ml_dtypes, the rules as written, and Transformers' own decoding."""

import ml_dtypes
import numpy as np
import pytest

from anabranch.packed import SCALE_RULES, Fp8Blocks, Mxfp4
from anabranch.reference.packed import MAGNITUDES, pack_fp8, pack_mxfp4, unpack

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
equal = np.testing.assert_array_equal


def bits(values):
    """The bits of floats; all NaNs count as one number."""
    values = np.asarray(values)
    integers = values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])
    return np.where(np.isnan(values.astype(np.float32)), 1, integers)


def every_code():
    """All 16 codes with all 256 scales, [256, 32]."""
    pairs = np.arange(8, dtype=np.uint8) * 34 + 16  # (2 i, 2 i + 1)
    codes = np.broadcast_to(np.concatenate([pairs, pairs]), (256, 1, 16)).copy()
    return Mxfp4(codes, np.arange(256, dtype=np.uint8)[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_the_product_of_ml_dtypes_numbers(dtype):
    packed = every_code()
    codes = np.stack([packed.codes & 15, packed.codes >> 4], -1).reshape(256, 32)
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = packed.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(over="ignore"):
        equal(bits(unpack(packed, dtype)), bits((elements * scales).astype(np.float32).astype(dtype)))


def test_mxfp4_overflows_at_two_scales_only_and_keeps_denormals():
    values = unpack(every_code(), ml_dtypes.bfloat16).astype(np.float64)
    assert np.isnan(values[255]).all() and np.isfinite(values[:253]).all()
    overflows = [sorted(set(MAGNITUDES[np.isinf(values[scale, :8])])) for scale in (253, 254)]
    assert overflows == [[4, 6], [2, 3, 4, 6]]
    assert values[0, 1] == 2.0**-128 and values[1, 1] == 2.0**-127


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_mxfp4_has_the_bits_of_transformers(dtype):
    """At scale 255 Transformers gives finite numbers, where the format means NaN."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed = every_code()
    found = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(packed.codes)[None], torch.from_numpy(packed.scales)[None], dtype=getattr(torch, dtype)
    )
    found = found[0].T[:255].float().numpy()  # [E, C, N]
    equal(bits(found), bits(unpack(packed, np.dtype(dtype)).astype(np.float32)[:255]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales_dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, np.uint8])
def test_fp8_blocks_round_to_float32_and_then_to_the_dtype(dtype, scales_dtype):
    """All 256 codes, with scales from tiny to huge."""
    q = np.resize(np.arange(256, dtype=np.uint8), (128, 640)).view(ml_dtypes.float8_e4m3fn)
    scales = np.array([[3e38, 1e-38, 1.7e-3, -0.5, np.nan]]).astype(np.float32)
    if np.dtype(scales_dtype) in (np.uint8, ml_dtypes.float8_e8m0fnu):
        scales = np.array([[0, 1, 120, 254, 255]], np.uint8).view(scales_dtype)
        as_floats = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    else:
        scales = scales.astype(scales_dtype)
        as_floats = scales.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (q.astype(np.float32) * np.repeat(as_floats, 128, 1)).astype(dtype)
    equal(bits(unpack(Fp8Blocks(q, scales), dtype)), bits(want))


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_packing_follows_the_rule_and_rounds_as_ml_dtypes(rule):
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((500, 64)) * np.exp2(rng.integers(-120, 120, (500, 1)))).astype(np.float32)
    packed = pack_mxfp4(w, rule)
    assert packed.codes.shape == (500, 2, 16) and packed.scales.shape == (500, 2)
    blocks = w.reshape(500, 2, 32)
    largest = np.abs(blocks).max(-1).astype(np.float64)
    k = np.floor(np.log2(largest)) - 2 if rule == "floor" else np.ceil(np.log2(largest / 6))
    equal(packed.scales, k + 127)
    scaled = blocks / np.exp2(k)[..., None]
    elements = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = np.stack([packed.codes & 15, packed.codes >> 4], -1).reshape(blocks.shape)
    equal(codes, elements)
    if rule == "ceil":
        assert (np.abs(scaled) <= 6).all()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_special_blocks(rule):
    w = np.zeros((6, 32), np.float32)
    w[0, ::2] = -0.0
    w[1, 5], w[2, 31] = np.inf, np.nan
    w[3] = np.arange(32) * np.float32(2.0**-149)
    w[4, 0], w[4, 1:] = np.finfo(np.float32).max, -1
    w[5] = np.arange(32) / 4  # ties
    packed = pack_mxfp4(w, rule)
    assert packed.scales[0, 0] == 0 and set(packed.codes[0].ravel()) == {8}
    equal(packed.scales[1:3, 0], [255, 255])
    assert not packed.codes[1:3].any()
    assert packed.scales[3, 0] == 0 and packed.scales[4, 0] == 252 + (rule == "ceil")
    values = unpack(packed)
    assert np.isnan(values[1:3]).all() and np.isfinite(values[[0, 3, 5]]).all()
    assert np.signbit(values[0, ::2]).all() and not np.signbit(values[0, 1::2]).any()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_decoded_values_packed_again_are_the_same(rule):
    rng = np.random.default_rng(4)
    packed = Mxfp4(rng.integers(0, 256, (40, 3, 16), np.uint8), rng.integers(0, 253, (40, 3), np.uint8))
    values = unpack(packed, np.float32)
    equal(bits(unpack(pack_mxfp4(values, rule), np.float32)), bits(values))


def test_pack_fp8_is_within_half_a_step():
    w = np.random.default_rng(5).standard_normal((3, 2, 128, 256)).astype(np.float32)
    packed = pack_fp8(w)
    assert packed.q.shape == w.shape and packed.scales.shape == (3, 2, 1, 2)
    largest = np.abs(w.reshape(3, 2, 128, 2, 128)).max((2, 4))[:, :, None]
    equal(packed.scales, largest / np.float32(448))
    assert np.abs(unpack(packed) - w).max() <= np.abs(w).max() / 28 + 1e-6


def test_unknown_rule():
    with pytest.raises(ValueError, match="scale_rule: got 'round', expected one of 'floor', 'ceil'"):
        pack_mxfp4(np.ones((1, 32)), "round")

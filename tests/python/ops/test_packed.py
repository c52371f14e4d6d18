"""pack_mxfp4, pack_fp8 and unpack against the oracle, bit for bit, in both frameworks."""

import ml_dtypes
import numpy as np
import pytest

from anabranch.packed import SCALE_RULES, Fp8Blocks, Mxfp4
from anabranch.reference import packed as oracle
from bad_values import VALUES
from frameworks import BOTH, in_torch
from packed_cases import as_array, as_given, bits, dtype_of, front_end, random_packed

pytestmark = BOTH
DTYPES = ("float32", "bfloat16", "float16")
equal = np.testing.assert_array_equal


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def every_code():
    pairs = np.arange(8, dtype=np.uint8) * 34 + 16  # (2 i, 2 i + 1)
    codes = np.broadcast_to(np.concatenate([pairs, pairs]), (256, 1, 16)).copy()
    return Mxfp4(codes, np.arange(256, dtype=np.uint8)[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_mxfp4_of_every_code_and_scale(platform, dtype):
    packed = every_code()
    given = as_given(packed)
    got = front_end().unpack(given, dtype_of(dtype))
    equal(bits(as_array(got)), bits(oracle.unpack(packed, numpy_dtype(dtype))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["float32", "bfloat16", "uint8"])
def test_unpack_fp8_blocks_of_every_code(platform, dtype, scales):
    packed = random_packed("fp8_blocks", (2, 3, 128, 256), scales=scales)
    q = np.resize(np.arange(256, dtype=np.uint8), packed.q.shape).view(ml_dtypes.float8_e4m3fn)
    packed = packed._replace(q=q)
    got = front_end().unpack(as_given(packed), dtype_of(dtype))
    equal(bits(as_array(got)), bits(oracle.unpack(packed, numpy_dtype(dtype))))


def e8m0(packed):
    """The packed matrix with scales of dtype float8_e8m0fnu in the current framework."""
    given = as_given(packed)
    if in_torch():
        import torch

        return given._replace(scales=given.scales.view(torch.float8_e8m0fnu))
    return given._replace(scales=given.scales.view("float8_e8m0fnu"))


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_blocks"])
def test_scales_of_dtype_e8m0(platform, kind):
    packed = random_packed(kind, (2, 128, 128), scales="uint8")
    got = front_end().unpack(e8m0(packed), dtype_of("float32"))
    equal(bits(as_array(got)), bits(oracle.unpack(packed, np.float32)))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_mxfp4(platform, rule, dtype):
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((3, 5, 2, 64)) * np.exp2(rng.integers(-12, 12, (3, 5, 2, 1)))).astype(numpy_dtype(dtype))
    w[0, 0, 0, :32], w[0, 1, 0, 3], w[0, 2, 0, 40] = -0.0, np.nan, -np.inf
    w[1, 0, 0] = (np.arange(64) % 32 / 4).astype(w.dtype)  # ties
    got = front_end().pack_mxfp4(as_given(w), rule)
    want = oracle.pack_mxfp4(w, rule)
    equal(as_array(got.scales), want.scales)
    equal(as_array(got.codes), want.codes)


@pytest.mark.parametrize("fp8_scales", ["float32", "power_of_two"])
def test_pack_fp8(platform, fp8_scales):
    w = np.random.default_rng(2).standard_normal((2, 3, 128, 256)).astype(np.float32)
    got, want = front_end().pack_fp8(as_given(w), fp8_scales), oracle.pack_fp8(w, fp8_scales)
    equal(as_array(got.scales), want.scales)
    equal(bits(as_array(got.q)), bits(want.q))


def test_a_matrix_and_an_empty_tensor(platform):
    w = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    for array in (w, w[:0], w[None]):
        packed = front_end().pack_mxfp4(as_given(array))
        values = as_array(front_end().unpack(packed, dtype_of("float32")))
        equal(bits(values), bits(oracle.unpack(oracle.pack_mxfp4(array), np.float32)))


ERRORS = {
    "w: got float32.2, 48., expected a last dimension that is a multiple of 32": lambda f, a: f.pack_mxfp4(a(2, 48)),
    "w: got float32.128, 64., expected last dimensions that are multiples": lambda f, a: f.pack_fp8(a(128, 64)),
    "scale_rule: got 'round', expected one of 'floor', 'ceil'": lambda f, a: f.pack_mxfp4(a(2, 64), "round"),
    "fp8_scales: got 'x'": lambda f, a: f.pack_fp8(a(128, 128), "x"),
    "packed: got float32.2, 64., expected an Mxfp4 or an Fp8Blocks": lambda f, a: f.unpack(
        a(2, 64), dtype_of("float32")
    ),
    "packed.scales: got uint8.2, 3., expected uint8": lambda f, a: f.unpack(
        Mxfp4(a(2, 2, 16, dtype=np.uint8), a(2, 3, dtype=np.uint8)), dtype_of("float32")
    ),
    "packed.codes: got uint8.2, 2, 15., expected": lambda f, a: f.unpack(
        Mxfp4(a(2, 2, 15, dtype=np.uint8), a(2, 2, dtype=np.uint8)), dtype_of("float32")
    ),
    "packed.q: got float8_e4m3fn.64, 128. with N=64, expected N a multiple of 128": lambda f, a: f.unpack(
        Fp8Blocks(a(64, 128, dtype=ml_dtypes.float8_e4m3fn), a(1, 1)), dtype_of("float32")
    ),
    "w: got Mxfp4.codes=uint8.2, 64, 1, 16., scales=uint8.2, 64, 1.., expected": lambda f, a: f.grouped_matmul(
        a(4, 64), f.pack_mxfp4(a(2, 64, 32)), a(2, dtype=np.int32)
    ),
    "packed: got NVFP4": lambda f, a: f.unpack(
        Mxfp4(a(2, 4, 8, dtype=np.uint8), a(2, 4, dtype=ml_dtypes.float8_e4m3fn)), dtype_of("float32")
    ),
    "packed: got MXFP8": lambda f, a: f.unpack(
        Fp8Blocks(a(128, 128, dtype=ml_dtypes.float8_e4m3fn), a(128, 4, dtype=np.uint8)), dtype_of("float32")
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(platform, message):
    def zeros(*shape, dtype=np.float32):
        return as_given(np.zeros(shape, dtype))

    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        ERRORS[message](front_end(), zeros)


@pytest.mark.parametrize("kind", [Mxfp4, Fp8Blocks])
def test_bad_parts_of_a_packed_matrix(platform, kind):
    """Every value in the place of an array is an error that names the array."""
    good = as_given(random_packed("mxfp4" if kind is Mxfp4 else "fp8_blocks", (2, 128, 128)))
    for field in kind._fields:
        for value in VALUES:
            with pytest.raises((TypeError, ValueError), match=rf"^packed\.{field}: got"):
                front_end().unpack(good._replace(**{field: value}), dtype_of("float32"))

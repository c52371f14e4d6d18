"""The layer on packed weights has the bits of the layer on unpacked ones, in every output and gradient.

On a GPU the small-M kernels of packed weights add sums in another order: there 16-bit results agree within rounding.
`moe` and `routed_experts` on packed weights are also compared with the oracle, whose weights numpy unpacks.
"""

import jax
import numpy as np
import pytest

from anabranch.activation import Activation
from anabranch.lora import NAMES
from anabranch.packed import Fp8Blocks, Mxfp4
from anabranch.reference import moe as reference
from anabranch.reference.packed import unpack
from frameworks import BOTH, in_torch, vjp
from lora_cases import lora_factors, oracle_options, takes_factors, with_factors
from moe_cases import BOUND, EXPERT_AXIS, expected_layer, in_our_layout, layouts_of, saved_dtype
from oracle import assert_close, assert_close_per_expert
from packed_cases import as_given, bits, dtype_of, front_end, random_packed

pytestmark = BOTH
T, E, K = 10, 5, 2  # few enough rows for the small-M kernels, of packed and of plain weights
COLD = 3  # an expert without tokens
PFD = dict(w_in_layout="pfd", w_out_layout="df")
FPD = dict(w_in_layout="fpd", w_out_layout="df")

#: (kind of w_in, kind of w_out, D, P, F, dtype, with adapters, options); kind None: a plain matrix.
CASES = {
    "mxfp4": ("mxfp4", "mxfp4", 96, 2, 64, "float32", False, PFD),
    "mxfp4, bfloat16, interleaved, adapters": ("mxfp4", "mxfp4", 64, 2, 96, "bfloat16", True, FPD),
    "mxfp4, float16, ungated, early weights": (
        *("mxfp4", "mxfp4", 64, 1, 32, "float16", False),
        dict(**PFD, activation="relu2", weight_early=True),
    ),
    "mxfp4 of w_in alone, gpt-oss": (
        *("mxfp4", None, 64, 2, 48, "bfloat16", True),
        dict(w_in_layout="fpd", activation=Activation.swiglu_oai(1.702, 7.0), lora_scale=(0.5, -2.0)),
    ),
    "mxfp4 of w_out alone, early weights": (
        None,
        "mxfp4",
        48,
        2,
        64,
        "float32",
        True,
        dict(w_out_layout="df", weight_early=True),
    ),
    "fp8 blocks": ("fp8_blocks", "fp8_blocks", 256, 2, 128, "bfloat16", False, PFD),
    "fp8 blocks, float32, adapters": ("fp8_blocks", "fp8_blocks", 128, 2, 128, "float32", True, PFD),
    "fp8 blocks of w_out, float16": ("mxfp4", "fp8_blocks", 128, 2, 128, "float16", False, PFD),
}


def packed_pair(case):
    """(w_in, w_out) of a case, packed or None, and the arrays of plain ones."""
    kind_in, kind_out, D, P, F, dtype, _, options = case
    parts = (F, P) if options.get("w_in_layout") == "fpd" else (P, F)
    w_in = w_out = None
    plain = {}
    rng = np.random.default_rng(5)
    if kind_in:
        w_in = random_packed(kind_in, (E, *parts, D), scales="float32" if dtype == "float32" else "bfloat16")
    else:
        plain["w_in"] = (rng.standard_normal((E, D, P, F)) / 8).astype(np.float32)
    if kind_out:
        w_out = random_packed(kind_out, (E, D, F), seed=1, scales="uint8")
    else:
        plain["w_out"] = (rng.standard_normal((E, F, D)) / 8).astype(np.float32)
    return (w_in, w_out), plain


def operands(case):
    """The differentiated operands of `moe` as arrays."""
    _, _, D, P, F, dtype, has_adapters, options = case
    rng = np.random.default_rng(6)
    parts = (F, P) if options.get("w_in_layout", "dpf") == "fpd" else (P, F)
    arrays = {"x": (T, D), "gate": (D, E), "b_in": (E, *parts), "b_out": (E, D)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in arrays.items()}
    arrays["gate"] *= np.float32(D**-0.5)
    arrays["gate"][:, COLD] = 0
    arrays["gate"][0, COLD], arrays["x"][:, 0] = -100, 1
    if has_adapters:
        arrays |= lora_factors(E, D, P, F, (8, 16), shared=("a_out",), dtype="float32")
    import ml_dtypes

    as_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {n: a if n == "gate" or n in NAMES else a.astype(as_dtype) for n, a in arrays.items()}


def weights_of(pair, dtype, unpacked):
    """Packed weights, or the values that they stand for."""
    given = [as_given(value) for value in pair]
    if not unpacked:
        return given
    return [None if value is None else front_end().unpack(value, dtype_of(dtype)) for value in given]


def both_ways(function, case):
    """(result, gradients) of function(w_in, w_out, operands...) on packed and on unpacked weights."""
    pair, plain = packed_pair(case)
    found = []
    for unpacked in (False, True):
        w_in, w_out = weights_of(pair, case[5], unpacked)

        def call(w_in=w_in, w_out=w_out, **given):
            return takes_factors(function)(given.pop("w_in", w_in), given.pop("w_out", w_out), **given)

        result, pull = vjp(call, call, operands(case) | plain)
        cotangent = np.random.default_rng(7).standard_normal(result.shape).astype(result.dtype)
        found.append((np.asarray(result), pull(cotangent)))
    return found


#: Roundings of a result and of the intermediate results that it depends on.
ROUNDINGS = 8


def assert_same(found, exact=True):
    (packed, packed_gradients), (plain, plain_gradients) = found
    assert packed_gradients.keys() == plain_gradients.keys()
    unit = 2.0**-9 if packed.dtype.name == "bfloat16" else 2.0**-12
    results = {"output": packed} | packed_gradients
    for name, want in ({"output": plain} | plain_gradients).items():
        values = np.asarray(want).astype(np.float32)
        assert np.isfinite(values).all() and np.abs(values).max() > 0, name
        if exact:
            np.testing.assert_array_equal(bits(results[name]), bits(want), err_msg=name)
        else:
            error = np.linalg.norm(np.asarray(results[name]).astype(np.float32) - values)
            assert error <= ROUNDINGS * unit * np.linalg.norm(values), name


def is_exact(platform, case):
    return platform != "gpu" or case[5] == "float32"


@pytest.mark.parametrize("case", CASES)
def test_moe(platform, case):
    options = CASES[case][-1]

    def layer(w_in, w_out, x, gate, **given):
        return front_end().moe(x, gate, w_in, w_out, topk=K, **given, **options).output

    assert_same(both_ways(layer, CASES[case]), is_exact(platform, CASES[case]))


def check_against_the_oracle(case, arrays, layer, expected):
    """Compares the output and every gradient, per expert, for a random cotangent. Expert COLD has no tokens.

    arrays: the differentiated operands, without packed weights. layer: a function of (w_in, w_out, *, the others).
    expected: (operands with unpacked weights, in our layout; cotangent) -> (output, gradients, terms of the gradients).
    """
    pair, plain = packed_pair(CASES[case])
    arrays = arrays | plain
    w_in, w_out = map(as_given, pair)

    def call(w_in=w_in, w_out=w_out, **given):
        return layer(w_in, w_out, **given)

    call = takes_factors(call)
    output, pull = vjp(call, call, arrays)
    cotangent = np.random.default_rng(7).standard_normal(output.shape).astype(output.dtype)
    layouts = layouts_of(CASES[case][-1])
    gradients = in_our_layout({name: np.asarray(array) for name, array in pull(cotangent).items()}, layouts)

    dtype = CASES[case][5]
    packed = zip(("w_in", "w_out"), pair, strict=True)
    values = {name: unpack(matrix, arrays["x"].dtype) for name, matrix in packed if matrix is not None}
    want, want_gradients, terms = expected(in_our_layout(arrays | values, layouts), cotangent)
    assert_close(output, want, BOUND[dtype], "output")
    assert gradients.keys() == arrays.keys()
    for name, gradient in gradients.items():
        bound = max(BOUND[dtype], BOUND[str(gradient.dtype)])
        assert_close(gradient, want_gradients[name], bound, f"d_{name}")
        if name in EXPERT_AXIS:
            given = gradient, want_gradients[name], 4 * bound, f"d_{name}"
            assert_close_per_expert(*given, EXPERT_AXIS[name], terms.get(name))


@pytest.mark.parametrize("case", CASES)
def test_moe_against_the_oracle(platform, case):
    options = CASES[case][-1]

    def layer(w_in, w_out, *, x, gate, **given):
        return front_end().moe(x, gate, w_in, w_out, topk=K, **given, **options).output

    def expected(arrays, cotangent):
        cotangents = (cotangent, np.float32(0), np.float32(0), np.zeros((T, K), np.float32))
        want, gradients, terms = expected_layer(arrays, cotangents, topk=K, **options)
        return want.output, gradients, terms

    check_against_the_oracle(case, operands(CASES[case]), layer, expected)


@pytest.mark.parametrize("case", CASES)
def test_routed_experts_against_the_oracle(platform, case):
    options = CASES[case][-1]
    rng = np.random.default_rng(8)
    experts = rng.choice([0, 1, 2, 4, -1], (T, K)).astype(np.int32)
    arrays = operands(CASES[case])
    del arrays["gate"]
    arrays["weights"] = rng.standard_normal((T, K)).astype(arrays["x"].dtype)

    def layer(w_in, w_out, *, x, weights, **given):
        return front_end().routed_experts(x, as_given(experts), weights, w_in, w_out, **given, **options).output

    def expected(arrays, cotangent):
        settings = {name: options[name] for name in ("activation", "weight_early", "lora_scale") if name in options}
        given = {name: array for name, array in arrays.items() if name not in NAMES} | {"experts": experts}
        given |= settings | oracle_options(arrays)
        kept = saved_dtype(options.get("activation", "silu"), str(arrays["x"].dtype))
        gradients = reference.routed_experts_backward(**given, d_output=cotangent, saved_dtype=kept)
        return reference.routed_experts(**given).output, with_factors(gradients), {}

    check_against_the_oracle(case, arrays, layer, expected)


@pytest.mark.parametrize("case", ["mxfp4, bfloat16, interleaved, adapters", "fp8 blocks"])
def test_routed_experts(platform, case):
    options = CASES[case][-1]
    rng = np.random.default_rng(8)
    experts = as_given(rng.choice([0, 1, 2, 4, -1], (T, K)).astype(np.int32))

    def layer(w_in, w_out, x, gate, **given):
        weights = (x.float() if in_torch() else x.astype("float32")) @ gate[:, :K]
        return front_end().routed_experts(x, experts, weights, w_in, w_out, **given, **options).output

    assert_same(both_ways(layer, CASES[case]), is_exact(platform, CASES[case]))


@pytest.mark.parametrize("case", ["mxfp4", "mxfp4 of w_out alone, early weights", "fp8 blocks, float32, adapters"])
def test_expert_ffn(platform, case):
    options = CASES[case][-1]
    sizes = as_given(np.array([4, 0, 3, 0, 2], np.int32))

    def layer(w_in, w_out, x, gate, **given):
        return front_end().expert_ffn(x, w_in, w_out, sizes, weights=x @ gate[:, 0], **given, **options)

    assert_same(both_ways(layer, CASES[case]), is_exact(platform, CASES[case]))


@pytest.mark.parametrize("only", ["both", "w_in", "w_out"])
def test_fp8_blocks_are_the_quantised_weights_of_fp8(platform, only):
    """With precision "fp8" the layer on pack_fp8(w) is the layer on w, which quantises w in the same way."""
    D = F = 128
    dtype = "bfloat16" if platform == "gpu" else "float32"  # Hopper's FP8 kernels have no float32
    rng = np.random.default_rng(9)
    shapes = {"w_in": (E, 2, F, D), "w_out": (E, D, F), "x": (T, D), "gate": (D, E), "b_in": (E, 2, F), "b_out": (E, D)}
    arrays = {
        name: (rng.standard_normal(shape) / 8).astype(jax.dtypes.canonicalize_dtype(dtype))
        for name, shape in shapes.items()
    }
    arrays |= lora_factors(E, D, 2, F, (3, 5), dtype=dtype)
    weights = {name: arrays.pop(name) for name in ("w_in", "w_out")}
    plain = {} if only == "both" else {name: weights.pop(name) for name in set(weights) - {only}}
    cotangent = rng.standard_normal((T, D)).astype(jax.dtypes.canonicalize_dtype(dtype))
    found = []
    for pack in (front_end().pack_fp8, lambda w: w):
        constants = {name: pack(as_given(w)) for name, w in weights.items()}

        def layer(x, gate, constants=constants, **given):
            return front_end().moe(x, gate, topk=K, precision="fp8", **constants, **given, **PFD).output

        layer = takes_factors(layer)
        result, pull = vjp(layer, layer, arrays | plain)
        found.append((np.asarray(result), pull(cotangent)))
    assert_same(found)


def given_errors():
    """Arguments of `moe` in the place of its weights and options, and the start of the message."""
    mxfp4, fp8 = random_packed("mxfp4", (E, 2, 128, 128)), random_packed("fp8_blocks", (E, 2, 128, 128))
    mxfp4_out, fp8_out = random_packed("mxfp4", (E, 128, 128)), random_packed("fp8_blocks", (E, 128, 128))
    return {
        "scales of another shape": (
            mxfp4._replace(scales=mxfp4.scales[..., :3]),
            mxfp4_out,
            PFD,
            "w_in.scales: got uint8[5, 2, 128, 3], expected uint8 or float8_e8m0fnu [5, 2, 128, 4]",
        ),
        "scales of another dtype": (
            mxfp4,
            mxfp4_out._replace(scales=mxfp4_out.scales.astype(np.float32)),
            PFD,
            "w_out.scales: got float32[5, 128, 4], expected uint8 or float8_e8m0fnu",
        ),
        "a layout whose sums run outside": (
            mxfp4,
            mxfp4_out,
            dict(w_in_layout="dpf", w_out_layout="df"),
            "w_in_layout: got 'dpf' with w_in as Mxfp4, expected 'pfd' or 'fpd'",
        ),
        "w_out of the default layout": (
            mxfp4,
            mxfp4_out,
            dict(w_in_layout="pfd"),
            "w_out_layout: got 'fd' with w_out as Mxfp4, expected 'df'",
        ),
        "interleaved FP8 blocks": (
            fp8,
            fp8_out,
            FPD,
            "w_in_layout: got 'fpd' with w_in as Fp8Blocks, expected 'pfd'",
        ),
        "another width": (
            random_packed("mxfp4", (E, 2, 128, 64)),
            mxfp4_out,
            PFD,
            "w_in.codes: got uint8[5, 2, 128, 2, 16], expected uint8 [E, 2 or 1, F, D/32=4, 16]",
        ),
        "MXFP4 with FP8": (
            mxfp4,
            mxfp4_out,
            dict(**PFD, precision="fp8"),
            'w_in: got an Mxfp4 with precision="fp8", expected',
        ),
        "NVFP4": (
            Mxfp4(np.zeros((E, 2, 128, 8, 8), np.uint8), np.zeros((E, 2, 128, 8), fp8.q.dtype)),
            mxfp4_out,
            PFD,
            "w_in: got NVFP4 (blocks of 16, scales float8_e4m3fn[5, 2, 128, 8]), expected MXFP4 or FP8 blocks",
        ),
        "MXFP8": (
            Fp8Blocks(fp8.q, np.zeros((E, 2, 128, 4), np.uint8)),
            fp8_out,
            PFD,
            "w_in: got MXFP8 (scales uint8[5, 2, 128, 4] for blocks of 1 x 32), expected",
        ),
        "GGUF": (
            np.zeros((E, 256, 72), np.uint8),
            mxfp4_out,
            PFD,
            "w_in: got uint8[5, 256, 72] without scales, expected floats, an Mxfp4 or an Fp8Blocks; other packed formats "
            "such as GGUF",
        ),
        "bare FP8": (fp8, fp8_out.q, PFD, "w_out: got float8_e4m3fn[5, 128, 128] without scales, expected floats"),
    }


@pytest.mark.parametrize("name", given_errors())
def test_errors(platform, name):
    w_in, w_out, options, message = given_errors()[name]
    x, gate = (as_given(np.ones(shape, np.float32)) for shape in ((T, 128), (128, E)))
    with pytest.raises((TypeError, ValueError)) as caught:
        front_end().moe(x, gate, as_given(w_in), as_given(w_out), topk=K, **options)
    assert str(caught.value).startswith(message), caught.value


def test_a_width_that_cuts_a_block(platform):
    x, gate = (as_given(np.ones(shape, np.float32)) for shape in ((T, 48), (48, E)))
    w_in = Mxfp4(np.zeros((E, 2, 32, 1, 16), np.uint8), np.zeros((E, 2, 32, 1), np.uint8))
    with pytest.raises(ValueError, match=r"^w_in.codes: got .* with D=48, expected D a multiple of 32"):
        front_end().moe(x, gate, as_given(w_in), as_given(np.ones((E, 48, 32), np.float32)), topk=K, **PFD)


def test_quantized_beside_packed_weights(platform):
    w = as_given(np.ones((E, 2, 128, 128), np.float32)), as_given(np.ones((E, 128, 128), np.float32))
    quantized = front_end().quantize_experts(*w, **PFD)
    x, gate = (as_given(np.ones(shape, np.float32)) for shape in ((T, 128), (128, E)))
    packed = [as_given(random_packed("fp8_blocks", shape)) for shape in ((E, 2, 128, 128), (E, 128, 128))]
    with pytest.raises(ValueError, match=r"^quantized: got QuantizedExperts beside w_in as Fp8Blocks, expected None"):
        front_end().moe(x, gate, *packed, topk=K, precision="fp8", quantized=quantized, **PFD)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_blocks"])
def test_new_adapters_of_packed_weights(platform, kind):
    ab, layouts = front_end(), dict(w_in_layout="pfd", w_out_layout="df")
    w_in, w_out = (as_given(random_packed(kind, shape)) for shape in ((3, 2, 128, 256), (3, 256, 128)))
    key = () if in_torch() else (jax.random.key(0),)
    new = ab.init_lora(*key, w_in, w_out, 4, **layouts)
    assert [tuple(factor.shape) for factor in new] == [(3, 256, 4), (3, 4, 2, 128), (3, 128, 4), (3, 4, 256)]
    with pytest.raises(TypeError, match=rf"^w_in: got {type(w_in).__name__}\(.*\), expected plain weights"):
        ab.merge_lora(w_in, w_out, new, **layouts)

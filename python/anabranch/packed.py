"""Packed weights of the experts (MXFP4 and FP8 blocks): what both front ends share.

A packed matrix stands in the place of w_in or w_out. Sizes: E experts, D model width, F expert width, P parts of w_in;
C is the contracted dimension of a matrix in the forward pass, N the other one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from anabranch import checks
from anabranch.layouts import Layouts
from anabranch.precision import BLOCK, FP8

#: Elements of a row that share a scale in MXFP4, and bytes that they take.
MX_BLOCK = 32
MX_BYTES = MX_BLOCK // 2
#: ab_mxfp4_scales by name, the default first.
SCALE_RULES = {"floor": 0, "ceil": 1}


class Mxfp4(NamedTuple):
    """Weights in MXFP4: elements of 4 bits, with a scale of one byte for 32 consecutive elements of a row.

    Element 2j of a block is the low half of byte j, element 2j + 1 the high half.

    `pack_mxfp4` rounds elements to nearest, ties to even; a block with a NaN or an infinity becomes NaN. The scale 2^k
    of a block follows from its largest magnitude m by a rule. "floor": k = floor(log2 m) - 2, the rule of OCP, with
    which magnitudes above 6 * 2^k become 6 * 2^k. "ceil": k = ceil(log2(m / 6)), with which none is clipped. `unpack`
    returns values that are exact in float32 and bfloat16, up to overflow, and rounded once in float16.

    Attributes:
      codes: uint8 [..., N, C/32, 16]; for w_in [E, P, F, D/32, 16] ("pfd") or [E, F, P, D/32, 16] ("fpd"), for w_out
        [E, D, F/32, 16] ("df").
      scales: uint8 or float8_e8m0fnu [..., N, C/32]: the scale is 2^(byte - 127); 255 is NaN.

    Raises:
      TypeError, ValueError: by the function that takes the weights: a dtype or shape differs, C is not a multiple of
        32, `w_in_layout` or `w_out_layout` is none of those above, or precision is "fp8". The message names the field,
        such as "w_in.codes".

    Gradients: none. A derivative with respect to the weights raises in JAX, tensors that require a gradient raise in
    PyTorch. Source: semantics, section 13; OCP Microscaling Formats (MX) v1.0.

    >>> from anabranch.jax import moe, pack_mxfp4
    >>> w_in, w_out = pack_mxfp4(jnp.ones((4, 2, 64, 32))), pack_mxfp4(jnp.ones((4, 32, 64)))
    >>> x, gate = jnp.ones((3, 32)), jnp.zeros((32, 4))
    >>> moe(x, gate, w_in, w_out, topk=2, w_in_layout="pfd", w_out_layout="df").output.shape
    (3, 32)
    """

    codes: Any
    scales: Any

    def to(self, device: Any) -> Self:
        """These weights on another device; for tensors of PyTorch."""
        return type(self)(*(part.to(device) for part in self))


class Fp8Blocks(NamedTuple):
    """Weights as e4m3 numbers, with a scale for every block of 128 x 128.

    `pack_fp8` packs weights. `unpack` rounds their values to float32 and then to the requested dtype. The
    "weight_scale_inv" of checkpoints multiplies: it is this scale.

    Attributes:
      q: float8_e4m3fn [..., N, C]; for w_in [E, P, F, D] ("pfd"), for w_out [E, D, F] ("df").
      scales: [..., N/128, C/128], float32, bfloat16, float8_e8m0fnu, or uint8: then the scale is 2^(byte - 127).

    Raises:
      TypeError, ValueError: by the function that takes the weights: a dtype or shape differs, N or C is not a multiple
        of 128, or `w_in_layout` or `w_out_layout` is not the one above. The message names the field, such as "w_in.q".

    Gradients: none. A derivative with respect to the weights raises in JAX, tensors that require a gradient raise in
    PyTorch. Source: semantics, sections 11 (Q2) and 13.

    >>> from anabranch.jax import pack_fp8, unpack
    >>> weights = pack_fp8(jnp.full((2, 128, 256), 3.0))
    >>> weights.q.shape, weights.scales.shape, float(unpack(weights, jnp.float32)[0, 0, 0])
    ((2, 128, 256), (2, 1, 2), 3.0)
    """

    q: Any
    scales: Any

    def to(self, device: Any) -> Self:
        """These weights on another device; for tensors of PyTorch."""
        return type(self)(*(part.to(device) for part in self))


FORMATS = (Mxfp4, Fp8Blocks)
_BYTES = ("uint8", "float8_e8m0fnu")
_SCALES: Mapping[type, tuple[str, ...]] = {Mxfp4: _BYTES, Fp8Blocks: ("float32", "bfloat16", *_BYTES)}
_LAYOUTS: Mapping[type, Mapping[str, tuple[str, ...]]] = {
    Mxfp4: {"w_in": ("pfd", "fpd"), "w_out": ("df",)},
    Fp8Blocks: {"w_in": ("pfd",), "w_out": ("df",)},
}


#: For each axis of a quantised matrix in the backward pass and of its scales, the axis of an Fp8Blocks.
BACKWARD_AXES = {"w_in": (0, 3, 1, 2), "w_out": (0, 2, 1)}
_NAMES = "an Mxfp4 or an Fp8Blocks"


def is_packed(value: Any) -> bool:
    """Whether a value is a packed matrix."""
    return isinstance(value, FORMATS)


def check_plain(**weights: Any) -> None:
    """Raises TypeError for packed matrices where plain weights are needed."""
    for name, value in weights.items():
        if is_packed(value):
            raise TypeError(f"{name}: got {checks.describe(value)}, expected plain weights (see `unpack`)")


def refuse_without_scales(name: str, value: Any) -> None:
    """Raises TypeError for an array that can only be a part of a packed matrix."""
    if str(getattr(value, "dtype", "")).removeprefix("torch.") in ("uint8", "int8", "float8_e4m3fn"):
        raise TypeError(
            f"{name}: got {checks.describe(value)} without scales, expected floats, {_NAMES}; other packed formats "
            "such as GGUF, NVFP4 and MXFP8 are not supported"
        )


def require_packed(name: str, value: Any) -> None:
    """Raises TypeError for other values than packed matrices."""
    if not is_packed(value):
        raise TypeError(f"{name}: got {checks.describe(value)}, expected {_NAMES}")


def check_whole_blocks(value: Any, block: int, axes: int) -> None:
    """Raises ValueError if blocks do not divide the last `axes` axes of the weights `w`, which are to be packed."""
    if any(size % block for size in value.shape[-axes:]):
        last = "a last dimension that is a multiple" if axes == 1 else "last dimensions that are multiples"
        raise ValueError(f"w: got {checks.describe(value)}, expected {last} of {block}")


def parts_of(value: Any) -> tuple[Any, Any]:
    """The array that stands for a matrix, and its scales; None for a plain matrix."""
    return tuple(value) if is_packed(value) else (value, None)  # type: ignore[return-value]


def logical_shape(shape: Sequence[Any], *, mxfp4: bool) -> tuple[Any, ...]:
    """The shape of the weights that an array stands for. mxfp4: it contains the codes of an Mxfp4."""
    return (*shape[:-2], shape[-2] * MX_BLOCK) if mxfp4 else tuple(shape)


def _shape(array: Any) -> tuple[Any, ...]:
    """The shape of an argument; () if it is no array."""
    shape = getattr(array, "shape", ())
    return tuple(shape) if isinstance(shape, tuple) else ()


def axes_of(value: Any) -> tuple[Any, ...]:
    """The axes for `check_packed` of a packed matrix of any size."""
    shape = _shape(value[0])
    if len(shape) > 1:
        shape = logical_shape(shape, mxfp4=isinstance(value, Mxfp4))
    return (*shape[:-2], ("N", shape[-2]), ("C", shape[-1])) if len(shape) > 1 else ("N", "C")


def _refuse_other_formats(name: str, value: Any) -> None:
    """Raises for arrays of formats that look like those of this module."""
    scales = value[1]
    dtype = str(getattr(scales, "dtype", "")).removeprefix("torch.")
    shape, blocks = map(_shape, value)
    if isinstance(value, Mxfp4) and (dtype == "float8_e4m3fn" or (len(shape) > 1 and shape[-1] == MX_BYTES // 2)):
        raise ValueError(
            f"{name}: got NVFP4 (blocks of 16, scales {checks.describe(scales)}), expected MXFP4 or FP8 blocks; NVFP4 "
            "is not supported"
        )
    is_mxfp8 = dtype in _BYTES and len(shape) > 1 and blocks == (*shape[:-1], shape[-1] // MX_BLOCK)
    if isinstance(value, Fp8Blocks) and is_mxfp8:
        raise ValueError(
            f"{name}: got MXFP8 (scales {checks.describe(scales)} for blocks of 1 x 32), expected scales of blocks of "
            "128 x 128; MXFP8 is not supported"
        )


def check_packed(
    check: Callable[[str, Any, Sequence[Any], Sequence[Any]], Any],
    dtype_of: Callable[[str], Any],
    name: str,
    value: Any,
    axes: Sequence[Any],
) -> Any:
    """Checks a packed matrix.

    Args:
      check: the front end's check of an array: (name, value, dtypes, shape) -> array.
      dtype_of: the dtype that the check takes, by its name.
      name: the argument.
      value: an Mxfp4 or an Fp8Blocks.
      axes: the expected axes of the weights, each a name or (name, size), with N and C last.

    Returns:
      The packed matrix with the checked arrays.
    """
    _refuse_other_formats(name, value)
    kind, scale_dtypes = type(value), tuple(map(dtype_of, _SCALES[type(value)]))
    *leading, n, c = axes
    inner: tuple[Any, ...]
    if isinstance(value, Mxfp4):
        field, dtype, inner = f"{name}.codes", "uint8", (n, _part(c, MX_BLOCK), MX_BYTES)
    else:
        field, dtype, inner = f"{name}.q", "float8_e4m3fn", (n, c)
    for axis in (c,) if kind is Mxfp4 else (n, c):
        _check_width(field, value[0], axis, MX_BLOCK if kind is Mxfp4 else BLOCK)
    array = check(field, value[0], (dtype_of(dtype),), (*leading, *inner))
    sizes = array.shape[: len(leading)]
    if kind is Mxfp4:
        blocks: tuple[Any, ...] = tuple(array.shape[len(leading) : -1])
    else:
        blocks = tuple(size // BLOCK for size in array.shape[len(leading) :])
        for axis, size in zip((n, c), array.shape[len(leading) :], strict=True):
            _check_width(field, array, (axis[0] if isinstance(axis, tuple) else axis, size), BLOCK)
    scales = check(f"{name}.scales", value[1], scale_dtypes, (*sizes, *blocks))
    return kind(array, scales)


def _part(axis: Any, block: int) -> Any:
    """The axis of blocks."""
    return (f"{axis[0]}/{block}", axis[1] // block) if isinstance(axis, tuple) else f"{axis}/{block}"


def _check_width(name: str, array: Any, axis: Any, block: int) -> None:
    """Refuses a width that would cut a block."""
    if isinstance(axis, tuple) and isinstance(axis[1], int) and axis[1] % block:
        raise ValueError(
            f"{name}: got {checks.describe(array)} with {axis[0]}={axis[1]}, expected {axis[0]} a multiple of {block}, "
            "the size of a block"
        )


def check_layout(name: str, value: Any, layouts: Layouts) -> None:
    """Refuses a layout in which the forward pass does not sum along the innermost axis of a packed matrix."""
    allowed = _LAYOUTS[type(value)][name]
    layout = getattr(layouts, name)
    if layout not in allowed:
        raise ValueError(
            f"{name}_layout: got {layout!r} with {name} as {type(value).__name__}, expected "
            f"{' or '.join(map(repr, allowed))}"
        )


def check_precision(precision: int, quantized: Any, **weights: Any) -> None:
    """Checks packed matrices against the options precision and quantized."""
    for name, value in weights.items():
        if not is_packed(value):
            continue
        if precision == FP8 and isinstance(value, Mxfp4):
            raise ValueError(f'{name}: got an Mxfp4 with precision="fp8", expected "highest", "tf32" or an Fp8Blocks')
        if quantized is not None:
            raise ValueError(
                f"quantized: got {type(quantized).__name__} beside {name} as {type(value).__name__}, expected None"
            )


#: The choices of the option `packed` of a module: the kinds of its weights.
KINDS: Mapping[str, Any] = {"mxfp4": Mxfp4, "fp8_blocks": Fp8Blocks}


def check_kind(packed: Any, layouts: Layouts, precision: str, **widths: int) -> str | None:
    """Checks the option `packed` of a module with these layouts. widths: D and F by the names of their arguments."""
    if packed is None:
        return None
    packed = checks.choice("packed", packed, tuple(KINDS))
    block = MX_BLOCK if packed == "mxfp4" else BLOCK
    for name, width in widths.items():
        if width % block:
            raise ValueError(f"{name}: got {width} with packed={packed!r}, expected a multiple of {block}")
    for name in ("w_in", "w_out"):
        allowed, layout = _LAYOUTS[KINDS[packed]][name], getattr(layouts, name)
        if layout not in allowed:
            raise ValueError(
                f"packed: got {packed!r} with {name}_layout {layout!r}, expected {' or '.join(map(repr, allowed))}"
            )
    if packed == "mxfp4" and precision == "fp8":
        raise ValueError("precision: got 'fp8' with packed='mxfp4', expected 'highest' or 'tf32'")
    return packed


def packed_shapes(packed: str, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of the arrays of packed weights [..., N, C] by field."""
    *leading, N, C = shape
    if packed == "mxfp4":
        blocks = (*leading, N, C // MX_BLOCK)
        return {"codes": ((*blocks, MX_BYTES), "uint8"), "scales": (blocks, "uint8")}
    return {"q": (tuple(shape), "float8_e4m3fn"), "scales": ((*leading, N // BLOCK, C // BLOCK), "float32")}


def scale_rule_number(value: Any) -> int:
    """Converts the argument `scale_rule`, one of `SCALE_RULES`."""
    return SCALE_RULES[checks.choice("scale_rule", value, tuple(SCALE_RULES))]

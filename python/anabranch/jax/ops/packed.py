"""Packed weights of the experts: packing, unpacking, and packed matrices as operands of the layer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi
from anabranch.jax.binding.sharding import TokenCall
from anabranch.jax.ops.quantized import QuantizedExperts, quantize_matrix
from anabranch.layouts import Layouts
from anabranch.packed import (
    BACKWARD_AXES,
    MX_BLOCK,
    MX_BYTES,
    Fp8Blocks,
    Mxfp4,
    axes_of,
    check_layout,
    check_packed,
    check_whole_blocks,
    is_packed,
    logical_shape,
    refuse_without_scales,
    require_packed,
    scale_rule_number,
)
from anabranch.precision import BLOCK, fp8_scales_number

Packed = Mxfp4 | Fp8Blocks


def _bytes(scales: jax.Array) -> jax.Array:
    """Scales of one byte as uint8, which the handlers take."""
    return jax.lax.bitcast_convert_type(scales, jnp.uint8) if scales.dtype == jnp.float8_e8m0fnu else scales


# ---------------------------------------------------------------- operands of the layer


def weight_shape(w: jax.Array) -> tuple[int, ...]:
    """The shape of the weights that an array stands for."""
    return logical_shape(w.shape, mxfp4=w.dtype == jnp.uint8)


def fp4_names(arrays: Mapping[str, jax.Array | None]) -> tuple[str, ...]:
    """The names of weights that are given as codes of MXFP4, for `ffi.call`."""
    weights = {name: array for name in ("w_in", "w_out", "w") if (array := arrays.get(name)) is not None}
    return tuple(name for name, array in weights.items() if array.dtype == jnp.uint8)


def check_weight(name: str, value: Any, dtypes: Sequence[str], layouts: Layouts, **sizes: Any) -> dict[str, Any]:
    """Checks w_in or w_out, plain or packed. sizes: by letter, see `Layouts.shape`.

    Returns:
      The array that stands for the matrix and the scales of a packed one, else None, by the names of operands.
    """
    shape, scales_name = layouts.shape(name, **sizes), f"{name}_block_scales"
    if not is_packed(value):
        refuse_without_scales(name, value)
        return {name: check.array(name, value, dtypes, shape), scales_name: None}
    check_layout(name, value, layouts)
    array, scales = check_packed(check.array, str, name, value, shape)
    return {name: array, scales_name: _bytes(scales)}


def packed_value(arrays: Mapping[str, Any], name: str) -> Any:
    """The weight of a name among the results of `check_weight`, plain or packed."""
    array, scales = arrays[name], arrays[f"{name}_block_scales"]
    return array if scales is None else (Mxfp4 if array.dtype == jnp.uint8 else Fp8Blocks)(array, scales)


def refuse_gradients(operands: Any, needed: Any) -> None:
    """Raises TypeError if a packed matrix or its scales need a gradient. needed: a bool for each operand."""
    for name in ("w_in", "w_out"):
        scales = f"{name}_block_scales"
        if getattr(operands, scales) is not None and (getattr(needed, name) or getattr(needed, scales)):
            raise _derivative_error(name)


def _derivative_error(name: str) -> TypeError:
    return TypeError(
        f"{name}: got a derivative with respect to a packed matrix, expected one with respect to other "
        "operands: packed weights have no gradient (apply jax.lax.stop_gradient to them)"
    )


@jax.custom_jvp
def _without_derivative(array: jax.Array) -> jax.Array:
    return array


@_without_derivative.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    """JAX evaluates this rule only for an array whose tangent is not a symbolic zero."""
    raise _derivative_error("packed")


def _float_scales(scales: jax.Array) -> jax.Array:
    """Scales as float32."""
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    exponent = scales.astype(jnp.uint32)
    bits = jnp.where(exponent == 0, jnp.uint32(0x00400000), exponent << 23)  # 2^-127 is a denormal number
    return jax.lax.bitcast_convert_type(jnp.where(exponent == 255, jnp.uint32(0x7FC00000), bits), jnp.float32)


def fp8_for_pass(operands: Any, layouts: Layouts, fp8_scales: int, *, backward: bool) -> QuantizedExperts:
    """The quantised weights that one pass needs, for operands of which one or both matrices are FP8 blocks.

    The other matrix is quantised here.
    """
    fields: dict[str, Any] = dict.fromkeys(QuantizedExperts._fields)
    for name in ("w_in", "w_out"):
        w, scales = getattr(operands, name), getattr(operands, f"{name}_block_scales")
        field = name if backward else f"{name}_transposed"
        if scales is not None:
            fields[field] = w.transpose(BACKWARD_AXES[name]) if backward else w
            fields[f"{name}_scales"] = _float_scales(scales).transpose(BACKWARD_AXES[name])
        else:
            order = layouts.order(name)
            fields[field], fields[f"{name}_scales"] = quantize_matrix(
                w, fp8_scales, transposed=not backward, order=order
            )
    return QuantizedExperts(**fields)


# ---------------------------------------------------------------- packing


def _matrices(array: jax.Array, axes: int) -> jax.Array:
    """Merges all but the last `axes` axes."""
    leading = array.ndim - axes
    return array.reshape(math.prod(array.shape[:leading]), *array.shape[leading:])


def _pack_mxfp4(scale_rule: int, w: jax.Array) -> tuple[jax.Array, ...]:
    rows = _matrices(w, 1)
    blocks = rows.shape[1] // MX_BLOCK
    results = ffi.call(
        "ab_xla_pack_mxfp4",
        {"w": rows},
        {
            "codes": jax.ShapeDtypeStruct((rows.shape[0], blocks, MX_BYTES), jnp.uint8),
            "scales": jax.ShapeDtypeStruct((rows.shape[0], blocks), jnp.uint8),
        },
        fp4=("codes",),
        scale_rule=scale_rule,
    )
    shape = (*w.shape[:-1], blocks)
    return results["codes"].reshape(*shape, MX_BYTES), results["scales"].reshape(shape)


def pack_mxfp4(w: jax.Array, scale_rule: str = "floor") -> Mxfp4:
    """Packs weights as MXFP4.

    Args:
      w: float32, bfloat16 or float16 [..., N, C], C a multiple of 32. Its leading dimensions may be sharded.
      scale_rule: "floor" or "ceil", see `Mxfp4`.

    Returns:
      An `Mxfp4`, 17/32 bytes per weight.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: none.

    >>> packed = pack_mxfp4(jnp.full((2, 64), 3.0))
    >>> packed.codes.shape, packed.scales.shape, float(unpack(packed, jnp.float32)[0, 0])
    ((2, 2, 16), (2, 2), 3.0)
    """
    w = jax.lax.stop_gradient(check.array("w", w, check.FLOATS, (..., "N", "C")))
    check_whole_blocks(w, MX_BLOCK, axes=1)
    leading = w.ndim - 2
    return Mxfp4(*TokenCall(_pack_mxfp4, scale_rule_number(scale_rule), (leading,), (leading,) * 2)(w))


def _pack_fp8(fp8_scales: int, w: jax.Array) -> tuple[jax.Array, ...]:
    q, scales = quantize_matrix(_matrices(w, 2), fp8_scales, transposed=False)
    return q.reshape(w.shape), scales.reshape(*w.shape[:-2], *scales.shape[1:])


def pack_fp8(w: jax.Array, fp8_scales: str = "float32") -> Fp8Blocks:
    """Packs weights as FP8 blocks with float32 scales.

    Args:
      w: float32, bfloat16 or float16 [..., N, C], N and C multiples of 128. Its leading dimensions may be sharded.
      fp8_scales: "float32" or "power_of_two", see `moe`.

    Returns:
      An `Fp8Blocks`, one byte per weight and scales.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: none.

    >>> packed = pack_fp8(jnp.full((3, 128, 256), 2.0))
    >>> packed.q.dtype.name, packed.scales.shape, float(unpack(packed, jnp.float32)[0, 0, 0])
    ('float8_e4m3fn', (3, 1, 2), 2.0)
    """
    w = jax.lax.stop_gradient(check.array("w", w, check.FLOATS, (..., "N", "C")))
    check_whole_blocks(w, BLOCK, axes=2)
    leading = w.ndim - 2
    return Fp8Blocks(*TokenCall(_pack_fp8, fp8_scales_number(fp8_scales), (leading,), (leading,) * 2)(w))


def _unpack(dtype: str, array: jax.Array, scales: jax.Array) -> tuple[jax.Array, ...]:
    shape, mxfp4 = weight_shape(array), array.dtype == jnp.uint8
    matrices = _matrices(array, 3 if mxfp4 else 2)
    w = jax.ShapeDtypeStruct((matrices.shape[0], *shape[-2:]), dtype)
    operands = {"packed": matrices, "scales": _matrices(scales, 2)}
    results = ffi.call("ab_xla_unpack", operands, {"w": w}, fp4=("packed",) if mxfp4 else ())
    return (results["w"].reshape(shape),)


def unpack(packed: Packed, dtype: Any) -> jax.Array:
    """The weights that a packed matrix stands for.

    Args:
      packed: an `Mxfp4` or an `Fp8Blocks`. Its leading dimensions may be sharded.
      dtype: float32, bfloat16 or float16.

    Returns:
      [..., N, C], rounded as `Mxfp4` and `Fp8Blocks` describe.

    Raises:
      TypeError, ValueError: an argument is wrong, the message names it; or a derivative with respect to `packed` is
        requested.

    Gradient: none.

    >>> packed = Mxfp4(jnp.full((1, 1, 16), 0x21, jnp.uint8), jnp.full((1, 1), 128, jnp.uint8))
    >>> unpack(packed, jnp.float32)[0, :4].tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    require_packed("packed", packed)
    dtype = check.dtype("dtype", dtype, check.FLOATS)
    axes = axes_of(packed)
    arrays = check_packed(check.array, str, "packed", packed, axes)
    array, scales = (
        jax.lax.stop_gradient(_without_derivative(a)) if jnp.issubdtype(a.dtype, jnp.inexact) else a for a in arrays
    )
    leading = len(axes) - 2
    (w,) = TokenCall(_unpack, dtype, (leading,) * 2, (leading,))(array, _bytes(scales))
    return w

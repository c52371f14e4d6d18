"""Quantised operands of the experts' GEMMs: e4m3 numbers with one float32 scale per block of 128."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi
from anabranch.layouts import Layouts
from anabranch.precision import BLOCK

E4M3 = "float8_e4m3fn"


class QuantizedOperand(NamedTuple):
    """A quantised GEMM operand: its numbers, and the scales of their blocks."""

    q: jax.Array
    """e4m3."""
    scales: jax.Array
    """float32."""


class QuantizedExperts(NamedTuple):
    """The result of `quantize_experts`: the experts' matrices as operands of FP8 GEMMs, forward and backward.

    Attributes:
      w_in: float8_e4m3fn [E, D, P, F], for gradients; None: omitted.
      w_in_transposed: float8_e4m3fn [E, P, F, D], for the forward pass.
      w_in_scales: float32 [E, D/128, P, F/128].
      w_out: float8_e4m3fn [E, F, D], for gradients; None: omitted.
      w_out_transposed: float8_e4m3fn [E, D, F], for the forward pass.
      w_out_scales: float32 [E, F/128, D/128].
    """

    w_in: jax.Array | None
    w_in_transposed: jax.Array | None
    w_in_scales: jax.Array | None
    w_out: jax.Array | None
    w_out_transposed: jax.Array | None
    w_out_scales: jax.Array | None

    @staticmethod
    def shapes(E: Any, D: Any, P: Any, F: Any, d: Any, f: Any) -> "dict[str, tuple[Any, ...]]":
        """The fields' shapes, or other values per axis; d and f: numbers of blocks of D and of F."""
        return {
            "w_in": (E, D, P, F),
            "w_in_transposed": (E, P, F, D),
            "w_in_scales": (E, d, P, f),
            "w_out": (E, F, D),
            "w_out_transposed": (E, D, F),
            "w_out_scales": (E, f, d),
        }

    def operand(self, name: str, transposed: bool) -> QuantizedOperand | None:
        """The operand "w_in" or "w_out"; None if it is omitted."""
        q = getattr(self, f"{name}_transposed" if transposed else name)
        return None if q is None else QuantizedOperand(q, getattr(self, f"{name}_scales"))


# ---------------------------------------------------------------- calls


def quantize_rows(x: jax.Array, fp8_scales: int) -> QuantizedOperand:
    """Q1 of x [R, D]: one scale per 128 consecutive elements of a row, [R, D/128]."""
    R, D = x.shape
    results = ffi.call(
        "ab_xla_quantize_rows",
        {"x": x},
        {"q": _e4m3(R, D), "scales": jax.ShapeDtypeStruct((R, D // BLOCK), jnp.float32)},
        fp8_scales=fp8_scales,
    )
    return QuantizedOperand(results["q"], results["scales"])


def _e4m3(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)


def _quantize(
    w: jax.Array, order: tuple[int, ...], fp8_scales: int, plain: bool, transposed: bool
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """(q, q_transposed, scales) of w, whose axes in the default order are `order`; None: not requested."""
    E, D, *parts, N = (w.shape[axis] for axis in order)
    results = ffi.call(
        "ab_xla_quantize_weights",
        {"w": w},
        {
            "q": _e4m3(E, D, *parts, N) if plain else None,
            "q_transposed": _e4m3(E, *parts, N, D) if transposed else None,
            "scales": jax.ShapeDtypeStruct((E, D // BLOCK, *parts, N // BLOCK), jnp.float32),
        },
        orders=None if list(order) == sorted(order) else {"w": "".join(map(str, order))},
        fp8_scales=fp8_scales,
    )
    return results["q"], results["q_transposed"], results["scales"]


def quantize_matrix(
    w: jax.Array, fp8_scales: int, *, transposed: bool, order: tuple[int, ...] = (0, 1, 2)
) -> QuantizedOperand:
    """Q2 of w [E, D, N], or transposed [E, N, D]; the scales are those of [D, N] in both cases.

    order: the axes of w in the default order, [E, D, N] or [E, D, P, F].
    """
    q, q_transposed, scales = _quantize(w, order, fp8_scales, not transposed, transposed)
    chosen = q_transposed if transposed else q
    assert chosen is not None
    return QuantizedOperand(chosen, scales)


def quantized_matrices(
    w_in: jax.Array, w_out: jax.Array, layouts: Layouts, fp8_scales: int, *, plain: bool, transposed: bool
) -> QuantizedExperts:
    """Q2 of both matrices of the experts, in the requested orientations."""
    w_in_arrays = _quantize(w_in, layouts.order("w_in"), fp8_scales, plain, transposed)
    w_out_arrays = _quantize(w_out, layouts.order("w_out"), fp8_scales, plain, transposed)
    return QuantizedExperts(*w_in_arrays, *w_out_arrays)


def for_pass(
    given: QuantizedExperts | None,
    w_in: jax.Array | None,
    w_out: jax.Array | None,
    layouts: Layouts,
    fp8_scales: int,
    *,
    backward: bool,
) -> QuantizedExperts:
    """The quantised weights that one pass needs: from `given` if it has them, otherwise quantised here."""
    names = ("w_in", "w_out") if backward else ("w_in_transposed", "w_out_transposed")
    if given is None or any(getattr(given, name) is None for name in names):
        assert w_in is not None and w_out is not None
        given = quantized_matrices(w_in, w_out, layouts, fp8_scales, plain=backward, transposed=not backward)
    fields = (*names, "w_in_scales", "w_out_scales")
    return QuantizedExperts(**{name: getattr(given, name) if name in fields else None for name in given._fields})


# ---------------------------------------------------------------- operands quantised by the caller


def check_quantized(value: Any, E: int, D: int, P: int, F: int) -> QuantizedExperts | None:
    """Checks the argument `quantized` against the sizes of the weights, which are multiples of a block."""
    if value is None:
        return None
    if not isinstance(value, QuantizedExperts):
        raise TypeError(f"quantized: got {type(value).__name__}, expected a QuantizedExperts, or None")
    sizes = ("E", E), ("D", D), ("P", P), ("F", F), ("D/128", D // BLOCK), ("F/128", F // BLOCK)
    for name, shape in QuantizedExperts.shapes(*sizes).items():
        array = getattr(value, name)
        if array is not None or name not in ("w_in", "w_out"):
            dtype = "float32" if name.endswith("scales") else E4M3
            check.array(f"quantized.{name}", array, (dtype,), shape)
    return value

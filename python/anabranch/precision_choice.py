"""Which precision is faster for a layer, "fp8" or "highest": a model of their times.

The model is for an H200 and stands on what was measured there; each constant names its source in docs/performance.md,
where a table compares its predictions with measured times.
"""

import os
from typing import Any, NamedTuple

from anabranch.precision import BLOCK

FORWARD, BACKWARD = "forward", "backward"
PASSES = (FORWARD, BACKWARD)
#: Dtypes of x whose FP8 products a GPU has.
DTYPES = ("bfloat16", "float16")
#: The compute capability of GPUs with FP8 kernels, and of those for which times are predicted.
CAPABILITY = "9.0"

_TERA = 1e12
#: Operations a second of 16-bit products and of the gradients of both matrices, which are 16-bit products with either
#: precision: fitted to 18 layers of "The whole layer, bfloat16" and "FP8". Power sets them: cuBLAS has 670 to 690.
RATE_16 = 674 * _TERA
RATE_WEIGHT_GRADIENTS = 588 * _TERA
#: Of FP8 products where the contraction is long, and the length at which half of that is left: fitted to "FP8".
RATE_FP8 = 1052 * _TERA
HALF_RATE_TERMS = 235
#: Bytes a second of a copy: "Router, T = 65536, bfloat16".
COPY = 4.29 * _TERA
#: The part of an epilogue's bytes that no product hides: fitted as the rates were, 16 bits and FP8.
EPILOGUE_16 = 0.91
EPILOGUE_FP8 = 0.55
#: Bytes a second, read and written, that weights (one orientation) and rows are quantised at: "FP8".
QUANTIZE_WEIGHTS = 3.2 * _TERA
QUANTIZE_ROWS = 3.5 * _TERA
#: Seconds of a quantiser that has next to nothing to do, assumed: about what any kernel takes.
QUANTIZER = 5e-6
#: Rows and columns of a tile: FP8 has one shape, 16 bits several, of which the narrowest wastes no columns.
TILE_ROWS, TILE_COLUMNS_FP8 = 128, 256


class LayerSize(NamedTuple):
    """What a device computes: T tokens, widths D and F, E experts, K experts a token, P parts of w_in (2: gated).

    Rows that stand by expert already are T = R, K = 1. On a mesh T, F and E are those of one device.
    """

    T: int
    D: int
    F: int
    E: int
    K: int
    P: int = 2


class Choice(NamedTuple):
    """The result of `choose_precision`.

    Attributes:
      precision: "fp8" or "highest".
      highest, fp8: predicted seconds of the experts in the wanted passes; None: FP8 can't be had, or not predicted.
      why: what keeps FP8 out; "": nothing, the times decide.
    """

    precision: str
    highest: float | None
    fp8: float | None
    why: str = ""


def choose_precision(
    size: LayerSize,
    *,
    dtype: str,
    capability: str | None,
    weight_bytes: int = 2,
    kept: tuple[str, ...] = (),
    passes: tuple[str, ...] = PASSES,
    width_shards: int = 1,
) -> Choice:
    """The faster precision for a layer's experts; "highest" where FP8 can't be had, never an error.

    Args:
      size: of the layer.
      dtype: of x.
      capability: of the GPUs that compute it, such as "9.0"; None: of no GPU, or of several kinds.
      weight_bytes: of an element of w_in and w_out as they are given.
      kept: the passes for which quantised experts are given; in the others a pass quantises them.
      passes: what is wanted of PASSES; the forward pass alone, or both, which a step of training is.
      width_shards: devices over which D of the weights is divided.

    >>> qwen3 = LayerSize(32768, 2048, 768, 128, 8)
    >>> choice = choose_precision(qwen3, dtype="bfloat16", capability="9.0")
    >>> choice.precision, round(1e3 * choice.highest, 1), round(1e3 * choice.fp8, 1)
    ('fp8', 13.8, 12.7)
    >>> choose_precision(qwen3._replace(T=2048), dtype="bfloat16", capability="9.0").precision
    'highest'
    >>> choose_precision(qwen3, dtype="bfloat16", capability=None)
    Choice(precision='highest', highest=None, fp8=None, why='no GPU of compute capability 9.0')
    """
    if why := why_not_fp8(size, dtype, capability, width_shards):
        return Choice("highest", None, None, why)
    highest = sum(seconds_in_16_bits(size, name, weight_bytes) for name in passes)
    fp8 = sum(seconds_in_fp8(size, name, weight_bytes, kept=name in kept) for name in passes)
    return Choice("fp8" if fp8 < highest else "highest", highest, fp8)


def why_not_fp8(size: LayerSize, dtype: str, capability: str | None, width_shards: int = 1) -> str:
    """What keeps FP8 out; "": nothing."""
    if capability != CAPABILITY:
        return f"no GPU of compute capability {CAPABILITY}"
    if os.environ.get("ANABRANCH_CUDA_PATH", "hopper") != "hopper":
        return "ANABRANCH_CUDA_PATH names another path than hopper"
    if dtype not in DTYPES:
        return f"x of {dtype}"
    if size.D % (BLOCK * width_shards) or size.F % BLOCK:
        return f"D or F of a device is no multiple of {BLOCK}"
    # Rows and scales of which the kernels have no count would be more than such a GPU holds.
    return "" if min(size) > 0 else "an empty layer"


def kept_passes(quantized: Any) -> tuple[str, ...]:
    """The passes for which a QuantizedExperts, or None, has what they multiply with."""
    if quantized is None:
        return ()
    return (FORWARD,) if quantized.w_in is None or quantized.w_out is None else PASSES


# ---------------------------------------------------------------- the model


def _touched(size: LayerSize) -> float:
    """Experts that are expected to have rows, of slots that are spread evenly."""
    return size.E * (1 - (1 - 1 / size.E) ** (size.T * size.K))


def _tile_rows(size: LayerSize) -> float:
    """Rows of all tiles: half a tile of every expert is empty on average, and it has at least one."""
    touched = _touched(size)
    return touched * max(TILE_ROWS, size.T * size.K / touched + TILE_ROWS / 2)


def _products(size: LayerSize, name: str) -> tuple[tuple[int, int, int, int], ...]:
    """Of each product with weights in a pass: its contraction and columns, and the bytes that its epilogue reads and
    writes for a row, in 16 bits and in FP8."""
    _, D, F, _, _, P = size
    h, a, rows = 2 * P * F, 2 * F, 2 * D
    if name == FORWARD:
        return (D, P * F, h + a, h + a // 2), (F, D, rows, rows)
    return (D, F, 2 * h + a, 2 * h + h // 2 + a), (P * F, D, rows, rows)


def _same_in_both(size: LayerSize, name: str) -> float:
    """The sum over a token's slots, and gradients of the weights."""
    T, D, F, E, K, P = size
    sums = 2 * (T * K * D + T * D) / COPY
    if name == FORWARD:
        return sums
    weights = (P + 1) * D * F
    return sums + 2 * T * K * weights / RATE_WEIGHT_GRADIENTS + 2 * E * weights / COPY


def seconds_in_16_bits(size: LayerSize, name: str, weight_bytes: int = 2) -> float:
    """Of a pass over the experts with precision "highest". Wider weights are rounded first."""
    rows, touched = _tile_rows(size), _touched(size)
    seconds = _same_in_both(size, name)
    for terms, columns, epilogue, _ in _products(size, name):
        multiplied = 2 * rows * terms * columns / RATE_16
        seconds += max(multiplied, 2 * touched * terms * columns / COPY)
        seconds += EPILOGUE_16 * size.T * size.K * epilogue / COPY
    rounded = 0 if weight_bytes == 2 else weight_bytes + 2
    return seconds + rounded * (size.P + 1) * size.E * size.D * size.F / COPY


def seconds_in_fp8(size: LayerSize, name: str, weight_bytes: int = 2, *, kept: bool = False) -> float:
    """Of a pass over the experts with precision "fp8"; kept: with weights that were quantised before."""
    T, D, F, E, K, P = size
    rows, touched = _tile_rows(size), _touched(size)
    seconds = _same_in_both(size, name) + 3 * T * D / QUANTIZE_ROWS + QUANTIZER  # x, or d_out
    for terms, columns, _, epilogue in _products(size, name):
        of_tiles = -(-columns // TILE_COLUMNS_FP8) * TILE_COLUMNS_FP8
        multiplied = 2 * rows * (terms + HALF_RATE_TERMS) * of_tiles / RATE_FP8
        seconds += max(multiplied, touched * terms * columns / COPY)
        seconds += EPILOGUE_FP8 * T * K * epilogue / COPY
    if kept:
        return seconds
    return seconds + (weight_bytes + 1) * (P + 1) * E * D * F / QUANTIZE_WEIGHTS + 2 * QUANTIZER

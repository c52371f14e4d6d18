"""Predicts whether precision "fp8" or "highest" is faster for a layer.

The model of the run time is for an H200 and fitted to measurements on it. Each constant names its source in
docs/performance.md, where a table compares predicted with measured times.
"""

import os
from typing import NamedTuple

from anabranch.precision import BLOCK

FORWARD, BACKWARD = "forward", "backward"
PASSES = (FORWARD, BACKWARD)
#: Dtypes of x for which a GPU has FP8 GEMMs.
DTYPES = ("bfloat16", "float16")
#: The compute capability of GPUs with FP8 kernels; times are predicted for these GPUs only.
CAPABILITY = "9.0"

_TERA = 1e12
#: Operations per second of 16-bit GEMMs, and of the weight gradients, which are 16-bit GEMMs with either precision.
#: Fitted to 18 layers of "The whole layer, bfloat16" and "FP8". Power limits both: cuBLAS reaches 670 to 690.
RATE_16 = 674 * _TERA
RATE_WEIGHT_GRADIENTS = 588 * _TERA
#: Operations per second of FP8 GEMMs with a long contraction, and the contraction length with half that rate. Fitted:
#: "FP8".
RATE_FP8 = 1052 * _TERA
HALF_RATE_TERMS = 235
#: Bytes per second of a copy: "Router, T = 65536, bfloat16".
COPY = 4.29 * _TERA
#: The fraction of an epilogue's memory traffic that does not overlap with a GEMM, in 16 bits and FP8. Fitted like the
#: rates.
EPILOGUE_16 = 0.91
EPILOGUE_FP8 = 0.55
#: Bytes per second, read and written, of quantising weights (one orientation) and rows: "FP8".
QUANTIZE_WEIGHTS = 3.2 * _TERA
QUANTIZE_ROWS = 3.5 * _TERA
#: Seconds of a quantiser with almost no work; assumed to be the time of any small kernel.
QUANTIZER = 5e-6
#: Rows and columns of a tile. FP8 has one tile shape; 16 bits has several, the narrowest of which wastes no columns.
TILE_ROWS, TILE_COLUMNS_FP8 = 128, 256


class LayerSize(NamedTuple):
    """The size of one device's work.

    T tokens, D model width, F expert width, E experts, K experts per token, P parts of w_in (2: gated, 1: ungated).
    For rows that are already grouped by expert, T = R and K = 1. On a mesh T, F and E are those of one device.
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
      highest, fp8: predicted seconds of the experts in the requested passes; None: FP8 is unsupported or not predicted.
      why: the reason why FP8 is unsupported; "": it is supported, and the times decide.
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
    """The faster precision for a layer's experts; "highest", not an error, if FP8 is unsupported.

    Args:
      size: the layer's size.
      dtype: the dtype of x.
      capability: the compute capability of the GPUs, such as "9.0"; None: no GPU, or GPUs of several kinds.
      weight_bytes: bytes per element of w_in and w_out as the caller passes them.
      kept: the passes for which quantised experts are given; the other passes quantise them.
      passes: the passes to predict: the forward pass alone, or both, as in a training step.
      width_shards: the number of devices over which D of the weights is divided.

    Returns:
      A `Choice`.

    Source: the model of the run time in this module, fitted to the measurements in docs/performance.md.

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
    """The reason why FP8 is unsupported; "" if it is supported."""
    if capability != CAPABILITY:
        return f"no GPU of compute capability {CAPABILITY}"
    if os.environ.get("ANABRANCH_CUDA_PATH", "hopper") != "hopper":
        return "ANABRANCH_CUDA_PATH names another path than hopper"
    if dtype not in DTYPES:
        return f"x of {dtype}"
    if size.D % (BLOCK * width_shards) or size.F % BLOCK:
        return f"D or F of a device is not a multiple of {BLOCK}"
    # No upper bound is checked: an H200 does not hold as many rows and scales as the kernels can count.
    return "" if min(size) > 0 else "an empty layer"


# ---------------------------------------------------------------- the model


def _touched(size: LayerSize) -> float:
    """The expected number of experts with rows, for assignments drawn uniformly at random."""
    return size.E * (1 - (1 - 1 / size.E) ** (size.T * size.K))


def _tile_rows(size: LayerSize) -> float:
    """Rows of all tiles. An expert with rows has at least one tile, and half of its last tile is empty on average."""
    touched = _touched(size)
    return touched * max(TILE_ROWS, size.T * size.K / touched + TILE_ROWS / 2)


def _gemms(size: LayerSize, name: str) -> tuple[tuple[int, int, int, int], ...]:
    """For each GEMM with weights in a pass: its contraction length and columns, and the bytes per row that its epilogue
    reads and writes, in 16 bits and in FP8."""
    _, D, F, _, _, P = size
    h, a, rows = 2 * P * F, 2 * F, 2 * D
    if name == FORWARD:
        return (D, P * F, h + a, h + a // 2), (F, D, rows, rows)
    return (D, F, 2 * h + a, 2 * h + h // 2 + a), (P * F, D, rows, rows)


def _same_in_both(size: LayerSize, name: str) -> float:
    """Seconds of the combine and of the weight gradients, which are the same with both precisions."""
    T, D, F, E, K, P = size
    sums = 2 * (T * K * D + T * D) / COPY
    if name == FORWARD:
        return sums
    weights = (P + 1) * D * F
    return sums + 2 * T * K * weights / RATE_WEIGHT_GRADIENTS + 2 * E * weights / COPY


def seconds_in_16_bits(size: LayerSize, name: str, weight_bytes: int = 2) -> float:
    """Seconds of a pass over the experts with precision "highest". Float32 weights are rounded first."""
    rows, touched = _tile_rows(size), _touched(size)
    seconds = _same_in_both(size, name)
    for terms, columns, epilogue, _ in _gemms(size, name):
        multiplied = 2 * rows * terms * columns / RATE_16
        seconds += max(multiplied, 2 * touched * terms * columns / COPY)
        seconds += EPILOGUE_16 * size.T * size.K * epilogue / COPY
    rounded = 0 if weight_bytes == 2 else weight_bytes + 2
    return seconds + rounded * (size.P + 1) * size.E * size.D * size.F / COPY


def seconds_in_fp8(size: LayerSize, name: str, weight_bytes: int = 2, *, kept: bool = False) -> float:
    """Seconds of a pass over the experts with precision "fp8"; kept: the weights are already quantised."""
    T, D, F, E, K, P = size
    rows, touched = _tile_rows(size), _touched(size)
    seconds = _same_in_both(size, name) + 3 * T * D / QUANTIZE_ROWS + QUANTIZER  # x, or d_out
    for terms, columns, _, epilogue in _gemms(size, name):
        padded_columns = -(-columns // TILE_COLUMNS_FP8) * TILE_COLUMNS_FP8
        multiplied = 2 * rows * (terms + HALF_RATE_TERMS) * padded_columns / RATE_FP8
        seconds += max(multiplied, touched * terms * columns / COPY)
        seconds += EPILOGUE_FP8 * T * K * epilogue / COPY
    if kept:
        return seconds
    return seconds + (weight_bytes + 1) * (P + 1) * E * D * F / QUANTIZE_WEIGHTS + 2 * QUANTIZER

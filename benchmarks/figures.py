"""Measurements of a layer as rows, and the kernels that its experts run on."""

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

from anabranch import _library
from anabranch.bench import BenchError
from benchmarks.shapes import LayerShape
from benchmarks.timing import Timing

GIB = 2**30
UNITS = {"cpu": "GFLOP/s", "cuda": "TFLOP/s"}
SCALES = {"GFLOP/s": 1e9, "TFLOP/s": 1e12}


class Memory(NamedTuple):
    """Bytes of the compiled forward and backward pass, from XLA's memory analysis."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def total(self) -> int:
        """Bytes in use while the program runs; aliased arguments and outputs count once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class Measured(NamedTuple):
    """Measurements of one layer by one implementation. None means not measured; `note` gives the reason.

    forward, both: times of the forward pass, and of forward and backward together.
    product: FLOP/s of the large GEMM before and after.
    product_by: library that computed that GEMM.
    largest_load: rows of the busiest expert divided by the mean.
    memory: XLA's memory analysis.
    peak: peak bytes in use on the device.
    note: what is missing and why, or "".
    path: our kernels that the experts ran on; None: none of ours.
    """

    forward: Timing | None = None
    both: Timing | None = None
    product: tuple[float, float] | None = None
    product_by: str | None = None
    largest_load: float | None = None
    memory: Memory | None = None
    peak: int | None = None
    note: str = ""
    path: str | None = None


def rates(shape: LayerShape, seconds: Mapping[str, float | None], device: str) -> dict[str, float | None]:
    """Returns milliseconds and FLOP/s of the passes forward, backward and both."""
    flops = {"forward": shape.forward_flops(), "backward": shape.backward_flops()}
    flops["both"] = flops["forward"] + flops["backward"]
    unit = UNITS[device]
    return {
        **{f"{name} ms": None if time is None else 1e3 * time for name, time in seconds.items()},
        **{
            f"{name} {unit}": None if time is None else flops[name] / time / SCALES[unit]
            for name, time in seconds.items()
        },
    }


def spread(times: Mapping[str, Timing | None]) -> dict[str, list[float]]:
    """Returns the lowest and highest milliseconds of each; see `Timing`."""
    return {f"{name} ms": [1e3 * t.low, 1e3 * t.high] for name, t in times.items() if t is not None}


def row(shape: LayerShape, routing: str, dtype: str, by: str, device: str, measured: Measured) -> dict[str, Any]:
    """Returns the row for the JSON file: milliseconds, FLOP/s, shares of the large GEMM's rate, and GiB.

    The time of the backward pass is the difference between both and forward.
    """
    times = {"forward": measured.forward, "both": measured.both}
    forward, both = (None if t is None else t.seconds for t in times.values())
    backward = None if forward is None or both is None else both - forward
    columns, unit = ("forward", "backward", "both"), UNITS[device]
    pass_rates = rates(shape, dict(zip(columns, (forward, backward, both), strict=True)), device)
    product = None if measured.product is None else sum(measured.product) / 2 / SCALES[unit]
    memory, needed = measured.memory, shape.step_bytes(4 if dtype == "float32" else 2)
    planned = {} if memory is None else {**memory._asdict(), "total": memory.total}
    shares = {name: pass_rates[f"{name} {unit}"] for name in columns}
    return {
        "T,D,F,E,K": str(shape),
        "routing": routing,
        "dtype": dtype,
        "by": by,
        "path": measured.path,
        **pass_rates,
        f"product {unit}": product,
        "product by": measured.product_by,
        **{f"{name} share": None if rate is None or not product else rate / product for name, rate in shares.items()},
        "largest load": measured.largest_load,
        "needed GiB": needed / GIB,
        **{f"{name} GiB": planned[name] / GIB if planned else None for name in (*Memory._fields, "total")},
        "total / needed": memory.total / needed if memory else None,
        "peak GiB": None if measured.peak is None else measured.peak / GIB,
        "host bound": [name for name, timing in times.items() if timing is not None and timing.host_bound],
        "note": measured.note,
        "spread": {
            **spread(times),
            f"product {unit}": None if measured.product is None else [r / SCALES[unit] for r in measured.product],
        },
    }


def experts_path(shape: LayerShape, dtype: str, w_in_layout: str = "dpf", w_out_layout: str = "fd") -> str:
    """Returns the kernels of a forward and backward pass on the current GPU (ab_cuda_experts_path).

    Args:
      shape: sizes of the layer.
      dtype: dtype of the operands.
      w_in_layout, w_out_layout: layouts of the weights, as in `moe`.

    Returns:
      One or more of "few_rows", "hopper" and "portable", joined by +.

    Raises:
      BenchError: no kernel supports the layer; the message gives the reason.
    """
    ask = _library.load_cuda().ab_cuda_experts_path
    ask.restype = _library.Status
    gated = 2
    sizes = map(ctypes.c_int64, (shape.T, shape.K, shape.E, shape.D, gated, shape.F))
    flags = map(ctypes.c_int32, (w_in_layout[-1] == "d", w_out_layout[-1] == "f", True))
    path = ctypes.c_char_p()
    status = ask(ctypes.c_int32(_library.DTYPES[dtype]), *sizes, *flags, ctypes.byref(path), None)
    if status.code != 0:
        raise BenchError(f"path: {status.message.decode()}")
    assert path.value is not None
    return path.value.decode()

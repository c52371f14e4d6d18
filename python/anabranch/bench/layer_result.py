"""What was measured of a layer on a GPU, as rows and as tables."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench.gpu import Timing
from anabranch.bench.layer_shape import LayerShape

GIB = 2**30


class Memory(NamedTuple):
    """Bytes of the compiled forward and backward pass, as XLA plans them."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def total(self) -> int:
        """Held while the program runs; what is both argument and output counts once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class LayerTimes(NamedTuple):
    """Of one call on all ranks of a mesh, and how many slots it dropped."""

    forward: Timing
    both: Timing
    dropped: int


class Measured(NamedTuple):
    """One layer by one implementation. None: not measured, and `note` says why.

    forward, both: time of the forward pass, and of forward and backward.
    product: FLOP/s of the large product before and after.
    product_by: whose kernel that was.
    largest_load: rows of the busiest expert over the mean.
    memory: what XLA says.
    peak: bytes of the device's memory that were in use at most.
    note: "" or what is missing and why.
    path: which of our kernels the experts ran on; None: on none.
    auto: what precision="auto" chooses for such a layer there; None: experts are not ours.
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
    auto: str | None = None


def row(shape: LayerShape, routing: str, dtype: str, by: str, measured: Measured) -> dict[str, Any]:
    """The row for the JSON file: milliseconds, TFLOP/s, shares of the large product's rate, and GiB.

    The backward pass is the difference of the two medians; `spread` has the 10th and 90th percentiles.
    """
    times = {"forward": measured.forward, "both": measured.both}
    seconds = {name: timing and timing.median for name, timing in times.items()}
    seconds["backward"] = (
        seconds["both"] - seconds["forward"] if seconds["both"] is not None and seconds["forward"] is not None else None
    )
    flops = {"forward": shape.forward_flops(), "backward": shape.backward_flops()}
    flops["both"] = flops["forward"] + flops["backward"]
    rates = {name: None if value is None else flops[name] / value for name, value in seconds.items()}
    product = measured.product and sum(measured.product) / 2
    memory, needed = measured.memory, shape.step_bytes(4 if dtype == "float32" else 2)
    planned = {} if memory is None else {**memory._asdict(), "total": memory.total}
    columns = ("forward", "backward", "both")
    return {
        "T,D,F,E,K": str(shape),
        "routing": routing,
        "dtype": dtype,
        "by": by,
        "path": measured.path,
        "auto": measured.auto,
        **{f"{name} ms": None if seconds[name] is None else 1e3 * seconds[name] for name in columns},
        **{f"{name} TFLOP/s": None if rates[name] is None else rates[name] / 1e12 for name in columns},
        "product TFLOP/s": None if product is None else product / 1e12,
        "product by": measured.product_by,
        **{f"{name} share": None if rates[name] is None or not product else rates[name] / product for name in columns},
        "largest load": measured.largest_load,
        "needed GiB": needed / GIB,
        **{f"{name} GiB": planned[name] / GIB if planned else None for name in (*Memory._fields, "total")},
        "total / needed": memory.total / needed if memory else None,
        "peak GiB": None if measured.peak is None else measured.peak / GIB,
        "host bound": [name for name, timing in times.items() if timing is not None and timing.host_bound],
        "note": measured.note,
        "spread": {
            **{f"{name} ms": [1e3 * t.low, 1e3 * t.high] for name, t in times.items() if t is not None},
            "product TFLOP/s": None if measured.product is None else [rate / 1e12 for rate in measured.product],
        },
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows as a table of rates and one of memory."""
    what = ("T,D,F,E,K", "routing", "by")
    passes = ("forward", "backward", "both")
    rates = (
        *(f"{name} ms" for name in ("forward", "backward")),
        *(f"{name} TFLOP/s" for name in (*passes, "product")),
        *(f"{name} share" for name in passes),
        "largest load",
    )
    memory = ("arguments", "outputs", "aliased", "temporaries", "total", "needed", "peak")

    def starred(row: Mapping[str, Any], name: str) -> Any:
        bound = {"forward ms": ["forward"], "backward ms": ["forward", "both"]}.get(name, [])
        star = row[name] is not None and any(part in row["host bound"] for part in bound)
        return f"{row[name]:.3g}*" if star else row[name]

    return {
        "rates": [{name: starred(row, name) for name in (*what, "path", "auto", *rates, "note")} for row in rows],
        "memory of forward and backward, GiB": [
            {
                **{name: row[name] for name in what},
                **{name: row[f"{name} GiB"] for name in memory},
                "total / needed": row["total / needed"],
            }
            for row in rows
            if row["total GiB"] is not None or row["peak GiB"] is not None
        ],
    }

"""What was measured of a layer in torch, as rows and as tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench.layer_shape import LayerShape

PASSES = ("forward", "both")
RATES = {"GFLOP/s": 1e9, "TFLOP/s": 1e12}
JIT = "jit"
"""How a layer through JAX is called: one program, as a graph is."""


def row(
    shape: LayerShape,
    dtype: str,
    by: str,
    mode: str,
    *,
    seconds: Mapping[str, float] | None = None,
    host_seconds: Mapping[str, float] | None = None,
    spread: Mapping[str, Sequence[float]] | None = None,
    rate: str = "TFLOP/s",
    path: str | None = None,
    auto: str | None = None,
    note: str = "",
) -> dict[str, Any]:
    """A row for the JSON file: milliseconds and rates of PASSES, and microseconds of the host; None: not measured.

    rate: the unit, out of RATES.
    path: which of our kernels the experts ran on, of a GPU's.
    auto: what precision="auto" chooses for such a layer there.
    """
    seconds, host_seconds = seconds or {}, host_seconds or {}
    forward = shape.forward_flops()
    flops = {"forward": forward, "both": forward + shape.backward_flops()}
    return {
        "T,D,F,E,K": str(shape),
        "dtype": dtype,
        "by": by,
        "mode": mode,
        "path": path,
        "auto": auto,
        **{f"{name} ms": 1e3 * seconds[name] if name in seconds else None for name in PASSES},
        **{f"{name} {rate}": flops[name] / seconds[name] / RATES[rate] if name in seconds else None for name in PASSES},
        **{f"host {name} us": 1e6 * host_seconds[name] if name in host_seconds else None for name in PASSES},
        "note": note,
        "spread": {f"{name} ms": [1e3 * t for t in times] for name, times in (spread or {}).items()},
    }


def with_ratios(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with "x forward" and "x both": their times over those of moe, called alike, that came before.

    MoE in "reduce-overhead" and a program of JAX's are compared with moe in a graph.

    >>> shape = LayerShape(8, 8, 8, 8, 2)
    >>> of = [("moe", "graph", 2.0), ("MoE", "graph", 3.0), ("jax", "jit", 1.0), ("MoE", "eager", 1.0)]
    >>> rows = [row(shape, "float32", by, mode, seconds={"both": time}) for by, mode, time in of]
    >>> [found["x both"] for found in with_ratios(rows)]
    [1.0, 1.5, 0.5, None]
    """
    base: dict[Any, dict[str, Any]] = {}
    for found in rows:
        case = found["T,D,F,E,K"], found["dtype"]
        if found["by"] == "moe":
            base[*case, found["mode"]] = found
        like = "graph" if found["mode"] in (JIT, "reduce-overhead") else found["mode"]
        ours = base.get((*case, like), {})
        ratios = {}
        for name in PASSES:
            time, of_moe = found[f"{name} ms"], ours.get(f"{name} ms")
            ratios[f"x {name}"] = time / of_moe if time is not None and of_moe is not None else None
        yield found | ratios


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows as one table, with paths and choices where there are any."""
    figures = [f"{name} {unit}" for unit in ("ms", *RATES) for name in PASSES]
    figures += [f"x {name}" for name in PASSES] + [f"host {name} us" for name in PASSES]
    of_gpu = [name for name in ("path", "auto") if any(found[name] for found in rows)]
    names = ("T,D,F,E,K", "dtype", "by", "mode", *of_gpu, *figures, "note")
    return {"": [{name: found[name] for name in names if name in found} for found in rows]}

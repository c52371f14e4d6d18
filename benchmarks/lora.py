"""Low-rank adapters (LoRA) of frozen experts in PyTorch, beside frozen experts, full training and merged adapters."""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import flags, timing
from benchmarks.shapes import ITEMSIZES, NAMED, LayerShape
from benchmarks.tables import selected

CAPTION = """moe() from x [T, D] to the output. forward: without gradients; both: forward and backward, with the
gradient of x and of what is trained. frozen: nothing is trained; full: all weights; lora: float32 factors of w_in and
w_out of that rank; merged: the same factors, but every step computes W + s B A for all experts, in the weights' dtype.
x frozen: the time of both divided by that of frozen. MiB: peak memory of both, less what existed before the call. On a
GPU, times are of CUDA graphs, and so exclude the host's time"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}
SHAPES = (*(NAMED["qwen3-30b"]._replace(T=T) for T in (4096, 8192)), NAMED["gpt-oss"]._replace(T=8192))
OPTIONS = {
    **flags.shapes("the layers of Qwen3-30B with T = 4096 and 8192, and of gpt-oss-20b with T = 8192"),
    "--rank": {
        "type": flags.positive,
        "metavar": "R",
        "action": "append",
        "help": "ranks of the adapters; default: 16, 64, 256",
    },
    "--shared": {
        "metavar": "FACTOR",
        "choices": ("a_in", "b_in", "a_out", "b_out"),
        "action": "append",
        "default": [],
        "help": "factors that all experts share, of a_in, b_in, a_out, b_out; default: none",
    },
}

Call = Callable[[], Any]


def _merged(weight: Any, a: Any, b: Any) -> Any:
    """Returns weight + A B for weights [E, D, N], in the weights' dtype, as PEFT computes it."""
    import torch

    a, b = (factor.to(weight.dtype).expand(weight.shape[0], *factor.shape[1:]) for factor in (a, b))
    return torch.baddbmm(weight, a, b)


def _case(
    shape: LayerShape, dtype: str, device: str, kind: str, rank: int, shared: Sequence[str], seed: int
) -> dict[str, Call]:
    """Returns the calls of one implementation by pass."""
    import torch

    from anabranch.torch import Lora, init_lora, moe

    normal = timing.normal_on(device, dtype, seed)
    T, D, F, E, K = shape
    x, d_out = normal(T, D).requires_grad_(), normal(T, D)
    gate = normal(D, E, scale=D**-0.5)
    w_in, w_out = normal(E, D, 2, F, scale=D**-0.5), normal(E, F, D, scale=F**-0.5)
    leaves = [x]
    factors: Lora | None = None
    if kind == "full":
        leaves += [weight.requires_grad_() for weight in (gate, w_in, w_out)]
    elif kind != "frozen":
        factors = init_lora(w_in, w_out, rank, shared=tuple(shared))
        for b in (factors.b_in, factors.b_out):  # zeros
            b.normal_(std=rank**-0.5)
        leaves += [factor.requires_grad_() for factor in factors]

    def layer() -> Any:
        if kind == "merged" and factors is not None:
            up = _merged(w_in.flatten(2), factors.a_in, factors.b_in.flatten(2)).view_as(w_in)
            return moe(x, gate, up, _merged(w_out, factors.a_out, factors.b_out), topk=K).output
        return moe(x, gate, w_in, w_out, topk=K, lora=factors).output

    def forward() -> Any:
        with torch.no_grad():
            return layer()

    def both() -> Any:
        output = layer()
        return output, *torch.autograd.grad(output, leaves, d_out)

    return {"forward": forward, "both": both}


def _peak_mib(call: Call, device: str) -> float | None:
    """Peak memory of a call beyond what is allocated before it; None: not on a GPU."""
    if device != "cuda":
        return None
    torch = timing.torch_on(device)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _row(
    shape: LayerShape, dtype: str, options: argparse.Namespace, kind: str, rank: int, frozen: float | None
) -> dict[str, Any]:
    """Measures one implementation. frozen: milliseconds of both passes of the frozen layer, if known."""
    torch = timing.torch_on(options.device)
    count = timing.sets_past_cache(options.device, shape.operand_bytes(ITEMSIZES[dtype]), least=1)
    make = functools.partial(_case, shape, dtype, options.device, kind, rank, options.shared)
    row: dict[str, Any] = {"T,D,F,E,K": str(shape), "dtype": dtype, "by": kind, "rank": rank or None}
    sets: list[dict[str, Call]] = []
    calls: dict[str, list[Call]] = {}
    try:
        sets = [make(seed) for seed in range(count)]
        row["MiB"] = _peak_mib(sets[0]["both"], options.device)
        calls = {name: [one[name] for one in sets] for name in ("forward", "both")}
        settings: dict[str, Any] = {} if options.device == "cpu" else {"least_calls": 4, "seconds": 40e-3}
        times = timing.times_of(options.device, calls, quick=options.quick, **settings)
    except torch.cuda.OutOfMemoryError:
        return row | {"note": "out of memory"}
    finally:
        sets, calls = [], {}
        if options.device == "cuda":
            torch.cuda.empty_cache()
    row |= {f"{name} ms": time.seconds * 1e3 for name, time in times.items()}
    return row | {"x frozen": row["both ms"] / frozen if frozen else 1.0}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, dtype, implementation and rank.

    Raises:
      BenchError: an argument is invalid, or this machine lacks something.
    """
    timing.torch_on(options.device)
    for shape in flags.sized(options.shape or SHAPES, options.tokens, options.quick):
        for dtype in options.dtype:
            frozen = None
            ranks = options.rank or (16, 64, 256)
            cases = [("frozen", 0), ("full", 0), *(("lora", rank) for rank in ranks), ("merged", ranks[0])]
            for kind, rank in cases:
                row = _row(shape, dtype, options, kind, rank, frozen)
                frozen = frozen or row.get("both ms")
                yield row


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table."""
    return {
        "": selected(rows, ["T,D,F,E,K", "dtype", "by", "rank", "forward ms", "both ms", "x frozen", "MiB", "note"])
    }

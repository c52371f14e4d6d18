"""Host time of the layer in PyTorch: how long a call takes until it returns."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import flags, timing
from benchmarks.shapes import LayerShape

CAPTION = """microseconds per call until it returns, best (median) of the series of calls. both: forward and backward,
with gradients of x and all weights; one thread: the backward pass on the calling thread, see
torch.autograd.set_multithreading_enabled; no_grad: forward without gradients. floor: an autograd function that does
nothing, with the same gradients as moe. On a GPU, the launches of a series fit the queue, so the GPU time of a small
layer does not count. On the CPU: CPU time of one thread, with the computation"""

DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
DEFAULT = LayerShape(64, 64, 64, 8, 2)
OPTIONS = flags.shapes("64,64,64,8,2")


def _layers(shape: LayerShape, dtype: str, device: str) -> dict[str, tuple[Callable[[], Any], list[Any]]]:
    """Forward passes by name, and the tensors that get a gradient."""
    import torch

    from anabranch.torch import MoE, moe

    normal = timing.normal_on(device, dtype, 0)
    T, D, F, E, K = shape
    x, gate, w_in, w_out = (normal(*size).requires_grad_() for size in ((T, D), (D, E), (E, D, 2, F), (E, F, D)))
    module = MoE(D, F, E, K).to(device, x.dtype)

    class Floor(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.save_for_backward(*given)
            return given[0].view_as(given[0])

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return ctx.saved_tensors

    weights = [x, gate, w_in, w_out]
    return {
        "moe": (lambda: moe(*weights, topk=K).output, weights),
        "MoE": (lambda: module(x).output, [x, *module.parameters()]),
        "floor": (lambda: Floor.apply(*weights), weights),
    }


def _calls(forward: Callable[[], Any], leaves: list[Any]) -> dict[str, Callable[[], Any]]:
    """The timed calls by column. leaves: the tensors that get a gradient; the first has the shape of the output."""
    import torch

    cotangent = torch.randn_like(leaves[0])

    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, cotangent)

    def one_thread() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    return {"forward": forward, "no_grad": torch.no_grad()(forward), "both": both, "both, one thread": one_thread}


def _microseconds(call: Callable[[], Any], device: str, quick: bool) -> list[float]:
    """The time per call of each series."""
    import torch

    clock = time.thread_time if device == "cpu" else time.perf_counter
    calls, series = (5, 2) if quick else (50, 20)
    times = []
    for _ in range(series + 1):
        start = clock()
        for _ in range(calls):
            call()
        times.append(1e6 * (clock() - start) / calls)
        if device == "cuda":
            torch.cuda.synchronize()
    return times[1:]


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape and layer.

    Raises:
      BenchError: this machine lacks something.
    """
    torch = timing.torch_on(options.device)
    if options.device == "cpu":
        torch.set_num_threads(1)
    for shape in flags.sized(options.shape or [DEFAULT], options.tokens, options.quick):
        for dtype in options.dtype:
            for name, (forward, leaves) in _layers(shape, dtype, options.device).items():
                row: dict[str, Any] = {"T,D,F,E,K": str(shape), "dtype": dtype, "call": name}
                for column, call in _calls(forward, leaves).items():
                    times = _microseconds(call, options.device, options.quick)
                    row |= {column: min(times), f"median {column}": statistics.median(times)}
                yield row


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the table of all rows: a cell is "best (median)"."""

    def cell(row: Mapping[str, Any], name: str) -> Any:
        return f"{row[name]:.0f} ({row[f'median {name}']:.0f})" if f"median {name}" in row else row[name]

    return {"": [{name: cell(row, name) for name in row if not name.startswith("median ")} for row in rows]}

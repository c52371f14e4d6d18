"""The whole layer on a GPU without JAX: operands, and the times of whatever is called with them, from CUDA graphs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from anabranch.bench import gpu
from anabranch.bench.layer_in_torch import select
from anabranch.bench.layer_result import Measured
from anabranch.bench.layer_shape import LayerShape, zipf_experts

DEVICE = "cuda"
_GRAPH_SECONDS = 40e-3


class Operands(NamedTuple):
    """x, gate, w_in, w_out; d_out; experts int64 [T, K] where they are given."""

    leaves: tuple[Any, Any, Any, Any]
    d_out: Any
    experts: Any


def operands(shape: LayerShape, dtype: str, routing: str, seed: int = 0, device: str | None = None) -> Operands:
    """As layer_in_jax.operands: other numbers of the same distribution, the same given experts."""
    import torch

    T, D, F, E, _ = shape
    device = device or DEVICE
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Any:
        values = torch.empty(size, device=device, dtype=getattr(torch, dtype))
        return values.normal_(0.0, scale, generator=generator)

    leaves = (
        normal(T, D),
        normal(D, E, scale=D**-0.5),
        normal(E, D, 2, F, scale=D**-0.5),
        normal(E, F, D, scale=F**-0.5),
    )
    experts = torch.from_numpy(zipf_experts(shape, seed)).to(device, torch.int64) if routing == "zipf" else None
    return Operands(tuple(leaf.requires_grad_() for leaf in leaves), normal(T, D), experts)


def largest_load(given: Operands, topk: int) -> float:
    """The largest load of an expert over the mean."""
    import torch

    x, gate, *_ = given.leaves
    with torch.no_grad():
        sizes = torch.bincount(select(x, gate, given.experts, topk=topk)[1].flatten(), minlength=gate.shape[1])
    return float(sizes.max() / sizes.float().mean())


Calls = Callable[[Operands, int], dict[str, Callable[[], Any]]]


def measure(
    shape: LayerShape, dtype: str, routing: str, *, repeats: int, product_size: int, calls_of: Calls
) -> Measured:
    """Times of one layer; see cuda_layer_jax.measure.

    calls_of: makes the calls of some operands and topk: "forward" and "forward and backward".
    """
    torch = gpu.torch_with_gpu()
    try:
        return _measure(shape, dtype, routing, repeats, product_size, calls_of)
    except torch.cuda.OutOfMemoryError:
        return Measured(note="out of memory")


def _measure(shape: LayerShape, dtype: str, routing: str, repeats: int, product_size: int, calls_of: Calls) -> Measured:
    import torch

    timed = functools.partial(gpu.seconds_of_each, repeats=repeats, seconds=_GRAPH_SECONDS)
    given = operands(shape, dtype, routing)
    count = gpu.copies_past_cache(shape.operand_bytes(given.d_out.element_size()), least=1)
    sets = [given, *(operands(shape, dtype, routing, seed) for seed in range(1, count))]
    by_name = [calls_of(one, shape.K) for one in sets]

    kind = getattr(torch, dtype)
    a, b = (torch.randn(product_size, product_size, device=DEVICE).to(kind) for _ in range(2))

    def product() -> float:
        return 2.0 * product_size**3 / timed([lambda: a @ b]).median

    times, missing, before = {}, [], product()
    for name in by_name[0]:
        try:
            times[name] = timed([one[name] for one in by_name])
        except torch.cuda.OutOfMemoryError:
            missing.append(name)
        torch.cuda.empty_cache()
    after = product()
    return Measured(
        forward=times.get("forward"),
        both=times.get("forward and backward"),
        product=(before, after),
        product_by="cuBLAS",
        largest_load=largest_load(given, shape.K),
        note="; ".join(f"{name}: out of memory" for name in missing),
    )

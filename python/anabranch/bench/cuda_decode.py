"""The layer's forward pass of few tokens on a GPU, as in decoding, beside the time to read the weights it needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import gpu
from anabranch.bench.layer_shape import NAMED, LayerShape
from anabranch.bench.selection import check_dtypes, sized

CAPTION = """microseconds of moe's forward pass in torch, w_in and w_out as checkpoints have them ("pfd", "df"), median
of the replays of a CUDA graph of calls with tokens of their own, whose weights have left the L2 cache since they were
read before. experts: that have tokens, in the mean of the calls; floor: the bytes of their matrices at the rate of a
copy in this run; x floor: the time over that"""

DTYPES = ("bfloat16",)
TOKENS = (1, 8, 32, 128, 512)
SHAPES = tuple(NAMED[name] for name in ("qwen3-30b", "mixtral", "deepseek-v3"))
_CALLS = 20
_DEVICE = "cuda"


def rows(
    *,
    dtypes: Sequence[str],
    quick: bool,
    shape: Sequence[LayerShape] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for every shape and number of tokens.

    Args:
      dtypes: "bfloat16" alone.
      quick: the first shape with the first number of tokens, and 5 repeats.
      shape: None: SHAPES; T of a shape plays no part.
      tokens: T; None: TOKENS.

    Raises:
      BenchError: an argument is wrong, or this machine has no GPU.
    """
    check_dtypes("decode", dtypes, DTYPES)
    cases = sized(shape or SHAPES, tokens or TOKENS, quick)
    gpu.torch_with_gpu()
    rate = gpu.copy_rate()
    while cases:
        layer = cases[0]._replace(T=0)
        yield from _of_layer([case for case in cases if case._replace(T=0) == layer], rate, 5 if quick else gpu.REPEATS)
        cases = [case for case in cases if case._replace(T=0) != layer]


def _of_layer(cases: Sequence[LayerShape], rate: float, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one layer, which differ in T."""
    copies = [_weights(cases[0], seed) for seed in range(_copies(cases))]
    for case in cases:
        found = [_call(case, copies[i % len(copies)], i) for i in range(_CALLS)]
        timing = gpu.seconds_of_each([call for call, _ in found], repeats=repeats, least_calls=_CALLS)
        experts = sum(count for _, count in found) / _CALLS
        floor = experts * 3 * case.D * case.F * 2 / rate
        yield {
            "T,D,F,E,K": str(case),
            **gpu.columns({"layer": timing}),
            "experts": experts,
            "floor": 1e6 * floor,
            "x floor": timing.median / floor,
            "copy TB/s": rate / 1e12,
        }


def _copies(cases: Sequence[LayerShape]) -> int:
    """How many layers take turns: until the weights that a call of one token reads have left the cache.

    >>> _copies([LayerShape(1, 2048, 768, 128, 8)]), _copies([LayerShape(1, 4096, 14336, 8, 2)])
    (2, 1)
    """
    return max(gpu.copies_past_cache(case.K * 3 * case.D * case.F * 2, least=1) for case in cases)


def _weights(shape: LayerShape, seed: int) -> tuple[Any, Any, Any]:
    """gate, w_in and w_out."""
    torch = gpu.torch_with_gpu()
    _, D, F, E, _ = shape
    generator = torch.Generator(_DEVICE).manual_seed(seed)

    def normal(*size: int, scale: float) -> Any:
        values = torch.empty(size, device=_DEVICE, dtype=torch.bfloat16)
        return values.normal_(0.0, scale, generator=generator)

    return normal(D, E, scale=D**-0.5), normal(E, 2, F, D, scale=D**-0.5), normal(E, D, F, scale=F**-0.5)


def _call(shape: LayerShape, weights: Sequence[Any], seed: int) -> tuple[Callable[[], Any], int]:
    """A call with tokens of its own, and the number of experts that they go to."""
    from anabranch.torch import moe

    torch = gpu.torch_with_gpu()
    generator = torch.Generator(_DEVICE).manual_seed(1000 + seed)
    x = torch.empty(shape.T, shape.D, device=_DEVICE, dtype=torch.bfloat16).normal_(generator=generator)

    def call() -> Any:
        with torch.no_grad():
            return moe(x, *weights, topk=shape.K, w_in_layout="pfd", w_out_layout="df")

    return call, int((call().tokens_per_expert > 0).sum())


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows as one table."""
    names = ("T,D,F,E,K", "layer", "experts", "floor", "x floor", "copy TB/s")
    return {"": [{name: row[name] for name in names} for row in rows]}

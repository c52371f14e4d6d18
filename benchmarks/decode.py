"""The layer's forward pass on few tokens, as in decoding, against the time to read the weights that it needs."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import ceilings, flags, timing
from benchmarks.processes import rows_of_a_process
from benchmarks.shapes import ITEMSIZES, NAMED, LayerShape
from benchmarks.tables import columns, selected

CAPTION = """microseconds: moe's forward pass in torch, w_in and w_out in checkpoint layout ("pfd", "df"). experts:
experts with tokens, mean of the calls; weights: plain, FP8 blocks or MXFP4; floor: time to read the weights of those
experts at the copy rate of this run; x floor: time divided by floor. r = R: the layer with adapters of that rank, which
have float32 factors; packed: value of ANABRANCH_CUDA_PACKED. On a GPU: median of the replays of a CUDA graph. Its
calls have different tokens, and rotate layers so that weights have left the L2 cache before they are read again. On the
CPU: best repeat of one call"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
TOKENS = (1, 8, 32, 128, 512)
SHAPES = {
    "cpu": (LayerShape(1, 512, 256, 64, 8),),
    "cuda": tuple(NAMED[name] for name in ("qwen3-30b", "gpt-oss", "gpt-oss-120b", "mixtral", "deepseek-v3")),
}
#: Kinds of weights: bytes per weight in packed ones, and what sizes must be multiples of.
PACKED = {"fp8": (1 + 4 / 128**2, 128), "mxfp4": (17 / 32, 32)}
OPTIONS = {
    **flags.shapes("five on a GPU, a small one on the CPU, with T = 1, 8, 32, 128 and 512 instead of their own T"),
    **flags.choices("--weights", ("plain", *PACKED), "kinds of weights; default: all that the shape allows"),
    **flags.choices("--packed", ("by-rows", "always", "never"), "values of ANABRANCH_CUDA_PACKED; a process for each"),
    "--rank": {
        "type": flags.positive,
        "metavar": "R",
        "action": "append",
        "default": [],
        "help": "also time the layer with adapters of w_in and w_out of this rank",
    },
}
_CALLS = 20


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, dtype, kind of weights and number of tokens.

    Raises:
      BenchError: an argument is invalid, or this machine lacks something.
    """
    if options.packed:
        yield from _rows_by_path(options)
        return
    device = options.device
    cases = flags.sized(options.shape or SHAPES[device], options.tokens or TOKENS, options.quick)
    timing.torch_on(device)
    rate = ceilings.copy_rate(device)
    for dtype in options.dtype:
        for layer in dict.fromkeys(case._replace(T=0) for case in cases):
            same_layer = [case for case in cases if case._replace(T=0) == layer]
            for kind in options.weights or ("plain", *PACKED):
                if kind == "plain" or (layer.D % PACKED[kind][1] == 0 and layer.F % PACKED[kind][1] == 0):
                    yield from _layer_rows(same_layer, dtype, kind, device, rate, options)


def _rows_by_path(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of a process per value of ANABRANCH_CUDA_PACKED, which the library reads once."""
    arguments = ["decode", "--device", options.device, *["--quick"] * options.quick]
    for name in ("shape", "tokens", "weights", "rank", "dtype"):
        arguments += [word for value in getattr(options, name) or () for word in (f"--{name}", str(value))]
    for value in options.packed:
        variables = {"ANABRANCH_CUDA_PACKED": "" if value == "by-rows" else value}
        for row in rows_of_a_process(arguments, variables=variables):
            yield {"packed": value, **row}


def _layer_rows(
    cases: Sequence[LayerShape], dtype: str, kind: str, device: str, rate: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one layer for several T."""
    from anabranch.torch import init_lora

    weight_bytes = ITEMSIZES[dtype] if kind == "plain" else PACKED[kind][0]
    make = _weights if kind == "plain" else _packed_weights
    copies = [make(cases[0], dtype, device, seed, kind) for seed in range(_copies(cases, weight_bytes, device))]
    adapters: dict[str, list[Any]] = {"layer": [None] * len(copies)}
    for rank in options.rank:
        adapters[f"r = {rank}"] = [
            init_lora(w_in, w_out, rank, w_in_layout="pfd", w_out_layout="df") for _, w_in, w_out in copies
        ]
    calls = _CALLS if device == "cuda" else 1
    for case in cases:
        by_name: dict[str, list[Callable[[], Any]]] = {}
        for name, factors in adapters.items():
            found = [_call(case, dtype, copies[i % len(copies)], factors[i % len(copies)], i) for i in range(calls)]
            by_name[name] = [call for call, _ in found]
        times = timing.times_of(device, by_name, quick=options.quick, least_calls=_CALLS)
        experts = sum(count for _, count in found) / calls  # adapters do not change the routing
        floor = experts * 3 * case.D * case.F * weight_bytes / rate
        yield {
            "T,D,F,E,K": str(case),
            "dtype": dtype,
            "weights": kind,
            **columns(times),
            "experts": experts,
            "floor": 1e6 * floor,
            "x floor": times["layer"].seconds / floor,
            "copy TB/s": rate / 1e12,
        }


def _copies(cases: Sequence[LayerShape], weight_bytes: float, device: str) -> int:
    """Returns how many layers to rotate, so that the weights that a call of one token reads have left the cache.

    >>> [_copies([NAMED[name]], 2, "cuda") for name in ("qwen3-30b", "mixtral")]
    [2, 1]
    """
    sizes = [int(case.K * 3 * case.D * case.F * weight_bytes) for case in cases]
    return max(timing.sets_past_cache(device, size, least=1) for size in sizes)


def _weights(shape: LayerShape, dtype: str, device: str, seed: int, _kind: str = "plain") -> tuple[Any, Any, Any]:
    """Returns random gate, w_in and w_out."""
    _, D, F, E, _ = shape
    normal = timing.normal_on(device, dtype, seed)
    return normal(D, E, scale=D**-0.5), normal(E, 2, F, D, scale=D**-0.5), normal(E, D, F, scale=F**-0.5)


def _packed_weights(shape: LayerShape, dtype: str, device: str, seed: int, kind: str) -> tuple[Any, Any, Any]:
    """Returns a random gate, and w_in and w_out of random codes."""
    import torch

    from anabranch.torch import Fp8Blocks, Mxfp4

    _, D, F, E, _ = shape
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(*leading: int, N: int, C: int) -> Any:
        size = (*leading, N, C) if kind == "fp8" else (*leading, N, C // 32, 16)
        codes = torch.randint(256, size, generator=generator, device=device, dtype=torch.uint8)
        if kind == "mxfp4":
            exponent = 125 - round(math.log2(C) / 2)
            return Mxfp4(codes, torch.full(size[:-1], exponent, device=device, dtype=torch.uint8))
        scales = torch.full((*leading, N // 128, C // 128), C**-0.5, device=device)
        return Fp8Blocks(codes.bitwise_and_(0xBF).view(torch.float8_e4m3fn), scales)  # magnitudes below 2

    gate = timing.normal_on(device, dtype, seed)(D, E, scale=D**-0.5)
    return gate, matrix(E, 2, N=F, C=D), matrix(E, N=D, C=F)


def _call(
    shape: LayerShape, dtype: str, weights: Sequence[Any], factors: Any, seed: int
) -> tuple[Callable[[], Any], int]:
    """Returns a call with its own tokens, and the number of experts that get tokens."""
    import torch

    from anabranch.torch import moe

    x = timing.normal_on(weights[0].device.type, dtype, 1000 + seed)(shape.T, shape.D)

    def call() -> Any:
        with torch.no_grad():
            return moe(x, *weights, topk=shape.K, w_in_layout="pfd", w_out_layout="df", lora=factors)

    return call, int((call().tokens_per_expert > 0).sum())


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table."""
    packed = ("packed",) if any("packed" in row for row in rows) else ()
    names = (*packed, "T,D,F,E,K", "dtype", "weights", "layer", "experts", "floor", "x floor", "copy TB/s")
    ranks = dict.fromkeys(name for row in rows for name in row if name.startswith("r = "))
    return {"": selected(rows, (*names, *ranks))}

"""The plan on a GPU: through C and through JAX, beside a stable sort in torch and in XLA."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import gpu
from anabranch.bench.cuda_call import cuda_call
from anabranch.bench.errors import ArgumentError

CAPTION = """microseconds a call, median of the repeats, over 8 sets of experts; skewed: expert e has a share of
1 / (1 + e). plan (through C) and torch (a stable sort, searchsorted, a scatter) from graphs of many calls, timed on the
device; jax plan (ours) and xla (argsort, bincount, a scatter) from jitted programs of 8 calls one after another, timed
on the host with the queue full; *: the host's launches are the limit. x: their time over ours through C. Floor: the
bytes of experts, row_of_slot and slot_of_row at the rate of a copy in this run"""

#: T, E, K
SHAPES = [(32768, 128, 8), (65536, 256, 8), (256, 128, 8)]
_SETS = 8


def experts(T: int, E: int, K: int, skewed: bool, seed: int = 0) -> Any:
    """K distinct experts a token [T, K], int32, uniform or with a share of 1/(1 + e) for expert e."""
    torch = gpu.torch_with_gpu()
    generator = torch.Generator("cuda").manual_seed(seed)
    shares = 1.0 / torch.arange(1, E + 1, device="cuda") if skewed else torch.ones(E, device="cuda")
    return torch.multinomial(shares.expand(T, E), K, generator=generator).to(torch.int32)


def c_call(slots: Any, E: int) -> Callable[[], None]:
    """The plan of experts [T, K] through C, with every result."""
    torch = gpu.torch_with_gpu()

    def empty(*shape: int) -> Any:
        return torch.empty(shape, device="cuda", dtype=torch.int32)

    return cuda_call(
        "ab_cuda_plan",
        num_experts=E,
        experts=slots,
        tokens_per_expert=empty(E),
        group_sizes=empty(E),
        offsets=empty(E + 1),
        row_of_slot=empty(*slots.shape),
        slot_of_row=empty(slots.numel()),
        dropped=empty(),
    )


def jax_functions(E: int, by: Sequence[str]) -> dict[str, Callable[[Any], Any]]:
    """Ours and XLA's, by the name of their column. What our custom call writes besides the result is written too."""
    from anabranch.bench.in_jax import xla_plan
    from anabranch.jax import plan

    result: dict[str, Callable[[Any], Any]] = {}
    if "jax" in by:
        result["jax plan"] = lambda slots: plan(slots, E).row_of_slot
    if "xla" in by:
        result["xla"] = lambda slots: xla_plan(slots, E)
    return result


def rows(
    *,
    dtypes: list[str],
    quick: bool,
    rows: Sequence[tuple[int, int]] | None = None,
    tokens: Sequence[int] | None = None,
    by: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for every shape and kind of routing.

    Args:
      dtypes: play no part.
      quick: the first shape only.
      rows: (E, K) with K <= E, each with every number of tokens; None: those of SHAPES.
      tokens: T; None: those of SHAPES, or with rows 32768.
      by: out of gpu.BY; None: all that this machine has.

    Raises:
      ArgumentError: K > E.
      BenchError: this machine lacks something.
    """
    from anabranch.bench.in_torch import torch_plan

    del dtypes
    chosen = SHAPES
    if rows is not None or tokens is not None:
        pairs = rows or list(dict.fromkeys((E, K) for _, E, K in SHAPES))
        chosen = [(T, E, K) for T in tokens or [32768] for E, K in pairs]
    for _, E, K in chosen:
        if K > E:
            raise ArgumentError(f"--rows: got {E},{K}, expected E,K with K <= E")
    by = gpu.choose_by(by)
    rate = gpu.copy_rate()
    for T, E, K in chosen[:1] if quick else chosen:
        functions = jax_functions(E, by) if "jax" in by or "xla" in by else {}
        shapes = [(gpu.struct(T, K, dtype="int32"),)] * _SETS if functions else []
        programs = gpu.compile_all({name: (gpu.chained(function), shapes) for name, function in functions.items()})
        for skewed in (False, True):
            slots = [experts(T, E, K, skewed, seed) for seed in range(_SETS)]
            times: dict[str, gpu.Timing] = {}
            if "c" in by:
                times["plan"] = gpu.seconds_of_each([c_call(one, E) for one in slots])
            if "torch" in by:
                times["torch"] = gpu.seconds_of_each([functools.partial(torch_plan, one, E) for one in slots])
            if programs:
                gpu.torch_with_gpu().cuda.synchronize()
                arrays = [(gpu.jax_with_gpu().dlpack.from_dlpack(one),) for one in slots]
                times |= {name: gpu.seconds_of_program(program, [arrays]) for name, program in programs.items()}
            yield {
                "T": T,
                "E": E,
                "K": K,
                "routing": "skewed" if skewed else "uniform",
                **gpu.columns(times),
                "floor": 1e6 * 3 * 4 * T * K / rate,
                "copy TB/s": rate / 1e12,
            }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows as one table."""
    names = ["T", "E", "K", "routing", "plan", "jax plan", "torch", "xla", "x torch", "x xla", "floor"]
    return {"": [gpu.shown(row, names, "plan", ("torch", "xla")) for row in rows]}

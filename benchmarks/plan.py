"""The plan of dispatch, through C and through JAX, against a stable sort in torch and in XLA."""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import ArgumentError
from benchmarks import timing
from benchmarks.c_call import c_call
from benchmarks.options import add_by, add_rows, add_tokens
from benchmarks.tables import columns, shown

CAPTION = """microseconds per call. skewed: expert e has a share of 1 / (1 + e). plan: ours through C; torch: a stable
sort, searchsorted, a scatter; jax plan: ours through JAX; xla: argsort, bincount, a scatter; both jitted. x: time of
the peer divided by plan. floor: the bytes of experts, row_of_slot and slot_of_row at the copy rate of this run. On a
GPU: median of the repeats over 8 sets of experts. C and torch are timed on the device, in graphs of many calls; jax and
xla on the host with the queue full, in programs of 8 calls; *: bound by the host's launches. On the CPU: best of
interleaved repeats"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": (), "cuda": ()}
BY = ("c", "jax", "torch", "xla")
#: T, E, K
SHAPES = {
    "cpu": [(4096, 64, 8), (4096, 8, 2), (8192, 128, 8), (64, 64, 8)],
    "cuda": [(32768, 128, 8), (65536, 256, 8), (256, 128, 8)],
}
_SETS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_rows(parser, "E experts, K per token, with every T of --tokens; default: three or four shapes")
    add_tokens(parser, "T of the shapes; with --rows the first of them")
    add_by(parser, BY, "all installed ones")


def experts(T: int, E: int, K: int, device: str, skewed: bool, seed: int = 0) -> Any:
    """Draws K distinct experts per token [T, K], int32, uniform or with a share of 1/(1 + e) for expert e."""
    torch = timing.torch_on(device)
    generator = torch.Generator(device).manual_seed(seed)
    shares = 1.0 / torch.arange(1, E + 1, device=device) if skewed else torch.ones(E, device=device)
    return torch.multinomial(shares.expand(T, E), K, generator=generator).to(torch.int32)


def through_c(slots: Any, E: int) -> Callable[[], None]:
    """Returns a call of our plan through C for experts [T, K], with all results."""

    def empty(*shape: int) -> Any:
        return slots.new_empty(shape)

    return c_call(
        "plan",
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
    """Returns our function and XLA's by column. Our custom call writes all results, although only one is returned."""
    if "jax" not in by and "xla" not in by:
        return {}
    from anabranch.jax import plan
    from benchmarks.peers import xla

    ours = {"jax plan": lambda slots: plan(slots, E).row_of_slot} if "jax" in by else {}
    return ours | ({"xla": lambda slots: xla.plan(slots, E)} if "xla" in by else {})


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape and kind of routing.

    Raises:
      ArgumentError: K > E.
      BenchError: this machine lacks something.
    """
    device = options.device
    chosen = SHAPES[device]
    if options.rows is not None or options.tokens is not None:
        pairs = options.rows or list(dict.fromkeys((E, K) for _, E, K in chosen))
        chosen = [(T, E, K) for T in options.tokens or [chosen[0][0]] for E, K in pairs]
    for _, E, K in chosen:
        if K > E:
            raise ArgumentError(f"--rows: got {E},{K}, expected E,K with K <= E")
    by = timing.available("plan", options.by or BY, options.by is not None, device)
    from benchmarks.peers import torch as eager

    rate = timing.copy_rate(device)
    count = _SETS if device == "cuda" else 1
    for T, E, K in chosen[:1] if options.quick else chosen:
        functions = jax_functions(E, by)
        shapes = [(timing.struct(device, T, K, dtype="int32"),)] * count if functions else []
        compiled = timing.compile_all(
            {name: (timing.chained(function), shapes) for name, function in functions.items()}
        )
        for skewed in (False, True):
            slots = [experts(T, E, K, device, skewed, seed) for seed in range(count)]
            calls: dict[str, list[Callable[[], Any]]] = {}
            if "c" in by:
                calls["plan"] = [through_c(one, E) for one in slots]
            if "torch" in by:
                calls["torch"] = [functools.partial(eager.plan, one, E) for one in slots]
            if device == "cuda":
                timing.torch_on(device).cuda.synchronize()
            arrays = [(timing.as_jax(one),) for one in slots] if compiled else []
            programs = {str(name): timing.Program(run, [arrays]) for name, run in compiled.items()}
            yield {
                "T": T,
                "E": E,
                "K": K,
                "routing": "skewed" if skewed else "uniform",
                **columns(timing.times_of(device, calls, programs, quick=options.quick)),
                "floor": 1e6 * 3 * 4 * T * K / rate,
                "copy TB/s": rate / 1e12,
            }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table."""
    names = ["T", "E", "K", "routing", "plan", "jax plan", "torch", "xla", "x torch", "x xla", "floor"]
    return {"": [shown(row, names, "plan", ("torch", "xla")) for row in rows]}

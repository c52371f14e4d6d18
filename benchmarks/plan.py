"""The plan of dispatch, through C, against a stable sort in torch and in XLA."""

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import ArgumentError
from benchmarks import beside, ceilings, flags, timing
from benchmarks.c_call import Calls, c_call
from benchmarks.shapes import draw_experts
from benchmarks.tables import columns, shown

CAPTION = """microseconds per call. skewed: expert e has a share of 1 / (1 + e). plan: ours through C; torch: a stable
sort, searchsorted, a scatter; xla: argsort, bincount, a scatter, jitted. x: the peer's time divided by plan. floor: the
bytes of experts, row_of_slot and slot_of_row at the copy rate of this run. On a GPU: median of the repeats over 8 sets
of experts. C and torch are timed on the device, in graphs of many calls; xla on the host with the queue full, in
programs of 8 calls; *: bound by the host's launches. On the CPU: best of interleaved repeats"""

DTYPES = {"cpu": (), "cuda": ()}
BY = ("c", "torch", "xla")
#: T, E, K
SHAPES = {
    "cpu": [(4096, 64, 8), (4096, 8, 2), (8192, 128, 8), (64, 64, 8)],
    "cuda": [(32768, 128, 8), (65536, 256, 8), (256, 128, 8)],
}
OPTIONS = {
    **flags.rows("E experts, K per token, with every T of --tokens; default: three or four shapes"),
    **flags.tokens("T of the shapes; with --rows the first of them"),
    **flags.by(BY),
}


def c_calls(experts: Any, E: int) -> Calls:
    """Returns a call of our plan for experts [T, K], with all results."""
    empty = experts.new_zeros
    call = c_call(
        "plan",
        num_experts=E,
        experts=experts,
        tokens_per_expert=empty(E),
        group_sizes=empty(E),
        offsets=empty(E + 1),
        row_of_slot=empty(experts.shape),
        slot_of_row=empty(experts.numel()),
        dropped=empty(()),
    )
    return {"plan": call}


def _chosen(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    chosen = SHAPES[options.device]
    if options.rows is not None or options.tokens is not None:
        pairs = options.rows or list(dict.fromkeys((E, K) for _, E, K in chosen))
        chosen = [(T, E, K) for T in options.tokens or [chosen[0][0]] for E, K in pairs]
    for _, E, K in chosen:
        if K > E:
            raise ArgumentError(f"--rows: got {E},{K}, expected E,K with K <= E")
    return chosen[:1] if options.quick else chosen


def cases(options: argparse.Namespace) -> Iterator[beside.Case]:
    """Yields the first columns of each row, sets of experts and our calls."""
    torch, count = timing.torch_on(options.device), 8 if options.device == "cuda" else 1
    for T, E, K in _chosen(options):
        for zipf in (False, True):
            drawn = [draw_experts(T, E, K, seed, zipf=zipf) for seed in range(count)]
            head = {"T": T, "E": E, "K": K, "routing": "skewed" if zipf else "uniform"}
            sets = [torch.from_numpy(one).to(options.device) for one in drawn]
            yield head, sets, functools.partial(c_calls, E=E)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape and kind of routing.

    Raises:
      ArgumentError: K > E.
      BenchError: this machine lacks something.
    """
    _chosen(options)
    device, by = options.device, timing.available("plan", options.by, BY, options.device)
    from benchmarks.peers import torch as eager

    rate = ceilings.copy_rate(device)
    for head, sets, make in cases(options):
        E, calls, programs = head["E"], {}, {}
        if "c" in by:
            calls["plan"] = [make(one)["plan"] for one in sets]
        if "torch" in by:
            calls["torch"] = [functools.partial(eager.plan, one, E) for one in sets]
        if "xla" in by:
            from benchmarks.peers import xla

            arrays = [(timing.as_jax(one),) for one in sets]
            programs["xla"] = timing.program(functools.partial(xla.plan, num_experts=E), arrays, len(sets))
        yield {
            **head,
            **columns(timing.times_of(device, calls, programs, quick=options.quick)),
            "floor": 1e6 * 3 * 4 * head["T"] * head["K"] / rate,
            "copy TB/s": rate / 1e12,
        }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table."""
    names = ["T", "E", "K", "routing", "plan", "torch", "xla", "x torch", "x xla", "floor"]
    return {"": [shown(row, names, "plan", ("torch", "xla")) for row in rows]}

"""A training step of a language model in JAX: its MoE blocks are ours, ragged_dot's or tokamax's."""

import argparse
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import BenchError
from benchmarks import flags, timing
from benchmarks.processes import ROOT, as_bench_errors, rows_of_a_process
from benchmarks.shapes import LayerShape
from benchmarks.tables import selected

CAPTION = """the model of examples/jax_train: embedding, layers of attention and experts, AdamW; parameters and
optimiser are float32, the computation has the dtype. T: tokens per step, on all devices. anabranch: moe();
ragged-dot: jax.lax.ragged_dot as trainers call it; tokamax: the block of ragged-dot with tokamax.ragged_dot, if it is
installed. The names alone: weights wi_0 and wi_1 [E, D, F] as in MaxText; prefused: wi [E, D, 2 F]. step ms: median
of batches of steps with the queue full (on the CPU, XLA computes ragged_dot with all experts for every row); bits:
loss in bits per byte of the first step, equal up to rounding. GiB per device: planned by XLA, from its analysis;
peak: from the device. Each implementation runs in its own process"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float32")}
SHAPES = {
    "cpu": (LayerShape(512, 128, 256, 8, 2),),
    "cuda": (LayerShape(16384, 2048, 768, 64, 8),),
}


class Block(NamedTuple):
    """The MoE block of the example, the module of its grouped GEMM, and whether wi_0 and wi_1 are one array."""

    moe: str
    product: str = ""
    prefused: bool = False


BY = {
    "anabranch": Block("anabranch"),
    "anabranch-prefused": Block("anabranch", prefused=True),
    "ragged-dot": Block("ragged_dot", "jax.lax"),
    "ragged-dot-prefused": Block("ragged_dot", "jax.lax", prefused=True),
    "tokamax": Block("ragged_dot", "tokamax"),
    "tokamax-prefused": Block("ragged_dot", "tokamax", prefused=True),
}
OPTIONS = {
    **flags.shapes("one per device; T is a multiple of --seq"),
    **flags.by(tuple(BY), "all; tokamax if it is installed"),
    "--layers": {"type": flags.positive, "metavar": "N", "default": 4, "help": "decoder layers; default: 4"},
    "--seq": {"type": flags.positive, "metavar": "S", "default": 256, "help": "tokens per sequence; default: 256"},
    "--remat": {
        "metavar": "POLICY",
        "default": "none",
        "help": "none, full, or names of residuals to save, such as moe_h,moe_routing; default: none",
    },
    "--mesh": {"default": "", "help": "devices, such as expert=2,data=2, where data is the axis of FSDP; default: one"},
}
_BATCH_SECONDS = 0.2


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, dtype and implementation.

    Raises:
      BenchError: an argument is invalid, or the only implementation cannot run.
    """
    names = list(dict.fromkeys(options.by or BY))
    shapes = flags.sized(options.shape or SHAPES[options.device], options.tokens, options.quick)
    cases = [(shape, dtype, by) for shape in shapes for dtype in options.dtype for by in names]
    for shape, dtype, by in cases:
        head = {"T,D,F,E,K": str(shape), "layers": options.layers, "seq": options.seq, "dtype": dtype, "by": by}
        missing = _missing(by)
        if missing and options.by:
            raise BenchError(missing)
        if missing:
            print(f"train: NOT MEASURED: {missing}", file=sys.stderr)
            yield {**head, "note": missing}
        elif len(cases) == 1:
            with as_bench_errors(by):
                yield head | _measure(shape, dtype, by, options)
        else:
            try:
                yield from rows_of_a_process(_arguments(shape, dtype, by, options), quiet=True)
            except BenchError as error:
                yield {**head, "error": str(error)}


def _missing(by: str) -> str:
    """Returns why an implementation cannot run here, or ""."""
    if BY[by].product != "tokamax" or importlib.util.find_spec("tokamax") is not None:
        return ""
    return f"{by}: tokamax is not installed: pip install tokamax"


def _arguments(shape: LayerShape, dtype: str, by: str, options: argparse.Namespace) -> list[str]:
    """Returns the command line of one measurement."""
    given = {"device": options.device, "shape": shape, "dtype": dtype, "by": by}
    given |= {"layers": options.layers, "seq": options.seq, "remat": options.remat, "mesh": options.mesh}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["train", *words, *["--quick"] * options.quick]


def _config(shape: LayerShape, dtype: str, by: str, options: argparse.Namespace) -> Any:
    """Returns the example's configuration.

    Raises:
      BenchError: an option does not fit; the message has the example's name of it.
    """
    from jax_train.config import Config

    T, D, F, E, K = shape
    if T % options.seq:
        raise BenchError(f"--seq: got {options.seq}, expected a divisor of T = {T}")
    try:
        return Config(
            base_emb_dim=D,
            base_num_decoder_layers=options.layers,
            base_num_query_heads=max(1, D // 128),
            dtype=dtype,
            remat_policy=options.remat,
            moe=BY[by].moe,
            num_experts=E,
            num_experts_per_tok=K,
            base_moe_mlp_dim=F,
            prefuse_moe_weights=BY[by].prefused,
            global_batch_size=T // options.seq,
            max_target_length=options.seq,
            mesh=options.mesh,
        )
    except ValueError as error:
        raise BenchError(str(error)) from error


def _measure(shape: LayerShape, dtype: str, by: str, options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    config = _config(shape, dtype, by, options)
    from mesh import make_mesh, parse_mesh, request_devices

    sizes = parse_mesh(options.mesh)
    if options.mesh:
        request_devices(sizes)
    jax = timing.jax_on(options.device)
    if not options.mesh:
        return _steps(config, by, options)
    try:
        mesh = make_mesh(sizes)
    except ValueError as error:
        raise BenchError(str(error)) from error
    with jax.set_mesh(mesh):
        return _steps(config, by, options)


def _steps(config: Any, by: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compiles the step, runs it, and measures it."""
    import jax
    import numpy as np

    from jax_train.blocks import RaggedDotMoE
    from jax_train.step import Program

    block = None
    if BY[by].product:
        block = functools.partial(RaggedDotMoE, product=importlib.import_module(BY[by].product).ragged_dot)
    program = Program(config, block)
    size = (config.global_batch_size, config.max_target_length + 1)
    batch = program.put(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    state = program.init()
    step = program.compiled_step.lower(state, batch).compile()
    state, bits = step(state, batch)
    first = float(bits)

    def seconds(count: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(count):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / count

    count = max(1, round(_BATCH_SECONDS / seconds(1)))
    timed = [seconds(count) for _ in range(3 if options.quick else 7)]
    memory = step.memory_analysis()
    planned = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    planned -= memory.alias_size_in_bytes  # the state is donated
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    middle = statistics.median(timed)
    return {
        "remat": config.remat_policy,
        "mesh": config.mesh or None,
        "step ms": 1e3 * middle,
        "tokens/s": config.global_batch_size * config.max_target_length / middle,
        "planned GiB": planned / 2**30,
        "peak GiB": None if peak is None else peak / 2**30,
        "bits": first,
        "spread": {"step ms": [1e3 * min(timed), 1e3 * max(timed)]},
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table."""
    names = ["T,D,F,E,K", "layers", "seq", "dtype", "remat", "mesh", "by", "step ms", "tokens/s", "planned GiB"]
    return {"": selected(rows, [*names, "peak GiB", "bits", "note"])}

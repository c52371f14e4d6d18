"""The whole layer on a GPU: ours through JAX and C, beside plain JAX, torch's grouped products and a large product."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from anabranch import _library
from anabranch.bench import gpu, layer_result
from anabranch.bench.auto_choice import auto_choice
from anabranch.bench.errors import ArgumentError, BenchError, as_bench_errors
from anabranch.bench.experts_path import experts_path
from anabranch.bench.layer_result import Measured
from anabranch.bench.layer_shape import SHAPES, LayerShape
from anabranch.bench.processes import rows_of_a_process
from anabranch.bench.selection import check_dtypes, implementations, sized

CAPTION = """from x [T, D] to the output: router, top K of E, SwiGLU experts [D, 2, F] and [F, D], combine; random
operands; backward: of x, gate, w_in and w_out, the difference between forward and backward, and forward. TFLOP/s: of
6 T K D F forward, 12 T K D F backward. jax: ours, moe() under jit; c: the same C functions in CUDA graphs, with the
gate's products by torch; xla: lax.top_k, argsort, ragged_dot, segment_sum under jit; ragged-dot: the same with our
ragged_dot; torch: topk, sort, grouped_mm, index_add, eager operations in CUDA graphs; sonicmoe, where it is named:
SonicMoE's layer likewise. Each in a process of its own, in which product, bfloat16 8192^3 by cuBLAS, is timed right
before and after; share: of their mean. Medians of 20 batches of calls with the queue full; *: the host's launches are
the limit. routing: uniform, by the random gate; zipf, K distinct experts with shares 1 / (1 + e) given; path: which
of our kernels the experts ran on; auto: what precision="auto" chooses for these sizes, forward and for both passes,
each of which quantises; largest load: over the mean. needed: weights, x, their gradients, the output, its cotangent
and h; total: arguments + outputs - aliased + temporaries, as XLA plans; peak: by the device"""

BY = ("jax", "c", "ragged-dot", "xla", "torch")
VARIANTS = ("jax-transposed", "jax-interleaved", "jax-biases", "jax-swiglu-oai")
"""Timed where they are named: see layer_in_jax.LAYERS."""
SONICMOE = "sonicmoe"
"""Timed where it is named: it is no dependency of ours."""
PEERS = ("xla", "torch", SONICMOE)
"""Those whose experts are not ours."""
ROUTINGS = ("uniform", "zipf")
DTYPES = ("bfloat16",)

_PRODUCT_SIZE = 8192

Case = tuple[LayerShape, str, str]  # and the routing, and who


def rows(
    *,
    dtypes: Sequence[str],
    quick: bool,
    shape: Sequence[LayerShape] | None = None,
    tokens: Sequence[int] | None = None,
    routing: Sequence[str] | None = None,
    by: Sequence[str] | None = None,
    trace: str | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for every shape, routing and implementation; a single one in this process.

    Args:
      dtypes: "bfloat16" alone.
      quick: the first shape only, and 5 repeats.
      shape: None: those of layer_shape.SHAPES.
      tokens: T, in the place of the shapes' own.
      routing: out of ROUTINGS; None: uniform.
      by: out of BY, VARIANTS and SONICMOE; None: all of BY that are installed.
      trace: a folder for profiler traces of ours, one folder a shape and routing in it.

    Raises:
      ArgumentError: an argument is wrong.
      BenchError: this machine has no GPU. What fails by itself has a row with `error`.
    """
    chosen = _cases(dtypes, quick, shape, tokens, routing, by, trace)
    _require_gpu()
    for case in chosen:
        traced = trace if case[2] == "jax" else None
        if len(chosen) == 1:
            with as_bench_errors(case[2]):
                measured = _measure(case, quick, traced)
            yield _row(case, measured)
        else:
            yield from _rows_of_a_process(case, quick, traced)


tables = layer_result.tables


def _cases(
    dtypes: Sequence[str],
    quick: bool,
    shape: Sequence[LayerShape] | None,
    tokens: Sequence[int] | None,
    routing: Sequence[str] | None,
    by: Sequence[str] | None,
    trace: str | None,
) -> list[Case]:
    """All combinations, each once."""
    check_dtypes("layer on cuda", dtypes, DTYPES)
    timed = implementations("layer", by, BY if by is None else (*BY, *VARIANTS, SONICMOE))
    if trace is not None and "jax" not in timed:
        raise ArgumentError(f"--trace: got it with --by {' '.join(timed)}, expected jax among them: it traces ours")
    routings = dict.fromkeys(routing or ROUTINGS[:1])
    return [(sizes, kind, who) for sizes in sized(shape or SHAPES, tokens, quick) for kind in routings for who in timed]


def _require_gpu() -> None:
    """Raises BenchError where there is no GPU; starts nothing on one."""
    try:
        facts = _library.describe_cuda()
    except _library.LibraryError as error:
        raise BenchError(f"benchmarks of CUDA kernels need libanabranch_cuda.so: {error}") from error
    if "error" in facts:
        raise BenchError(f"benchmarks of CUDA kernels need a GPU: {facts['error']}")


def _measure(case: Case, quick: bool, trace: str | None) -> Measured:
    measured = _times(case, quick, trace)
    if case[2] in PEERS or measured.forward is measured.both is None:
        return measured
    return measured._replace(path=experts_path(case[0], DTYPES[0]), auto=auto_choice(case[0], DTYPES[0]))


def _times(case: Case, quick: bool, trace: str | None) -> Measured:
    shape, routing, by = case
    settings: dict[str, Any] = {"repeats": 5 if quick else gpu.REPEATS, "product_size": _PRODUCT_SIZE}
    if by in ("c", "torch", SONICMOE):
        from anabranch.bench import cuda_layer_c, cuda_layer_graphs, cuda_layer_sonicmoe, cuda_layer_torch

        # The report names JAX's devices, which starts JAX beside torch.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        calls_of = {"c": cuda_layer_c, "torch": cuda_layer_torch, SONICMOE: cuda_layer_sonicmoe}[by].calls
        return cuda_layer_graphs.measure(shape, DTYPES[0], routing, **settings, calls_of=calls_of)
    from anabranch.bench import cuda_layer_jax

    folder = None if trace is None else os.path.join(trace, f"{shape}-{routing}")
    return cuda_layer_jax.measure(by, shape, DTYPES[0], routing, trace=folder, **settings)


def _row(case: Case, measured: Measured) -> dict[str, Any]:
    shape, routing, by = case
    return layer_result.row(shape, routing, DTYPES[0], by, measured)


def _rows_of_a_process(case: Case, quick: bool, trace: str | None) -> Iterator[dict[str, Any]]:
    """The row of a process of its own; where that fails, one with its last words as `error`."""
    shape, routing, by = case
    flags = ["--device", "cuda", "--shape", str(shape), "--routing", routing, "--by", by]
    flags += ["--quick"] * quick + (["--trace", trace] if trace else [])
    try:
        yield from rows_of_a_process("layer", flags, quiet=True)
    except BenchError as error:
        yield {**_row(case, Measured(note=str(error))), "error": str(error)}

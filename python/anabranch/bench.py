"""`python -m anabranch bench`: how fast the layer and the router are on this machine, through JAX or torch.

Peers, other operations and finer measurements are programs of the repository's folder benchmarks/.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from anabranch import _packages
from anabranch.checks import INDEX_LIMIT

_DTYPES = {"float32": 4, "bfloat16": 2}
_MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices of the reference GEMM and copy, by device."""
_BATCH_SECONDS, _REPEATS = 0.1, 7

#: The calls "forward", "forward and backward", "GEMM" and "copy", and a function that waits for a call's result.
_Calls = tuple[dict[str, Callable[[], Any]], Callable[[Any], Any]]


class BenchError(RuntimeError):
    """This machine cannot run the requested benchmark; the message says why."""


class ArgumentError(BenchError):
    """An argument of the command line is wrong: "--name: got X, expected Y"."""


class _Sizes(NamedTuple):
    T: int
    D: int
    F: int
    E: int
    K: int


_DEFAULTS = {
    ("layer", "cpu"): _Sizes(1024, 512, 1024, 8, 2),
    ("layer", "cuda"): _Sizes(8192, 2048, 768, 128, 8),
    ("router", "cpu"): _Sizes(4096, 1, 1, 128, 8),
    ("router", "cuda"): _Sizes(65536, 1, 1, 128, 8),
}


def _sizes(text: str) -> _Sizes:
    parts = text.split(",")
    if len(parts) != 5 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected T,D,F,E,K such as 8192,2048,768,128,8")
    sizes = _Sizes(*map(int, parts))
    if sizes.K > sizes.E or sizes.T * sizes.K >= INDEX_LIMIT:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected T,D,F,E,K with K <= E and T * K < 2^31")
    return sizes


def add_command(commands: Any) -> None:
    """Adds `bench` and its options to the subparsers of the command line."""
    parser = commands.add_parser(
        "bench",
        help="time and rate of the layer or the router on this machine",
        description="Times the layer or the router: the forward pass, and the forward and backward pass. The rate of "
        "the layer is the FLOP/s of the experts' GEMMs; that of the router is the GB/s of logits read and, in the "
        "backward pass, gradients written. The share compares the rate with that of a large GEMM or copy of the same "
        "framework and dtype.",
    )
    parser.add_argument("operation", choices=["layer", "router"])
    parser.add_argument("--device", choices=list(_MATRIX_SIZE), default="cpu", help="default: cpu")
    parser.add_argument("--through", choices=["jax", "torch"], help="framework (default: jax if it is installed)")
    parser.add_argument(
        "--shape",
        type=_sizes,
        metavar="T,D,F,E,K",
        help="tokens, model width, expert width, experts, experts per token; the router ignores D and F. "
        + "Default: "
        + "; ".join(f"{' on '.join(key)} {','.join(map(str, sizes))}" for key, sizes in _DEFAULTS.items()),
    )
    parser.add_argument("--dtype", choices=list(_DTYPES), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE ('-': standard output, no table)")


def run(options: argparse.Namespace) -> int:
    """Times one operation and prints a line for each pass.

    Raises:
      ArgumentError: the file of --json can't be written.
      BenchError: this machine cannot run the requested benchmark.
    """
    check_json(options.json)
    through = options.through or ("jax" if importlib.util.find_spec("jax") else "torch")
    rows = list(_rows(options, through))
    if options.json != "-":
        for row in rows:
            print(
                f"{row['operation']} {row['T,D,F,E,K']} {row['dtype']} through {through} on {options.device}, "
                f"{row['pass']}: {row['ms']:.3g} ms, {row['rate']:.3g} {row['unit']}, {row['share']:.0%} of a "
                f"large {row['ceiling']}"
            )
    write_json(options.json, {options.operation: rows})
    return 0


def check_json(file: str | None) -> None:
    """Checks that the file of --json can be written, before any measurement.

    Raises:
      ArgumentError: the file can't be written.
    """
    if file not in (None, "-"):
        path = pathlib.Path(str(file))
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ArgumentError(f"--json: got {path}, expected a file that can be written")


def write_json(file: str | None, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the rows by operation, the machine and the arguments to a file, to standard output ("-") or nowhere."""
    from anabranch import info

    if file is None:
        return
    report = json.dumps({"machine": info.collect(), "arguments": sys.argv[1:], "rows": rows}, indent=2)
    if file == "-":
        print(report)
    else:
        pathlib.Path(file).write_text(report)


def _rows(options: argparse.Namespace, through: str) -> Iterator[dict[str, Any]]:
    device, sizes = options.device, options.shape or _DEFAULTS[options.operation, options.device]
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    layer, size = options.operation == "layer", _MATRIX_SIZE[device]
    try:
        calls, wait = (_jax if through == "jax" else _torch)(options.operation, sizes, dtype, device)
    except ImportError as error:
        raise BenchError(_packages.explain("bench", error)) from error
    times = {name: _seconds(call, wait) for name, call in calls.items()}
    gemm, copy = times.pop("GEMM"), times.pop("copy")
    for name, (best, median) in times.items():
        passes = 1 if name == "forward" else 3
        if layer:
            work, scale, unit = passes * 6.0 * sizes.T * sizes.K * sizes.D * sizes.F, 1e9, "GFLOP/s"
            ceiling = 2.0 * size**3 / gemm[0]
        else:
            work, scale, unit = float(passes * sizes.T * sizes.E * _DTYPES[dtype]), 1e9, "GB/s"
            ceiling = 2.0 * size**2 * _DTYPES[dtype] / copy[0]
        yield {
            "operation": options.operation,
            "T,D,F,E,K": ",".join(map(str, sizes)),
            "dtype": dtype,
            "by": through,
            "pass": name,
            "ms": 1e3 * best,
            "median ms": 1e3 * median,
            "rate": work / best / scale,
            "unit": unit,
            "share": work / best / ceiling,
            "ceiling": "GEMM" if layer else "copy",
        }


def _seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """The best and the median time of a call in seconds, over batches that end when the device has finished."""
    wait(call())
    samples, calls = [], 1
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(calls - 1):
            call()
        wait(call())
        samples.append((time.perf_counter() - start) / calls)
        calls = min(1000, max(1, math.ceil(_BATCH_SECONDS / max(samples[-1], 1e-7))))
    return min(samples), statistics.median(samples)


def _jax(operation: str, sizes: _Sizes, dtype: str, device: str) -> _Calls:
    import jax
    import jax.numpy as jnp

    from anabranch.jax import moe, route

    try:
        jax.config.update("jax_default_device", jax.devices(device)[0])
    except RuntimeError as error:
        raise BenchError(f"--device: got {device}, expected a device that JAX finds: {error}") from error
    T, D, F, E, K = sizes
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(i: int, *shape: int, scale: float = 1.0) -> Any:
        return (jax.random.normal(keys[i], shape) * scale).astype(dtype)

    if operation == "layer":
        operands: tuple[Any, ...] = (
            normal(0, T, D),
            normal(1, D, E, scale=D**-0.5),
            normal(2, E, D, 2, F, scale=D**-0.5),
            normal(3, E, F, D, scale=F**-0.5),
        )
        cotangent = normal(4, T, D)

        def forward(*given: Any) -> Any:
            return moe(*given, topk=K).output

    else:
        operands = (normal(0, T, E),)
        cotangent = jax.random.normal(keys[4], (T, K))

        def forward(*given: Any) -> Any:
            return route(given[0], K).weights

    def both(cotangent: Any, *given: Any) -> Any:
        output, pull = jax.vjp(forward, *given)
        return output, pull(cotangent)

    square = normal(0, _MATRIX_SIZE[device], _MATRIX_SIZE[device])
    functions = {
        "forward": (jax.jit(forward), operands),
        "forward and backward": (jax.jit(both), (cotangent, *operands)),
        "GEMM": (jax.jit(jnp.matmul), (square, square)),
        "copy": (jax.jit(jnp.negative), (square,)),
    }
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(function, *arguments) for name, (function, arguments) in functions.items()
    }
    return calls, jax.block_until_ready


def _torch(operation: str, sizes: _Sizes, dtype: str, device: str) -> _Calls:
    import torch

    from anabranch.torch import moe, route

    if device == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device: got cuda, expected cpu, because torch finds no GPU")
    T, D, F, E, K = sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        values = torch.empty(shape, device=device, dtype=getattr(torch, dtype))
        return values.normal_(0.0, scale, generator=generator)

    if operation == "layer":
        operands = [
            normal(T, D),
            normal(D, E, scale=D**-0.5),
            normal(E, D, 2, F, scale=D**-0.5),
            normal(E, F, D, scale=F**-0.5),
        ]
        cotangent = normal(T, D)

        def output() -> Any:
            return moe(*operands, topk=K).output

    else:
        operands, cotangent = [normal(T, E)], normal(T, K).float()

        def output() -> Any:
            return route(operands[0], K).weights

    for operand in operands:
        operand.requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            output()

    square = normal(_MATRIX_SIZE[device], _MATRIX_SIZE[device])
    calls = {
        "forward": forward,
        "forward and backward": lambda: torch.autograd.grad(output(), operands, cotangent),
        "GEMM": lambda: square @ square,
        "copy": lambda: -square,
    }
    return calls, lambda _: torch.cuda.synchronize() if device == "cuda" else None

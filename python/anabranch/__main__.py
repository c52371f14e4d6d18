"""`python -m anabranch info` and `python -m anabranch bench`."""

import argparse
import os
import sys
from typing import Any

import anabranch
from anabranch.bench import CUDA_OPERATIONS, CUDA_TOGETHER, DTYPES, OPERATIONS, TOGETHER, ArgumentError, BenchError
from anabranch.bench import run as run_bench
from anabranch.bench.layer_shape import NAMED, LayerShape, parse_shape
from anabranch.bench.processes import busy_processes


def _pair(text: str) -> tuple[int, int]:
    """E and K from "E,K"."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected E,K such as 128,8")
    return int(parts[0]), int(parts[1])


def _shape(text: str) -> LayerShape:
    """A layer's shape from "T,D,F,E,K" or its name."""
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def _add_bench(commands: Any) -> argparse.ArgumentParser:
    """The parser of `bench`."""
    bench = commands.add_parser(
        "bench",
        help="our operations beside torch (if installed) and XLA on this machine, in one run",
        description="Times our operations beside torch (if installed) and XLA on this machine, in one run.",
    )
    bench.add_argument(
        "operation",
        nargs="?",
        choices=[*dict.fromkeys([*OPERATIONS, *CUDA_OPERATIONS]), "all"],
        default="all",
        help=f"all: {', '.join(TOGETHER)}; torch: the layer in torch, beside its own and transformers'; decode: the "
        "layer of few tokens",
    )
    bench.add_argument("--json", metavar="FILE", help="also write the rows to FILE ('-': standard output, no table)")
    bench.add_argument("--quick", action="store_true", help="fewer repeats and only the first shape of each table")
    bench.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help=f"cuda: {', '.join(CUDA_OPERATIONS)} on a GPU; all are {', '.join(CUDA_TOGETHER)}, in one process",
    )
    bench.add_argument(
        "--dtype", choices=DTYPES, action="append", help="default: both; the layer on a GPU is bfloat16 alone"
    )
    bench.add_argument(
        "--busy", type=_positive, metavar="N", default=0, help="also run N other processes, each busy on one thread"
    )
    cuda = bench.add_argument_group(
        "with --device cuda, of torch --shape, --tokens and --by on the CPU, too; each may be given several times"
    )
    cuda.add_argument(
        "--rows", type=_pair, metavar="E,K", action="append", help="router, plan: only E experts, K a token"
    )
    cuda.add_argument(
        "--shape",
        type=_shape,
        metavar="T,D,F,E,K",
        action="append",
        help=f"layer, mesh, torch, decode: the sizes, or {', '.join(NAMED)} at T = 32768; default: twelve shapes; "
        "mesh: two, with T = 8192, which is that of a GPU; torch: qwen3-30b at T = 8192 and 32768, on the CPU two "
        "small ones; decode: three, whose T plays no part",
    )
    cuda.add_argument(
        "--tokens",
        type=_positive,
        metavar="T",
        action="append",
        help="router, plan, layer, mesh, torch, decode: numbers of tokens",
    )
    cuda.add_argument(
        "--routing",
        choices=["uniform", "zipf"],
        action="append",
        help="layer: nearly equal loads (the default), or loads that fall like 1 / (1 + e)",
    )
    cuda.add_argument(
        "--by",
        choices=[
            "MoE",
            "c",
            "grouped_mm",
            "fp8",
            "fp8-exchange",
            "fp8-kept",
            "hf-batched_mm",
            "hf-eager",
            "hf-grouped_mm",
            "jax",
            "jax-biases",
            "jax-interleaved",
            "jax-swiglu-oai",
            "jax-transposed",
            "moe",
            "ragged-dot",
            "sonicmoe",
            "torch",
            "xla",
        ],
        action="append",
        help="router, plan, layer: what to time: ours through C or through JAX, torch eager, XLA's jit "
        "of plain JAX; layer: that with our ragged_dot, too, ours with transposed or interleaved weights, biases, "
        "gpt-oss's activation, and SonicMoE where it is installed; mesh: ours through JAX and (moe) through torch, "
        "XLA's collectives, NCCL through torch; torch: ours as moe() and as MoE, torch's grouped products, "
        "transformers' experts, ours through JAX",
    )
    cuda.add_argument(
        "--transport", choices=["ring", "all_to_all", "ragged"], action="append", help="mesh: default: all of them"
    )
    cuda.add_argument(
        "--trace", metavar="DIR", help="layer: also write profiler traces of ours to DIR/T,D,F,E,K-ROUTING (once)"
    )
    return bench


def _choose(bench: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The operations to time, and what is chosen of them; exits where one does not offer that."""
    on_gpu = options.device == "cuda"
    known = CUDA_OPERATIONS if on_gpu else OPERATIONS
    names = dict.fromkeys(name for choices in CUDA_OPERATIONS.values() for name in choices)
    selection = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name in selection:
        if not any(name in choices for choices in known.values()) or (not on_gpu and options.operation != "torch"):
            bench.error(f"--{name}: got it with --device {options.device}, expected --device cuda")
    if options.operation == "all":
        together = CUDA_TOGETHER if on_gpu else TOGETHER
        chosen = tuple(name for name in together if not selection or selection.keys() <= set(CUDA_OPERATIONS[name]))
        if not chosen:
            given = " and ".join(f"--{name}" for name in selection)
            bench.error(f"operation: got all with {given}, expected one that takes this")
        return chosen, selection
    if options.operation not in known:
        bench.error(f"operation: got {options.operation} on {options.device}, expected one of {', '.join(known)}")
    for name in selection:
        takers = [operation for operation, choices in CUDA_OPERATIONS.items() if name in choices]
        if options.operation not in takers:
            bench.error(f"--{name}: got it with {options.operation}, expected it with {' or '.join(takers)}")
    return (options.operation,), selection


def main(argv: list[str] | None = None) -> int:
    """Runs one of the commands; returns the exit status: 2 for a wrong argument, 1 for any other failure."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("anabranch: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of standard output is gone, as in `| head`. Python would complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m anabranch", description="The Mixture-of-Experts layer.")
    parser.add_argument("--version", action="version", version=f"anabranch {anabranch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="versions, libraries found, instruction set, threads, backends")
    info.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    info.add_argument(
        "--selftest",
        action="store_true",
        help="also check, with JAX, every transport of expert parallelism against the ring, on the GPUs or on 4 CPU "
        "devices, and with PyTorch the layer on every device against the float64 oracle",
    )
    bench = _add_bench(commands)

    options = parser.parse_args(argv)
    if options.command == "info":
        from anabranch import info as command

        return command.run(as_json=options.json, selftest=options.selftest)
    operations, selection = _choose(bench, options)
    try:
        with busy_processes(options.busy):
            return run_bench(
                operations,
                device=options.device,
                dtypes=options.dtype,
                quick=options.quick,
                json_file=options.json,
                selection=selection,
            )
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m anabranch info` and `python -m anabranch bench`."""

import argparse
import sys

import anabranch


def _pair(text: str) -> tuple[int, int]:
    """E and K from "E,K"."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected E,K such as 128,8")
    return int(parts[0]), int(parts[1])


def _positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Runs one of the commands; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m anabranch", description="The Mixture-of-Experts layer.")
    parser.add_argument("--version", action="version", version=f"anabranch {anabranch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="versions, libraries found, instruction set, threads, backends")
    info.add_argument("--json", action="store_true", help="print one JSON object instead of lines")

    info.add_argument(
        "--selftest",
        action="store_true",
        help="also check every transport of expert parallelism against the ring, on the GPUs or on 4 CPU devices",
    )

    bench = commands.add_parser(
        "bench",
        help="our operations beside torch (if installed) and XLA on this machine, in one run",
        description="Times our operations beside torch (if installed) and XLA on this machine, in one run.",
    )
    from anabranch.bench import CUDA_FIXED, CUDA_OPERATIONS, OPERATIONS

    bench.add_argument(
        "operation", nargs="?", choices=[*dict.fromkeys([*OPERATIONS, *CUDA_OPERATIONS]), "all"], default="all"
    )
    bench.add_argument("--json", metavar="FILE", help="also write the rows to FILE ('-': standard output, no table)")
    bench.add_argument("--quick", action="store_true", help="fewer repeats and only the first shape of each table")
    bench.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help=f"cuda: {' and '.join(CUDA_OPERATIONS)} on a GPU"
    )
    bench.add_argument("--dtype", choices=["float32", "bfloat16"], action="append", help="default: both")
    cuda = bench.add_argument_group("with --device cuda; each may be given several times")
    cuda.add_argument(
        "--rows", type=_pair, metavar="E,K", action="append", help="only the shapes of E experts, K a token"
    )
    cuda.add_argument("--tokens", type=_positive, metavar="T", action="append", help="numbers of tokens")
    cuda.add_argument(
        "--by",
        choices=["c", "jax", "torch", "xla"],
        action="append",
        help="what to time: ours through C or through JAX, torch eager, XLA's jit of plain JAX",
    )

    options = parser.parse_args(argv)
    if options.command == "info":
        from anabranch import info as command

        return command.run(as_json=options.json, selftest=options.selftest)
    from anabranch import bench as command_bench

    known = CUDA_OPERATIONS if options.device == "cuda" else OPERATIONS
    given = {"rows": options.rows, "tokens": options.tokens, "by": options.by}
    selection = {name: value for name, value in given.items() if value is not None}
    offered = tuple(name for name in known if not (selection and name in CUDA_FIXED))
    operations = offered if options.operation == "all" else (options.operation,)
    if not set(operations) <= set(known):
        parser.error(f"operation: got {options.operation} on {options.device}, expected one of {', '.join(known)}")
    if selection and options.device != "cuda":
        parser.error(f"--{next(iter(selection))}: got it with --device {options.device}, expected --device cuda")
    try:
        return command_bench.run(
            operations,
            device=options.device,
            dtypes=options.dtype or ["float32", "bfloat16"],
            quick=options.quick,
            json_file=options.json,
            selection=selection,
        )
    except command_bench.BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

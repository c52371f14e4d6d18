"""`python -m anabranch info` and `python -m anabranch bench`."""

import argparse
import sys

import anabranch


def main(argv: list[str] | None = None) -> int:
    """Runs one of the commands; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m anabranch", description="The Mixture-of-Experts layer.")
    parser.add_argument("--version", action="version", version=f"anabranch {anabranch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="versions, libraries found, instruction set, threads, backends")
    info.add_argument("--json", action="store_true", help="print one JSON object instead of lines")

    bench = commands.add_parser(
        "bench",
        help="our operations beside torch (if installed) and XLA on this machine, in one run",
        description="Times our operations beside torch (if installed) and XLA on this machine, in one run.",
    )
    from anabranch.bench import CUDA_OPERATIONS, OPERATIONS

    bench.add_argument("operation", nargs="?", choices=[*OPERATIONS, "all"], default="all")
    bench.add_argument("--json", metavar="FILE", help="also write the rows to FILE ('-': standard output, no table)")
    bench.add_argument("--quick", action="store_true", help="fewer repeats and only the first shape of each table")
    bench.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the CUDA kernels on a GPU, through C"
    )
    bench.add_argument("--dtype", choices=["float32", "bfloat16"], action="append", help="default: both")

    options = parser.parse_args(argv)
    if options.command == "info":
        from anabranch import info as command

        return command.run(as_json=options.json)
    from anabranch import bench as command_bench

    if options.device == "cuda":
        if options.operation not in ("all", *CUDA_OPERATIONS):
            parser.error(f"operation: got {options.operation} on cuda, expected one of {', '.join(CUDA_OPERATIONS)}")
        chosen = CUDA_OPERATIONS if options.operation == "all" else [options.operation]
        operations = [f"cuda_{name}" for name in chosen]
    else:
        operations = list(OPERATIONS) if options.operation == "all" else [options.operation]
    return command_bench.run(
        operations,
        dtypes=options.dtype or ["float32", "bfloat16"],
        quick=options.quick,
        json_file=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())

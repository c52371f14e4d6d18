"""`python -m anabranch info` and `python -m anabranch bench`."""

import argparse
import os
import sys

import anabranch
from anabranch import bench


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: success; 2: a wrong argument; 130: interrupted; 141: nobody reads standard output; 1: any other failure.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("anabranch: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of standard output is gone, as in `| head`. Without this, Python reports the error again at exit.
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
    bench.add_command(commands)

    options = parser.parse_args(argv)
    if options.command == "info":
        from anabranch import info as command

        return command.run(as_json=options.json, selftest=options.selftest)
    try:
        return bench.run(options)
    except bench.BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, bench.ArgumentError) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m byte_lm`, from the folder `examples`."""

import sys

from launch import num_processes
from run_error import RunError, needs, run_main

with needs("demo"):
    from byte_lm.options import Options, parse
    from mesh import parse_mesh, request_devices


def train(options: Options, start: str) -> int:
    """Trains; returns the exit status.

    Raises:
      RunError: as in `run`, or this is one of several processes.
    """
    if num_processes() > 1:
        raise RunError(f"processes: got {num_processes()} from launch.py, expected 1; --mesh trains on several devices")
    print("byte_lm: loading JAX and the corpus", file=sys.stderr, flush=True)  # This takes seconds.
    try:
        with needs("demo"):
            from byte_lm.train import run
        if options.mesh:
            request_devices(parse_mesh(options.mesh))
        run(options, start)
    except KeyboardInterrupt:
        print(
            f"\nStopped without saving. The checkpoints in {options.out} are complete; the same command resumes from "
            "the newest."
        )
        return 130
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and trains; returns the exit status."""
    return run_main("byte_lm", lambda: train(*parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m byte_lm.generate`, from the folder `examples`: continues a text with the model of a run."""

import argparse
import dataclasses
import sys
from pathlib import Path

from run_error import RunError, needs, run_main

with needs("demo"):
    from byte_lm.options import DEFAULT_OUT, Options
    from option_fields import LARGEST


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Options that a run also has take its defaults."""
    default = {field.name: field.default for field in dataclasses.fields(Options)}
    parser = argparse.ArgumentParser(
        prog="byte_lm.generate",
        description="Continues a text with the model of the newest checkpoint of a run of byte_lm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FOLDER", help="the run's --out")
    parser.add_argument("--prompt", default=default["prompt"], metavar="TEXT", help="the text to continue")
    parser.add_argument("--bytes", type=int, default=default["sample_bytes"], metavar="N", help="bytes to add")
    parser.add_argument(
        "--temperature", type=float, default=default["temperature"], help="0: always the likeliest byte"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    options = parser.parse_args(arguments)
    for name, least in (("bytes", 1), ("temperature", 0), ("seed", 0)):
        value = getattr(options, name)
        if not least <= value <= LARGEST[type(value)]:
            parser.error(f"--{name}: got {value}, expected a number from {least} to {LARGEST[type(value)]}")
    if not options.prompt.encode():
        parser.error("--prompt: got '', expected at least one byte")
    return options


def write(options: argparse.Namespace) -> None:
    """Prints the prompt and the model's continuation.

    Raises:
      RunError: the folder has no readable checkpoint.
    """
    with needs("demo"):
        from byte_lm.checkpoint import CONFIG, RunFolder
        from byte_lm.sampling import continued
        from byte_lm.step import Program
    if not (options.out / CONFIG).exists():
        raise RunError(f"--out: got {options.out}, expected the folder of a run of byte_lm")
    folder = RunFolder(options.out)
    try:
        saved = folder.options()
        program = Program.of(saved)
        state, _ = folder.restore(program.shapes, (saved.layers, saved.experts))
    finally:
        folder.close()
    print(continued(program, state, options.prompt, options.bytes, options.temperature, options.seed))


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and prints the text; returns the exit status."""
    return run_main("byte_lm.generate", lambda: write(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())

"""The options of transformers_finetune.py, lora_finetune.py and transformers_parallel.py."""

import argparse
from pathlib import Path

DTYPES = ("float32", "bfloat16")


def common(description: str | None) -> argparse.ArgumentParser:
    """The options of all three programs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder or a config.json (default: a small random Qwen3-MoE)")
    parser.add_argument("--text", type=Path, help="folder of *.py files to train on (default: the standard library's)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--seq", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    return parser


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of the programs that train a model twice on one device."""
    parser = common(description)
    parser.add_argument(
        "--beside", default="default", help='experts to compare with: "default", "eager", "grouped_mm", ...'
    )
    parser.add_argument("--device", help="such as cuda:1 (default: the first GPU if there is one, else cpu)")
    return parser


def checked(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line and checks the options of `parser`."""
    options = parser.parse_args(arguments)
    for name, least in (("steps", 2), ("batch", 1), ("seq", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}, expected at least {least}")
    if options.model is not None and not options.model.exists():
        parser.error(f"--model: got {options.model}, expected a folder or a file")
    return options

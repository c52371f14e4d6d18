"""Options of an example: the fields of one dataclass define the command line, the help and the allowed ranges."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

#: The largest int32 and float32, so that no number wraps around or becomes infinite.
LARGEST = {int: 2**31 - 1, float: 3.4e38}


def option(group: str, default: Any, text: str, minimum: float | None = None, choices: tuple[str, ...] | None = None):
    """A field of the dataclass.

    Args:
      group: heading in the help.
      default: also gives the type.
      text: the help.
      minimum: the least number; None: no check.
      choices: the allowed values; None: all.
    """
    return dataclasses.field(default=default, metadata=dict(group=group, text=text, minimum=minimum, choices=choices))


def flag(name: str) -> str:
    """The name of a field on the command line."""
    return f"--{name.replace('_', '-')}"


def check_ranges(options: Any) -> None:
    """Checks every field against its minimum and its choices.

    Raises:
      ValueError: a field is out of range; the message names it.
    """
    for field in dataclasses.fields(options):
        value, minimum, choices = getattr(options, field.name), field.metadata["minimum"], field.metadata["choices"]
        if minimum is not None and not minimum <= value <= LARGEST[type(field.default)]:
            maximum = LARGEST[type(field.default)]
            raise ValueError(f"{flag(field.name)}: got {value}, expected a number from {minimum} to {maximum}")
        if choices is not None and value not in choices:
            raise ValueError(f"{flag(field.name)}: got {value!r}, expected one of {', '.join(choices)}")


def add_options(parser: argparse.ArgumentParser, cls: type) -> dict[str, Any]:
    """Adds every field of the dataclass to the parser; returns the groups of arguments by name."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        about = field.metadata
        group = groups.setdefault(about["group"], parser.add_argument_group(about["group"]))
        group.add_argument(
            flag(field.name),
            type=_parser_of(field.default),
            default=field.default,
            choices=about["choices"],
            metavar=None if about["choices"] else type(field.default).__name__.replace("PosixPath", "folder"),
            help=about["text"],
        )
    return groups


def _parser_of(default: Any) -> Any:
    """The function that reads an option with this default."""
    if isinstance(default, bool):
        return _boolean
    return type(default) if isinstance(default, (int, float, str)) else Path


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")
    return text == "true"

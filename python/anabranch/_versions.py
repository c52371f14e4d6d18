"""The versions that the tests have been run with, in one place: `python -m anabranch info` warns of others."""

import importlib.metadata
import platform

#: Series, that is the first two numbers of a version, by package. Others are not refused: they may well work.
TESTED = {
    "python": ("3.11", "3.12", "3.13"),
    "jax": ("0.10", "0.11", "0.12"),
    "flax": ("0.12",),
    "numpy": ("2.4", "2.5"),
    "torch": ("2.9", "2.10", "2.11", "2.13", "2.14", "2.15"),
    "transformers": ("5.9", "5.17", "5.23", "5.24"),
    "peft": ("0.21",),
}
#: The oldest torch whose library of operations is the one that `anabranch.torch` uses.
OLDEST_TORCH = (2, 9)


def found(package: str) -> str | None:
    """The version that is here; None: not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def series(version: str) -> str:
    """The first two numbers.

    >>> series("0.12.0.1"), series("2.5.0rc1")
    ('0.12', '2.5')
    """
    return ".".join(version.split(".")[:2])


def torch_is_supported(version: str) -> bool:
    """Whether torch is not older than the oldest that is supported.

    >>> torch_is_supported("2.9.1+cpu"), torch_is_supported("2.10.0a0"), torch_is_supported("2.8.0")
    (True, True, False)
    """
    return tuple(int(part) for part in series(version).split(".")) >= OLDEST_TORCH


def untested(versions: dict[str, str | None]) -> list[str]:
    """What to say of packages whose series is not in the table; those that are not installed are not looked at.

    >>> untested({"jax": "0.9.2", "flax": None, "numpy": "2.4.6"})
    ['jax 0.9.2 was never tested, 0.10, 0.11, 0.12 were']
    """
    return [
        f"{package} {version} was never tested, {', '.join(TESTED[package])} were"
        for package, version in versions.items()
        if version is not None and series(version) not in TESTED[package]
    ]

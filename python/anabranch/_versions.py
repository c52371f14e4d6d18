"""The package versions that the tests have run with; `python -m anabranch info` warns about others."""

import importlib.metadata
import platform

#: Tested release series (the first two numbers of a version) by package. Other series may work and are not refused.
TESTED = {
    "python": ("3.11", "3.12", "3.13"),
    "jax": ("0.10", "0.11", "0.12"),
    "flax": ("0.12",),
    "numpy": ("2.4", "2.5"),
    "torch": ("2.9", "2.10", "2.11", "2.13", "2.14", "2.15"),
    "transformers": ("5.9", "5.17", "5.23", "5.24"),
    "peft": ("0.21",),
}
#: The oldest torch release that has the operator-library API which `anabranch.torch` uses.
OLDEST_TORCH = (2, 9)
#: The oldest series of Transformers that loads packed checkpoints. Older ones drop axes of size 1 of scales when they
#: save a model. 5.17 also loads incomplete checkpoints, and converts codes and scales of another dtype by value,
#: without an error.
OLDEST_PACKED = (5, 24)


def installed(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def series(version: str) -> str:
    """The first two numbers of a version.

    >>> series("0.12.0.1"), series("2.5.0rc1")
    ('0.12', '2.5')
    """
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in series(version).split("."))


def torch_is_supported(version: str) -> bool:
    """Whether this torch is at least as new as the oldest supported release.

    >>> torch_is_supported("2.9.1+cpu"), torch_is_supported("2.10.0a0"), torch_is_supported("2.8.0")
    (True, True, False)
    """
    return _numbers(version) >= OLDEST_TORCH


def packed_is_supported(version: str) -> bool:
    """Whether this Transformers loads packed checkpoints.

    >>> packed_is_supported("5.24.0"), packed_is_supported("5.18.0")
    (True, False)
    """
    return _numbers(version) >= OLDEST_PACKED


def untested(versions: dict[str, str | None]) -> list[str]:
    """Warnings for installed packages whose release series is not in the table.

    >>> untested({"jax": "0.9.2", "flax": None, "numpy": "2.4.6"})
    ['jax 0.9.2 was never tested, 0.10, 0.11, 0.12 were']
    """
    return [
        f"{package} {version} was never tested, {', '.join(TESTED[package])} were"
        for package, version in versions.items()
        if version is not None and series(version) not in TESTED[package]
    ]

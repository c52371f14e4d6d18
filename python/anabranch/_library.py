"""Finds and loads libanabranch.so, the C library under every front end."""

import ctypes
import functools
import importlib.metadata
import os
import pathlib

import anabranch


class LibraryError(RuntimeError):
    """The C library was not found or cannot be used on this machine; the message says why."""


def _candidates() -> list[pathlib.Path]:
    """Places where libanabranch.so may be: named by ANABRANCH_LIBRARY, or installed with the package."""
    override = os.environ.get("ANABRANCH_LIBRARY")
    if override:
        return [pathlib.Path(override)]
    # An editable install keeps the sources and the library in two folders, both on __path__.
    return [pathlib.Path(folder) / "lib" / "libanabranch.so" for folder in anabranch.__path__]


def _preload_onednn() -> None:
    """Loads the oneDNN of the wheel onednn-cpu-gomp where the library's own search path does not reach it."""
    try:
        files = importlib.metadata.files("onednn-cpu-gomp") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "libdnnl.so.3":
            ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
            return


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the library once.

    Raises:
      LibraryError: no library was found, or the system cannot load it.
    """
    candidates = _candidates()
    for path in candidates:
        if not path.exists():
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError as first:
            if "libdnnl" not in str(first):
                raise LibraryError(f"{path}: {first}") from first
            try:
                _preload_onednn()
                return ctypes.CDLL(str(path))
            except OSError as second:
                raise LibraryError(f"{path}: {second}") from second
    raise LibraryError("libanabranch.so: not found in " + ", ".join(map(str, candidates)))


def describe() -> dict[str, str]:
    """What the library says of its build and this machine: version, isa, threads, threading, onednn, compiler."""
    text = ctypes.create_string_buffer(1024)
    load().ab_describe(text, ctypes.c_size_t(len(text)))
    return dict(line.split("=", 1) for line in text.value.decode().splitlines())

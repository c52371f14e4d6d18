"""Finds and loads the libraries under every front end: libanabranch.so and, for GPUs, libanabranch_cuda.so."""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import anabranch

#: XLA's entry points in the C library. `on_cuda(name)` is the name of the entry point in the CUDA library.
HANDLERS = (
    "ab_xla_combine",
    "ab_xla_combine_backward",
    "ab_xla_dispatch",
    "ab_xla_expand_row_id_map",
    "ab_xla_expert_ffn_backward",
    "ab_xla_expert_ffn_forward",
    "ab_xla_grouped_matmul",
    "ab_xla_grouped_matmul_combine",
    "ab_xla_grouped_matmul_dw",
    "ab_xla_pack_mxfp4",
    "ab_xla_plan",
    "ab_xla_quantize_rows",
    "ab_xla_quantize_weights",
    "ab_xla_router_backward",
    "ab_xla_router_forward",
    "ab_xla_score_sum",
    "ab_xla_sequence",
    "ab_xla_sort_chunks",
    "ab_xla_unpack",
)

#: XLA's entry points that only the CUDA library has, also under their names without "cuda".
CUDA_HANDLERS = ("ab_xla_exchange_all_gather", "ab_xla_exchange_all_to_all")

#: Functions of the C library that bound the CUDA library's workspaces (include/anabranch/cuda_workspaces.h).
WORKSPACE_BOUNDS = (
    "ab_cuda_arriving_workspace_bound",
    "ab_cuda_expert_ffn_backward_workspace_bound",
    "ab_cuda_expert_ffn_forward_workspace_bound",
    "ab_cuda_grouped_matmul_combine_workspace_bound",
    "ab_cuda_grouped_matmul_dw_workspace_bound",
    "ab_cuda_lora_workspace_bound",
    "ab_cuda_plan_workspace_bound",
    "ab_cuda_quantile_workspace_bound",
    "ab_cuda_returning_workspace_bound",
    "ab_cuda_sort_chunks_workspace_bound",
    "ab_cuda_fp8_rows_workspace_bound",
    "ab_cuda_statistics_workspace_bound",
    "ab_cuda_unpacked_workspace_bound",
)

#: ab_dtype by dtype name.
DTYPES = {
    "bool": 1, "uint8": 2, "int16": 3, "int32": 4, "int64": 5, "float16": 6, "bfloat16": 7, "float32": 8,
    "float8_e4m3fn": 9, "float4_e2m1fn_x2": 10, "float8_e8m0fnu": 11,
}  # fmt: skip
#: Dtypes of views of bytes in C calls; arrays of the front ends do not have them.
VIEW_DTYPES = ("float4_e2m1fn_x2", "float8_e8m0fnu")


class Status(ctypes.Structure):
    """ab_status."""

    _fields_ = (("code", ctypes.c_int32), ("message", ctypes.c_char * 508))


#: Exceptions by the code of a status; others are RuntimeError.
ERRORS: dict[int, type[Exception]] = {1: ValueError, 2: NotImplementedError, 3: MemoryError}
#: All of them.
STATUS_ERRORS: tuple[type[Exception], ...] = (*ERRORS.values(), RuntimeError)


def check_status(status: Status) -> None:
    """Raises the exception that a status stands for, with its message."""
    if status.code != 0:
        raise ERRORS.get(status.code, RuntimeError)(status.message.decode())


class LibraryError(RuntimeError):
    """The C library was not found or cannot be used on this machine; the message says why."""


def _find(name: str, variable: str) -> pathlib.Path:
    """The path of a library: named by an environment variable, or installed with the package."""
    override = os.environ.get(variable)
    # An editable install keeps the sources and the library in two folders, both on __path__.
    folders = [pathlib.Path(folder) / "lib" / name for folder in anabranch.__path__]
    candidates = [pathlib.Path(override)] if override else folders
    for path in candidates:
        if path.exists():
            return path
    message = f"{name}: not found in " + ", ".join(map(str, candidates))
    if not override and name == "libanabranch_cuda.so":
        message += (
            "; this build has no CUDA support; to build with CUDA: pip install . "
            "--config-settings=cmake.define.ANABRANCH_CUDA=ON"
        )
    raise LibraryError(message)


def _preload_onednn() -> None:
    """Loads the oneDNN of the wheel onednn-cpu-gomp, for a library whose own search path does not reach it."""
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
      LibraryError: no library was found, the system cannot load it, or functions are missing from it.
    """
    path = _find("libanabranch.so", "ANABRANCH_LIBRARY")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as first:
        if "libgomp" in str(first):
            raise LibraryError(f"{path}: {first}; it is OpenMP's runtime: apt-get install libgomp1") from first
        if "libdnnl" not in str(first):
            raise LibraryError(f"{path}: {first}") from first
        try:
            _preload_onednn()
            library = ctypes.CDLL(str(path))
        except OSError as second:
            raise LibraryError(f"{path}: {second}") from second
    return with_symbols(library, ("ab_describe", *WORKSPACE_BOUNDS))


def on_cuda(name: str) -> str:
    """The CUDA library's name of a function of the C library.

    >>> on_cuda("ab_xla_plan"), on_cuda("ab_describe")
    ('ab_cuda_xla_plan', 'ab_cuda_describe')
    """
    return name.replace("ab_", "ab_cuda_", 1)


def with_symbols(library: ctypes.CDLL, names: Sequence[str]) -> ctypes.CDLL:
    """Returns the library if it has these functions; raises LibraryError if it is another library or version."""
    missing = [name for name in names if not hasattr(library, name)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LibraryError(
            f"{library._name}: got a library without {missing[0]}{more}, expected one of anabranch "
            f"{anabranch.__version__}"
        )
    return library


@functools.cache
def load_cuda() -> ctypes.CDLL:
    """Loads the CUDA library once. Loading needs no GPU; `describe_cuda` reports whether there is one.

    Raises:
      LibraryError: this build has no CUDA library, the system cannot load it, or functions are missing from it.
    """
    path = _find("libanabranch_cuda.so", "ANABRANCH_CUDA_LIBRARY")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path}: {error}") from error
    return with_symbols(library, tuple(map(on_cuda, ("ab_describe", "ab_experts_path", "ab_exchange_describe"))))


def _facts(describe: Any) -> dict[str, str]:
    text = ctypes.create_string_buffer(4096)
    describe(text, ctypes.c_size_t(len(text)))
    return dict(line.split("=", 1) for line in text.value.decode().splitlines())


def describe() -> dict[str, str]:
    """Facts about the library's build and this machine: version, isa, threads, threading, onednn, compiler."""
    return _facts(load().ab_describe)


def describe_cuda() -> dict[str, str]:
    """Facts from the CUDA library: version, cuda, driver and lines per device, or `error` if there is no device."""
    library = load_cuda()
    peers = _facts(functools.partial(library.ab_cuda_exchange_describe, None))
    return peers | _facts(library.ab_cuda_describe)


def cuda_capabilities(facts: Mapping[str, str]) -> list[str]:
    """The compute capabilities of the devices that `describe_cuda` lists, in order.

    >>> cuda_capabilities({"cuda": "13.0", "device 0": "NVIDIA H200, compute capability 9.0, 132 multiprocessors"})
    ['9.0']
    """
    named = (re.search(r"compute capability (\d+\.\d+)", facts[name]) for name in facts if name.startswith("device "))
    return [match[1] for match in named if match]

"""libanabranch_torch.so: native kernels for torch's operations, by functions of libtorch that are found at run time.

The kernels run prepared calls (see `PreparedCalls`) without Python. If calls are not prepared yet, the library calls
back: the operation's descriptions in Python are the only ones. Without the library, or with ANABRANCH_TORCH_NATIVE=0,
the kernels are Python functions that call the C libraries through ctypes.
"""

import ctypes
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anabranch import _library, _structs, _versions
from anabranch.torch.binding.calls import PreparedCalls, prepare
from anabranch.torch.binding.keys import decode, encode, kinds_of
from anabranch.torch.binding.probe import probe

NAME = "libanabranch_torch.so"
_MAX_RANK = _structs.MAX_RANK


# The structs of src/torch/prepared.h.


class _Node(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("left", ctypes.c_int64), ("right", ctypes.c_int64))


class _Condition(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("code", "left", "right", "outcome"))


class _Result(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int32), ("rank", ctypes.c_int32), ("sizes", ctypes.c_int32 * _MAX_RANK))


class _Place(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_int32), ("offset", ctypes.c_int32))


class _Cell(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_int32), ("number", ctypes.c_int32))


class _Call(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("function", "query", "args", "phase"))


class _Description(ctypes.Structure):
    _fields_ = (
        *[
            (f"num_{name}", ctypes.c_int32)
            for name in ("given", "results", "places", "cells", "calls", "inputs", "nodes", "conditions")
        ],
        ("working_size", ctypes.c_int32),
        ("num_after_error", ctypes.c_int32),
        ("nodes", ctypes.POINTER(_Node)),
        ("conditions", ctypes.POINTER(_Condition)),
        ("results", ctypes.POINTER(_Result)),
        ("places", ctypes.POINTER(_Place)),
        ("cells", ctypes.POINTER(_Cell)),
        ("calls", ctypes.POINTER(_Call)),
        ("tensors", ctypes.c_void_p),
        ("exec", ctypes.c_void_p),
    )


_PREPARE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int64,
    ctypes.POINTER(_Description),
)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Description))


class _Unavailable(Exception):
    """The reason why there are no native kernels."""


class Native:
    """The loaded library.

    Args:
      library: the library.
      torch_cpu, torch_cuda: the libraries of torch whose functions it calls.

    Raises:
      _Unavailable: a function is missing.
    """

    def __init__(self, library: ctypes.CDLL, torch_cpu: ctypes.CDLL, torch_cuda: ctypes.CDLL | None):
        self.library, self.on_cuda = library, torch_cuda is not None
        self.dtypes = {}
        for name in _library.DTYPES:
            if name in _library.VIEW_DTYPES:
                continue
            number = getattr(torch_cpu, f"aoti_torch_dtype_{name}", None)
            if number is None:
                raise _Unavailable(f"torch {torch.__version__} has no function aoti_torch_dtype_{name}")
            self.dtypes[number()] = getattr(torch, name)
        self.numbers = {dtype: number for number, dtype in self.dtypes.items()}
        self.cpu = torch_cpu.aoti_torch_device_type_cpu()
        #: (kinds, allocate, calls) of each operation, by its number.
        self.operations: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = []
        self.failures = threading.local()
        self._held: dict[int, Any] = {}
        self._callbacks = _PREPARE(self._prepare), _RELEASE(self._release)
        library.ab_torch_load.restype = library.ab_torch_error.restype = ctypes.c_char_p
        library.ab_torch_load.argtypes = (ctypes.c_void_p, ctypes.c_void_p, _PREPARE, _RELEASE)
        missing = library.ab_torch_load(
            torch_cpu._handle, None if torch_cuda is None else torch_cuda._handle, *self._callbacks
        )
        if missing is not None:
            raise _Unavailable(f"torch {torch.__version__} has no function {missing.decode()}")
        library.ab_torch_add.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
        library.ab_torch_register.argtypes = (ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p)
        text = (ctypes.c_char_p, ctypes.c_int64)
        library.ab_torch_config.argtypes = (*text, *text, ctypes.c_int32)
        self.takes_lists = bool(library.ab_torch_takes_lists())

    @property
    def dispatch_keys(self) -> tuple[str, ...]:
        """The dispatch keys that have native kernels."""
        return ("CPU", "CUDA") if self.on_cuda else ("CPU",)

    def add(self, name: str, kinds: str, allocate: Callable[..., Any], calls: Callable[..., Any]) -> int:
        """Adds an operation and returns its number."""
        number: int = self.library.ab_torch_add(name.encode(), kinds.encode())
        self._check(number)
        self.operations.append((kinds, allocate, calls))
        return number

    def add_kernel(self, number: int, namespace: str, dispatch_key: str) -> None:
        """Registers an operation's kernel for a dispatch key."""
        self._check(self.library.ab_torch_register(number, namespace.encode(), dispatch_key.encode()))

    def register(self, schema: str, allocate: Callable[..., Any], calls: Callable[..., Any]) -> bool:
        """Registers the kernels of an operation; False: it has arguments that a native kernel can't read."""
        kinds = kinds_of(schema)
        number = self.add(schema.split("(")[0], kinds, allocate, calls)
        if not self.takes_lists and set(kinds) & set("IFs"):
            return False
        for key in self.dispatch_keys:
            self.add_kernel(number, "anabranch", key)
        return True

    def add_internal(self, name: str, arguments: str, allocate: Callable[..., Any], calls: Callable[..., Any]) -> None:
        """Adds an operation that only native code calls. arguments: as in a schema, with parentheses."""
        self.add(name, kinds_of(arguments), allocate, calls)

    def register_layer(self) -> None:
        """Registers the kernels of the whole layer."""
        for key in self.dispatch_keys:
            self._check(self.library.ab_torch_register_layer(key.encode()))

    def register_group_layer(self) -> None:
        """Registers the kernels of the layer over the memory of peers."""
        for key in self.dispatch_keys:
            self._check(self.library.ab_torch_register_group_layer(key.encode()))

    def config(self, layer: Sequence[tuple[str, Any]], network: Sequence[tuple[str, Any]], *, parts_first: bool) -> int:
        """The number of a layer's options.

        Args:
          layer, network: (kind, value) of the last arguments of the layer's and the experts' operations.
          parts_first: whether a parameter [E, P F, D] has the gate rows first, then the up rows.
        """
        encoded = [b"".join(map(encode, *zip(*options, strict=True))) for options in (layer, network)]
        number: int = self.library.ab_torch_config(
            encoded[0], len(encoded[0]), encoded[1], len(encoded[1]), parts_first
        )
        self._check(number)
        return number

    def _check(self, number: int) -> None:
        if number < 0:
            raise RuntimeError(self.library.ab_torch_error().decode())

    def describe(self) -> str:
        """What is native, for `python -m anabranch info`."""
        devices = " and ".join(self.dispatch_keys)
        lists = "" if self.takes_lists else f", not those with lists, which torch {torch.__version__} can't pass"
        return f"native on {devices}{lists}: {self.library._name}"

    def counts(self) -> tuple[int, int]:
        """How many calls have been prepared, and how many operations have run."""
        prepared, runs = ctypes.c_int64(), ctypes.c_int64()
        self.library.ab_torch_count(ctypes.byref(prepared), ctypes.byref(runs))
        return prepared.value, runs.value

    def forget(self) -> None:
        """Removes all prepared calls."""
        self.library.ab_torch_forget()

    def translated(self, error: RuntimeError) -> BaseException:
        """The exception that a kernel's RuntimeError stands for, or the error itself."""
        code, separator, text = str(error).removeprefix("anabranch:").partition(":")
        if not str(error).startswith("anabranch:") or not separator:
            return error
        number = int(code)
        if number == -1:
            failure: BaseException = self.failures.__dict__.pop("last", error)
            return failure
        if number == 5:
            return (torch.OutOfMemoryError if self.on_cuda else RuntimeError)(text)
        return _library.ERRORS.get(number, RuntimeError)(text)

    # ------------------------------------------------------------ callbacks

    def _prepare(self, operation: int, key: int, key_size: int, inputs: Any, num_inputs: int, description: Any) -> int:
        """Prepares the calls of an operation for a key and sizes. Returns 0, or 1 after keeping the exception."""
        try:
            kinds, allocate, calls = self.operations[operation]
            found = decode(kinds, ctypes.string_at(key, key_size), inputs[:num_inputs], self.dtypes)
            on_cpu = found.device_type == self.cpu
            device = torch.device("cpu") if on_cpu else torch.device("cuda", found.device_index)
            prepared = prepare(allocate, calls, found.arguments, found.sizes, device, found.threads)
            self._describe(prepared, description[0])
        except BaseException as error:
            self.failures.last = error
            return 1
        return 0

    def _describe(self, prepared: PreparedCalls, description: _Description) -> None:
        """Fills in a description, whose memory is kept until it is released."""
        sizes = prepared.sizes
        results = (_Result * len(prepared.results))()
        for result, described in zip(results, prepared.results, strict=True):
            if described is None:
                result.rank = -1
                continue
            shape, dtype = described
            result.dtype, result.rank = self.numbers[dtype], len(shape)
            result.sizes[: len(shape)] = shape
        phases = [None if phase is None else ctypes.c_char_p(phase.encode()) for phase in prepared.phases]
        calls = [
            (_address(function), _address(query), ctypes.addressof(args), _address(phase))
            for (function, query, args), phase in zip(prepared.functions, phases, strict=True)
        ]
        arrays: dict[str, Any] = {
            "nodes": _array(_Node, sizes.nodes),
            "conditions": _array(_Condition, sizes.conditions),
            "results": results,
            "places": _array(_Place, prepared.places),
            "cells": _array(_Cell, prepared.cells),
            "calls": _array(_Call, calls),
        }
        for name, array in arrays.items():
            setattr(description, f"num_{name}", len(array))
            setattr(description, name, array)
        description.num_inputs, description.working_size = sizes.num_inputs, prepared.working_size
        description.num_after_error = prepared.num_after_error
        description.tensors = ctypes.addressof(prepared.tensors)
        description.exec = ctypes.addressof(prepared.execution)
        self._held[description.exec] = prepared, arrays, phases

    def _release(self, description: Any) -> None:
        self._held.pop(description[0].exec, None)


class python_errors:
    """A context in which errors of native kernels become the exceptions that they stand for."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is RuntimeError and native is not None and (translated := native.translated(error)) is not error:
            raise translated from None


def call(operation: Any, *arguments: Any) -> Any:
    """Calls an operation outside autograd functions, where its errors are not yet those of Python."""
    if torch.compiler.is_compiling():
        return operation(*arguments)
    with python_errors():
        return operation(*arguments)


def _array(struct_type: Any, rows: Sequence[Any]) -> Any:
    return (struct_type * len(rows))(*rows)


def _address(pointer: Any) -> int | None:
    return None if pointer is None else ctypes.cast(pointer, ctypes.c_void_p).value


def _load() -> Native:
    """Loads the library.

    Raises:
      _Unavailable: there are no native kernels; the message says why.
    """
    if os.environ.get("ANABRANCH_TORCH_NATIVE") == "0":
        raise _Unavailable("ANABRANCH_TORCH_NATIVE=0")
    if torch.version.hip:
        raise _Unavailable(f"torch {torch.__version__} is built for ROCm")
    try:
        path = pathlib.Path(_library.load()._name).with_name(NAME)
    except _library.LibraryError as error:
        raise _Unavailable(str(error)) from error
    if not path.exists():
        raise _Unavailable(f"{path} does not exist")
    folder = pathlib.Path(torch.__file__).parent / "lib"
    cuda = folder / "libtorch_cuda.so"
    try:
        library, torch_cpu = ctypes.CDLL(str(path)), ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        return Native(library, torch_cpu, ctypes.CDLL(str(cuda)) if cuda.exists() else None)
    except OSError as error:
        raise _Unavailable(str(error)) from error


def _load_or_reason() -> tuple[Native | None, str]:
    try:
        library = _load()
        if _versions.series(torch.__version__) not in _versions.TESTED["torch"]:
            if fault := probe(library):
                raise _Unavailable(f"torch {torch.__version__} failed the self-test: {fault}")
        return library, ""
    except _Unavailable as error:
        return None, str(error)


#: The library, or None and the reason.
native, reason = _load_or_reason()

"""The structs of the C interface as ctypes lays them out are those of the headers."""

import ctypes
import pathlib
import re

import pytest

from anabranch import _library, _structs, peer_exchange

HEADERS = "".join(
    path.read_text() for path in sorted((pathlib.Path(__file__).parents[3] / "include" / "anabranch").glob("*.h"))
)
CTYPES = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "char": ctypes.c_char,
    "void*": ctypes.c_void_p,
    "const int64_t*": ctypes.c_void_p,
    "const ab_tensor*": ctypes.POINTER(_structs.Tensor),
    "ab_exchange*": ctypes.c_void_p,
}
LIMITS = {"AB_MAX_RANK": _structs.MAX_RANK, "AB_EXCHANGE_BUFFERS": _structs.EXCHANGE_BUFFERS}
STRUCTS = {f"ab_{name}_args": struct for name, struct in _structs.ARGS.items()} | {
    "ab_tensor": _structs.Tensor,
    "ab_exec": _structs.Exec,
    "ab_status": _library.Status,
}


def fields_of(name):
    """(field, ctype) of a struct in the headers."""
    (body,) = re.findall(rf"typedef struct {name} \{{(.*?)\}} {name};", HEADERS, re.S)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    for limit, value in LIMITS.items():
        body = body.replace(limit, str(value))
    declared = re.findall(r"((?:const )?\w+\*?)\s+(\w+)(?:\[(\d+)\])?;", body)
    assert len(declared) == body.count(";")
    return [(field, CTYPES[kind] * int(size) if size else CTYPES[kind]) for kind, field, size in declared]


def test_every_struct_is_described():
    assert set(STRUCTS) == set(re.findall(r"typedef struct (\w+) \{", HEADERS))
    limits = {"AB_EXCHANGE_MAX_RANKS": peer_exchange.MAX_RANKS, "AB_EXCHANGE_HANDLE_BYTES": peer_exchange.HANDLE_BYTES}
    for limit, value in (LIMITS | limits).items():
        assert f"#define {limit} {value}\n" in HEADERS
    assert f"#define AB_EXCHANGE_ALL_BUFFERS ({peer_exchange.ALL_BUFFERS})\n" in HEADERS
    for part in ("WHOLE", "START", "FINISH"):
        assert f"AB_EXCHANGE_{part} = {getattr(peer_exchange, part)}" in HEADERS


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_are_those_of_the_header(name):
    assert list(STRUCTS[name]._fields_) == fields_of(name)

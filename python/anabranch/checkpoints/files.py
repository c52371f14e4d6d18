"""Reads and writes the safetensors files of a checkpoint, tensor by tensor, in every dtype."""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from anabranch._text import shown, typed

_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U64": np.uint64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_NAMES = {np.dtype(dtype).name: name for name, dtype in _DTYPES.items()}
INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """A tensor of a file.

    Attributes:
      dtype: its name in safetensors.
      shape: its shape.
      bytes: its size.
      file, start: where its bytes are; None and 0: not written yet.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: pathlib.Path | None = None
    start: int = 0


def new_entry(dtype: Any, shape: tuple[int, ...]) -> Entry:
    """An entry for a tensor of a numpy dtype."""
    dtype = np.dtype(dtype)
    return Entry(_NAMES[dtype.name], shape, math.prod(shape) * dtype.itemsize)


class Files(Mapping[str, np.ndarray]):
    """The tensors of a safetensors checkpoint by name, for `load`. Each is a read-only view of its file.

    Args:
      path: a folder with a model's safetensors files, or one file. In a folder, the files of its index are read;
        without an index model.safetensors, or else all. An index of which no file is left beside a model.safetensors
        is ignored: `save_pretrained` of Transformers leaves it there.

    Raises:
      ValueError: a file is missing or damaged, a name is in two files, the index and the files disagree, or there is
        a model.safetensors beside the files of an index that does not list it. Messages name the file.

    >>> import numpy as np, pathlib, tempfile
    >>> from anabranch.checkpoints import Files, write_file
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> write_file(file, {"weight": np.ones((2, 3), np.float32)})
    >>> Files(file)["weight"].sum()
    np.float32(6.0)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        index, alone = self.path / INDEX, self.path / "model.safetensors"
        listed = _weight_map(index) if index.exists() else {}
        given = [self.path / name for name in sorted(set(listed.values()))]
        if alone.exists() and alone not in given:
            if left := [file.name for file in given if file.exists()]:
                raise ValueError(
                    f"path: got {alone}, which Transformers loads, beside {', '.join(left[:2])} of {INDEX}, expected "
                    f"one checkpoint; delete {alone.name}, or the index and its files, whichever is outdated"
                )
            listed, given = {}, [alone]
        self.files = given or (sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path])
        for file in given:
            if not file.exists():
                raise ValueError(f"path: got no file {file}, expected all files of {index}")
        if not self.files or not self.files[0].exists():
            raise ValueError(f"path: got {self.path}, expected a safetensors file or a folder with some")
        self.entries: dict[str, Entry] = {}
        for file in self.files:
            for name, entry in _read_header(file):
                if name in self.entries:
                    raise ValueError(
                        f"{name}: got it in {self.entries[name].file} and {file}, expected every name once"
                    )
                self.entries[name] = entry
        if listed:
            for name in sorted(listed.keys() | self.entries.keys()):
                file_of = self.entries[name].file if name in self.entries else None
                found = None if file_of is None else file_of.name
                if listed.get(name) != found:
                    raise ValueError(f"{name}: got {found or 'no file'}, expected {listed.get(name)} ({index})")

    def __getitem__(self, name: str) -> np.ndarray:
        return self.bytes_of(name).view(self.dtype_of(name)).reshape(self.entries[name].shape)

    def dtype_of(self, name: str) -> np.dtype:
        """The numpy dtype of a tensor."""
        dtype = self.entries[name].dtype
        if dtype not in _DTYPES:
            raise TypeError(f"{name}: got {dtype}, expected one of {', '.join(_DTYPES)}")
        return np.dtype(_DTYPES[dtype])

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of a tensor, of any dtype."""
        entry = self.entries[name]
        assert entry.file is not None
        if not entry.bytes:
            return np.empty(0, np.uint8)
        return np.memmap(entry.file, np.uint8, "r", entry.start, (entry.bytes,))

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: got damaged JSON ({error}), expected an object") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: got {typed(found)}, expected an object")
    return found


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    """The file of every tensor, by an index."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index}: got the weight_map {shown(found)}, expected the file of every tensor")
    return found


def _read_header(file: pathlib.Path) -> Iterator[tuple[str, Entry]]:
    """The entries of a file in the order of their bytes."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file}: got a header of {length} bytes in a file of {size}, expected a safetensors file")
        text = opened.read(length)
    found = []
    try:
        for name, fields in json.loads(text, object_pairs_hook=lambda pairs: pairs):
            if name == "__metadata__":
                continue
            entry = dict(fields)
            begin, end = entry["data_offsets"]
            found.append((name, Entry(entry["dtype"], tuple(entry["shape"]), end - begin, file, 8 + length + begin)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: got a damaged header ({error!r}), expected a safetensors file") from error
    for name, tensor in found:
        if tensor.start + tensor.bytes > size:
            raise ValueError(f"{name}: got a file of {size} bytes, expected {tensor.start + tensor.bytes}: {file}")
        if tensor.dtype in _DTYPES and tensor.bytes != new_entry(_DTYPES[tensor.dtype], tensor.shape).bytes:
            raise ValueError(
                f"{name}: got {tensor.bytes} bytes, expected those of {tensor.dtype} {list(tensor.shape)}: {file}"
            )
    return iter(sorted(found, key=lambda item: item[1].start))


def write(path: pathlib.Path, entries: Mapping[str, Entry], contents: Iterable[np.ndarray]) -> None:
    """Writes a file. contents: the bytes of all entries in their order, in arrays of any sizes and dtypes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, offset + entry.bytes]}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for array in contents:
            opened.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        written = opened.tell() - 8 - len(text)
    if written != offset:
        raise RuntimeError(f"{path}: wrote {written} bytes, expected {offset}")


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Writes tensors to a safetensors file.

    Args:
      path: the file.
      tensors: name -> array (anything that np.asarray accepts), as `store` returns them.

    >>> import pathlib, tempfile
    >>> write_file(pathlib.Path(tempfile.mkdtemp()) / "a.safetensors", {"weight": np.ones(3, np.float32)})
    """
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise TypeError(f"{name}: got {array.dtype}, expected one of {', '.join(_NAMES)}")
    entries = {name: new_entry(array.dtype, array.shape) for name, array in arrays.items()}
    write(pathlib.Path(path), entries, arrays.values())

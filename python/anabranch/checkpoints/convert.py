"""`convert`: writes a checkpoint with packed experts."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from anabranch.checkpoints.complete import (
    Report,
    check,
    check_blocks,
    find_family,
    find_num_experts,
    name_pattern,
    norm_of,
    read_config,
)
from anabranch.checkpoints.families import FAMILIES
from anabranch.checkpoints.family import Family, Stored, parts_of
from anabranch.checkpoints.files import INDEX, Entry, Files, new_entry, write
from anabranch.checkpoints.packing import pack, unpack

#: Files of a checkpoint that are copied, by suffix.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md")
_DTYPES = {"uint8": np.uint8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float32": np.float32}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    packed: str,
    *,
    family: str | Family | None = None,
    num_experts: int | None = None,
    progress: Callable[[str], None] | None = print,
) -> Report:
    """Packs the experts of a checkpoint, file by file; all other tensors are copied.

    The memory in use is a few matrices of one expert. Tensors have the names of `Family.with_packed`. Names, shapes,
    dtypes, routers and biases are checked before a file is written. An expert's matrix that is zero or not finite is an
    error when it is read, and `check` runs on the result. After an error or an interrupt, the files and folders that
    this call created are removed. config.json gets a quantization_config and is written last: a folder without it is
    not complete.

    | packed | quant_method | who loads it |
    |---|---|---|
    | "fp8_blocks" | "fp8" | whatever loads DeepSeek-V3 or Qwen3-FP8; layers that stay plain are in modules_to_not_convert |
    | "mxfp4", gpt-oss | "mxfp4" | whatever loads gpt-oss |
    | "mxfp4", other families | "anabranch_mxfp4" | `load`, and Transformers after `packed_config` or `register` |

    Args:
      source: the folder with the safetensors files and config.json of plain weights.
      target: the new folder; it must not exist or be empty.
      packed: "mxfp4", packed as by `pack_mxfp4`, or "fp8_blocks", as by `pack_fp8`.
      family, num_experts: as in `check`.
      progress: is called with a line of text for every file and block; None: no progress.

    Returns:
      The `Report` of the new checkpoint.

    Raises:
      TypeError: an expert's tensor is not float32, bfloat16 or float16.
      ValueError: an argument is wrong, `check` refuses the source or the result, the source is packed already, the
        family has no tensor per expert and is not gpt_oss, or cannot have this format, or a width is not a multiple of
        its blocks.
    """  # noqa: E501
    files, config, target = Files(source), read_config(source), pathlib.Path(target)
    if not files.path.is_dir():
        raise ValueError(f"source: got {source}, expected a folder")
    if "quantization_config" in config:
        raise ValueError(f"source: got a quantization_config in {source}, expected a checkpoint of plain weights")
    plain = find_family(config, family)
    if not plain.w_in.per_expert and plain != FAMILIES["gpt_oss"]:
        raise ValueError(f"family: got experts stored as {plain.w_in}, expected a tensor per expert, or gpt_oss")
    new = plain.with_packed(packed)
    E = find_num_experts(config, num_experts)
    with _new_folder(target) as new_file:
        check_blocks(files, plain, E)
        planned = {file: dict(_plan(files, file, plain, new)) for file in files.files}
        for number, (file, tensors) in enumerate(planned.items()):
            entries = {name: entry for tensor in tensors.values() for name, entry in tensor.entries.items()}
            if progress is not None:
                size = sum(entry.bytes for entry in entries.values())
                progress(f"file {number + 1} of {len(planned)}: {file.name}, {size / 1e9:.2f} GB")
            write(new_file(file.name), entries, _contents(files, tensors, packed))
        map_of = {name: file.name for file, ts in planned.items() for t in ts.values() for name in t.entries}
        if [file.name for file in planned] != ["model.safetensors"]:
            total = sum(entry.bytes for ts in planned.values() for t in ts.values() for entry in t.entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(map_of.items()))}
            new_file(INDEX).write_text(json.dumps(index, indent=2) + "\n")
        report = check(target, family=plain, num_experts=E, progress=progress)
        for file in sorted(files.path.iterdir()):
            if file.suffix in _COPIED and file.name not in (INDEX, "config.json"):
                shutil.copy2(file, new_file(file.name))
        config["quantization_config"] = _quantization_config(files, planned, packed, plain)
        new_file("config.json").write_text(json.dumps(config, indent=2) + "\n")
    return report


@contextlib.contextmanager
def _new_folder(path: pathlib.Path) -> Iterator[Callable[[str], pathlib.Path]]:
    """Makes a folder and gives paths to new files in it by their names. After an error it removes what was created."""
    folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    first = folders[-1].parent if folders else path
    if not first.is_dir():
        raise ValueError(f"target: got {path}, expected a new folder; {first} is a file")
    if not folders and any(path.iterdir()):
        raise ValueError(f"target: got {path}, which is not empty, expected a new folder")
    created: list[pathlib.Path] = []

    def new_file(name: str) -> pathlib.Path:
        created.append(path / name)
        return created[-1]

    try:
        path.mkdir(parents=True, exist_ok=True)
        yield new_file
    except BaseException:
        for file in created:
            file.unlink(missing_ok=True)
        for folder in folders:
            with contextlib.suppress(OSError):  # Another program put files there.
                folder.rmdir()
        raise


class _Tensor(NamedTuple):
    """A tensor of the source: its entries in the target, and for experts how its matrices are stored."""

    entries: dict[str, Entry]
    stored: Stored | None = None
    transposed: bool = False


def _plan(files: Files, file: pathlib.Path, plain: Family, new: Family) -> Iterator[tuple[str, _Tensor]]:
    """The tensors of a file in their order."""
    patterns = [
        (name_pattern(name), before, after)
        for before, after in ((plain.w_in, new.w_in), (plain.w_out, new.w_out))
        for name in before.names
    ]
    for name, entry in files.entries.items():
        if entry.file != file:
            continue
        for pattern, before, after in patterns:
            if pattern.fullmatch(name):
                yield name, _planned(files, name, before, after, new.packed)
                break
        else:
            yield name, _Tensor({name: entry})


def _planned(files: Files, name: str, before: Stored, after: Stored, packed: str | None) -> _Tensor:
    """An expert's tensor, checked."""
    tensor = files[name]
    if tensor.dtype.name not in ("float32", "bfloat16", "float16"):
        raise TypeError(f"{name}: got {tensor.dtype}, expected float32, bfloat16 or float16")
    axes = before.axes.split()
    if tensor.ndim != len(axes):
        raise ValueError(f"{name}: got {list(tensor.shape)}, expected {len(axes)} axes")
    transposed = before.axes != after.axes
    *leading, N, C = tensor.swapaxes(-1, -2).shape if transposed else tensor.shape
    entries = {}
    for part in parts_of(packed, after.letters):
        shape = []
        for axis, size in zip(after.axes.split(), (*leading, N, C), strict=True):
            block = max(part.blocks.get(letter, 1) for letter in axis)
            if size % block:
                raise ValueError(f"{name}: got {list(tensor.shape)}, expected {axis.upper()} a multiple of {block}")
            shape.append(size // block)
        dtype = _DTYPES["float32" if "float32" in part.dtypes else part.dtypes[0]]
        entries[name + part.suffix] = new_entry(dtype, (*shape, *part.tail))
    return _Tensor(entries, after, transposed)


def _contents(files: Files, tensors: dict[str, _Tensor], packed: str) -> Iterator[np.ndarray]:
    """The bytes of the tensors of a file in their order."""
    for name, tensor in tensors.items():
        if tensor.stored is None:
            yield files.bytes_of(name)
            continue
        array, per_expert = files[name], tensor.stored.per_expert
        scales = []
        for e, matrix in enumerate((array,) if per_expert else array):
            norm_of(name if per_expert else f"{name}, expert {e}", unpack(matrix))
            codes, scale = pack(packed, matrix.T if tensor.transposed else matrix)
            scales.append(scale)
            yield codes
        yield from scales


def _quantization_config(files: Files, planned: Any, packed: str, family: Family) -> dict[str, Any]:
    """The entry of config.json. Its list has every matrix that stays plain."""
    kept = [name for tensors in planned.values() for name, tensor in tensors.items() if tensor.stored is None]
    matrices = (name for name in kept if name.endswith(".weight") and len(files.entries[name].shape) == 2)
    names = sorted(name.removesuffix(".weight") for name in matrices)
    if packed == "mxfp4":
        method = "mxfp4" if family == FAMILIES["gpt_oss"] else "anabranch_mxfp4"
        return {"quant_method": method, "modules_to_not_convert": names}
    if "lm_head.weight" not in files:  # it is the matrix of the embeddings
        names = ["lm_head", *names]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": names,
    }

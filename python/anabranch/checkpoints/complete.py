"""`check`: whether a checkpoint has every expert exactly once."""

import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch import checks
from anabranch._text import shown
from anabranch.checkpoints.block import (
    check_dtype,
    check_num_experts,
    check_shape,
    known_sizes,
    pieces,
    shape_text,
    some,
)
from anabranch.checkpoints.families import FAMILIES
from anabranch.checkpoints.family import PLAIN, Family, Part, Stored, parts_of
from anabranch.checkpoints.files import Files, read_json
from anabranch.checkpoints.packing import unpack
from anabranch.packed import KINDS

#: Where a config.json has the number of experts.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Report:
    """The experts of a checkpoint, as `check` found them; `print` shows one line per matrix.

    Attributes:
      packed: "mxfp4" or "fp8_blocks"; None: the experts are plain.
      num_experts: E.
      norms: float64 [E], the Frobenius norms of the experts, by the name of the tensor that has them ("{e}": one tensor
        per expert).
    """

    packed: str | None
    num_experts: int
    norms: Mapping[str, np.ndarray]

    def __str__(self) -> str:
        lines = [f"{len(self.norms)} matrices of {self.num_experts} experts, {self.packed or 'plain'}; norms:"]
        for name, norms in self.norms.items():
            low, middle, high = (f"{value:.4g}" for value in (norms.min(), np.median(norms), norms.max()))
            lines.append(f"  {name}: {low} to {high}, median {middle}")
        return "\n".join(lines)


def check(
    path: str | os.PathLike[str],
    *,
    family: str | Family | None = None,
    num_experts: int | None = None,
    progress: Callable[[str], None] | None = print,
) -> Report:
    """Checks that a checkpoint has every expert of every layer exactly once, and computes their norms.

    All experts are read, one matrix at a time, with their biases and the router's `gate` and `gate_bias`. No other
    tensor is checked: `expert_bias`, shared experts, attention, norms and embeddings may be missing or wrong.

    Args:
      path: the folder with the safetensors files, and the config.json if an argument is left out.
      family: as in `load`, without `with_packed`; None: by the model_type in config.json.
      num_experts: E; None: from config.json.
      progress: is called with a line of text for every block; None: no progress.

    Returns:
      A `Report`.

    Raises:
      TypeError: a tensor has a dtype that its format does not allow.
      ValueError: an expert lacks a weight, scales or a bias, is surplus, is in two files, is zero, or has the bytes of
        another expert of its layer; an expert or a router is not finite, or has another shape or dtype than the others
        of its block; a router is not one of E experts; a block has a router but no experts, or experts but no router;
        a file is missing or damaged, or the index and the files disagree; an argument is needed or wrong. The message
        names the tensors or the file.
    """
    files = Files(path)
    config = read_config(path)
    plain = find_family(config, family)
    packed = _format(files, plain)
    family = plain.with_packed(packed) if packed else plain
    E = find_num_experts(config, num_experts)
    norms: dict[str, np.ndarray] = {}
    prefixes = check_blocks(files, family, E)
    for number, prefix in enumerate(prefixes):
        if progress is not None:
            progress(f"checking experts {number + 1} of {len(prefixes)}: {prefix}")
        for stored in (family.w_in, family.w_out):
            for name in stored.names:
                norms[prefix + name] = _norms(files, prefix + name, stored, family.packed, E)
    return Report(packed, E, norms)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json of a folder; {} if there is none."""
    file = pathlib.Path(path) / "config.json"
    return read_json(file) if file.exists() else {}


def find_family(config: dict[str, Any], family: str | Family | None) -> Family:
    """The family that is given, or that of the model_type."""
    if isinstance(family, Family):
        if family.packed:
            raise ValueError(f"family: got one with packed={family.packed!r}, expected it without with_packed")
        return family
    text = config.get("text_config") or {}
    names = [family] if family is not None else [config.get("model_type"), text.get("model_type")]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ValueError(f"family: got {shown(names[0])}, expected a Family or one of {', '.join(sorted(FAMILIES))}")


def find_num_experts(config: dict[str, Any], num_experts: int | None) -> int:
    """E, as given or from a config.json."""
    if num_experts is not None:
        return checks.integer("num_experts", num_experts, 1)
    for part in (config, config.get("text_config") or {}):
        for key in _NUM_EXPERTS:
            if part.get(key):
                return checks.integer(key, part[key], 1)
    raise ValueError(f"num_experts: got None, and no {' or '.join(_NUM_EXPERTS)} in config.json, expected E")


def _format(files: Files, family: Family) -> str | None:
    """The format of the experts, by the names of their tensors."""
    for packed in KINDS:
        suffix = parts_of(packed, family.w_out.letters)[1].suffix
        if any(name_pattern(family.w_out.names[0] + suffix).fullmatch(name) for name in files):
            return packed
    return None


def name_pattern(name: str) -> re.Pattern[str]:
    """A pattern for the full names of a stored tensor, with the groups prefix and e."""
    return re.compile(r"(?P<prefix>(?:.*\.)?)" + re.escape(name).replace(r"\{e\}", r"(?P<e>\d+)"))


def _parts(family: Family) -> Iterator[tuple[Stored, Part]]:
    """The arrays of the experts: weights, their scales, and biases."""
    for stored in (family.w_in, family.w_out):
        yield from ((stored, part) for part in parts_of(family.packed, stored.letters))
    yield from ((stored, PLAIN) for stored in (family.b_in, family.b_out) if stored)


def check_blocks(files: Files, family: Family, E: int) -> list[str]:
    """Checks all but the values of the experts' weights; returns the prefixes of the blocks in the order of layers."""
    found: dict[str, set[str]] = {}
    for stored, part in _parts(family):
        for pattern in (name_pattern(name + part.suffix) for name in stored.names):
            for name in files:
                if match := pattern.fullmatch(name):
                    found.setdefault(match["prefix"], set()).add(name)
    expected = {name + part.suffix for stored, part in _parts(family) for _, name in pieces(stored, E)}
    gate = name_pattern(family.gate.names[0])
    routers = {match["prefix"] for name in files if (match := gate.fullmatch(name))}
    if not found and not routers:
        raise ValueError(f"path: got {files.path} without experts named {family.w_in.names[0]}, expected some")
    missing = {prefix + name for prefix in found.keys() | routers for name in expected} - set(files)
    if missing:
        raise ValueError(f"experts: got no {some(missing)}, expected all {E} experts of every block")
    surplus = {name for prefix, names in found.items() for name in names if name.removeprefix(prefix) not in expected}
    if surplus:
        raise ValueError(f"experts: got {some(surplus)}, expected only experts 0 to {E - 1}")
    if without := found.keys() - routers:
        raise ValueError(f"experts: got experts of {some(without)} without {family.gate.names[0]}, expected a router")
    prefixes = sorted(found, key=lambda prefix: [int(part) if part.isdigit() else -1 for part in prefix.split(".")])
    for prefix in prefixes:
        _check_arrays(files, family, prefix, E)
    return prefixes


def _check_arrays(files: Files, family: Family, prefix: str, E: int) -> None:
    """Checks dtypes and shapes of the router and the experts of a block, and that all but packed weights are finite."""
    sizes = known_sizes(family) | {"e": E}
    router = [(stored, PLAIN) for stored in (family.gate, family.gate_bias) if stored]
    for stored, part in (*router, *_parts(family)):
        dtype = None
        for _, name in pieces(stored, E):
            name = prefix + name + part.suffix
            if name not in files:
                raise ValueError(f"{name}: got no such tensor, expected a tensor {shape_text(stored.axes, sizes)}")
            found = files.dtype_of(name)
            check_dtype(name, found, part)
            check_shape(name, files.entries[name].shape, stored.axes, sizes, part)
            dtype = dtype or found
            if found != dtype:
                raise ValueError(f"{name}: got {found}, expected {dtype} like the other tensors of its array")
            if stored not in (family.w_in, family.w_out) and not np.isfinite(files[name]).all():
                raise ValueError(f"{name}: got NaN or an infinity, expected finite numbers")
    check_num_experts(family, prefix + family.gate.names[0], sizes)


def _matrix(files: Files, name: str, stored: Stored, packed: str | None, E: int, e: int) -> tuple[np.ndarray, ...]:
    """The arrays of one expert's matrix; views."""
    arrays = []
    for part in parts_of(packed, stored.letters):
        array = files[name.format(e=e) + part.suffix]
        if "ef" in stored.axes:
            array = array.reshape(E, -1, *array.shape[1:])
        arrays.append(array if stored.per_expert else array[e])
    return tuple(arrays)


def norm_of(name: str, values: np.ndarray) -> float:
    """The Frobenius norm of an expert's matrix, which must be positive and finite."""
    norm = float(np.sqrt(np.sum(np.square(values, dtype=np.float64))))
    if not 0 < norm < np.inf:
        raise ValueError(f"{name}: got the norm {norm}, expected a positive number")
    return norm


def _norms(files: Files, name: str, stored: Stored, packed: str | None, E: int) -> np.ndarray:
    """The norms of one matrix of all experts; refuses experts that are zero, not finite or alike."""
    norms = np.empty(E)
    for e in range(E):
        arrays = _matrix(files, name, stored, packed, E, e)
        values = unpack(KINDS[packed](*arrays) if packed else arrays[0])
        norms[e] = norm_of(name.format(e=e) if stored.per_expert else f"{name}, expert {e}", values)
        for other in np.flatnonzero(norms[:e] == norms[e]):
            before = _matrix(files, name, stored, packed, E, int(other))
            if all(a.tobytes() == b.tobytes() for a, b in zip(arrays, before, strict=True)):
                raise ValueError(f"{name}: got the same weights for the experts {other} and {e}, expected each once")
    return norms

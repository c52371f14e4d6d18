"""`load` and `store`: convert between the named tensors of a block and the arguments of `moe`."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from anabranch import checks
from anabranch._text import shown, typed
from anabranch.checkpoints.families import FAMILIES
from anabranch.checkpoints.family import PLAIN, Family, Part, Stored, parts_of, with_parts
from anabranch.packed import KINDS, is_packed


class Block(NamedTuple):
    """The arrays of one block by argument name; a pytree.

    Attributes:
      router: gate [D, E], and gate_bias [E] and expert_bias [E] if the family has them.
      experts: w_in, w_out, and b_in and b_out if the family has them, in the layouts of the family's options. w_in and
        w_out are `Mxfp4` or `Fp8Blocks` if the family has packed weights.
      shared: w_in [D, 2 or 1, S], w_out [S, D] and, if there is one, w_gate [D] of `shared_expert`; {} if the family
        has no shared expert.
      others: the family's further tensors, by their names after the prefix.
    """

    router: dict[str, Any]
    experts: dict[str, Any]
    shared: dict[str, Any]
    others: dict[str, Any]


#: For each array of Family: its field and key in Block and the order of its axes there; None: the checkpoint's order.
#: The gate comes first because it determines the number of experts.
_PLACES = {
    "gate": ("router", "gate", "cdre"),
    "gate_bias": ("router", "gate_bias", "er"),
    "expert_bias": ("router", "expert_bias", "er"),
    "w_in": ("experts", "w_in", None),
    "w_out": ("experts", "w_out", None),
    "b_in": ("experts", "b_in", None),
    "b_out": ("experts", "b_out", None),
    "shared_in": ("shared", "w_in", "cdps"),
    "shared_out": ("shared", "w_out", "scd"),
    "shared_gate": ("shared", "w_gate", "cd"),
}


def load(
    family: str | Family,
    tensors: Any,
    prefix: str = "",
    *,
    num_experts: int | None = None,
    intermediate_size: int | None = None,
) -> Block:
    """Loads the arrays of one Mixture-of-Experts block, in the dtypes of the checkpoint.

    Every size is checked against every tensor that has it. The number of experts is never inferred from tensor names:
    a checkpoint that lacks its last experts is an error.

    Args:
      family: a name in `FAMILIES`, which is the model_type in the model's config.json, or a `Family` of your own.
      tensors: name -> array (anything that np.asarray accepts): a mapping, or an open safetensors file, from which only
        the block's tensors are read.
      prefix: the common prefix of the block's tensor names, for example "model.layers.3.mlp.".
      num_experts: E, from the model's config.json. None: taken from the router's tensors. Required for a family whose
        router does not determine it (longcat_flash).
      intermediate_size: F. None: taken from the experts' tensors. Required for a family that stores the experts as
        [E F, D] (dbrx), where a tensor with missing rows looks like one with a smaller F.

    Returns:
      A `Block`. An array that is one tensor in the checkpoint is a view of it.

    Raises:
      TypeError: tensors is not a mapping, or a tensor has no floating dtype (quantised weights need
        `Family.with_packed`).
      ValueError: an unknown family, a required size that is not given, a tensor that is missing, that has another
        shape or dtype than the others, or that the family does not have. Messages name the tensor, the value it has
        and the expected one.

    >>> import numpy as np
    >>> from anabranch.checkpoints import load
    >>> tensors = {"mlp.router.weight": np.zeros([4, 8]), "mlp.router.bias": np.zeros(4)}
    >>> tensors |= {"mlp.experts.gate_up_proj": np.zeros([4, 8, 32]), "mlp.experts.down_proj": np.zeros([4, 16, 8])}
    >>> tensors |= {"mlp.experts.gate_up_proj_bias": np.zeros([4, 32]), "mlp.experts.down_proj_bias": np.zeros([4, 8])}
    >>> load("gpt_oss", tensors, prefix="mlp.").experts["w_in"].shape
    (4, 8, 16, 2)
    """
    family = _family(family)
    source = _Source(tensors, prefix, family.roots)
    sizes = known_sizes(family) | _given_sizes(family, num_experts, intermediate_size)
    gate = source.full(family.gate.names[0])
    block = Block({}, {}, {}, {})
    for place in _places(family):
        if place.part != "router" and "e" not in sizes:
            raise ValueError("num_experts: got None, expected E, which this family's router does not determine")
        getattr(block, place.part)[place.argument] = _read(source, family, place, sizes)
        check_num_experts(family, gate, sizes)
    for name, axes in family.others.items():
        block.others[name] = source.read(name, f"a tensor {shape_text(axes, sizes)}")
        check_shape(source.full(name), block.others[name].shape, axes, sizes)
    check_num_experts(family, gate, sizes)
    if source.unread:
        raise ValueError(
            f"{prefix or 'tensors'}: got {some(prefix + name for name in source.unread)}, which the family does "
            "not have; expected only the tensors of a block after the prefix"
        )
    return block


def store(family: str | Family, block: Block, prefix: str = "") -> dict[str, np.ndarray]:
    """Converts a block to checkpoint tensors, the inverse of `load`, bit for bit.

    Args:
      family: as in `load`.
      block: the arrays, in the layouts of the family's options; anything that np.asarray accepts, JAX arrays included.
      prefix: the common prefix of the block's tensor names.

    Returns:
      name -> array. Arrays are views of the block's arrays wherever the layouts agree, so they may not be contiguous.

    Raises:
      ValueError: an unknown family, or an array that is missing, has the wrong shape or is not part of the family.
        Messages name the array, the value it has and the expected one.

    >>> import numpy as np
    >>> from anabranch.checkpoints import Block, store
    >>> experts = {"w_in": np.zeros([2, 2, 16, 8]), "w_out": np.zeros([2, 8, 16])}
    >>> sorted(store("mixtral", Block({"gate": np.zeros([8, 2])}, experts, {}, {})))[:3]
    ['experts.0.w1.weight', 'experts.0.w2.weight', 'experts.0.w3.weight']
    """
    family = _family(family)
    sizes = known_sizes(family)
    tensors: dict[str, np.ndarray] = {}
    given = {(part, argument) for part in Block._fields for argument in getattr(block, part)}
    for place in _places(family):
        for name, tensor in _written(block, family, place, given, sizes):
            tensors[prefix + name] = tensor
    for name, axes in family.others.items():
        tensors[prefix + name] = np.asarray(_take(block, "others", name, given, shape_text(axes, sizes)))
        check_shape(f"others[{name!r}]", tensors[prefix + name].shape, axes, sizes)
    check_num_experts(family, "router['gate']", sizes)
    if given:
        raise ValueError(
            f"block: got {some(f'{part}[{argument!r}]' for part, argument in given)}, expected nothing there"
        )
    return tensors


def _family(family: str | Family) -> Family:
    if isinstance(family, Family):
        return family
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"family: got {shown(family)}, expected a Family or one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[family]


class _Place(NamedTuple):
    """One array of a block: its storage in the checkpoint and its place in `Block`."""

    stored: Stored
    part: str
    argument: str
    axes: str
    """The axes in the checkpoint's order, P included for ungated experts too."""
    own_axes: str
    """The axes in `Block`'s order."""

    @property
    def from_stored(self) -> list[int]:
        """The permutation for a transpose from the checkpoint's order to `Block`'s."""
        return [self.axes.index(letter) for letter in self.own_axes]

    @property
    def to_stored(self) -> list[int]:
        """The permutation for a transpose from `Block`'s order to the checkpoint's."""
        return [self.own_axes.index(letter) for letter in self.axes]


def _places(family: Family) -> Iterator[_Place]:
    for name, (part, argument, order) in _PLACES.items():
        stored = getattr(family, name)
        if stored is not None:
            axes = with_parts(stored.letters) if name in ("w_in", "b_in", "shared_in") else stored.letters
            yield _Place(
                stored, part, argument, axes, axes if order is None else "".join(sorted(axes, key=order.index))
            )


def known_sizes(family: Family) -> dict[str, int]:
    """The sizes known at the start, by letter; `check_shape` adds to them."""
    return {"1": 1, "p": family.parts}


def _given_sizes(family: Family, num_experts: Any, intermediate_size: Any) -> dict[str, int]:
    """The sizes that the caller of `load` passed, by letter."""
    given = {}
    if num_experts is not None:
        given["e"] = checks.integer("num_experts", num_experts, 1)
    if intermediate_size is not None:
        given["f"] = checks.integer("intermediate_size", intermediate_size, 1)
    elif any("ef" in place.stored.axes for place in _places(family)):
        raise ValueError("intermediate_size: got None, expected F, which tensors [E F, D] do not determine")
    return given


def check_num_experts(family: Family, gate: str, sizes: dict[str, int]) -> None:
    """Relates E to the number of router logits if both are known; sets E if only the logits determine it."""
    logits, extra = sizes.get("r"), family.extra_logits
    if isinstance(extra, str):
        extra = sizes.get(extra)
    if logits is not None and extra is not None:
        E = sizes.setdefault("e", logits - extra)
        if logits != E + extra:
            raise ValueError(f"{gate}: got {logits} logits, expected {E + extra}, {extra} more than E = {E}")
    if logits is not None and logits < sizes.get("e", 0):
        raise ValueError(f"{gate}: got {logits} logits, expected at least E = {sizes['e']}")
    if sizes.get("e", 1) < 1:
        raise ValueError(f"{gate}: got {sizes['e']} experts, expected at least one")


def _read(source: "_Source", family: Family, place: _Place, sizes: dict[str, int]) -> Any:
    """An array of the block, or a packed matrix."""
    packed = family.packed if place.argument in ("w_in", "w_out") else None
    if packed and place.part == "shared":  # by itself
        scales = parts_of(packed, place.stored.letters)[1]
        packed = packed if place.stored.names[0] + scales.suffix in source.names else None
    arrays = [
        _assemble(source, place.stored, sizes, part).reshape(part.shape(place.axes, sizes))
        for part in parts_of(packed, place.stored.letters)
    ]
    return KINDS[packed](*arrays) if packed else arrays[0].transpose(place.from_stored)


def _written(
    block: Block, family: Family, place: _Place, given: set[tuple[str, str]], sizes: dict[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of an array of the block, or of a packed matrix."""
    label, axes = f"{place.part}[{place.argument!r}]", " ".join(place.own_axes)
    value = _take(block, place.part, place.argument, given, shape_text(axes, sizes))
    packed = next((name for name, kind in KINDS.items() if isinstance(value, kind)), None)
    if place.argument in ("w_in", "w_out") and packed != family.packed and (packed or place.part == "experts"):
        got, expected = (KINDS[name].__name__ if name else "a plain array" for name in (packed, family.packed))
        raise ValueError(f"{label}: got {got}, expected {expected}")
    if not is_packed(value):
        array = np.asarray(value)
        check_shape(label, array.shape, axes, sizes)
        value = (array.transpose(place.to_stored),)
    for part, array in zip(parts_of(packed, place.stored.letters), map(np.asarray, value), strict=True):
        check_shape(label, array.shape, " ".join(place.axes), sizes, part)
        yield from _split(array, place.stored, sizes, part)


class _Source:
    """Reads the tensors with a prefix one at a time. `unread` contains the block's names that were not read yet."""

    def __init__(self, tensors: Any, prefix: str, roots: Iterable[str]):
        self._read = getattr(tensors, "get_tensor", None)
        if self._read is None:
            if not isinstance(tensors, Mapping):
                raise TypeError(f"tensors: got {typed(tensors)}, expected a mapping of names to arrays")
            self._read = tensors.__getitem__
        self._prefix = prefix
        names = [name.removeprefix(prefix) for name in tensors.keys() if name.startswith(prefix)]
        self.names = set(names)
        if len(names) > len(self.names):
            twice = {prefix + name for name in names if names.count(name) > 1}
            raise ValueError(f"tensors: got {some(twice)} more than once, expected every name once")
        self.unread = {name for name in self.names if name.startswith(tuple(roots))}

    def read(self, name: str, expected: str) -> np.ndarray:
        """The tensor of that name; `expected`: its expected shape, for the message."""
        if name not in self.names:
            found = f"found {some(self.names)}" if self.names else "no name begins with that prefix"
            raise ValueError(f"{self._prefix}{name}: got no such tensor, expected {expected}; {found}")
        self.unread.discard(name)
        assert self._read is not None
        return np.asarray(self._read(self._prefix + name))

    def full(self, name: str) -> str:
        """The name with the prefix."""
        return self._prefix + name


def pieces(stored: Stored, num_experts: int) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Each tensor that an array consists of: its index in the array, and its name."""
    whole = slice(None)
    for e in range(num_experts) if stored.per_expert else (whole,):
        for p, name in enumerate(stored.names):
            at = {"e": e, "p": p if len(stored.names) == 2 else whole}
            yield tuple(at.get(letter, whole) for letter in stored.letters), name.format(e=e)


def _assemble(source: _Source, stored: Stored, sizes: dict[str, int], part: Part) -> np.ndarray:
    """The whole array in the checkpoint's order; a view if it is one tensor."""
    array = None
    stored_pieces = list(pieces(stored, sizes.get("e", 0)))
    for at, name in stored_pieces:
        name += part.suffix
        tensor = source.read(name, f"a tensor {shape_text(stored.axes, sizes, part)}")
        check_dtype(source.full(name), tensor.dtype, part)
        check_shape(source.full(name), tensor.shape, stored.axes, sizes, part)
        tensor = tensor.reshape(part.shape("".join(letter for letter in stored.axes if letter not in " 1"), sizes))
        if len(stored_pieces) == 1:
            array = tensor
            continue
        if array is None:
            array = np.empty(part.shape(stored.letters, sizes), tensor.dtype)
        if tensor.dtype != array.dtype:
            raise ValueError(
                f"{source.full(name)}: got {tensor.dtype}, expected {array.dtype} like the other tensors of its array"
            )
        array[at] = tensor
    assert array is not None
    return array


def _split(array: np.ndarray, stored: Stored, sizes: dict[str, int], part: Part) -> Iterator[tuple[str, np.ndarray]]:
    """Splits an array in the checkpoint's order into the checkpoint's tensors."""
    array = array.reshape(part.shape(stored.letters, sizes))
    for at, name in pieces(stored, sizes.get("e", 0)):
        shape = [math.prod(part.shape(axis, sizes)[: len(axis)]) for axis in stored.axes.split()]
        yield name + part.suffix, array[at].reshape([*shape, *part.tail])


def check_shape(name: str, shape: tuple[int, ...], axes: str, sizes: dict[str, int], part: Part = PLAIN) -> None:
    """Checks the shape of an array that stands for a matrix with these axes, and adds the sizes that it determines."""
    expected = shape_text(axes, sizes, part)
    logical = part.logical(shape, axes.split())
    fits = logical is not None
    for size, axis in zip(logical or (), axes.split(), strict=False):
        unknown = [letter for letter in axis if letter not in sizes]
        known = math.prod(sizes[letter] for letter in axis if letter in sizes)
        if unknown and fits:
            (letter,) = unknown
            fits = size % known == 0
            sizes[letter] = size // known
        fits = fits and size == math.prod(sizes[letter] for letter in axis)
    if not fits:
        raise ValueError(f"{name}: got {list(shape)}, expected {expected}")


def shape_text(axes: str, sizes: dict[str, int], part: Part = PLAIN) -> str:
    """The shape of an array that stands for a matrix with these axes, for a message, with the known sizes.

    >>> shape_text("e pf d", {"e": 8, "p": 2, "d": 16})
    '[E, 2 F, D] with E = 8, D = 16'
    >>> shape_text("f d", {}, parts_of("mxfp4", "fd")[0])
    '[F, D/32, 16]'
    """

    def text(letter: str) -> str:
        name = str(sizes["p"]) if letter == "p" else letter.upper()
        return f"{name}/{part.blocks[letter]}" if letter in part.blocks else name

    names = [" ".join(map(text, axis)) for axis in axes.split()] + [*map(str, part.tail)]
    known = [f"{letter.upper()} = {sizes[letter]}" for letter in axes if letter in sizes and letter not in "p1"]
    return f"[{', '.join(names)}]" + (f" with {', '.join(known)}" if known else "")


def check_dtype(name: str, dtype: np.dtype, part: Part) -> None:
    """Checks the dtype of an array that stands for a matrix."""
    if dtype.name not in part.dtypes:
        plain = "float32" in part.dtypes and not part.suffix
        expected = "a floating dtype of 16 bits or more" if plain else " or ".join(part.dtypes)
        hint = "; Family.with_packed reads MXFP4 and FP8 blocks, other formats must be decoded before" if plain else ""
        raise TypeError(f"{name}: got {dtype}, expected {expected}{hint}")


def _take(block: Block, part: str, argument: str, given: set[tuple[str, str]], expected: str) -> Any:
    """Returns an array of the block and removes it from `given`, the arrays not yet used."""
    arrays = getattr(block, part)
    if argument not in arrays:
        raise ValueError(f"{part}[{argument!r}]: got none, expected {expected}")
    given.discard((part, argument))
    return arrays[argument]


def some(names: Iterable[str]) -> str:
    """The first four names, and the number of further ones, for a message."""
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")

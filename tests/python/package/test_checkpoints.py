"""Checkpoint tensors are converted to our arrays and back without a changed bit or an unneeded copy."""

import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from anabranch.checkpoints import FAMILIES, Block, Family, Stored, load, store
from anabranch.checkpoints.families import SOFTMAX

E, D, F, S = 4, 6, 5, 7
LETTERS = {"e": E, "d": D, "f": F, "s": S, "p": 2, "c": 9, "1": 1, "n": 2, "v": 11, "k": 2}
PLACES = {
    "gate": "router",
    "gate_bias": "router",
    "expert_bias": "router",
    "w_in": "experts",
    "w_out": "experts",
    "b_in": "experts",
    "b_out": "experts",
    "shared_in": "shared",
    "shared_out": "shared",
    "shared_gate": "shared",
}
ARGUMENTS = {"shared_in": "w_in", "shared_out": "w_out", "shared_gate": "w_gate"}


def bits(shape, dtype, seed):
    """Random bits, including every kind of NaN."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)


def sizes_of(family):
    """The size of each axis by its letter; if the checkpoint has no expert count, the router has 3 further logits."""
    extra = family.extra_logits
    return LETTERS | {"r": E + (3 if extra is None else LETTERS.get(extra, extra))}


def shape_of(axes, sizes):
    return tuple(int(np.prod([sizes[letter] for letter in axis])) for axis in axes.split())


def tensors_of(stored, dtype, seed, sizes=LETTERS):
    """Random tensors by name for one array."""
    names = [name.format(e=e) for e in range(sizes["e"] if stored.per_expert else 1) for name in stored.names]
    return {name: bits(shape_of(stored.axes, sizes), dtype, seed + i) for i, name in enumerate(names)}


def checkpoint(family, prefix="", dtype=np.float32):
    """Random tensors for a block."""
    described = [getattr(family, name) for name in PLACES if getattr(family, name) is not None]
    tensors, sizes = {}, sizes_of(family)
    for i, stored in enumerate(described):
        tensors |= tensors_of(stored, dtype, 1000 * i, sizes)
    tensors |= {name: bits(shape_of(axes, sizes), np.int32, 7) for name, axes in family.others.items()}
    return {prefix + name: array for name, array in tensors.items()}


def known(family):
    """The sizes that `load` needs as arguments."""
    told = {"longcat_flash": {"num_experts": E}, "dbrx": {"intermediate_size": F}}
    return next((sizes for name, sizes in told.items() if FAMILIES[name] is family), {})


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_comes_back_bit_for_bit(name, dtype):
    tensors = checkpoint(FAMILIES[name], "model.layers.3.mlp.", dtype)
    block = load(name, tensors, "model.layers.3.mlp.", **known(FAMILIES[name]))
    back = store(name, block, "model.layers.3.mlp.")
    assert back.keys() == tensors.keys()
    for tensor in tensors:
        assert same_bits(back[tensor], tensors[tensor]), tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_arrays_have_the_shapes_of_their_arguments(name):
    family = FAMILIES[name]
    block = load(name, checkpoint(family), **known(family))
    sizes = {"d": D, "p": family.parts, "f": F}
    assert block.experts["w_in"].shape == (E, *(sizes[letter] for letter in family.w_in_layout))
    assert block.experts["w_out"].shape == (E, *(sizes[letter] for letter in family.w_out_layout))
    width, logits = (sizes_of(family)[letter] for letter in (family.gate.axes[-1], family.gate.axes[0]))
    assert block.router["gate"].shape == (width, logits)
    if family.expert_bias is not None:
        assert block.router["expert_bias"].shape in {(E,), (logits,)}
    if family.b_in is not None:
        assert block.experts["b_in"].shape == (E, *(sizes[letter] for letter in family.w_in_layout if letter != "d"))
        assert block.experts["b_out"].shape == (E, D)
    if family.shared_in is not None:
        assert block.shared["w_in"].shape == (width, family.parts, S)
        assert block.shared["w_out"].shape == (S, width)
    if family.shared_gate is not None:
        assert block.shared["w_gate"].shape == (width,)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_arrays_in_several_tensors_are_copied(name):
    family = FAMILIES[name]
    tensors = checkpoint(family)
    block = load(name, tensors, **known(family))
    for place, part in PLACES.items():
        stored = getattr(family, place)
        if stored is None:
            continue
        array = getattr(block, part)[ARGUMENTS.get(place, place)]
        in_pieces = stored.per_expert or len(stored.names) == 2
        if in_pieces:
            assert not any(np.shares_memory(array, tensors[name]) for name in tensors)
        else:
            assert np.shares_memory(array, tensors[stored.names[0]])
    back = store(name, block)
    for place in ("w_in", "w_out"):
        stored = getattr(family, place)
        apart = len(stored.names) == 2 and "ef" in stored.axes  # gate and up of an expert are adjacent in w_in
        for tensor in tensors_of(stored, np.float32, 0) if not apart else ():
            assert np.shares_memory(back[tensor], block.experts[place]), tensor
            assert back[tensor].flags.c_contiguous or not stored.per_expert


def test_results_are_the_formulas():
    """gate and up of each layout, element by element."""
    gate, up = bits((E, F, D), np.float32, 0), bits((E, F, D), np.float32, 1)
    forms = {
        "hy_v4": {"experts.gate_up_proj": np.concatenate([gate, up], 1)},
        "llama4": {"experts.gate_up_proj": np.concatenate([gate, up], 1).swapaxes(1, 2)},
        "gpt_oss": {"experts.gate_up_proj": np.stack([gate, up], 2).reshape(E, 2 * F, D).swapaxes(1, 2)},
        "inkling2": {"experts.w13_weight": np.stack([gate, up], 2).reshape(E, 2 * F, D)},
        "mixtral": {f"experts.{e}.{w}.weight": a[e] for w, a in (("w1", gate), ("w3", up)) for e in range(E)},
        "step3p7": {"moe.gate_proj.weight": gate, "moe.up_proj.weight": up},
        "dbrx": {"experts.mlp.w1": gate.reshape(-1, D), "experts.mlp.v1": up.reshape(-1, D)},
    }
    for name, form in forms.items():
        family = FAMILIES[name]
        w_in = load(name, checkpoint(family) | form, **known(family)).experts["w_in"]
        ours = w_in.transpose(0, *(1 + family.w_in_layout.index(letter) for letter in "pfd"))
        assert same_bits(np.ascontiguousarray(ours[:, 0]), gate), name
        assert same_bits(np.ascontiguousarray(ours[:, 1]), up), name


def test_only_the_blocks_tensors_of_an_open_file_are_read():
    class Handle:
        """The interface of safetensors' open files: keys and get_tensor, but no mapping."""

        def __init__(self, tensors):
            self.tensors, self.read = tensors, []

        def keys(self):
            return self.tensors.keys()

        def get_tensor(self, name):
            self.read.append(name)
            return self.tensors[name]

    block = checkpoint(FAMILIES["mixtral"], "layers.1.")
    handle = Handle(block | checkpoint(FAMILIES["mixtral"], "layers.11."))
    loaded = load("mixtral", handle, "layers.1.")
    assert sorted(handle.read) == sorted(block)
    assert same_bits(loaded.experts["w_out"][2], block["layers.1.experts.2.w2.weight"])


def test_a_family_of_your_own():
    family = Family(
        gate=Stored("switch", "e d"), w_in=Stored("up", "e d pf"), w_out=Stored("down", "e f d"), router_options=SOFTMAX
    )
    tensors = checkpoint(family)
    assert np.shares_memory(load(family, tensors).experts["w_in"], tensors["up"])
    assert family.options["w_in_layout"] == "dpf" and family.options["w_out_layout"] == "fd"
    with pytest.raises(ValueError, match="w_in: got the axes e pf, expected e and one of dpf, pfd, dfp, fpd"):
        Family(Stored("switch", "e d"), w_in=Stored("up", "e pf"), w_out=Stored("down", "e f d"))
    with pytest.raises(ValueError, match="w_out: got the axes e ed, expected e and one of fd, df"):
        Family(Stored("switch", "e d"), w_in=Stored("up", "e d pf"), w_out=Stored("down", "f e d"))


def changed(tensors, **changes):
    """The tensors with some replaced, or removed if None."""
    names = {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in (tensors | names).items() if value is not None}


WRONG = {
    "missing": (
        {"experts__2__w3__weight": None},
        r"m\.experts\.2\.w3\.weight: got no such tensor, expected a tensor \[F, D\]",
    ),
    "shape": (
        {"experts__2__w3__weight": np.zeros((F, D + 1), np.float32)},
        r"m\.experts\.2\.w3\.weight: got \[5, 7\], expected \[F, D\] with F = 5, D = 6",
    ),
    "rank": ({"gate__weight": np.zeros((E, D, 1), np.float32)}, r"m\.gate\.weight: got \[4, 6, 1\], expected \[E, D\]"),
    "dtype of one": (
        {"experts__2__w3__weight": np.zeros((F, D), np.float16)},
        r"m\.experts\.2\.w3\.weight: got float16, expected float32",
    ),
    "one too many": (
        {"experts__4__w3__weight": np.zeros((F, D), np.float32)},
        r"m\.: got m\.experts\.4\.w3\.weight, which the family does not have",
    ),
    "another family's": (
        {"shared__weight": np.zeros(3, np.float32)},
        r"m\.: got m\.shared\.weight, which the family does not have",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tensor_is_an_error_that_names_it(wrong):
    changes, message = WRONG[wrong]
    tensors = changed(checkpoint(FAMILIES["mixtral"]), **changes)
    with pytest.raises(ValueError, match=message):
        load("mixtral", {f"m.{name}": tensor for name, tensor in tensors.items()}, "m.")


def experts_changed(family, wrong):
    """The block's tensors with changed experts, and the name that the error has to contain.

    wrong: "last", "middle": that expert is missing; "more": one expert too many; "fewer": no tensor has the last one.
    """
    tensors = checkpoint(family)
    each = [stored for stored in (family.w_in, family.w_out, family.b_in, family.b_out) if stored is not None]
    fewer, more = (sizes_of(family) | {"e": E + change} for change in (-1, 1))
    if wrong in ("last", "middle") and family.w_out.per_expert:
        name = family.w_out.names[0].format(e={"last": E - 1, "middle": 1}[wrong])
        return {n: a for n, a in tensors.items() if n != name}, name
    if wrong == "more" and family.w_out.per_expert:
        name = family.w_out.names[0].format(e=E)
        return tensors | {name: np.zeros((1, 1), np.float32)}, name
    first = family.w_in.names[0]
    if family.w_in.per_expert:
        names = [name.format(e=E - 1) for stored in each for name in stored.names]
        return {n: a for n, a in tensors.items() if n not in names}, first.format(e=E - 1)
    for stored in each:
        tensors |= tensors_of(stored, np.float32, 0, more if wrong == "more" else fewer)
    return tensors, first


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_or_a_surplus_expert_is_an_error_that_names_its_tensor(name):
    family = FAMILIES[name]
    for wrong in ("last", "middle", "more", "fewer"):
        tensors, named = experts_changed(family, wrong)
        with pytest.raises(ValueError, match=rf"m\.{re.escape(named)}\b"):
            load(name, {f"m.{n}": a for n, a in tensors.items()}, "m.", **known(family))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_size_is_checked_in_every_tensor(name):
    """A tensor with one axis longer by one step is refused, including the router's tensors."""
    family, right = FAMILIES[name], checkpoint(FAMILIES[name])
    free = {"gate.tid2eid"}  # a table of any number of tokens and experts
    for tensor, array in right.items():
        for axis in range(array.ndim if tensor not in free else 0):
            times = 2 * E if array.shape[axis] % 2 == 0 or "mlp.w" in tensor else 1  # divisible by the parts
            longer = np.zeros([size + times * (i == axis) for i, size in enumerate(array.shape)], array.dtype)
            with pytest.raises(ValueError, match="got"):
                load(name, right | {tensor: longer}, **known(family))


def test_sizes_that_the_checkpoint_does_not_determine_are_required():
    longcat, dbrx = (checkpoint(FAMILIES[name]) for name in ("longcat_flash", "dbrx"))
    with pytest.raises(
        ValueError, match=r"num_experts: got None, expected E, which this family's router does not determine"
    ):
        load("longcat_flash", longcat)
    with pytest.raises(ValueError, match=r"router\.classifier\.weight: got 7 logits, expected at least E = 8"):
        load("longcat_flash", longcat, num_experts=8)
    with pytest.raises(ValueError, match=r"intermediate_size: got None, expected F"):
        load("dbrx", dbrx)
    with pytest.raises(ValueError, match=r"experts\.mlp\.w1: got \[20, 6\], expected \[E F, D\] with E = 4, F = 4"):
        load("dbrx", dbrx, intermediate_size=4)
    with pytest.raises(ValueError, match=r"gate\.weight: got \[4, 6\], expected \[E, D\] with E = 3"):
        load("mixtral", checkpoint(FAMILIES["mixtral"]), num_experts=3)
    for name, message in (
        ("zaya", r"gate\.router_mlp\.out_proj\.weight: got 5 logits, expected 4, 1 more than E = 3"),
        ("inkling", r"gate\.bias: got \[4\], expected \[E\] with E = 3"),
    ):
        with pytest.raises(ValueError, match=message):
            load(name, checkpoint(FAMILIES[name]), num_experts=3)
    with pytest.raises(TypeError, match=r"num_experts: got float 4\.0"):
        load("mixtral", checkpoint(FAMILIES["mixtral"]), num_experts=4.0)
    with pytest.raises(ValueError, match=r"gate\.weight: got 0 experts, expected at least one"):
        load("mixtral", {"gate.weight": np.zeros((0, D), np.float32)})


def test_a_name_that_a_file_has_twice_is_an_error():
    class Twice(dict):
        def keys(self):
            return [*super().keys(), "m.gate.weight"]

    with pytest.raises(ValueError, match=r"tensors: got m\.gate\.weight more than once"):
        load("mixtral", Twice(checkpoint(FAMILIES["mixtral"], "m.")), "m.")


def test_other_wrong_arguments():
    tensors = checkpoint(FAMILIES["gpt_oss"])
    with pytest.raises(ValueError, match="family: got 'gptoss', expected a Family or one of afmoe, "):
        load("gptoss", tensors)
    with pytest.raises(TypeError, match="tensors: got list"):
        load("gpt_oss", list(tensors))
    with pytest.raises(ValueError, match=r"x\.router\.weight: got no such tensor.*; no name begins with that prefix"):
        load("gpt_oss", tensors, "x.")
    odd = tensors | {"experts.gate_up_proj": np.zeros((E, D, 9), np.float32)}
    with pytest.raises(ValueError, match=r"gate_up_proj: got \[4, 6, 9\], expected \[E, D, F 2\] with E = 4, D = 6"):
        load("gpt_oss", odd)
    quantised = tensors | {"experts.gate_up_proj": np.zeros((E, D, 2 * F), np.uint8)}
    with pytest.raises(TypeError, match="gate_up_proj: got uint8, expected a floating dtype"):
        load("gpt_oss", quantised)


def test_storing_a_wrong_block_is_an_error_that_names_the_array():
    block = load("mixtral", checkpoint(FAMILIES["mixtral"]))
    without = Block(block.router, {"w_in": block.experts["w_in"]}, {}, {})
    with pytest.raises(
        ValueError, match=r"experts\['w_out'\]: got none, expected \[E, D, F\] with E = 4, D = 6, F = 5"
    ):
        store("mixtral", without)
    ours = block._replace(experts=block.experts | {"w_out": block.experts["w_out"].swapaxes(1, 2)})
    with pytest.raises(ValueError, match=r"experts\['w_out'\]: got \[4, 5, 6\], expected \[E, D, F\]"):
        store("mixtral", ours)
    with pytest.raises(ValueError, match=r"block: got shared\['w_in'\], expected nothing there"):
        store("mixtral", block._replace(shared={"w_in": np.zeros(3)}))


def test_needs_numpy_alone():
    code = (
        "import sys, anabranch.checkpoints; "
        "sys.exit(', '.join({'jax', 'torch', 'flax', 'safetensors'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_says_how_every_family_is_stored():
    page = (pathlib.Path(__file__).parents[3] / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\w+)`, `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    told = {}
    for w_in, w_out, copied, families in rows:
        for family in re.findall("`([^`]+)`", families):
            assert family not in told, family
            told[family] = (w_in, w_out, copied)
    assert told.keys() == FAMILIES.keys()
    for name, (w_in, w_out, copied) in told.items():
        family = FAMILIES[name]
        assert (family.w_in_layout, family.w_out_layout) == (w_in, w_out), name
        pieces = [
            place
            for place in ("w_in", "w_out")
            if getattr(family, place).per_expert or len(getattr(family, place).names) == 2
        ]
        assert copied == {0: "none", 1: "`w_in`", 2: "`w_in`, `w_out`"}[len(pieces)], name

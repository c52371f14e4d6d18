"""A description, as data, of how the checkpoints of a model family store one Mixture-of-Experts block.

Axis letters: e experts, d model width of the experts, f expert width, p gate and up; r router logits if they differ
from e, c the router's input width if it differs from d; s width of the shared expert, n shared experts; v and k, the
axes of a table [v, k] of experts.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from anabranch import checks
from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS
from anabranch.packed import KINDS, MX_BLOCK, MX_BYTES
from anabranch.precision import BLOCK

_BYTES = ("uint8", "float8_e8m0fnu")


class Part(NamedTuple):
    """How a checkpoint stores one of the arrays that stand for a matrix.

    Attributes:
      suffix: what follows the name of the matrix.
      dtypes: the allowed dtypes.
      blocks: the number of elements of the matrix along an axis that share an element of this array, by letter.
      tail: further axes at the end.
    """

    suffix: str
    dtypes: tuple[str, ...]
    blocks: Mapping[str, int]
    tail: tuple[int, ...] = ()

    def shape(self, letters: str, sizes: Mapping[str, int]) -> list[int]:
        """The shape of this array with an axis per letter."""
        return [sizes[letter] // self.blocks.get(letter, 1) for letter in letters] + [*self.tail]

    def logical(self, shape: Sequence[int], axes: Sequence[str]) -> tuple[int, ...] | None:
        """The shape of the matrix, with these axes, that an array of a shape belongs to; None: there is none."""
        if len(shape) != len(axes) + len(self.tail) or tuple(shape[len(axes) :]) != self.tail:
            return None
        blocks = (math.prod(self.blocks.get(letter, 1) for letter in axis) for axis in axes)
        return tuple(size * block for size, block in zip(shape, blocks, strict=False))


#: The only array of a matrix that is not packed.
PLAIN = Part("", ("float64", "float32", "float16", "bfloat16"), {})


def parts_of(packed: str | None, letters: str) -> tuple[Part, ...]:
    """The arrays that stand for a matrix with these axes, in the order of its packed type."""
    if packed is None:
        return (PLAIN,)
    if packed == "mxfp4":
        blocks = {letters[-1]: MX_BLOCK}
        return Part("_blocks", ("uint8",), blocks, (MX_BYTES,)), Part("_scales", _BYTES, blocks)
    blocks = {letter: BLOCK for letter in letters if letter not in "ep1"}
    return Part("", ("float8_e4m3fn",), {}), Part("_scale_inv", ("float32", "bfloat16", *_BYTES), blocks)


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores one array of a `Block`.

    Attributes:
      name: the tensor's name after the prefix of its block. If it contains "{e}", every expert has its own tensor. Two
        names: gate and up are separate tensors.
      axes: the axes of each tensor, separated by spaces. Letters of one merged axis are written together: "e pf d" is
        [E, 2F, D] with all of gate before all of up, "e d fp" is [E, D, 2F] with gate and up interleaved. "1" is an
        axis of size 1.

    >>> Stored("experts.gate_up_proj", "e d fp").letters
    'edfp'
    >>> Stored(("experts.{e}.w1.weight", "experts.{e}.w3.weight"), "f d").letters
    'epfd'
    """

    name: str | tuple[str, str]
    axes: str

    @property
    def names(self) -> tuple[str, ...]:
        """The one or two names, as a tuple."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @property
    def per_expert(self) -> bool:
        """Whether every expert has a tensor of its own."""
        return "{e}" in self.names[0]

    @property
    def letters(self) -> str:
        """The axes of the whole array in the checkpoint's order: experts first, then separately stored parts."""
        own = re.sub("[ 1]", "", self.axes)
        parts = "p" if len(self.names) == 2 else ""
        if own.startswith("e"):
            return "e" + parts + own[1:]
        return ("e" if self.per_expert else "") + parts + own


@dataclass(frozen=True)
class Family:
    """The tensors of a block, by the arguments of `moe` that they become, and the matching options.

    Attributes:
      gate: the router's weight.
      w_in, w_out: the experts' weights; a w_in without "p" belongs to ungated experts.
      gate_bias, expert_bias, b_in, b_out: as the arguments of `moe`; None: the family has none.
      shared_in, shared_out, shared_gate: the shared expert's w_in, w_out and w_gate of `shared_expert`.
      others: further tensors of the block, name -> axes; `load` returns them unchanged.
      extra_logits: for a router with logits r, the number of logits beyond the experts: an integer or a size's letter.
        None: the checkpoint does not determine it, and the caller passes num_experts to `load`.
      router_options: the options of `moe` that describe the family's routing, as far as the family fixes them; {} if
        they do not describe it, and the caller routes and uses `routed_experts`.
      activation: the experts' activation, with the published parameters; None if it differs between layers, so that
        the caller passes one.
      roots: the prefixes, after the block's prefix, of names that belong to the block; "": all names.
      packed: the format of w_in and w_out, "mxfp4" or "fp8_blocks", see `with_packed`; None: they are plain.
    """

    gate: Stored
    w_in: Stored
    w_out: Stored
    gate_bias: Stored | None = None
    expert_bias: Stored | None = None
    b_in: Stored | None = None
    b_out: Stored | None = None
    shared_in: Stored | None = None
    shared_out: Stored | None = None
    shared_gate: Stored | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    extra_logits: int | str | None = None
    router_options: Mapping[str, Any] = field(default_factory=dict)
    activation: Any = "silu"
    roots: tuple[str, ...] = ("",)
    packed: str | None = None

    def __post_init__(self) -> None:
        for name, layouts, got in (
            ("w_in", IN_LAYOUTS, self.w_in_layout),
            ("w_out", OUT_LAYOUTS, self.w_out_layout),
        ):
            if got not in layouts:
                raise ValueError(f"{name}: got the axes e {got}, expected e and one of {', '.join(layouts)}")

    def with_packed(self, packed: str) -> Self:
        """The family with packed experts, whose contracted dimension is the last one.

        | packed | tensors | as in |
        |---|---|---|
        | "mxfp4" | `NAME_blocks` uint8 [..., N, C/32, 16], `NAME_scales` uint8 [..., N, C/32] | gpt-oss |
        | "fp8_blocks" | `NAME` float8_e4m3fn [..., N, C], `NAME_scale_inv` [..., N/128, C/128] | DeepSeek-V3, Qwen3-FP8 |

        NAME is the plain tensor's name. `load` returns an `Mxfp4` or `Fp8Blocks` of numpy arrays as w_in and w_out. The
        matrices of a shared expert are `Fp8Blocks` if they are in FP8, too: [P, S, D] and [D, S].

        Raises:
          ValueError: another format, or one that the family's storage does not allow.

        >>> from anabranch.checkpoints import FAMILIES
        >>> FAMILIES["gpt_oss"].with_packed("mxfp4").w_in
        Stored(name='experts.gate_up_proj', axes='e fp d')
        """  # noqa: E501
        packed = checks.choice("packed", packed, tuple(KINDS))

        def last(stored: Stored, letter: str) -> Stored:
            axes = sorted(stored.axes.split(), key=lambda axis: axis == letter)
            if axes[-1] != letter or "ef" in axes:
                raise ValueError(f"packed: got {packed!r} with tensors {stored.axes!r}, expected an axis of its own")
            return replace(stored, axes=" ".join(axes))

        if packed == "fp8_blocks" and "fp" in self.w_in.axes:
            raise ValueError(
                f"packed: got {packed!r} with interleaved gate and up {self.w_in.axes!r}, expected 'mxfp4'"
            )
        return replace(self, w_in=last(self.w_in, "d"), w_out=last(self.w_out, "f"), packed=packed)

    @property
    def parts(self) -> int:
        """P of w_in: 2 for gated experts, 1 for ungated ones."""
        return 2 if "p" in self.w_in.letters else 1

    @property
    def w_in_layout(self) -> str:
        """The checkpoint's layout of w_in, without E."""
        return with_parts(self.w_in.letters)[1:]

    @property
    def w_out_layout(self) -> str:
        """The checkpoint's layout of w_out, without E."""
        return self.w_out.letters[1:]

    @property
    def experts_options(self) -> dict[str, Any]:
        """The options of `routed_experts`: the activation and both layouts."""
        return {
            "activation": self.activation,
            "w_in_layout": self.w_in_layout,
            "w_out_layout": self.w_out_layout,
        }

    @property
    def options(self) -> dict[str, Any]:
        """The options of `moe` that the family fixes; topk, groups and scaling factors are in the config.json."""
        return {**self.router_options, **self.experts_options}


def with_parts(letters: str) -> str:
    """Inserts the axis p, which ungated experts lack in a checkpoint, before f or s.

    >>> with_parts("efd"), with_parts("edfp")
    ('epfd', 'edfp')
    """
    return letters if "p" in letters else re.sub("([fs])", r"p\1", letters)

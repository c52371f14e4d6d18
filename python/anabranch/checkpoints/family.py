"""How the checkpoints of a model family store one Mixture-of-Experts block: a description as data.

Letters of axes: e experts, d model width of the experts, f their width, p gate and up; r logits of the router and c its
input, where they are not e and d; s width of the shared expert, n shared experts; v and k, a table [v, k] of experts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS


@dataclass(frozen=True)
class Stored:
    """Where the checkpoints of a family have one of our arrays.

    Attributes:
      name: the tensor's name behind the prefix of its block. With "{e}" in it every expert has a tensor of its own;
        two names: gate and up have.
      axes: the axes of that tensor, or of each. What is one axis there is written together: "e pf d" is [E, 2F, D] with
        all of gate before all of up, "e d fp" is [E, D, 2F] with gate and up alternating. "1" is an axis of size 1.

    >>> Stored("experts.gate_up_proj", "e d fp").letters
    'edfp'
    >>> Stored(("experts.{e}.w1.weight", "experts.{e}.w3.weight"), "f d").letters
    'epfd'
    """

    name: str | tuple[str, str]
    axes: str

    @property
    def names(self) -> tuple[str, ...]:
        """The name, or both."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @property
    def an_expert_each(self) -> bool:
        """Whether every expert has a tensor of its own."""
        return "{e}" in self.names[0]

    @property
    def letters(self) -> str:
        """The axes of the whole array in the checkpoint's order: experts first, then parts that are tensors apart."""
        own = re.sub("[ 1]", "", self.axes)
        of_names = "p" if len(self.names) == 2 else ""
        if own.startswith("e"):
            return "e" + of_names + own[1:]
        return ("e" if self.an_expert_each else "") + of_names + own


@dataclass(frozen=True)
class Family:
    """The tensors of a block by the arguments that they become, and the options that go with them.

    Attributes:
      gate: the router's weight.
      w_in, w_out: of the experts; w_in without a "p" in it is that of ungated experts.
      gate_bias, expert_bias, b_in, b_out: as the arguments of `moe`; None: the family has none.
      shared_in, shared_out, shared_gate: the shared expert, w_in, w_out and w_gate of `shared_expert`.
      others: further tensors of the block, which `load` hands on as they are: name -> axes.
      extra_logits: for a router with logits r: how many more they are than experts, a number or the letter of a size;
        None: the checkpoint does not tell, and `load` has to be told the number of experts.
      router_options: the options of `moe` that say how the family routes, as far as the family fixes them; {} where its
        routing is its own, for `routed_experts`.
      activation: that of the experts, with the parameters that the family was published with; None where it differs
        from layer to layer, and `moe` has to be told another.
      roots: the beginnings of the names behind the prefix that belong to the block; "": all.
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

    def __post_init__(self) -> None:
        for name, layouts, got in (
            ("w_in", IN_LAYOUTS, self.w_in_layout),
            ("w_out", OUT_LAYOUTS, self.w_out_layout),
        ):
            if got not in layouts:
                raise ValueError(f"{name}: got the axes e {got}, expected e and one of {', '.join(layouts)}")

    @property
    def parts(self) -> int:
        """P of w_in: 2 for gated experts, 1 for ungated ones."""
        return 2 if "p" in self.w_in.letters else 1

    @property
    def w_in_layout(self) -> str:
        """The layout of w_in behind E, as the checkpoint has it."""
        return with_parts(self.w_in.letters)[1:]

    @property
    def w_out_layout(self) -> str:
        """The layout of w_out behind E, as the checkpoint has it."""
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
        """The options of `moe` that the family fixes; topk, groups and factors are in the model's config.json."""
        return {**self.router_options, **self.experts_options}


def with_parts(letters: str) -> str:
    """The letters with the p that ungated experts leave out, before f or s.

    >>> with_parts("efd"), with_parts("edfp")
    ('epfd', 'edfp')
    """
    return letters if "p" in letters else re.sub("([fs])", r"p\1", letters)

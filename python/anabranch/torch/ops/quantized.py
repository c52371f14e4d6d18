"""Quantised expert weights, for calls with precision="fp8"."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS, Layouts
from anabranch.packed import check_precision, parts_of
from anabranch.precision import BLOCK, FP8, check_fp8, check_fp8_widths, fp8_scales_number
from anabranch.torch.binding import check, private
from anabranch.torch.binding.native import call
from anabranch.torch.ops import torch_ops


class QuantizedExperts(NamedTuple):
    """The result of `quantize_experts`: expert weights as operands of FP8 GEMMs, forward and backward.

    Attributes:
      w_in: float8_e4m3fn [E, D, P, F], for the backward pass; None without gradients.
      w_in_transposed: float8_e4m3fn [E, P, F, D], for the forward pass.
      w_in_scales: float32 [E, D/128, P, F/128].
      w_out: float8_e4m3fn [E, F, D], for the backward pass; None without gradients.
      w_out_transposed: float8_e4m3fn [E, D, F], for the forward pass.
      w_out_scales: float32 [E, F/128, D/128].
    """

    w_in: Tensor | None
    w_in_transposed: Tensor
    w_in_scales: Tensor
    w_out: Tensor | None
    w_out_transposed: Tensor
    w_out_scales: Tensor


def as_quantized_experts(fields: Sequence[Tensor | None]) -> QuantizedExperts | None:
    """A QuantizedExperts from its fields, or None if the fields are None."""
    if fields[2] is None and fields[5] is None:
        return None
    return QuantizedExperts(*fields)  # type: ignore[arg-type]


def check_fp8_operands(
    precision: int, layouts: Layouts, device_name: str, x: Tensor, w_in: Any, w_out: Any, quantized: Any
) -> QuantizedExperts | None:
    """Checks the argument `quantized`, packed weights beside the precision, and with FP8 the widths of w_in."""
    check_fp8(precision, "float32", quantized)
    check_precision(precision, quantized, w_in=w_in, w_out=w_out)
    if precision != FP8:
        return None
    array, _ = parts_of(w_in)
    sizes = layouts.sizes("w_in", array.shape)
    E, D, P, F = (sizes[letter] for letter in "edpf")
    check_fp8_widths("w_in", check.describe(array), D=D, F=F)
    if quantized is None:
        return None
    if not isinstance(quantized, QuantizedExperts):
        raise TypeError(f"quantized: got {type(quantized).__name__}, expected a QuantizedExperts, or None")
    e, d, p, f = ("E", E), ("D", D), ("P", P), ("F", F)
    d_blocks, f_blocks = ("D/128", D // BLOCK), ("F/128", F // BLOCK)
    shapes = ((e, d, p, f), (e, p, f, d), (e, d_blocks, p, f_blocks), (e, f, d), (e, d, f), (e, f_blocks, d_blocks))
    for name, tensor, shape in zip(quantized._fields, quantized, shapes, strict=True):
        if tensor is not None or name not in ("w_in", "w_out"):
            dtype = torch.float32 if name.endswith("scales") else torch.float8_e4m3fn
            check.tensor(f"quantized.{name}", tensor, (dtype,), shape)
            check.same_device(device_name, x, **{f"quantized.{name}": tensor})
    return quantized


#: Versions of the weights w_in and w_out (see `private.version`), by `w_in_transposed` of the quantised experts.
_sources: Any = WeakTensorKeyDictionary()


def check_current(quantized: Any, w_in: Any, w_out: Any) -> None:
    """Raises if weights were written in place after they were quantised, for example by an optimizer.

    It compares version counters. A weight that is another tensor than before is not checked: offloading replaces
    tensors without changing their values. A compiled program does not check.

    Raises:
      ValueError: w_in or w_out has changed.
    """
    key = getattr(quantized, "w_in_transposed", None)
    if torch.compiler.is_compiling() or not isinstance(key, Tensor):
        return
    for name, weight, before in zip(("w_in", "w_out"), (w_in, w_out), _sources.get(key, (None, None)), strict=True):
        now = private.version(weight)
        if before and now and now[0] == before[0] and now != before:
            raise ValueError(
                f"quantized: got experts that were quantised before {name} changed, expected a new quantize_experts"
            )


def forward_operands(quantized: QuantizedExperts | None) -> tuple[Tensor | None, ...]:
    """The arguments of operations of the forward pass; if None, they quantise."""
    q = quantized
    return (None,) * 4 if q is None else (q.w_in_transposed, q.w_in_scales, q.w_out_transposed, q.w_out_scales)


def backward_operands(quantized: QuantizedExperts | None) -> tuple[Tensor | None, ...]:
    """The arguments of operations of the backward pass; if None, they quantise."""
    q = quantized
    return (None,) * 4 if q is None else (q.w_in, q.w_in_scales, q.w_out, q.w_out_scales)


def quantize_experts(
    w_in: Tensor,
    w_out: Tensor,
    *,
    fp8_scales: str = "float32",
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
    gradients: bool = True,
) -> QuantizedExperts:
    """Quantises expert weights, for `moe`, `routed_experts` and `expert_ffn` with precision="fp8".

    Pass the result as `quantized`, together with the weights. Then calls do not quantise: once per step instead of once
    per pass, or once for frozen weights. Quantise again when the weights change. A call raises if the weights were
    written in place since, for example by an optimizer. Not noticed: a weight that is another tensor than before,
    changes through `.data`, a copy of the result (copy.deepcopy), and any change in a compiled program or under FSDP.

    Args:
      w_in: [E, D, 2, F] or [E, D, 1, F], float32, bfloat16 or float16; D and F multiples of 128. With a group, this
        rank's experts, as in `moe`.
      w_out: [E, F, D], float32, bfloat16 or float16.
      fp8_scales: "float32" or "power_of_two", see `moe`. Scales of rows are an option of the call.
      w_in_layout, w_out_layout: layouts of w_in and w_out, as in `moe`. The layout of the result does not depend on
        them.
      gradients: False omits the operands of the backward pass and halves the memory. A backward pass then quantises the
        weights itself.

    Returns:
      QuantizedExperts, 2 bytes per weight, or 1 without gradients, and scales.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match, or widths are not multiples of 128.

    Gradient: none. w_in and w_out get theirs in the call that also takes `quantized`. Source: semantics, section 11.

    >>> quantized = quantize_experts(torch.ones(2, 128, 2, 256), torch.ones(2, 256, 128))
    >>> quantized.w_in_transposed.dtype, tuple(quantized.w_in_scales.shape)
    (torch.float8_e4m3fn, (2, 1, 2, 2))
    """
    layouts = Layouts(
        check.choice("w_in_layout", w_in_layout, IN_LAYOUTS), check.choice("w_out_layout", w_out_layout, OUT_LAYOUTS)
    )
    w_in = check.tensor("w_in", w_in, check.FLOATS, layouts.shape("w_in", e="E", d="D", p="2 or 1", f="F"))
    found = layouts.sizes("w_in", w_in.shape)
    if found["p"] not in (1, 2):
        raise ValueError(f"w_in: got {check.describe(w_in)}, expected 2 (gate, up) or 1 as P")
    sizes: dict[str, Any] = {letter: (letter.upper(), found[letter]) for letter in "efd"}
    w_out = check.tensor("w_out", w_out, check.FLOATS, layouts.shape("w_out", **sizes))
    check.same_device("w_in", w_in, w_out=w_out)
    check_fp8_widths("w_in", check.describe(w_in), D=found["d"], F=found["f"])
    number, gradients = fp8_scales_number(fp8_scales), check.boolean("gradients", gradients)
    results = call(torch_ops.quantize_experts, w_in.detach(), w_out.detach(), *layouts, gradients, number)
    quantized = QuantizedExperts(*results)
    if not torch.compiler.is_compiling():
        _sources[quantized.w_in_transposed] = private.version(w_in), private.version(w_out)
    return quantized if gradients else quantized._replace(w_in=None, w_out=None)

"""Low-rank adapters (LoRA) of the experts: initial factors, merged weights, joined factors of gate and up."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anabranch.layouts import Layouts
from anabranch.lora import Lora, check_join, check_scales, factor_shapes
from anabranch.options import check_layouts
from anabranch.torch.binding import check
from anabranch.torch.layer.module import MoE
from anabranch.torch.layer.parameters import factor_uniform_
from anabranch.torch.ops.experts import check_experts, check_network_lora

Model = TypeVar("Model", bound=nn.Module)


def init_lora(
    w_in: Tensor,
    w_out: Tensor,
    rank: int,
    *,
    projections: Sequence[str] = ("in", "out"),
    shared: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
) -> Lora:
    """Makes initial LoRA factors for experts: A uniform in +-1/sqrt(its inputs), B zero.

    B of zero leaves the layer's results as they are. The distribution is that of PEFT.

    Args:
      w_in, w_out: the experts' weights, as in `moe`; only shapes and device are read.
      rank: r, at least 1.
      projections: "in" for an adapter of w_in, "out" for one of w_out.
      shared: fields of `Lora` that all experts share: one matrix instead of E.
      dtype: dtype of the factors: float32, or that of x.
      generator: of the random numbers; None: torch's default generator.
      w_in_layout, w_out_layout: layouts of w_in and w_out, as in `moe`.

    Returns:
      Lora; its tensors require no gradient yet.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    >>> lora = init_lora(torch.ones(4, 8, 2, 16), torch.ones(4, 16, 8), 2, shared=("a_in",))
    >>> tuple(lora.a_in.shape), tuple(lora.b_in.shape), bool(lora.b_in.any())
    ((1, 8, 2), (4, 2, 2, 16), False)
    """
    layouts = check_layouts(w_in_layout, w_out_layout)
    shapes = factor_shapes(_check_weights(layouts, w_in, w_out), rank, projections, shared)
    if dtype not in check.FLOATS:
        raise TypeError(f"dtype: got {dtype}, expected float32, bfloat16 or float16")
    factors = {name: torch.zeros(shape, dtype=dtype, device=w_in.device) for name, shape in shapes.items()}
    for name, factor in factors.items():
        if name.startswith("a_"):
            factor_uniform_(factor, generator)
    return Lora(**factors)


def merge_lora(
    w_in: Tensor,
    w_out: Tensor,
    lora: Lora,
    lora_scale: float | tuple[float, float] = 1.0,
    *,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
) -> tuple[Tensor, Tensor]:
    """Adds adapters to the weights: W_in[e] + s_in A_in[e] B_in[e], and the same for W_out.

    A layer with the merged weights computes what the layer with adapters does, up to the rounding of the sum to the
    dtype of the weights, which is large for adapters that are small beside 16-bit weights.

    Args:
      w_in, w_out, lora, lora_scale, w_in_layout, w_out_layout: as in `moe`.

    Returns:
      (w_in, w_out), in their layouts and dtypes; the sum is computed in float32. A weight without an adapter is
      returned itself.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: of all tensors, by torch's own operations.

    >>> w_in, w_out = torch.ones(1, 2, 1, 3), torch.ones(1, 3, 2)
    >>> a, b = torch.ones(1, 2, 1), torch.ones(1, 1, 1, 3)
    >>> merge_lora(w_in, w_out, Lora(a_in=a, b_in=b), 0.5)[0].unique().tolist()
    [1.5]
    """
    layouts = check_layouts(w_in_layout, w_out_layout)
    checked = check_network_lora(lora, w_in, _check_weights(layouts, w_in, w_out))
    s_in, s_out = check_scales(lora_scale, checked)
    if checked is None:
        return w_in, w_out

    def merged(name: str, w: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
        if a is None or b is None:
            return w
        product = (a.float() @ b.float().flatten(2)).unflatten(2, b.shape[2:])
        return (w.float() + scale * product.permute(layouts.from_ours(name))).to(w.dtype)

    return (
        merged("w_in", w_in, checked.a_in, checked.b_in, s_in),
        merged("w_out", w_out, checked.a_out, checked.b_out, s_out),
    )


def join_lora(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins the adapters of separate gate and up projections to one of w_in, whose rank is the sum of both.

    Args:
      gate, up: (A [E or 1, D, r], B [E or 1, r, F]) each, with the same scale; ranks may differ.

    Returns:
      (A_in [E or 1, D, r + r'], B_in [E or 1, r + r', 2, F]): B_in is block-diagonal, with zeros where the gate's rows
      meet up's columns and the reverse. These zeros are parameters of the joined adapter: training changes them.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    >>> a, b = torch.ones(4, 8, 2), torch.ones(4, 2, 16)
    >>> a_in, b_in = join_lora((a, b), (a, b))
    >>> tuple(a_in.shape), tuple(b_in.shape)
    ((4, 8, 4), (4, 4, 2, 16))
    """
    (a_gate, b_gate), (a_up, b_up) = check_join(check.tensor, check.FLOATS, gate, up)
    rows = max(a_gate.shape[0], a_up.shape[0])
    a = torch.cat([factor.expand(rows, -1, -1) for factor in (a_gate, a_up)], 2)
    rows = max(b_gate.shape[0], b_up.shape[0])
    b_gate, b_up = (factor.expand(rows, -1, -1) for factor in (b_gate, b_up))
    parts = [torch.stack([b_gate, torch.zeros_like(b_gate)], 2), torch.stack([torch.zeros_like(b_up), b_up], 2)]
    return a, torch.cat(parts, 1)


def add_lora(
    module: Model,
    rank: int,
    alpha: float | None = None,
    *,
    projections: Sequence[str] = ("in", "out"),
    shared: Sequence[str] = (),
) -> Model:
    """Adds low-rank adapters to every `MoE` in a module, in place, and freezes all other parameters of the module.

    The adapters are parameters `lora_a_in`, `lora_b_in`, `lora_a_out` and `lora_b_out` of each layer, see `MoE`. They
    start as with `init_lora`, so the module's results stay as they are.

    Args:
      module: a `MoE`, or a module that contains `MoE` layers.
      rank: r, at least 1.
      alpha: the adapters' scale is alpha / rank; None: rank.
      projections, shared: as in `init_lora`.

    Returns:
      `module` itself.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range, there is no `MoE`, or a layer has adapters, or is already sharded by
        fully_shard. Then nothing is changed.

    >>> layer = add_lora(MoE(8, 16, num_experts=4, topk=2), rank=2, alpha=4)
    >>> [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    ['lora_a_in', 'lora_b_in', 'lora_a_out', 'lora_b_out']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {check.describe(module)}, expected a torch.nn.Module")
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    if not layers:
        raise ValueError(f"module: got a {type(module).__name__} without a MoE layer, expected one that has some")
    for layer in layers:
        layer._check_lora(rank, alpha, projections, shared)
    module.requires_grad_(False)
    for layer in layers:
        layer._add_lora(rank, alpha, projections, shared)
    return module


def _check_weights(layouts: Layouts, w_in: Any, w_out: Any) -> tuple[int, int, int, int]:
    """Checks weights without rows and returns (E, D, P, F)."""
    w_in = check.tensor("w_in", w_in, check.FLOATS, layouts.shape("w_in", e="E", d="D", p="2 or 1", f="F"))
    rows = w_in.new_empty((0, layouts.sizes("w_in", w_in.shape)["d"]))
    return check_experts(layouts, rows, check.FLOATS, w_in, w_out, None, None)

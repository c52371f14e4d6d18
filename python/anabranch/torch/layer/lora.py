"""Low-rank adapters (LoRA) of the experts: new factors, their sum with the weights, joined adapters."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anabranch.layouts import Layouts
from anabranch.lora import (
    PROJECTIONS,
    Lora,
    NewLora,
    check_join,
    check_lora,
    check_names_of,
    check_scales,
    factor_shapes,
)
from anabranch.options import check_layouts
from anabranch.packed import check_plain, parts_of
from anabranch.torch.binding import check
from anabranch.torch.layer.parameters import factor_uniform_
from anabranch.torch.ops.packed import Packed, check_weight, device_operands, shape_of

Module = TypeVar("Module", bound=nn.Module)


def _sizes(layouts: Layouts, w_in: Any, w_out: Any) -> dict[str, int]:
    """Checks weights, plain or packed, and returns their sizes "e", "d", "p" and "f"."""
    w_in = check_weight("w_in", w_in, check.FLOATS, layouts, e="E", d="D", p="P", f="F")
    sizes = layouts.sizes("w_in", shape_of(w_in))
    E, D, F = ("E", sizes["e"]), ("D", sizes["d"]), ("F", sizes["f"])
    w_out = check_weight("w_out", w_out, check.FLOATS, layouts, e=E, f=F, d=D)
    (name, first), *others = {**device_operands("w_in", w_in), **device_operands("w_out", w_out)}.items()
    check.same_device(name, first, **dict(others))
    return sizes


def init_lora(
    w_in: Tensor | Packed,
    w_out: Tensor | Packed,
    rank: int,
    *,
    projections: Sequence[str] = PROJECTIONS,
    shared: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
) -> Lora:
    """New adapters that do not change the experts: B is 0, and A is uniform in +-1/sqrt(its inputs), as in PEFT.

    Args:
      w_in, w_out: the experts' weights, float [E, D, 2 or 1, F] and [E, F, D], or packed; only shapes and device
        are read.
      rank: of both adapters, at least 1.
      projections: "in" and "out", or one of them.
      shared: the fields of `Lora` that all experts share, for example ("a_in",).
      dtype: dtype of the factors: that of x, or float32.
      generator: of the random numbers; None: torch's default generator.
      w_in_layout, w_out_layout: the layouts of w_in and w_out, as in `moe`.

    Returns:
      A `Lora` for the argument `lora` of `moe`, `routed_experts` and `expert_ffn`. Its tensors require no gradient yet.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: none is defined for the weights. Source: PEFT's default initialisation.

    >>> lora = init_lora(torch.ones(4, 8, 2, 16), torch.ones(4, 16, 8), 3, shared=("a_in",))
    >>> [tuple(factor.shape) for factor in lora]
    [(1, 8, 3), (4, 3, 2, 16), (4, 16, 3), (4, 3, 8)]
    """
    sizes = _sizes(check_layouts(w_in_layout, w_out_layout), w_in, w_out)
    rank = check.integer("rank", rank, 1, check.INDEX_LIMIT - 1)
    projections = check_names_of("projections", projections, PROJECTIONS)
    shared = check_names_of("shared", shared, Lora._fields)
    dtype, device = check.float_dtype("dtype", dtype), parts_of(w_in)[0].device
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {check.describe(generator)}, expected a torch.Generator or None")
    if generator is not None and device.type not in ("meta", generator.device.type):
        raise ValueError(f"generator: got one for {generator.device}, expected one for {device}, where w_in is")
    factors = {}
    for name, shape in factor_shapes(sizes, rank, projections, shared).items():
        factors[name] = torch.zeros(shape, dtype=dtype, device=device)
        if name.startswith("a"):
            factor_uniform_(factors[name], generator)
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
    """The weights with their adapters: W_in[e] + s_in A_in[e] B_in[e], and W_out[e] + s_out A_out[e] B_out[e].

    The sums are computed in float32 and rounded once. For 16-bit weights that loses most of a small adapter, so merge
    for inference only.

    Args:
      w_in, w_out, w_in_layout, w_out_layout: as for `init_lora`, but not packed.
      lora: the adapters.
      lora_scale: as in `moe`.

    Returns:
      (w_in, w_out) in the shapes and dtypes of the arguments. A weight without an adapter is returned itself.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: for the weights and the factors, by torch.

    >>> lora = Lora(a_out=torch.ones(1, 1, 1), b_out=torch.ones(1, 1, 1))
    >>> merge_lora(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), lora, 0.5)[1].tolist()
    [[[1.5]]]
    """
    check_plain(w_in=w_in, w_out=w_out)
    layouts = check_layouts(w_in_layout, w_out_layout)
    checked = check_lora(check.tensor, check.FLOATS, lora, _sizes(layouts, w_in, w_out))
    s_in, s_out = check_scales(lora_scale, checked)
    if checked is None:
        return w_in, w_out
    check.same_device("w_in", w_in, **{f"lora.{name}": factor for name, factor in checked._asdict().items()})

    def merged(name: str, weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
        if a is None or b is None:
            return weight
        product = (a.float() @ b.float().flatten(2)).unflatten(2, b.shape[2:])
        return (weight.float() + scale * product.permute(layouts.from_ours(name))).to(weight.dtype)

    return (
        merged("w_in", w_in, checked.a_in, checked.b_in, s_in),
        merged("w_out", w_out, checked.a_out, checked.b_out, s_out),
    )


def join_lora(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins separate adapters of gate and up, of ranks r and q, into one of rank r + q.

    Args:
      gate: (A [E or 1, D, r], B [E or 1, r, F]) of the gate columns.
      up: (A [E or 1, D, q], B [E or 1, q, F]) of the up columns.

    Returns:
      (a_in [E or 1, D, r + q], b_in [E or 1, r + q, 2, F]) for a `Lora`; b_in is 0 from the gate's ranks to up and from
      up's ranks to the gate. The scales of both adapters must be equal, or be part of the factors.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: for all factors, by torch.

    >>> a, b = join_lora((torch.ones(1, 4, 2), torch.ones(1, 2, 3)), (torch.ones(1, 4, 1), torch.ones(1, 1, 3)))
    >>> tuple(a.shape), b[0, :, 0, 0].tolist(), b[0, :, 1, 0].tolist()
    ((1, 4, 3), [1.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    """
    (gate_a, gate_b), (up_a, up_b) = check_join(check.tensor, check.FLOATS, gate, up)
    check.same_device("gate[0]", gate_a, **{"gate[1]": gate_b, "up[0]": up_a, "up[1]": up_b})

    def alike(*factors: Tensor) -> list[Tensor]:
        experts = torch.broadcast_shapes(*(factor.shape[:1] for factor in factors))
        return [factor.expand(*experts, -1, -1) for factor in factors]

    gate_b, up_b = alike(gate_b, up_b)
    no_gate, no_up = torch.zeros_like(up_b), torch.zeros_like(gate_b)
    b_in = torch.cat([torch.stack([gate_b, no_up], 2), torch.stack([no_gate, up_b], 2)], 1)
    return torch.cat(alike(gate_a, up_a), 2), b_in


def add_lora(module: Module, rank: int, alpha: float | None = None, *, shared: Sequence[str] = ()) -> Module:
    """Adds low-rank adapters to the experts of a module, in place, and freezes all other parameters of the module.

    These are the experts of every `MoE`, and those that Transformers loaded with `packed_config`. The adapters are the
    parameters that `MoE` has with `lora_rank`. They start without effect.

    Args:
      module: a `MoE`, or a module that contains `MoE` layers or packed experts of Transformers.
      rank: of the adapters of both projections, at least 1.
      alpha: the adapters are multiplied by alpha / rank; None: by 1.
      shared: the fields of `Lora` that all experts share.

    Returns:
      `module` itself.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range, there is no such layer, or a layer has adapters or is already sharded by
        fully_shard. Then nothing is changed.

    >>> from anabranch.torch import MoE
    >>> layer = add_lora(MoE(8, 16, num_experts=4, topk=2), rank=2, alpha=4)
    >>> [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    ['lora_a_in', 'lora_b_in', 'lora_a_out', 'lora_b_out']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {check.describe(module)}, expected a torch.nn.Module")
    layers: list[Any] = [layer for layer in module.modules() if hasattr(type(layer), "_add_lora")]
    if not layers:
        raise ValueError(f"module: got a {type(module).__name__} without a MoE layer, expected one that has some")
    rank = check.integer("rank", rank, 1, check.INDEX_LIMIT - 1)
    scale = 1.0 if alpha is None else check.number("alpha", alpha) / rank
    lora = NewLora(rank, scale, check_names_of("shared", shared, Lora._fields))
    for layer in layers:
        layer._check_without_lora()
    module.requires_grad_(False)
    for layer in layers:
        layer._add_lora(lora)
    return module

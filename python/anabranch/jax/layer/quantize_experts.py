"""Quantises the experts' matrices once, for calls with precision="fp8"."""

import dataclasses
import functools
from typing import Any

import jax

from anabranch.jax.binding import check
from anabranch.jax.binding.sharding import TokenCall, all_manual, current_mesh
from anabranch.jax.ops.quantized import QuantizedExperts, quantized_matrices
from anabranch.jax.parallel.parallel import Parallel, mesh_for, quantized_specs
from anabranch.layouts import Layouts
from anabranch.options import check_layouts
from anabranch.precision import check_fp8_widths, fp8_scales_number


@dataclasses.dataclass(frozen=True)
class _Options:
    layouts: Layouts
    fp8_scales: int
    gradients: bool


def _quantize_shard(options: _Options, w_in: jax.Array, w_out: jax.Array) -> tuple[jax.Array, ...]:
    o = options
    quantized = quantized_matrices(w_in, w_out, o.layouts, o.fp8_scales, plain=o.gradients, transposed=True)
    return tuple(array for array in quantized if array is not None)


def _named(options: _Options, arrays: Any) -> QuantizedExperts:
    remaining = iter(arrays)
    absent = () if options.gradients else ("w_in", "w_out")
    return QuantizedExperts(*(None if name in absent else next(remaining) for name in QuantizedExperts._fields))


def quantize_experts(
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    fp8_scales: str = "float32",
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
    gradients: bool = True,
    parallel: Parallel | None = None,
) -> QuantizedExperts:
    """Quantises the experts' matrices, for `moe`, `routed_experts` and `expert_ffn` with precision="fp8".

    These functions accept the result as `quantized`, in addition to the weights, and then quantise no weights. Call
    this function once per step, instead of once per pass, or only once if the weights do not change.

    Args:
      w_in: [E, D, 2, F] or [E, D, 1, F], float32, bfloat16 or float16; D and F multiples of 128.
      w_out: [E, F, D], any of these dtypes.
      fp8_scales: "float32" or "power_of_two", see `moe`; that call's option applies to the scales of rows.
      w_in_layout, w_out_layout: the order of the axes of both after E, as in `moe`. The result's layout is fixed.
      gradients: False: omits the arrays that gradients need, which halves the memory; a backward pass then quantises
        the weights.
      parallel: how the weights are spread over a mesh, as for `moe`; None: only E may be sharded.

    Returns:
      QuantizedExperts: 2 bytes per weight (1 without gradients) plus scales.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, or widths are not multiples of 128.

    Gradient: none; the functions that accept the result return the gradients of w_in and w_out. Source: semantics,
    section 11.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from anabranch.jax import moe, quantize_experts
      >>> w_in, w_out = jnp.ones([2, 128, 2, 256]), jnp.ones([2, 256, 128])
      >>> quantized = jax.jit(quantize_experts)(w_in, w_out)
      >>> quantized.w_in_transposed.dtype.name, quantized.w_in_scales.shape
      ('float8_e4m3fn', (2, 1, 2, 2))
      >>> x, gate = jnp.ones([3, 128]), jnp.ones([128, 2])
      >>> moe(x, gate, w_in, w_out, topk=1, precision="fp8", quantized=quantized).output.shape
      (3, 128)
    """
    layouts = check_layouts(w_in_layout, w_out_layout)
    w_in = check.array("w_in", w_in, check.FLOATS, layouts.shape("w_in", e="E", d="D", p="2 or 1", f="F"))
    axis_sizes = layouts.sizes("w_in", w_in.shape)
    if axis_sizes["p"] not in (1, 2):
        raise ValueError(f"w_in: got {check.describe(w_in)}, expected 2 (gate, up) or 1 as P")
    sizes: dict[str, Any] = {letter: (letter.upper(), axis_sizes[letter]) for letter in "efd"}
    w_out = check.array("w_out", w_out, check.FLOATS, layouts.shape("w_out", **sizes))
    check_fp8_widths("w_in", check.describe(w_in), D=axis_sizes["d"], F=axis_sizes["f"])
    options = _Options(layouts, fp8_scales_number(fp8_scales), check.boolean("gradients", gradients))
    if parallel is not None and not isinstance(parallel, Parallel):
        raise TypeError(f"parallel: got {check.describe(parallel)}, expected a Parallel")
    w_in, w_out = jax.lax.stop_gradient((w_in, w_out))
    if parallel is None or all_manual(current_mesh(w_in)):
        results = 6 if gradients else 4
        return _named(options, TokenCall(_quantize_shard, options, (1, 1), (1,) * results)(w_in, w_out))
    weight_specs, mesh = parallel.specs(*layouts), mesh_for(parallel, w_in)
    for width, axes in (("d", parallel.fsdp_axes), ("f", (parallel.tensor_axis,) if parallel.tensor_axis else ())):
        devices = 1
        for axis in axes:
            devices *= mesh.shape[axis]
        check_fp8_widths(
            "w_in", f"{check.describe(w_in)} over {devices} devices", **{width.upper(): axis_sizes[width] // devices}
        )
    specs = quantized_specs(parallel)
    arrays: Any = jax.shard_map(
        functools.partial(_quantize_shard, options),
        mesh=mesh,
        in_specs=(weight_specs["w_in"], weight_specs["w_out"]),
        out_specs=tuple(s for s in (specs if gradients else _without_gradients(specs)) if s is not None),
        check_vma=False,
    )(w_in, w_out)
    return _named(options, arrays)


def _without_gradients(specs: QuantizedExperts) -> QuantizedExperts:
    return specs._replace(w_in=None, w_out=None)

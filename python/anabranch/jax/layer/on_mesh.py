"""The rules of the whole layer on a mesh with named axes: expert, data, FSDP and tensor parallelism.

Both rules are a jax.shard_map around the work of one device. A device routes its own tokens; a transport (exchange.py)
sends them to their experts and returns the sums. Gradients of operands that several devices share are reduced here
explicitly; JAX does not differentiate through collectives.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from anabranch.jax.binding.arrays import flat
from anabranch.jax.binding.sharding import array_axes, entry_axes, spec_entry, vary_like
from anabranch.jax.layer.gate import GateResiduals, gate_residuals, select, select_backward
from anabranch.jax.layer.mesh_halves import halves, tensor_sum
from anabranch.jax.layer.names import named_h, named_u
from anabranch.jax.layer.operands import (
    TOKEN_RESULTS,
    TOKENS,
    Cotangents,
    LayerConfig,
    LayerOutput,
    Operands,
    Selection,
    flat_selection,
    flat_tokens,
    gradients,
    layer_output,
    output_names,
    quantize_weights,
    quantized_fields,
    round_weights,
    weight_dtypes,
)
from anabranch.jax.ops.ffn import (
    Saved,
)
from anabranch.jax.ops.plan import plan
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.parallel.exchange import drop_over_capacity
from anabranch.jax.parallel.parallel import Placement, quantized_specs
from anabranch.jax.parallel.transports import transport

#: Residuals of the forward rule by name: arrays whose first dimension is sharded over the token axes.
MeshResiduals = dict[str, Any]


def _fsdp_dimensions(placement: Placement) -> dict[str, int]:
    """For each operand that FSDP shards, the dimension D, which is divided over the FSDP axes."""
    weights = {name: placement.layouts.axis(name, "d") for name in ("w_in", "w_out")} | {
        "lora_a_in": 1,
        "lora_b_out": 2,
    }
    weights |= {f"{name}_block_scales": weights[name] for name in ("w_in", "w_out")}
    d = {name: axes.index("d") for name, axes in QuantizedExperts.shapes("e", "d", "p", "f", "d", "f").items()}
    return {"gate": 0, "b_out": 1} | weights | {f"quantized_{name}": axis for name, axis in d.items()}


def operand_specs(placement: Placement) -> dict[str, PartitionSpec]:
    """The sharding of every operand, by name."""
    token_spec = _token_spec(placement)
    quantized = quantized_fields(quantized_specs(placement.parallel))
    specs = placement.parallel.specs(*placement.layouts, shared=placement.shared)
    return {**specs, **quantized, **dict.fromkeys(TOKENS, token_spec)}


def _token_spec(placement: Placement) -> PartitionSpec:
    """The spec of an array with the leading dimensions of x."""
    return PartitionSpec(*map(spec_entry, placement.tokens))


def _output_specs(placement: Placement) -> dict[str, PartitionSpec]:
    whole = dict.fromkeys(LayerOutput._fields, PartitionSpec())
    dropped = {"dropped": PartitionSpec(spec_entry(placement.token_axes))}
    return whole | dict.fromkeys(TOKEN_RESULTS, _token_spec(placement)) | dropped


def _given(arrays: Any) -> dict[str, jax.Array]:
    """The fields of a NamedTuple of arrays that are not None."""
    return {name: array for name, array in arrays._asdict().items() if array is not None}


def _operand_specs(placement: Placement, operands: Operands) -> dict[str, PartitionSpec]:
    specs = operand_specs(placement)
    return {name: specs[name] for name in _given(operands)}


def _operands(given: dict[str, Any]) -> Operands:
    return Operands(**{name: given.get(name) for name in Operands._fields})  # type: ignore[arg-type]


# ---------------------------------------------------------------- on one device


def _gathered(config: LayerConfig, placement: Placement, operands: Operands, *, backward: bool) -> Operands:
    """All-gathers the FSDP-sharded operands. The experts' weights are sent in the dtype of x, with FP8 quantised."""
    operands = quantize_weights(config, round_weights(config, operands), backward=backward)
    if not placement.parallel.fsdp_axes:
        return operands

    def gather(name: str, array: jax.Array, dimension: int) -> jax.Array:
        if config.ffn.fp8 and name in ("w_in", "w_out"):  # only their sizes and axis order are read
            sizes = list(array.shape)
            sizes[dimension] *= math.prod(jax.lax.axis_size(axis) for axis in placement.parallel.fsdp_axes)
            return jnp.zeros(sizes, operands.x.dtype)
        return jax.lax.all_gather(array, placement.parallel.fsdp_axes, axis=dimension, tiled=True)

    whole = {
        name: gather(name, array, dimension)
        for name, dimension in _fsdp_dimensions(placement).items()
        if (array := getattr(operands, name)) is not None
    }
    return operands._replace(**whole)


def _reduced(placement: Placement, name: str, gradient: jax.Array) -> jax.Array:
    """The gradient of a parameter, summed over the devices that have the same shard of it."""
    on_every_rank = name in ("gate", "gate_bias") or name in [f"lora_{field}" for field in placement.shared]
    axes = placement.token_axes if on_every_rank else tuple(placement.parallel.data_axes)
    if name in ("lora_a_in", "lora_b_out"):  # from v_in and z', which every shard of F computes for its columns
        gradient = tensor_sum(placement, gradient)
    dimension = _fsdp_dimensions(placement).get(name)
    if placement.parallel.fsdp_axes and dimension is not None:
        gradient = jax.lax.psum_scatter(gradient, placement.parallel.fsdp_axes, scatter_dimension=dimension, tiled=True)
        axes = tuple(axis for axis in axes if axis not in placement.parallel.fsdp_axes)
    return jax.lax.psum(gradient, axes) if axes else gradient


def _without_invalid(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises given experts like a router's: (experts with -1 for invalid ones, counts [E], number of invalid)."""
    none = (experts < 0) | (experts >= num_experts)
    wrong = jnp.sum(none & (experts != -1), dtype=jnp.int32)
    return jnp.where(none, -1, experts), plan(experts, num_experts, num_rows=0).tokens_per_expert, wrong


def _forward(
    config: LayerConfig, placement: Placement, save: bool, given: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], MeshResiduals]:
    whole = _operands(given)
    leading = whole.x.shape[:-1]
    operands = flat_tokens(_gathered(config, placement, whole, backward=False))
    selection, sums, gate = select(config, operands, save=save, counts=True)
    experts, wrong = selection.experts, jnp.zeros((), jnp.int32)
    if config.router is None:
        experts, counts, wrong = _without_invalid(experts, placement.bounds.experts)
        sums = sums._replace(tokens_per_expert=counts)
    experts, dropped = drop_over_capacity(placement.bounds, experts)
    passes = halves(config, placement)
    output, saved, route = passes.experts(operands, experts, selection.weights, save=save)
    if placement.token_axes:
        sums = jax.lax.psum(sums, placement.token_axes)
    result = _given(layer_output(config, leading, output, selection, sums, (wrong + dropped)[None]))
    if not save:
        return result, {}
    rows = _given(Saved(named_h(saved.h), named_u(saved.u)))
    return result, _given(gate) | rows | {f"route.{name}": array for name, array in route._asdict().items()}


def _backward(
    config: LayerConfig,
    placement: Placement,
    wanted: tuple[str, ...],
    given: dict[str, jax.Array],
    selection: Selection,
    residuals: MeshResiduals,
    cotangents: Cotangents,
) -> dict[str, jax.Array]:
    # Without the barrier XLA would reuse the forward pass's gathered and sent arrays, and keep them in memory.
    given, cotangents = jax.lax.optimization_barrier((given, cotangents))
    whole = _operands(given)
    operands = flat_tokens(_gathered(config, placement, whole, backward=True))
    selection = flat_selection(selection)
    route_type = transport(placement.transport, placement.bounds).route
    route = route_type(**{name[6:]: array for name, array in residuals.items() if name.startswith("route.")})
    dtypes, saved = weight_dtypes(whole), Saved(residuals["h"], residuals.get("u"))
    passes = halves(config, placement)
    d_weights = passes.hidden(operands, route, selection.weights, saved, flat(cotangents.output), wanted, dtypes)
    d_weights = cotangents.total_d_weights(tensor_sum(placement, d_weights))
    gate = GateResiduals(residuals.get("logits"), residuals.get("lse"))
    selected = select_backward(config, operands, selection, gate, d_weights, cotangents.sums, wanted)
    d_x, of_experts = passes.inputs(whole.x.dtype, selected.x)
    parameters = {"gate": selected.gate, "gate_bias": selected.bias, **of_experts}
    results = {
        name: _reduced(placement, name, gradient).astype(config.ffn.gradient_dtype(name, getattr(whole, name)))
        for name, gradient in parameters.items()
        if gradient is not None
    }
    if whole.weights is not None and selected.weights is not None:
        results["weights"] = selected.weights.reshape(whole.weights.shape)
    return results if d_x is None else results | {"x": d_x.reshape(whole.x.shape)}


# ---------------------------------------------------------------- on the mesh
# Compiled even for an eager caller: otherwise every step on every device would be a program of its own.


def _on_mesh(placement: Placement, function: Any, in_specs: Any, out_specs: Any, *arrays: Any) -> Any:
    """Runs `function` on the arrays in a jax.shard_map, which may be nested in one over other axes."""
    on_mesh = jax.shard_map(
        function,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(placement.manual),
        check_vma=False,
    )
    return vary_like(on_mesh(*arrays), arrays)


def _route_names(placement: Placement) -> tuple[str, ...]:
    return tuple(f"route.{name}" for name in transport(placement.transport, placement.bounds).route._fields)


def _residual_specs(placement: Placement, names: Any) -> dict[str, PartitionSpec]:
    tokens = spec_entry(placement.token_axes)
    h = PartitionSpec(*placement.layouts.shape("h", r=tokens, p=None, f=placement.parallel.tensor_axis))
    return {name: h if name == "h" else PartitionSpec(tokens) for name in names}


def _resharded(placement: Placement, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Reshards an array whose type contains its sharding; otherwise jax.shard_map reshards it."""
    required = tuple(map(entry_axes, spec)) + ((),) * (array.ndim - len(spec))
    if not placement.explicit or array_axes(array) == required:
        return array
    return jax.sharding.reshard(array, spec)


def divide(placement: Placement, operands: Operands) -> Operands:
    """Reshards the operands as the rules require. JAX differentiates this, so gradients are sharded like operands."""
    specs = operand_specs(placement)
    return _operands({name: _resharded(placement, array, specs[name]) for name, array in _given(operands).items()})


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="save")
def placed_forward(
    config: LayerConfig, placement: Placement, operands: Operands, *, save: bool
) -> tuple[LayerOutput, MeshResiduals]:
    """The forward rule, and with `save` the residuals for `placed_backward`."""
    given, output_specs = _given(operands), _output_specs(placement)
    rows = ("h",) if operands.lora_a_in is None else ("h", "u")
    names = (*gate_residuals(config), *rows, *_route_names(placement)) if save else ()
    out_specs = ({name: output_specs[name] for name in output_names(config)}, _residual_specs(placement, names))
    rule = functools.partial(_forward, config, placement, save)
    result, residuals = _on_mesh(placement, rule, (_operand_specs(placement, operands),), out_specs, given)
    return LayerOutput(**{name: result.get(name) for name in LayerOutput._fields}), residuals


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def placed_backward(
    config: LayerConfig,
    placement: Placement,
    wanted: tuple[str, ...],
    operands: Operands,
    selection: Selection,
    residuals: MeshResiduals,
    cotangents: Cotangents,
) -> Operands:
    """The backward rule: the wanted gradients, sharded like their operands; None for other operands."""
    if not wanted:
        return gradients({})
    given, token_spec = _given(operands), _token_spec(placement)
    specs, output_specs = _operand_specs(placement, operands), _output_specs(placement)
    incoming = {name: output_specs[name] for name in _given(cotangents)}
    arriving = {name: _resharded(placement, getattr(cotangents, name), spec) for name, spec in incoming.items()}

    def rule(given: Any, selection: Any, residuals: MeshResiduals, arriving: Any) -> dict[str, jax.Array]:
        every = Cotangents(**{name: arriving.get(name) for name in Cotangents._fields})  # type: ignore[arg-type]
        return _backward(config, placement, wanted, given, selection, residuals, every)

    results = _on_mesh(
        placement,
        rule,
        (specs, Selection(token_spec, token_spec), _residual_specs(placement, residuals), incoming),  # type: ignore[arg-type]
        {name: specs[name] for name in wanted},
        given,
        selection,
        residuals,
        arriving,
    )
    return gradients(results)

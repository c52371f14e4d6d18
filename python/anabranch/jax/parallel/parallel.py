"""Maps a layer to a mesh: the axes over which tokens, experts, weight shards and F are divided."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from anabranch.exchange_sizes import capacity_of
from anabranch.jax.binding import check
from anabranch.jax.binding.sharding import Axes, array_axes, axes_with_type, current_mesh, spec_entry
from anabranch.jax.ops.packed import weight_shape
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.parallel.exchange import Bounds
from anabranch.jax.parallel.peers import Peers, concrete_mesh, peers_along, reason_against
from anabranch.jax.parallel.transports import TRANSPORTS, choose
from anabranch.layouts import Layouts
from anabranch.lora import Lora
from anabranch.options import check_layouts
from anabranch.packed import MX_BLOCK
from anabranch.precision import BLOCK


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Names the mesh axes that a layer is spread over; `moe`, `MoE` and `MoEBlock` accept it as `parallel`.

    One value holds all options, so it passes unchanged through model, layer and function, is checked in one place, and
    also defines the shardings of the parameters (`specs`). Results do not depend on it, up to the rounding of sums over
    devices, unless `capacity_factor` drops assignments.

    Args:
      expert_axis: axis over which the experts are divided, in contiguous equal ranges. Tokens are divided over it too;
        they are sent to the experts' devices, and the results are returned. None: every device has all experts.
      data_axes: axes over which the tokens are divided. The first dimension of x is divided over (*data_axes,
        expert_axis). Inside a jax.shard_map over the whole mesh no other field may be given: x is then this device's
        shard, and losses and counts cover all shards along these axes.
      fsdp_axes: the data_axes over which every expert matrix and the gate are also divided, along D. The matrices are
        all-gathered before use, forward and backward, and their gradients are reduce-scattered.
      tensor_axis: axis over which F is divided; all devices along it have the same tokens. Each pass has one sum over
        it.
      transport: "all_to_all", "ragged", "ring", "p2p", or "auto", which estimates their times (docs/scaling.md). "p2p"
        has bitwise the results of "ring" and copies directly between the GPUs of one host; "auto" considers it if
        one process has all devices, and not with fp8_exchange.
      capacity_factor: None: nothing is dropped, and buffers have the size of the worst case. Otherwise a device accepts
        at most ceil(capacity_factor * T * K) assignments, with T tokens per device, and drops the last ones in the
        order (source, token, slot), the same on every run. Drops are counted per source.
      fp8_exchange: with precision="fp8", tokens and the cotangents of their outputs are sent to the experts as e4m3
        numbers with the scales that the GEMMs use, 33/32 bytes per element; results are not quantised. Outputs are
        bitwise the same. Gradients of w_in, w_out and b_out, and the part of the weights' gradients from b_out, are
        computed from the quantised x and cotangents; docs/scaling.md has the error bound.
      mesh: the mesh; None: that of jax.set_mesh, or of the type of x.

    Raises:
      TypeError, ValueError: a field has a wrong type, is out of range, or contradicts another.

    >>> tuple(Parallel(expert_axis="expert", data_axes="data", fsdp_axes="data").specs()["w_in"])
    ('expert', 'data', None, None)
    """

    expert_axis: str | None = None
    data_axes: str | Axes = ()
    fsdp_axes: str | Axes = ()
    tensor_axis: str | None = None
    transport: str = "auto"
    capacity_factor: float | None = None
    mesh: Any = None
    fp8_exchange: bool = False

    def __post_init__(self) -> None:
        for name in ("data_axes", "fsdp_axes"):
            object.__setattr__(self, name, _axis_names(name, getattr(self, name)))
        for name in ("expert_axis", "tensor_axis"):
            axis = getattr(self, name)
            if axis is not None and not isinstance(axis, str):
                raise TypeError(f"{name}: got {check.describe(axis)}, expected the name of a mesh axis or None")
        single = [("expert_axis", self.expert_axis), ("tensor_axis", self.tensor_axis)]
        used: dict[str, str] = {}
        for name, axis in [*single, *(("data_axes", axis) for axis in self.data_axes)]:
            if axis is not None and axis in used:
                raise ValueError(f"{name}: got {axis!r}, expected an axis that is not in {used[axis]}")
            if axis is not None:
                used[axis] = name
        for axis in self.fsdp_axes:
            if axis not in self.data_axes:
                raise ValueError(f"fsdp_axes: got {axis!r}, expected axes of data_axes {self.data_axes}")
        if not used:
            raise ValueError("parallel: got no axis, expected expert_axis, data_axes or tensor_axis")
        check.choice("transport", self.transport, ("auto", *TRANSPORTS))
        if self.expert_axis is None and (self.transport != "auto" or self.capacity_factor is not None):
            name = "transport" if self.transport != "auto" else "capacity_factor"
            raise ValueError(f"{name}: got {getattr(self, name)!r} without expert_axis, expected none")
        if check.boolean("fp8_exchange", self.fp8_exchange) and self.expert_axis is None:
            raise ValueError("fp8_exchange: got True without expert_axis, expected False")
        if self.capacity_factor is not None and check.number("capacity_factor", self.capacity_factor) <= 0:
            raise ValueError(f"capacity_factor: got {self.capacity_factor}, expected a number > 0")
        if self.mesh is not None and not isinstance(self.mesh, (Mesh, jax.sharding.AbstractMesh)):
            raise TypeError(f"mesh: got {check.describe(self.mesh)}, expected a jax.sharding.Mesh")

    @property
    def token_axes(self) -> Axes:
        """The axes over which tokens are divided, slowest first."""
        expert = () if self.expert_axis is None else (self.expert_axis,)
        return (*self.data_axes, *expert)

    def specs(
        self, w_in_layout: str = "dpf", w_out_layout: str = "fd", *, shared: Sequence[str] = ()
    ) -> dict[str, PartitionSpec]:
        """The shardings of the arrays of `moe`.

        Args:
          w_in_layout, w_out_layout: the layouts of w_in and w_out, as in `moe`.
          shared: the fields of `lora` that all experts share, for example ("a_in",).

        Returns:
          PartitionSpecs by argument name; that of x shards its first dimension. Those of the fields of `lora` have the
          names lora_a_in, lora_b_in, lora_a_out and lora_b_out. Codes of packed weights are sharded like the weights,
          their scales as w_in_block_scales and w_out_block_scales say.

        Raises:
          ValueError: an unknown layout or field.
        """
        layouts = check_layouts(w_in_layout, w_out_layout)
        ep, tp, fsdp = self.expert_axis, self.tensor_axis, spec_entry(tuple(self.fsdp_axes))
        for name in shared:
            check.choice("shared", name, Lora._fields)
        own = {name: None if name in shared else ep for name in Lora._fields}
        return {
            "x": PartitionSpec(spec_entry(self.token_axes)),
            "gate": PartitionSpec(fsdp, None),
            "gate_bias": PartitionSpec(None),
            "w_in": PartitionSpec(*layouts.shape("w_in", e=ep, d=fsdp, p=None, f=tp)),
            "w_out": PartitionSpec(*layouts.shape("w_out", e=ep, f=tp, d=fsdp)),
            "b_in": PartitionSpec(*layouts.shape("b_in", e=ep, p=None, f=tp)),
            "b_out": PartitionSpec(ep, fsdp),
            "w_in_block_scales": PartitionSpec(*layouts.shape("w_in", e=ep, d=fsdp, p=None, f=tp)),
            "w_out_block_scales": PartitionSpec(*layouts.shape("w_out", e=ep, f=tp, d=fsdp)),
            "expert_bias": PartitionSpec(None),
            "qb_bin_bounds": PartitionSpec(None),
            "lora_a_in": PartitionSpec(own["a_in"], fsdp, None),
            "lora_b_in": PartitionSpec(own["b_in"], None, None, tp),
            "lora_a_out": PartitionSpec(own["a_out"], tp, None),
            "lora_b_out": PartitionSpec(own["b_out"], None, fsdp),
        }


def quantized_specs(parallel: Parallel) -> QuantizedExperts:
    """The shardings of the fields of a QuantizedExperts: like the weights. Blocks are never split."""
    d, f = spec_entry(tuple(parallel.fsdp_axes)), parallel.tensor_axis
    axes = QuantizedExperts.shapes(parallel.expert_axis, d, None, f, d, f)
    specs: dict[str, Any] = {name: PartitionSpec(*entries) for name, entries in axes.items()}
    return QuantizedExperts(**specs)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A `Parallel` resolved for the mesh and the shapes of one call.

    Attributes:
      parallel: the caller's argument.
      mesh: the mesh for jax.shard_map, which has devices with transport "p2p"; None: the mesh of the context.
      manual: the axes that this jax.shard_map makes manual.
      explicit: whether the arrays' types contain their sharding.
      tokens: the axes of every leading dimension of x.
      transport: a key of TRANSPORTS.
      bounds: the bounds of the transport's buffers.
      layouts: the layouts of w_in and w_out.
      shared: the fields of Lora that all experts share.
    """

    parallel: Parallel
    mesh: Any
    manual: Axes
    explicit: bool
    tokens: tuple[Axes, ...]
    transport: str
    bounds: Bounds
    layouts: Layouts
    shared: tuple[str, ...] = ()

    @property
    def token_axes(self) -> Axes:
        """The axes over which tokens are divided, slowest first."""
        return tuple(axis for axes in self.tokens for axis in axes)


def _axis_names(name: str, axes: Any) -> Axes:
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, (tuple, list)) or not all(isinstance(axis, str) for axis in names):
        raise TypeError(f"{name}: got {check.describe(axes)}, expected the names of mesh axes")
    return tuple(names)


def place(
    parallel: Parallel, arrays: dict[str, Any], topk: int, align_size: int, layouts: Layouts, *, fp8: bool = False
) -> Placement:
    """Checks that `parallel` fits `arrays`, by the names of moe's arguments; fp8: shards must be whole blocks.

    Raises:
      ValueError: an axis that the mesh does not have or that is already manual, a dimension that can't be divided, or
        an explicit sharding of an operand that contradicts `parallel`.
    """
    x, num_experts = arrays["x"], arrays["w_in"].shape[0]
    mesh = mesh_for(parallel, x)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))

    def size(*axes: str) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def divide(argument: str, dimension: str, number: int, axes: Axes) -> None:
        if number % size(*axes):
            raise ValueError(
                f"{argument}: got {check.describe(arrays[argument])}, expected {dimension} a multiple of "
                f"{size(*axes)}, the devices along {', '.join(map(repr, axes))}"
            )

    ep, tp = parallel.expert_axis, parallel.tensor_axis
    if x.ndim < 2:
        raise ValueError(f"x: got {check.describe(x)}, expected [..., D] with a first dimension to divide")
    tokens = _token_axes(parallel, x)
    for number, axes in zip(x.shape, tokens, strict=False):
        divide("x", "that dimension of tokens", number, axes)
    divide("x", "D", x.shape[-1], tuple(parallel.fsdp_axes))
    divide("w_in", "E", num_experts, (ep,) if ep else ())
    F = layouts.sizes("w_in", weight_shape(arrays["w_in"]))["f"]
    divide("w_in", "F", F, (tp,) if tp else ())
    if fp8:
        for dimension, number, axes in (("D", x.shape[-1], tuple(parallel.fsdp_axes)), ("F", F, (tp,) if tp else ())):
            if number % (BLOCK * size(*axes)):
                raise ValueError(
                    f"w_in: got {check.describe(arrays['w_in'])}, expected {dimension} a multiple of {BLOCK} times "
                    f'{size(*axes)}, the devices along {", ".join(map(repr, axes))}: with precision="fp8" a block of '
                    f"{BLOCK} has one scale, and must not be spread over devices"
                )
    _check_packed_shards(arrays, size, (("D", x.shape[-1], tuple(parallel.fsdp_axes)), ("F", F, (tp,) if tp else ())))
    factors = {name: arrays.get(f"lora_{name}") for name in Lora._fields}
    shared = tuple(n for n, factor in factors.items() if factor is not None and factor.shape[0] == 1 < num_experts)
    for name, spec in parallel.specs(*layouts, shared=shared).items():
        if name != "x" and arrays.get(name) is not None:
            _check_spec(name, arrays[name], spec)

    T = math.prod(x.shape[:-1]) // size(*parallel.token_axes)
    ranks = size(ep) if ep else 1
    selected = arrays["replay_experts"] is not None or arrays["experts"] is not None
    slots_per_token = topk if selected else min(topk, num_experts // ranks)  # given experts may repeat
    bounds = Bounds(
        axis=ep,
        ranks=ranks,
        experts=num_experts,
        align_size=align_size,
        tokens=T,
        topk=topk,
        slots_per_token=slots_per_token,
        capacity=capacity_of(parallel.capacity_factor, T, topk, ranks, slots_per_token),
    )
    transport = "ring" if ep is None else parallel.transport
    if transport == "auto":
        platform = _platform(parallel.mesh, mesh)
        # With fp8_exchange the steps of "p2p" do not overlap.
        p2p = platform == "gpu" and not parallel.fp8_exchange and _has_peers(parallel)
        transport = choose(platform, bounds, x.dtype.itemsize, parallel.fp8_exchange, p2p)
    bounds.check(transport)
    context = jax.sharding.get_abstract_mesh()
    call_mesh = None if not context.empty else parallel.mesh or mesh
    if transport == "p2p":
        # With its devices the mesh is part of the program, which JAX then refuses to run on other devices.
        call_mesh, peers = _peer_mesh(parallel)
        bounds = dataclasses.replace(bounds, peers=peers)
    return Placement(
        parallel=parallel,
        mesh=call_mesh,
        manual=tuple(axis for axis in mesh.axis_names if axis not in axes_with_type(mesh, AxisType.Manual)),
        explicit=bool(axes_with_type(mesh, AxisType.Explicit)),
        tokens=tokens,
        transport=transport,
        bounds=bounds,
        layouts=layouts,
        shared=shared,
    )


def _check_packed_shards(arrays: dict[str, Any], size: Any, divided: Sequence[tuple[str, int, Axes]]) -> None:
    """Refuses axes that would cut blocks of packed weights. divided: dimensions, their sizes and axes."""
    for name, contracted in (("w_in", "D"), ("w_out", "F")):
        if arrays.get(f"{name}_block_scales") is None:
            continue
        for dimension, number, axes in divided:
            mxfp4 = arrays[name].dtype == "uint8"
            block = MX_BLOCK if mxfp4 else BLOCK
            if not axes or (mxfp4 and dimension != contracted) or number % (block * size(*axes)) == 0:
                continue
            raise ValueError(
                f"{name}: got {check.describe(arrays[name])}, expected {dimension} a multiple of {block} times "
                f"{size(*axes)}, the devices along {', '.join(map(repr, axes))}: a block of packed weights must not be "
                "spread over devices"
            )


def _peer_mesh(parallel: Parallel) -> tuple[Mesh, Peers]:
    """The mesh with the devices of a call with transport "p2p", and the groups along the expert axis."""
    assert parallel.expert_axis is not None
    manual = axes_with_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)
    mesh = concrete_mesh(parallel.mesh)
    if manual:
        reason = f"inside a jax.shard_map over {', '.join(map(repr, manual))}, expected moe() outside of it"
    elif mesh is None:
        reason = "without known devices, expected parallel.mesh, or the call under jax.set_mesh(mesh)"
    else:
        peers = peers_along(mesh, parallel.expert_axis)
        reason = reason_against(peers)
        if not reason:
            return mesh, peers
    raise ValueError(f"transport: got 'p2p' {reason}")


def _has_peers(parallel: Parallel) -> bool:
    """Whether transport="auto" may choose "p2p": the devices can use it, and all belong to this process.

    Several processes would have to trace the same programs, since each makes exchanges together with the others.
    """
    try:
        _, peers = _peer_mesh(parallel)
        if any(device.process_index != jax.process_index() for group in peers.groups for device in group):
            return False
        peers.exchange(1)  # the smallest one shows whether the GPUs reach each other's memory
    except ValueError:
        return False
    return True


def manual_shard_axes(parallel: Parallel) -> Axes:
    """The axes of the shards inside a jax.shard_map over the whole mesh, where only data_axes may be given."""
    for name in ("expert_axis", "fsdp_axes", "tensor_axis", "mesh"):
        if getattr(parallel, name):
            raise ValueError(
                f"{name}: got {getattr(parallel, name)!r} inside a jax.shard_map over the whole mesh, expected only "
                "data_axes there; outside, moe() applies its own jax.shard_map"
            )
    names = jax.sharding.get_abstract_mesh().axis_names
    for axis in parallel.data_axes:
        if axis not in names:
            raise ValueError(f"data_axes: got {axis!r}, expected axes of the mesh, {', '.join(map(repr, names))}")
    return tuple(parallel.data_axes)


def mesh_for(parallel: Parallel, x: jax.Array) -> Any:
    """The mesh of a call: that of the context, with which a given mesh has to agree, else the given one."""
    mesh = current_mesh(x)
    if mesh.empty:
        mesh = mesh if parallel.mesh is None else parallel.mesh
    elif parallel.mesh is not None and mesh.shape != parallel.mesh.shape:
        raise ValueError(f"mesh: got {dict(parallel.mesh.shape)}, expected that of the context, {dict(mesh.shape)}")
    if mesh.empty:
        raise ValueError("mesh: got none, expected parallel.mesh, or the call under jax.set_mesh(mesh)")
    manual = axes_with_type(mesh, AxisType.Manual)
    single = [("expert_axis", parallel.expert_axis), ("tensor_axis", parallel.tensor_axis)]
    for name, axis in [*single, *(("data_axes", axis) for axis in parallel.data_axes)]:
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(
                f"{name}: got {axis!r}, expected an axis of the mesh, {', '.join(map(repr, mesh.axis_names))}"
            )
        if axis in manual:
            raise ValueError(
                f"{name}: got {axis!r}, which a jax.shard_map around the call made manual, expected moe() outside it"
            )
    return mesh


def _token_axes(parallel: Parallel, x: jax.Array) -> tuple[Axes, ...]:
    """The axes of every leading dimension of x: from its type, or all on the first dimension."""
    given = array_axes(x)
    named = [axis for axes in given for axis in axes]
    if not named:
        return (parallel.token_axes, *((),) * (x.ndim - 2))
    if given[-1] or sorted(named) != sorted(parallel.token_axes):
        raise ValueError(
            f"x: got {check.describe(x)} sharded as {jax.typeof(x).sharding.spec}, expected its leading dimensions "
            f"over {', '.join(map(repr, parallel.token_axes))}"
        )
    return given[:-1]


def _check_spec(name: str, array: jax.Array, spec: PartitionSpec) -> None:
    """Refuses an explicit sharding other than the required one."""
    given = PartitionSpec(*(spec_entry(axes) for axes in array_axes(array)))
    spec = PartitionSpec(*spec, *[None] * (array.ndim - len(spec)))
    if any(entry is not None for entry in given) and given != spec:
        raise ValueError(f"{name}: got {check.describe(array)} sharded as {given}, expected {spec}")


def _platform(given: Any, mesh: Any) -> str:
    """The platform of the mesh's devices, "cpu", "gpu" or "tpu"."""
    if isinstance(given, Mesh):
        return str(given.devices.flat[0].platform)
    return str(getattr(getattr(mesh, "abstract_device", None), "platform", None) or jax.default_backend())

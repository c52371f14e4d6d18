"""Runs an operation on sharded arrays: every device computes its own shards.

A call of the C library is opaque to XLA, which would gather its operands and run it in full on every device. So every
call declares which leading dimensions of its arrays are token dimensions (`TokenCall`). These may be sharded over any
mesh axes; all other dimensions have to be whole. A result with fewer token dimensions than the call is a sum over the
missing ones, and is summed over their shards. There are three cases, by the type of the mesh axes:

- manual (inside jax.shard_map): arrays are shards already. The operation runs on them, and sums stay per shard.
- explicit: the arrays' types contain their sharding. The operation runs in a jax.shard_map over these axes.
- automatic, or no known mesh: XLA calls us after it has chosen a sharding (custom_partitioning, with a rule for Shardy
  and an equivalent one for GSPMD).
"""

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]

#: While a TokenCall's function is traced: the mesh axes of its token dimensions. Nested calls run on the same shards.
_on_shards: contextvars.ContextVar[tuple[Axes, ...] | None] = contextvars.ContextVar("on_shards", default=None)


@dataclasses.dataclass(frozen=True)
class TokenCall:
    """An operation on tokens that can be computed on each shard of the tokens separately.

    Attributes:
      function: (static, *operands) -> tuple of arrays, on whole arrays or on shards. A module-level function, so that
        equal calls compare equal.
      static: the hashable options of the function.
      operands: for every operand, the number of leading dimensions that are token dimensions. The first operand has
        all token dimensions, and its sharding applies to the others.
      results: for every result, the number of its token dimensions. A result with fewer than the first operand is
        summed over the shards of the missing dimensions. A token dimension of a result may contain rows instead, with
        another size; the rows of the shards are concatenated.
      whole: the error for a sharded operand without token dimensions; empty: such an operand is gathered if the axes
        are automatic.
      names: the operands' names for that error; empty: none.
    """

    function: Callable[..., tuple[jax.Array, ...]]
    static: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    whole: str = ""
    names: tuple[str, ...] = ()

    def __call__(self, *operands: jax.Array | None) -> tuple[jax.Array, ...]:
        """Runs the call; operands that are None are passed on as None."""
        given = tuple(operand is not None for operand in operands)
        arrays = [operand for operand in operands if operand is not None]
        token_dims = tuple(n for n, there in zip(self.operands, given, strict=True) if there)
        names = tuple(f"{n} " for n, there in zip(self.names, given, strict=True) if there) if self.names else ()
        names = names or ("",) * len(arrays)
        call = _Bound(self.function, self.static, given, token_dims, self.results, self.whole, names)
        # Arrays that are not traced are not differentiated. A nested call is differentiated with its outer call.
        guarded = not on_shards() and any(isinstance(array, jax.core.Tracer) for array in arrays)
        outputs: tuple[jax.Array, ...] = (_run_once_differentiable if guarded else _run)(call, *arrays)
        return outputs


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A TokenCall with known optional operands."""

    function: Callable[..., tuple[jax.Array, ...]]
    static: Any
    given: tuple[bool, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    whole: str
    names: tuple[str, ...]

    def on_shards(self, token_axes: Sequence[Axes], *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results on the shards of a mesh whose axes `token_axes` shard the token dimensions."""
        remaining = iter(arrays)
        operands = [next(remaining) if there else None for there in self.given]
        inside = _on_shards.set(tuple(token_axes))
        try:
            results = self.function(self.static, *operands)
        finally:
            _on_shards.reset(inside)
        return tuple(map(functools.partial(self._summed, token_axes), results, self.results))

    def _summed(self, token_axes: Sequence[Axes], result: jax.Array, token_dims: int) -> jax.Array:
        axes = [axis for axes in token_axes[token_dims:] for axis in axes]
        if not axes:
            return result
        if result.dtype == jnp.bool_:  # psum does not support bool
            return jax.lax.psum(result.astype(jnp.int32), axes) > 0
        return jax.lax.psum(result, axes)

    def specs(self, token_axes: Sequence[Axes], token_dims: Sequence[int]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*map(spec_entry, token_axes[:n])) for n in token_dims)


def on_shards() -> bool:
    """Whether a TokenCall's function is being traced."""
    return _on_shards.get() is not None


def token_shard_axes(name: str, tokens: Sequence[int]) -> Axes:
    """Inside a TokenCall's function: the mesh axes that divide the tokens, whose shards are in token order.

    Args:
      name: the argument's name, for the error.
      tokens: the sizes of the token dimensions of this shard.

    Raises:
      ValueError: a dimension after the first with more than one token is divided, so that shards' tokens interleave.
    """
    token_axes = _on_shards.get() or ()
    divided = [i for i, axes in enumerate(token_axes) if axes]
    if not divided:
        return ()
    if len(divided) > 1 or any(size > 1 for size in tokens[: divided[0]]):
        raise ValueError(
            f"{name}: got a sharding of token dimension {divided[-1]}, expected one of the first only, since rows "
            "are in the order of the tokens"
        )
    return token_axes[divided[0]]


def spec_entry(axes: Axes) -> Any:
    """Converts mesh axes to one entry of a PartitionSpec."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def entry_axes(entry: Any) -> Axes:
    """Converts one entry of a PartitionSpec to mesh axes."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def array_axes(array: jax.Array) -> tuple[Axes, ...]:
    """The explicit mesh axes of every dimension of an array, from its type."""
    return tuple(map(entry_axes, jax.typeof(array).sharding.spec))


def current_mesh(*arrays: jax.Array) -> Any:
    """The abstract mesh of the arrays' types or of the context; an empty mesh if there is neither."""
    context = jax.sharding.get_abstract_mesh()
    meshes = [context, *(jax.typeof(array).sharding.mesh for array in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), context)


def axes_with_type(mesh: Any, axis_type: AxisType) -> Axes:
    """The names of a mesh's axes of one type."""
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == axis_type)


def all_manual(mesh: Any) -> bool:
    """Whether the program runs inside a jax.shard_map over the whole mesh."""
    return not mesh.empty and axes_with_type(mesh, AxisType.Manual) == mesh.axis_names


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Inside a jax.shard_map, makes arrays vary over the same mesh axes: those over which any of them varies.

    The gradient of a replicated operand is computed per shard; the transpose of this function sums it over the shards.
    """
    results: tuple[Any, ...] = vary_like(arrays, arrays)
    return results


def vary_like(results: Any, operands: Any) -> Any:
    """Makes the results vary over the mesh axes over which any operand varies; both are pytrees of arrays.

    A jax.shard_map nested in another one loses that information about the outer axes.
    """
    all_varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(operands)))
    order = sorted(all_varying)

    def vary(array: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in order if axis not in jax.typeof(array).manual_axis_type.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, results) if all_varying else results


def check_alike(**arrays: jax.Array | None) -> None:
    """Refuses arrays whose first dimension is sharded differently from that of the first array, by their types."""
    given = {name: array for name, array in arrays.items() if array is not None}
    (first, leader), *others = given.items()
    for name, array in others:
        if array_axes(array)[:1] != array_axes(leader)[:1]:
            raise ValueError(
                f"{name}: got {array.dtype}{list(array.shape)} sharded as {jax.typeof(array).sharding.spec}, expected "
                f"its first dimension as that of {first}, {jax.typeof(leader).sharding.spec}"
            )


def check_whole(function: str, **arrays: jax.Array | None) -> None:
    """Refuses sharded arrays, by name, for an operation that counts rows over all tokens.

    The check uses what is known before compilation: the types of arrays on explicit axes, and outside of a jitted
    program the placement of an array. Inside a program, only XLA knows how it shards arrays over automatic axes;
    compilation then fails with the message `TokenCall.whole`.
    """
    for name, array in arrays.items():
        if array is None or arrays_are_local(array):
            continue
        placed = None if isinstance(array, jax.core.Tracer) else array.sharding
        if any(array_axes(array)) or not (placed is None or placed.is_fully_replicated):
            raise ValueError(
                f"{name}: got {array.dtype}{list(array.shape)} sharded, expected whole arrays: {function} counts rows "
                "over all tokens; use moe(), which takes sharded tokens, or call it inside jax.shard_map"
            )


# ---------------------------------------------------------------- manual, explicit and automatic axes


def arrays_are_local(*arrays: jax.Array) -> bool:
    """Whether each array is whole on its device: inside a jax.shard_map or a TokenCall, or with one device only."""
    if on_shards():
        return True
    mesh = current_mesh(*arrays)
    if mesh.empty:
        return jax.device_count() == 1
    manual = axes_with_type(mesh, AxisType.Manual)
    left = [axis for axis in mesh.axis_names if axis not in manual]
    automatic = axes_with_type(mesh, AxisType.Auto)
    return bool(manual) and all(axis in automatic and mesh.shape[axis] == 1 for axis in left)


def _run(call: _Bound, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if arrays_are_local(*arrays):
        return call.on_shards((), *arrays)
    mesh = current_mesh(*arrays)
    if mesh.empty:
        return _automatic(call, *arrays)
    _check_kinds(mesh)
    explicit = axes_with_type(mesh, AxisType.Explicit)
    results: tuple[jax.Array, ...] = _explicit(call, mesh, explicit, *arrays) if explicit else _automatic(call, *arrays)
    return results


_run_once_differentiable = jax.custom_jvp(_run, nondiff_argnums=(0,))


@_run_once_differentiable.defjvp
def _no_second_derivative(call: _Bound, arrays: Any, tangents: Any) -> Any:
    """JAX evaluates this rule for the derivative of an operation's own derivative rule, which is unsupported."""
    operation = getattr(call.static, "target", call.function.__module__)
    raise TypeError(
        f"{operation}: got a gradient of a gradient, expected a first derivative: "
        "anabranch does not support second ones"
    )


def _check_kinds(mesh: Any) -> None:
    """Refuses automatic axes beside others: XLA would not report how it shards over them, and would gather."""
    others = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto]
    automatic = [axis for axis in axes_with_type(mesh, AxisType.Auto) if mesh.shape[axis] > 1]
    if others and automatic:
        raise ValueError(
            f"sharding: got automatic mesh axes {', '.join(map(repr, automatic))} beside manual or explicit ones "
            f"{', '.join(map(repr, others))}, expected explicit or manual ones, or moe(..., parallel=...)"
        )


# Compiled even for an eager caller, like the automatic case.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _explicit(call: _Bound, mesh: Any, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    for array, token_dims, name in zip(arrays, call.operands, call.names, strict=True):
        _check_whole(call, name, array, token_dims, [a for axes in array_axes(array)[token_dims:] for a in axes])
    leading = array_axes(arrays[0])[: call.operands[0]]
    results: tuple[jax.Array, ...] = jax.shard_map(
        functools.partial(_shards, call, leading),
        mesh=mesh,
        in_specs=call.specs(leading, call.operands),
        out_specs=call.specs(leading, call.results),
        axis_names=set(axes),
        check_vma=False,
    )(*(_reshard(mesh, a, s) for a, s in zip(arrays, call.specs(leading, call.operands), strict=True)))
    varying: tuple[jax.Array, ...] = vary_like(results, arrays)
    return varying


def _shards(call: _Bound, token_axes: Sequence[Axes], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return call.on_shards(token_axes, *arrays)


def _reshard(mesh: Any, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Reshards a token array to the sharding of the first operand; a cotangent may have another one."""
    required = tuple(entry_axes(entry) for entry in spec)
    required += ((),) * (array.ndim - len(required))
    return array if array_axes(array) == required else jax.sharding.reshard(array, NamedSharding(mesh, spec))


def _check_whole(call: _Bound, name: str, array: jax.Array, token_dims: int, sharded_over: Sequence[str]) -> None:
    if not sharded_over:
        return
    what = f"{name}{array.dtype}{list(array.shape)} sharded over {', '.join(map(repr, sharded_over))}"
    if call.whole and not token_dims:
        raise ValueError(call.whole.format(got=what))
    raise ValueError(
        f"sharding: got {what} in a dimension that is not a token dimension, expected it whole; "
        "jax.sharding.reshard gathers it"
    )


def _automatic(call: _Bound, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_partitioned(call, tuple(array.ndim for array in arrays))(*arrays))


@functools.lru_cache(maxsize=4096)
def _partitioned(call: _Bound, ranks: tuple[int, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """The call as a function that XLA may partition; jitted, because eager calls would gather sharded arrays."""
    partitioned = custom_partitioning(functools.partial(call.on_shards, ()))

    def partition(mesh: Mesh, operands: Any, results: Any) -> tuple[Any, ...]:
        if call.whole:
            for operand, token_dims, name in zip(operands, call.operands, call.names, strict=True):
                if not token_dims and not operand.sharding.is_fully_replicated:
                    raise ValueError(call.whole.format(got=f"{name}{operand.dtype}{list(operand.shape)} sharded"))
        axes = _token_axes(operands[0].sharding, call.operands[0])
        for operand, token_dims in zip(operands, call.operands, strict=True):
            for size, names in zip(operand.shape[:token_dims], axes, strict=False):
                if size % _size(mesh, names):
                    raise ValueError(
                        f"sharding: got {operand.dtype}{list(operand.shape)} in {_size(mesh, names)} shards, "
                        f"expected a divisor of {size}"
                    )
        place = functools.partial(NamedSharding, mesh)
        arguments = tuple(map(place, call.specs(axes, call.operands)))
        return (
            mesh,
            functools.partial(call.on_shards, axes),
            tuple(map(place, call.specs(axes, call.results))),
            arguments,
        )

    def infer(mesh: Mesh, operands: Any, results: Any) -> tuple[Any, ...]:
        """GSPMD calls this if Shardy is off, repeatedly as it learns shardings; an error here aborts the process."""
        n = call.operands[0]
        tokens = (o.sharding for o, token_dims in zip(operands, call.operands, strict=True) if token_dims == n)
        known = next((sharding for sharding in tokens if getattr(sharding, "spec", None) is not None), None)
        axes = ((),) * n if known is None else _token_axes(known, n)
        return tuple(map(functools.partial(NamedSharding, mesh), call.specs(axes, call.results)))

    def rule(mesh: Mesh, operand_types: Any, result_types: Any) -> SdyShardingRule:
        return _shardy_rule(call, [tuple(t.shape) for t in operand_types], [tuple(t.shape) for t in result_types])

    partitioned.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    function = custom_vmap(lambda *arrays: tuple(partitioned(*arrays)))

    @function.def_vmap
    def one_after_another(size: int, batched: Sequence[bool], *arrays: jax.Array) -> Any:
        def one(slices: Sequence[jax.Array]) -> Any:
            remaining = iter(slices)
            return function(*(next(remaining) if b else a for a, b in zip(arrays, batched, strict=True)))

        results = jax.lax.map(one, [a for a, b in zip(arrays, batched, strict=True) if b])
        return results, tuple(True for _ in results)

    return jax.jit(function)


def _size(mesh: Mesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _token_axes(sharding: Any, tokens: int) -> tuple[Axes, ...]:
    """The mesh axes of the token dimensions."""
    spec = getattr(sharding, "spec", None)
    if spec is None:  # an XLA sharding without axis names
        if not sharding.is_fully_replicated:
            raise ValueError(f"sharding: got {sharding}, expected one over the axes of a mesh; see jax.set_mesh")
        return ((),) * tokens
    return tuple(entry_axes(spec[i]) if i < len(spec) else () for i in range(tokens))


def _shardy_rule(
    call: _Bound, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> SdyShardingRule:
    """The Shardy rule for these shapes: corresponding token dimensions share a factor, other dimensions must be whole.

    Rows share a factor with tokens if there is an integer number of rows per token; otherwise Shardy does not relate
    them.
    """
    tokens = operands[0][: call.operands[0]]
    others: list[str] = []
    rows_of_token: dict[str, Any] = {}

    def own() -> str:
        others.append(f"x{len(others)}")
        return others[-1]

    def token_factor(i: int, size: int) -> str | CompoundFactor:
        if size == tokens[i]:
            return f"t{i}"
        if not tokens[i] or size % tokens[i] or not size:
            return own()
        name = f"r{len(rows_of_token)}"
        rows_of_token[name] = size // tokens[i]
        return CompoundFactor(f"t{i}", name)

    def factors(shape: tuple[int, ...], token_dims: int) -> ArrayMapping:
        return ArrayMapping(*(token_factor(i, n) if i < token_dims else own() for i, n in enumerate(shape)))

    left = tuple(map(factors, operands, call.operands))
    right = tuple(map(factors, results, call.results))
    return SdyShardingRule(left, right, need_replication_factors=tuple(others), **rows_of_token)

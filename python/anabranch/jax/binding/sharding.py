"""How an operation runs when its arrays are spread over devices: where the shards are, it runs on each of them.

A call of the C library is opaque to XLA, which would gather its operands and run it everywhere on everything. So every
call says which of its arrays' leading dimensions are those of the tokens (`TokenCall`); these may be sharded over any
mesh axes, all others have to be whole. What keeps fewer token dimensions than the call has is a sum over the rest, and
is added up over the shards. Three ways, by the kind of the mesh's axes:

- manual (inside jax.shard_map): arrays are shards already; the operation runs on them as they are, sums included.
- explicit: the types of the arrays say how they are sharded; the operation runs in a jax.shard_map over these axes.
- automatic, or no mesh in sight: XLA asks us once it has decided (custom_partitioning, with a rule for Shardy and the
  same in the terms of GSPMD).
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

#: While a TokenCall's function is being traced, the mesh axes of its token dimensions; calls inside run on its shards.
_on_shards: contextvars.ContextVar[tuple[Axes, ...] | None] = contextvars.ContextVar("on_shards", default=None)


@dataclasses.dataclass(frozen=True)
class TokenCall:
    """An operation on tokens, which shards of tokens can do by themselves.

    Attributes:
      function: (static, *operands) -> tuple of arrays, on whole arrays or on shards of them; a module's function, so
        that equal calls compare equal.
      static: its options, hashable.
      operands: the leading dimensions of every operand that are token dimensions; the first operand has all of them
        and says how they are sharded.
      results: the same of every result; one with fewer than the first operand is summed over the shards of the rest.
        A token dimension may be one of rows instead, of another size: the shards' rows one behind the other.
      whole: what to say when an operand without token dimensions comes sharded; empty: it is gathered where axes are
        automatic.
      names: of the operands, for that; empty: they have none.
    """

    function: Callable[..., tuple[jax.Array, ...]]
    static: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    whole: str = ""
    names: tuple[str, ...] = ()

    def __call__(self, *operands: jax.Array | None) -> tuple[jax.Array, ...]:
        """Runs it; an operand that is None stays None."""
        given = tuple(operand is not None for operand in operands)
        arrays = [operand for operand in operands if operand is not None]
        kept = tuple(n for n, there in zip(self.operands, given, strict=True) if there)
        names = tuple(f"{n} " for n, there in zip(self.names, given, strict=True) if there) if self.names else ()
        names = names or ("",) * len(arrays)
        call = _Bound(self.function, self.static, given, kept, self.results, self.whole, names)
        # What is not traced is not differentiated, and what runs inside a call is with it.
        guarded = _on_shards.get() is None and any(isinstance(array, jax.core.Tracer) for array in arrays)
        outputs: tuple[jax.Array, ...] = (_run_once_differentiable if guarded else _run)(call, *arrays)
        return outputs


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A TokenCall with the optional operands settled."""

    function: Callable[..., tuple[jax.Array, ...]]
    static: Any
    given: tuple[bool, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    whole: str
    names: tuple[str, ...]

    def on_shards(self, token_axes: Sequence[Axes], *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The results on the shards of a mesh whose axes `token_axes` shard the token dimensions."""
        rest = iter(arrays)
        operands = [next(rest) if there else None for there in self.given]
        inside = _on_shards.set(tuple(token_axes))
        try:
            results = self.function(self.static, *operands)
        finally:
            _on_shards.reset(inside)
        return tuple(map(functools.partial(self._summed, token_axes), results, self.results))

    def _summed(self, token_axes: Sequence[Axes], result: jax.Array, kept: int) -> jax.Array:
        axes = [axis for axes in token_axes[kept:] for axis in axes]
        if not axes:
            return result
        if result.dtype == jnp.bool_:  # of which there is no sum
            return jax.lax.psum(result.astype(jnp.int32), axes) > 0
        return jax.lax.psum(result, axes)

    def specs(self, token_axes: Sequence[Axes], kept: Sequence[int]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*map(entry_of, token_axes[:n])) for n in kept)


def axes_of_shard(name: str, tokens: Sequence[int]) -> Axes:
    """In a TokenCall's function, the mesh axes that divide the tokens; their shards are in the order of the tokens.

    Args:
      name: of the argument, for the error.
      tokens: the sizes of the token dimensions, of this shard.

    Raises:
      ValueError: a dimension behind the first one of more than one is divided, so that shards' tokens interleave.
    """
    token_axes = _on_shards.get() or ()
    divided = [i for i, axes in enumerate(token_axes) if axes]
    if not divided:
        return ()
    if len(divided) > 1 or any(size > 1 for size in tokens[: divided[0]]):
        raise ValueError(
            f"{name}: got token dimensions of which number {divided[-1]} is sharded, expected none but the first "
            "to be, since rows stand in the order of the tokens"
        )
    return token_axes[divided[0]]


def entry_of(axes: Axes) -> Any:
    """Mesh axes as one entry of a PartitionSpec."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(entry: Any) -> Axes:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def spec_of(array: jax.Array) -> tuple[Axes, ...]:
    """The explicit mesh axes of every dimension of an array, from its type."""
    return tuple(map(axes_of, jax.typeof(array).sharding.spec))


def mesh_of(*arrays: jax.Array) -> Any:
    """The abstract mesh that the arrays' types or the context tell of; an empty one where neither does."""
    context = jax.sharding.get_abstract_mesh()
    meshes = [context, *(jax.typeof(array).sharding.mesh for array in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), context)


def axes_of_type(mesh: Any, axis_type: AxisType) -> Axes:
    """The names of a mesh's axes of one type."""
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == axis_type)


def all_manual(mesh: Any) -> bool:
    """Whether the program runs inside a jax.shard_map over the whole mesh."""
    return not mesh.empty and axes_of_type(mesh, AxisType.Manual) == mesh.axis_names


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Inside a jax.shard_map, arrays that vary over the same mesh axes: those over which any does.

    An operation's gradient of a replicated operand is that of one shard; the transpose of this adds them up.
    """
    results: tuple[Any, ...] = vary_like(arrays, arrays)
    return results


def vary_like(results: Any, operands: Any) -> Any:
    """`results`, of which a jax.shard_map that is inside another one knows no more over which axes of that they vary.

    Both are pytrees of arrays; the results vary over the axes over which any operand does.
    """
    everywhere = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(operands)))
    order = sorted(everywhere)

    def vary(array: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in order if axis not in jax.typeof(array).manual_axis_type.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, results) if everywhere else results


def check_alike(**arrays: jax.Array | None) -> None:
    """Refuses arrays whose types say that their first dimensions are divided otherwise than that of the first."""
    given = {name: array for name, array in arrays.items() if array is not None}
    (first, leader), *others = given.items()
    for name, array in others:
        if spec_of(array)[:1] != spec_of(leader)[:1]:
            raise ValueError(
                f"{name}: got {array.dtype}{list(array.shape)} sharded as {jax.typeof(array).sharding.spec}, expected "
                f"its first dimension as that of {first}, {jax.typeof(leader).sharding.spec}"
            )


def check_whole(function: str, **arrays: jax.Array | None) -> None:
    """Refuses arrays that are divided over devices, by name, for an operation that counts rows over all tokens.

    As far as it is known before the program is compiled: by the types of arrays of explicit axes, and outside of a
    program by where an array is. Inside one, only XLA knows how it divides arrays over automatic axes: it then fails
    with the words of `TokenCall.whole`.
    """
    for name, array in arrays.items():
        if array is None or runs_as_it_is(array):
            continue
        placed = None if isinstance(array, jax.core.Tracer) else array.sharding
        if any(spec_of(array)) or not (placed is None or placed.is_fully_replicated):
            raise ValueError(
                f"{name}: got {array.dtype}{list(array.shape)} sharded, expected whole arrays: {function} counts rows "
                "over all tokens; use moe(), which takes sharded tokens, or call it inside jax.shard_map"
            )


# ---------------------------------------------------------------- the three ways


def runs_as_it_is(*arrays: jax.Array) -> bool:
    """Whether the arrays are what one device has: inside a jax.shard_map or a TokenCall, or where there is but one."""
    if _on_shards.get() is not None:
        return True
    mesh = mesh_of(*arrays)
    if mesh.empty:
        return jax.device_count() == 1
    manual = axes_of_type(mesh, AxisType.Manual)
    left = [axis for axis in mesh.axis_names if axis not in manual]
    automatic = axes_of_type(mesh, AxisType.Auto)
    return bool(manual) and all(axis in automatic and mesh.shape[axis] == 1 for axis in left)


def _run(call: _Bound, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if runs_as_it_is(*arrays):
        return call.on_shards((), *arrays)
    mesh = mesh_of(*arrays)
    if mesh.empty:
        return _automatic(call, *arrays)
    _check_kinds(mesh)
    explicit = axes_of_type(mesh, AxisType.Explicit)
    results: tuple[jax.Array, ...] = _explicit(call, mesh, explicit, *arrays) if explicit else _automatic(call, *arrays)
    return results


_run_once_differentiable = jax.custom_jvp(_run, nondiff_argnums=(0,))


@_run_once_differentiable.defjvp
def _no_second_derivative(call: _Bound, arrays: Any, tangents: Any) -> Any:
    """Operations are differentiated by their own rules; JAX comes here for the derivative of a rule."""
    operation = getattr(call.static, "target", call.function.__module__)
    raise TypeError(
        f"{operation}: got a gradient of a gradient, expected one of first order: anabranch has no second derivatives"
    )


def _check_kinds(mesh: Any) -> None:
    """Where some axes are of another kind XLA does not say by which automatic ones it shards, and would gather."""
    others = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto]
    automatic = [axis for axis in axes_of_type(mesh, AxisType.Auto) if mesh.shape[axis] > 1]
    if others and automatic:
        raise ValueError(
            f"sharding: got automatic mesh axes {', '.join(map(repr, automatic))} beside manual or explicit ones "
            f"{', '.join(map(repr, others))}, expected explicit or manual ones, or moe(..., parallel=...)"
        )


# Compiled, also where the caller is not, as the automatic way is.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _explicit(call: _Bound, mesh: Any, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    for array, kept, name in zip(arrays, call.operands, call.names, strict=True):
        _check_whole(call, name, array, kept, [a for axes in spec_of(array)[kept:] for a in axes])
    leading = spec_of(arrays[0])[: call.operands[0]]
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
    """A token array in the shards of the first operand; a cotangent may come in others."""
    wanted = tuple(axes_of(entry) for entry in spec)
    wanted += ((),) * (array.ndim - len(wanted))
    return array if spec_of(array) == wanted else jax.sharding.reshard(array, NamedSharding(mesh, spec))


def _check_whole(call: _Bound, name: str, array: jax.Array, kept: int, sharded_over: Sequence[str]) -> None:
    if not sharded_over:
        return
    what = f"{name}{array.dtype}{list(array.shape)} sharded over {', '.join(map(repr, sharded_over))}"
    if call.whole and not kept:
        raise ValueError(call.whole.format(got=what))
    raise ValueError(
        f"sharding: got {what} in a dimension that is not one of tokens, expected that dimension whole; "
        "jax.sharding.reshard gathers it"
    )


def _automatic(call: _Bound, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_partitioned(call, tuple(array.ndim for array in arrays))(*arrays))


@functools.lru_cache(maxsize=4096)
def _partitioned(call: _Bound, ranks: tuple[int, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """The call as a function that XLA may partition; compiled, since eager calls would gather sharded arrays."""
    partitioned = custom_partitioning(functools.partial(call.on_shards, ()))

    def partition(mesh: Mesh, operands: Any, results: Any) -> tuple[Any, ...]:
        if call.whole:
            for operand, kept, name in zip(operands, call.operands, call.names, strict=True):
                if not kept and not operand.sharding.is_fully_replicated:
                    raise ValueError(call.whole.format(got=f"{name}{operand.dtype}{list(operand.shape)} sharded"))
        axes = _token_axes(operands[0].sharding, call.operands[0])
        for operand, kept in zip(operands, call.operands, strict=True):
            for size, names in zip(operand.shape[:kept], axes, strict=False):
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
        """Asked by GSPMD, where Shardy is off, and asked again when it knows more; an error here ends the process."""
        n = call.operands[0]
        tokens = (o.sharding for o, kept in zip(operands, call.operands, strict=True) if kept == n)
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
            rest = iter(slices)
            return function(*(next(rest) if b else a for a, b in zip(arrays, batched, strict=True)))

        results = jax.lax.map(one, [a for a, b in zip(arrays, batched, strict=True) if b])
        return results, tuple(True for _ in results)

    return jax.jit(function)


def _size(mesh: Mesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _token_axes(sharding: Any, tokens: int) -> tuple[Axes, ...]:
    """The mesh axes of the token dimensions."""
    spec = getattr(sharding, "spec", None)
    if spec is None:  # XLA's own kind, without names
        if not sharding.is_fully_replicated:
            raise ValueError(f"sharding: got {sharding}, expected one over the axes of a mesh; see jax.set_mesh")
        return ((),) * tokens
    return tuple(axes_of(spec[i]) if i < len(spec) else () for i in range(tokens))


def _shardy_rule(
    call: _Bound, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> SdyShardingRule:
    """The rule of these shapes: token dimensions go together, every other dimension is one of its own and has to be
    whole. Rows go with tokens where there are so many for each; else Shardy does not know that they do.
    """
    tokens = operands[0][: call.operands[0]]
    others: list[str] = []
    rows_of_token: dict[str, Any] = {}

    def own() -> str:
        others.append(f"x{len(others)}")
        return others[-1]

    def of_tokens(i: int, size: int) -> str | CompoundFactor:
        if size == tokens[i]:
            return f"t{i}"
        if not tokens[i] or size % tokens[i] or not size:
            return own()
        name = f"r{len(rows_of_token)}"
        rows_of_token[name] = size // tokens[i]
        return CompoundFactor(f"t{i}", name)

    def factors(shape: tuple[int, ...], kept: int) -> ArrayMapping:
        return ArrayMapping(*(of_tokens(i, n) if i < kept else own() for i, n in enumerate(shape)))

    left = tuple(map(factors, operands, call.operands))
    right = tuple(map(factors, results, call.results))
    return SdyShardingRule(left, right, need_replication_factors=tuple(others), **rows_of_token)

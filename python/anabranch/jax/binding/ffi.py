"""The bridge from JAX to the C library: registers the XLA FFI handlers and calls them.

A call names its operands and results as the C struct does (include/anabranch/*.h). None means "not given" or "not
requested", so one handler serves every combination of optional tensors.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anabranch import _library
from anabranch.jax.binding.sequence import Buffer, Sequence
from anabranch.jax.binding.sharding import TokenCall, vary_alike


def custom_calls() -> tuple[str, ...]:
    """The names of the custom calls in programs that use this package; `jax.export` must be told to allow them.

    >>> "ab_xla_plan" in custom_calls()
    True
    """
    return _library.HANDLERS + _library.CUDA_HANDLERS


@functools.cache
def register() -> None:
    """Registers the handlers with JAX once. Importing `anabranch.jax` calls it, so exported programs find them.

    Raises:
      LibraryError: the C library cannot be loaded, or was built without handlers for XLA.
    """
    library = _library.with_symbols(_library.load(), _library.HANDLERS)
    for name in _library.HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    try:
        cuda = _library.with_symbols(_library.load_cuda(), tuple(map(_library.on_cuda, custom_calls())))
    except _library.LibraryError:
        return  # `python -m anabranch info` reports why; a GPU program fails with the name of the target
    for name in custom_calls():
        handler = getattr(cuda, _library.on_cuda(name))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="CUDA")


def cotangent(value: Any) -> jax.Array | None:
    """A cotangent in a rule with symbolic zeros: None if it is zero or belongs to integers."""
    if isinstance(value, jax.custom_derivatives.SymbolicZero) or value.dtype == jax.dtypes.float0:
        return None
    return value


def _like_operands(result: jax.ShapeDtypeStruct, operand: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a call's result: inside a jax.shard_map it varies over the same mesh axes as the operand."""
    manual = jax.typeof(operand).manual_axis_type
    if not manual.varying:
        return result
    whole = NamedSharding(jax.typeof(operand).sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=whole, manual_axis_type=manual)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a handler without its arrays."""

    target: str
    operands: tuple[str, ...]
    results: tuple[tuple[str, tuple[int, ...], str], ...]
    aliases: tuple[tuple[int, int], ...]
    workspace: int
    orders: str
    fp4: str
    attributes: tuple[tuple[str, int | float], ...]


def _call(static: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    arrays = vary_alike(*arrays)
    return _run_with_workspace(static, *arrays) if static.workspace else _run(static, *arrays, workspace=0)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run_with_workspace(static: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The call with a workspace; jitted so that the platform is known, because the CPU handler needs no workspace."""
    on_cpu = functools.partial(_run, static, workspace=0)
    outputs: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, cpu=on_cpu, default=functools.partial(_run, static, workspace=static.workspace)
    )
    return outputs


def _run(static: _Call, *arrays: jax.Array, workspace: int) -> tuple[jax.Array, ...]:
    results = static.results + ((("workspace", (workspace,), "uint8"),) if workspace else ())
    types = (jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results)
    outputs = jax.ffi.ffi_call(
        static.target,
        tuple(_like_operands(result, arrays[0]) for result in types),
        vmap_method="sequential",
        input_output_aliases=dict(static.aliases),
    )(
        *arrays,
        operands=",".join(static.operands),
        results=",".join(name for name, *_ in results),
        **({"orders": static.orders} if static.orders else {}),
        **({"fp4": static.fp4} if static.fp4 else {}),
        **{n: np.float32(v) if isinstance(v, float) else np.int32(v) for n, v in static.attributes},
    )
    return tuple(outputs[: len(static.results)])


def call(
    target: str,
    operands: Mapping[str, jax.Array | None],
    results: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    aliases: Mapping[str, str] | None = None,
    workspace: int = 0,
    orders: Mapping[str, str] | None = None,
    fp4: Iterable[str] = (),
    **attributes: int | float,
) -> dict[str, Any]:
    """Calls the handler `target` on arrays that are whole on one device.

    With a Buffer among the operands the call becomes one of its sequence, and the results are Buffers.

    Args:
      target: exported symbol, for example "ab_xla_router_forward".
      operands: arrays by field name; None: not given.
      results: shapes and dtypes by field name; None: not requested.
      aliases: operand name -> name of the result that may reuse the operand's buffer.
      workspace: bytes of scratch memory for the CUDA handler, which allocates nothing itself (workspaces.py). The CPU
        handler gets none.
      orders: for arrays whose axes are not in the C function's order, by field name: "0312" if the C function's axes
        are the array's axes 0, 3, 1, 2.
      fp4: names of arrays of bytes [..., n, 16] that the C function reads as float4 numbers [..., 32 n].
      attributes: options by field name; int becomes int32, float becomes float32.

    Returns:
      The results by name, None if not requested. vmap runs the call once per slice.

    Raises:
      ValueError: an operand is sharded, and the call does not run on shards (sharding.TokenCall).
    """
    name = target.removeprefix("ab_xla_")
    for operand in operands.values():
        if isinstance(operand, Buffer):
            return operand.sequence.call(
                name, operands, results, aliases=aliases, workspace=workspace, orders=orders, fp4=fp4, **attributes
            )
    register()
    given = {name: array for name, array in operands.items() if array is not None}
    requested = {name: result for name, result in results.items() if result is not None}
    order, names = list(given), list(requested)
    static = _Call(
        target,
        operands=tuple(given),
        results=tuple((name, tuple(r.shape), np.dtype(r.dtype).name) for name, r in requested.items()),
        aliases=tuple((order.index(a), names.index(b)) for a, b in (aliases or {}).items()),
        workspace=workspace,
        orders=",".join(
            f"{name}:{order}" for name, order in (orders or {}).items() if name in given or name in requested
        ),
        fp4=",".join(fp4),
        attributes=tuple(attributes.items()),
    )
    whole = (
        f"{name}: got {{got}}, expected whole arrays, since rows are counted over all tokens; "
        "use moe(), which takes sharded tokens, or call it inside jax.shard_map"
    )
    outputs = TokenCall(_call, static, (0,) * len(given), (0,) * len(requested), whole, tuple(given))(*given.values())
    named = dict(zip(requested, outputs, strict=True))
    return {name: named.get(name) for name in results}


def call_exchange(
    operation: str, x: jax.Array, order: list[jax.Array], shape: tuple[int, ...], exchange: str
) -> tuple[jax.Array, list[jax.Array]]:
    """Calls ab_xla_exchange_OPERATION, "all_gather" or "all_to_all", on one device of a mesh of GPUs.

    Args:
      x: this device's operand.
      order: what the previous call returned as such, after which this call runs; [] for the first call.
      shape: the shape of the result.
      exchange: the name of the exchange (parallel/peers.py).

    Returns:
      (result, order).
    """
    register()
    results = jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct((1,), "int32")
    call = jax.ffi.ffi_call(f"ab_xla_exchange_{operation}", results, vmap_method="sequential")
    result, after = call(x, *order, exchange=exchange)
    return result, [after]


@dataclasses.dataclass(frozen=True)
class _Program:
    """A sequence without its operands. Dictionaries are tuples of items, so it can be hashed."""

    operands: int
    results: tuple[tuple[tuple[int, ...], str], ...]
    aliases: tuple[tuple[int, int], ...]
    workspace: int
    exchanges: tuple[tuple[str, str], ...]
    views: tuple[tuple[tuple[str, Any], ...], ...]
    calls: tuple[tuple[tuple[tuple[str, str, int], ...], tuple[tuple[str, Any], ...]], ...]
    """One entry per call: (name, kind, index) of every tensor, and the options."""
    target: str = "ab_xla_sequence"

    def attributes(self, workspace: int) -> dict[str, Any]:
        """The attributes of the custom call; workspace: its bytes."""
        first_view = self.operands + len(self.results) + (workspace > 0)
        first = {"operand": 0, "result": self.operands, "view": first_view}
        found: dict[str, Any] = {
            "calls": np.int32(len(self.calls)),
            "workspace": np.int32(first_view - 1 if workspace else -1),
        }
        for i, (tensors, options) in enumerate(self.calls):
            numbers = ",".join(f"{name}={first[kind] + index}" for name, kind, index in tensors)
            found[f"call_{i}"] = {"tensors": numbers, **dict(options)}
        if self.exchanges:
            found["exchanges"] = dict(self.exchanges)
        if self.views:
            found["views"] = np.int32(len(self.views))
            found |= {f"view_{i}": dict(view) for i, view in enumerate(self.views)}
        return found


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return np.float32(value) if isinstance(value, float) else np.int32(value)


def _program(sequence: Sequence) -> _Program:
    calls = []
    for call in sequence.calls:
        options: dict[str, Any] = {"function": call.function}
        if call.orders:
            options["orders"] = call.orders
        if call.fp4:
            options["fp4"] = call.fp4
        options |= {name: _number(value) for name, value in call.options.items()}
        tensors = tuple((name, buffer.kind, buffer.index) for name, buffer in call.tensors.items())
        calls.append((tensors, tuple(options.items())))
    views = [
        {
            "exchange": view.exchange,
            "buffer": np.int32(view.buffer),
            "dtype": np.int32(_library.DTYPES[view.dtype.name]),
            "shape": ",".join(map(str, view.shape)),
        }
        for view in sequence.views
    ]
    return _Program(
        operands=len(sequence.operands),
        results=tuple((tuple(r.shape), np.dtype(r.dtype).name) for r in sequence.results),
        aliases=tuple(sequence.aliases),
        workspace=sequence.workspace,
        exchanges=tuple(sequence.exchanges.items()),
        views=tuple(tuple(view.items()) for view in views),
        calls=tuple(calls),
    )


def _call_sequence(program: _Program, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    arrays = vary_alike(*arrays)
    run = _run_sequence_with_workspace if program.workspace else functools.partial(_run_sequence, workspace=0)
    outputs: tuple[jax.Array, ...] = run(program, *arrays)
    return outputs


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run_sequence_with_workspace(program: _Program, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """As `_run_with_workspace`."""
    on_cpu = functools.partial(_run_sequence, program, workspace=0)
    outputs: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, cpu=on_cpu, default=functools.partial(_run_sequence, program, workspace=program.workspace)
    )
    return outputs


def _run_sequence(program: _Program, *arrays: jax.Array, workspace: int) -> tuple[jax.Array, ...]:
    results = program.results + ((((workspace,), "uint8"),) if workspace else ())
    types = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)
    outputs = jax.ffi.ffi_call(
        program.target,
        tuple(_like_operands(result, arrays[0]) for result in types),
        vmap_method="sequential",
        input_output_aliases=dict(program.aliases),
    )(*arrays, **program.attributes(workspace))
    return tuple(outputs[: len(program.results)])


def call_sequence(sequence: Sequence) -> list[jax.Array]:
    """Runs a sequence on one device, or on one device of a mesh; returns all of its results."""
    register()
    program = _program(sequence)
    run = TokenCall(_call_sequence, program, (0,) * program.operands, (0,) * len(program.results))
    return list(run(*sequence.operands))

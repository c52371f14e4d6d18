"""The whole layer on a GPU through JAX: times, memory, and a trace for the profiler."""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from anabranch.bench import gpu
from anabranch.bench.layer_result import Measured, Memory
from anabranch.bench.layer_shape import LayerShape

#: Share of the device's memory that a process gets when it starts: in one piece, so that nothing is split up.
_MEMORY_SHARE = "0.92"
_BATCH_SECONDS = 40e-3
#: A program has as many layers as take so long, like a model: between programs the device waits for a moment.
_PROGRAM_SECONDS, _MOST_LAYERS = 5e-3, 8


def _unless_out_of_memory(function: Callable[[], Any]) -> Any:
    """The function's result, or None where the device's memory did not suffice."""
    import jax

    try:
        return function()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _compiled(function: Callable[..., Any], *sets: Sequence[Any]) -> Any:
    """The program of a call of `function` with each of the sets, for `gpu.seconds_of_program`."""
    import jax

    return jax.jit(gpu.chained(function)).lower(list(sets)).compile()


def _device_says(name: str) -> int | None:
    """One of the device's memory statistics; None where it gives none."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get(name)


def executions_that_fit(memory: Memory, device_bytes: int | None) -> int:
    """How many executions may be under way when each holds its results and temporaries until it has run; at least 1.

    >>> small, large = Memory(4 << 30, 2 << 30, 0, 2 << 30), Memory(4 << 30, 2 << 30, 0, 50 << 30)
    >>> [executions_that_fit(small, 84 << 30), executions_that_fit(large, 84 << 30), executions_that_fit(large, None)]
    [16, 1, 30]
    """
    if device_bytes is None:
        return gpu.MOST_EXECUTIONS
    free = (device_bytes - memory.arguments) * 4 // 5  # the rest: gaps between the pieces
    return min(max(1, free // max(memory.outputs + memory.temporaries, 1)), gpu.MOST_EXECUTIONS)


class Product:
    """The rate of a large product of two square matrices through JAX."""

    def __init__(self, dtype: str, size: int, repeats: int):
        import jax
        import jax.numpy as jnp

        from anabranch.bench.layer_in_jax import normal

        keys = jax.random.split(jax.random.key(1), 2)
        self._matrices = tuple(normal(key, 1.0, (size, size), dtype) for key in keys)
        self._program = _compiled(jnp.matmul, self._matrices)
        self._flops, self._repeats = 2.0 * size**3, repeats
        self.by = "cuBLAS" if "__cublas" in self._program.as_text() else "XLA"

    def rate(self) -> float:
        """FLOP/s now, with the queue full."""
        timing = gpu.seconds_of_program(
            self._program, [[self._matrices]], repeats=self._repeats, seconds=_BATCH_SECONDS
        )
        return self._flops / timing.median


def measure(
    by: str, shape: LayerShape, dtype: str, routing: str, *, repeats: int, product_size: int, trace: str | None = None
) -> Measured:
    """Times and memory of one layer. The process should have done nothing on the device before.

    Args:
      by: out of layer_in_jax.LAYERS.
      shape: of the layer.
      dtype: of its arrays.
      routing: see layer_in_jax.operands.
      repeats: timed batches of executions, of the layer and of the large product.
      product_size: rows and columns of that.
      trace: a folder for a profiler's trace of three forward passes and three of forward and backward.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name; both are an error
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", _MEMORY_SHARE)
    gpu.jax_with_gpu()
    given = by, shape, dtype, routing
    measured = _unless_out_of_memory(lambda: _measure(*given, repeats, product_size, trace))
    return Measured(note="out of memory") if measured is None else measured


def _measure(
    by: str, shape: LayerShape, dtype: str, routing: str, repeats: int, product_size: int, trace: str | None
) -> Measured:
    import jax

    from anabranch.bench import layer_in_jax

    layer = layer_in_jax.LAYERS[by]
    functions = {
        "forward and backward": layer_in_jax.forward_and_backward(layer, shape.K),
        "forward": layer_in_jax.forward(layer, shape.K),
    }
    draw = functools.partial(layer_in_jax.operands, shape, dtype, routing, layouts=layer.layouts, biases=layer.biases)
    given = draw()
    programs = {}
    for name, function in functions.items():
        program = _unless_out_of_memory(lambda function=function: _compiled(function, given))
        # Forward and backward first, so that the peak is theirs.
        if program is not None and _unless_out_of_memory(lambda program=program: _run(program, given)):
            programs[name] = program
        if name == "forward and backward":
            memory, peak = None if program is None else _memory(program), _device_says("peak_bytes_in_use")
    if not programs:
        return Measured(memory=memory, note="out of memory")

    product = Product(dtype, product_size, repeats)
    before = product.rate()
    count = gpu.copies_past_cache(shape.operand_bytes(given.x.dtype.itemsize), least=1)
    sets = [given, *(draw(seed) for seed in range(1, count))]
    times = {name: _time(functions[name], program, sets, repeats) for name, program in programs.items()}
    after = product.rate()
    if trace is not None:
        with jax.profiler.trace(trace):
            for program in programs.values():
                for _ in range(3):
                    _run(program, given)
    missing = [name for name in functions if name not in programs]
    notes = [f"{name}: out of memory" for name in missing]
    if product.by != "cuBLAS":
        notes.append(f"product: by {product.by}, not cuBLAS")
    return Measured(
        forward=times.get("forward"),
        both=times.get("forward and backward"),
        product=(before, after),
        product_by=product.by,
        largest_load=layer_in_jax.largest_load(given, shape.K),
        memory=memory,
        peak=None if missing else peak,
        note="; ".join(notes),
    )


def _time(function: Callable[..., Any], program: Any, sets: Sequence[Any], repeats: int) -> gpu.Timing:
    """Of one call, in programs of several where one takes a short time.

    Args:
      function: what is called.
      program: that of one call.
      sets: operands; programs take them in turn.
      repeats: timed batches of executions.
    """

    def timed(program: Any, calls: int) -> gpu.Timing:
        most = executions_that_fit(_memory(program), _device_says("bytes_limit"))
        return gpu.seconds_of_program(
            program,
            gpu.groups_of(sets, calls),
            repeats=repeats,
            seconds=_BATCH_SECONDS,
            executions=(min(2, most), most),
        )

    of_one = timed(program, 1)
    calls = min(_MOST_LAYERS, math.ceil(_PROGRAM_SECONDS / of_one.median))
    if calls == 1:
        return of_one

    def in_one_program() -> gpu.Timing:
        return timed(_compiled(function, *gpu.groups_of(sets, calls)[0]), calls)

    of_many: gpu.Timing | None = _unless_out_of_memory(in_one_program)
    return of_many or of_one


def _run(program: Callable[[Any], Any], given: Sequence[Any]) -> bool:
    """Runs a program to its end and frees what it made."""
    import jax

    jax.block_until_ready(program([given]))
    return True


def _memory(program: Any) -> Memory:
    said = program.memory_analysis()
    return Memory(
        arguments=said.argument_size_in_bytes,
        outputs=said.output_size_in_bytes,
        aliased=said.alias_size_in_bytes,
        temporaries=said.temp_size_in_bytes,
    )

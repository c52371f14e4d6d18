"""The whole layer through JAX: its operands on the default device, ours and plain JAX's; times, memory and a trace."""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax import moe, ragged_dot
from anabranch.layouts import OURS, Layouts
from benchmarks import timing
from benchmarks.figures import Measured, Memory
from benchmarks.peers import xla
from benchmarks.shapes import LayerShape, zipf_experts

#: Share of the device's memory that a process gets when it starts, in one piece: nothing is split up.
_MEMORY_SHARE = "0.92"
_BATCH_SECONDS = 40e-3
#: A program has as many layers as take so long, like a model: between programs the device waits for a moment.
_PROGRAM_SECONDS, _MOST_LAYERS = 5e-3, 8


class Layer(NamedTuple):
    """A layer to time: a function of x, gate, w_in, w_out, experts, and by name topk, b_in and b_out."""

    function: Callable[..., jax.Array]
    layouts: Layouts = OURS
    biases: bool = False


class Operands(NamedTuple):
    """x [T, D], gate [D, E], w_in [E, D, 2, F], w_out [E, F, D], d_out [T, D]; experts [T, K] where they are given.

    Of a layer with biases b_in [E, 2, F] and b_out [E, D]; w_in, w_out and b_in in the layer's layouts.
    """

    x: jax.Array
    gate: jax.Array
    w_in: jax.Array
    w_out: jax.Array
    d_out: jax.Array
    experts: jax.Array | None
    b_in: jax.Array | None = None
    b_out: jax.Array | None = None

    def biases(self) -> dict[str, jax.Array]:
        """By name, if there are any."""
        return {name: bias for name in ("b_in", "b_out") if (bias := getattr(self, name)) is not None}


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key: jax.Array, scale: float, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, drawn expert by expert: all of them as float32 would not always fit."""
    of_experts = len(shape) > 2

    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape[of_experts:]) * scale).astype(dtype)

    return jax.lax.map(draw, jax.random.split(key, shape[0])) if of_experts else draw(key)


def operands(
    shape: LayerShape, dtype: str, routing: str, seed: int = 0, *, layouts: Layouts = OURS, biases: bool = False
) -> Operands:
    """Random operands that keep the scale of activations.

    Args:
      shape: of the layer.
      dtype: of all arrays but the experts.
      routing: "uniform": the gate decides, and the loads are nearly equal; "zipf": experts are given.
      seed: of everything.
      layouts: of w_in, w_out and b_in.
      biases: whether there are any.
    """
    T, D, F, E, _ = shape
    sizes = {"x": (T, D), "gate": (D, E), "d_out": (T, D)}
    names = ("w_in", "w_out", "b_in") if biases else ("w_in", "w_out")
    sizes |= {name: layouts.shape(name, e=E, d=D, p=2, f=F) for name in names}
    sizes |= {"b_out": (E, D)} if biases else {}
    scales = {"w_in": D**-0.5, "w_out": F**-0.5, "gate": D**-0.5}
    keys = dict(zip(sizes, jax.random.split(jax.random.key(seed), len(sizes)), strict=True))
    arrays = {name: normal(keys[name], scales.get(name, 1.0), size, dtype) for name, size in sizes.items()}
    return Operands(**arrays, experts=jnp.asarray(zipf_experts(shape, seed)) if routing == "zipf" else None)


def ours(
    x: jax.Array,
    gate: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    experts: jax.Array | None = None,
    *,
    topk: int,
    **options: Any,
) -> jax.Array:
    """anabranch.jax.moe, weights normalised."""
    output: jax.Array = moe(x, gate, w_in, w_out, topk=topk, forced_experts=experts, **options).output
    return output


def _in_layouts(w_in: str, w_out: str) -> Layer:
    return Layer(functools.partial(ours, w_in_layout=w_in, w_out_layout=w_out), Layouts(w_in, w_out))


#: "ragged-dot": plain JAX with our ragged_dot by one import. "jax-...": ours with weights as PyTorch's Linear has
#: them, with gate and up interleaved, with biases, and with biases and gpt-oss's activation.
LAYERS = {
    "jax": Layer(ours),
    "xla": Layer(xla.layer),
    "ragged-dot": Layer(functools.partial(xla.layer, product=ragged_dot)),
    "jax-transposed": _in_layouts("pfd", "df"),
    "jax-interleaved": _in_layouts("dfp", "fd"),
    "jax-biases": Layer(ours, biases=True),
    "jax-swiglu-oai": Layer(functools.partial(ours, activation="swiglu_oai"), biases=True),
}


def forward(layer: Layer, topk: int) -> Callable[..., jax.Array]:
    """A function of Operands' fields: the output."""

    def run(*arrays: Any) -> jax.Array:
        given = Operands(*arrays)
        return layer.function(*given[:4], given.experts, topk=topk, **given.biases())

    return run


def both(layer: Layer, topk: int) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of Operands' fields: the output and the gradients of x, gate, w_in, w_out and biases."""

    def run(*arrays: Any) -> tuple[jax.Array, ...]:
        given = Operands(*arrays)

        def output_of(biases: dict[str, Any], *main: Any) -> jax.Array:
            return layer.function(*main, given.experts, topk=topk, **biases)

        output, pull = jax.vjp(output_of, given.biases(), *given[:4])
        of_biases, *gradients = pull(given.d_out)
        return output, *gradients, *of_biases.values()

    return run


def largest_load(given: Operands, topk: int) -> float:
    """The largest load of an expert over the mean."""
    sizes = jax.jit(functools.partial(xla.select, topk=topk))(given.x, given.gate, given.experts)[2]
    return float(sizes.max() / sizes.mean())


def cpu_programs(by: str, shape: LayerShape, dtype: str, routing: str) -> dict[str, timing.Program]:
    """forward and both, for `timing.times_of`; each compiles when it is called first."""
    layer = LAYERS[by]
    given = operands(shape, dtype, routing, layouts=layer.layouts, biases=layer.biases)
    return {
        name: timing.Program(jax.jit(timing.chained(function(layer, shape.K))), [[given]])
        for name, function in (("forward", forward), ("both", both))
    }


def _unless_out_of_memory(function: Callable[[], Any]) -> Any:
    """The function's result, or None where the device's memory did not suffice."""
    try:
        return function()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _compiled(function: Callable[..., Any], *sets: Sequence[Any]) -> Any:
    """The program of a call of `function` with each of the sets, for `timing.seconds_of_program`."""
    return jax.jit(timing.chained(function)).lower(list(sets)).compile()


def _device_says(name: str) -> int | None:
    """One of the device's memory statistics; None where it gives none."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


def executions_that_fit(memory: Memory, device_bytes: int | None) -> int:
    """How many executions may be under way if each holds its results and temporaries until it has run; at least 1.

    >>> small, large = Memory(4 << 30, 2 << 30, 0, 2 << 30), Memory(4 << 30, 2 << 30, 0, 50 << 30)
    >>> [executions_that_fit(small, 84 << 30), executions_that_fit(large, 84 << 30), executions_that_fit(large, None)]
    [16, 1, 30]
    """
    if device_bytes is None:
        return timing.MOST_EXECUTIONS
    free = (device_bytes - memory.arguments) * 4 // 5  # the rest: gaps between the pieces
    return min(max(1, free // max(memory.outputs + memory.temporaries, 1)), timing.MOST_EXECUTIONS)


class Product:
    """The rate of a large product of two square matrices through JAX."""

    def __init__(self, dtype: str, size: int, repeats: int):
        keys = jax.random.split(jax.random.key(1), 2)
        self._matrices = tuple(normal(key, 1.0, (size, size), dtype) for key in keys)
        self._program = _compiled(jnp.matmul, self._matrices)
        self._flops, self._repeats = 2.0 * size**3, repeats
        self.by = "cuBLAS" if "__cublas" in self._program.as_text() else "XLA"

    def rate(self) -> float:
        """FLOP/s now, with the queue full."""
        timed = timing.seconds_of_program(
            self._program, [[self._matrices]], repeats=self._repeats, seconds=_BATCH_SECONDS
        )
        return self._flops / timed.seconds


def measure(
    by: str,
    shape: LayerShape,
    dtype: str,
    routing: str,
    *,
    repeats: int,
    product_size: int = 8192,
    trace: str | None = None,
) -> Measured:
    """Times and memory of one layer on a GPU. The process should have done nothing on the device before.

    Args:
      by: out of LAYERS.
      shape: of the layer.
      dtype: of its arrays.
      routing: see `operands`.
      repeats: timed batches of executions, of the layer and of the large product.
      product_size: rows and columns of that.
      trace: a folder for a profiler's trace of three forward passes and three of forward and backward.
    """
    measured = _unless_out_of_memory(lambda: _measure(by, shape, dtype, routing, repeats, product_size, trace))
    return Measured(note="out of memory") if measured is None else measured


def claim_memory() -> None:
    """Lets JAX take most of the GPU's memory when it starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name; both are an error
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", _MEMORY_SHARE)


def _measure(
    by: str, shape: LayerShape, dtype: str, routing: str, repeats: int, product_size: int, trace: str | None
) -> Measured:
    layer = LAYERS[by]
    functions: dict[str, Callable[..., Any]] = {"both": both(layer, shape.K), "forward": forward(layer, shape.K)}
    draw = functools.partial(operands, shape, dtype, routing, layouts=layer.layouts, biases=layer.biases)
    given = draw()
    programs = {}
    for name, function in functions.items():
        program = _unless_out_of_memory(functools.partial(_compiled, function, given))
        # Both first, so that the peak is theirs.
        if program is not None and _unless_out_of_memory(functools.partial(_run, program, given)):
            programs[name] = program
        if name == "both":
            memory, peak = None if program is None else _memory(program), _device_says("peak_bytes_in_use")
    if not programs:
        return Measured(memory=memory, note="out of memory")

    product = Product(dtype, product_size, repeats)
    before = product.rate()
    count = timing.sets_past_cache("cuda", shape.operand_bytes(given.x.dtype.itemsize), least=1)
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
        both=times.get("both"),
        product=(before, after),
        product_by=product.by,
        largest_load=largest_load(given, shape.K),
        memory=memory,
        peak=None if missing else peak,
        note="; ".join(notes),
    )


def _time(function: Callable[..., Any], program: Any, sets: Sequence[Any], repeats: int) -> timing.Timing:
    """Of one call, in programs of several where one takes a short time.

    Args:
      function: what is called.
      program: that of one call.
      sets: operands; programs take them in turn.
      repeats: timed batches of executions.
    """

    def timed(program: Any, calls: int) -> timing.Timing:
        most = executions_that_fit(_memory(program), _device_says("bytes_limit"))
        return timing.seconds_of_program(
            program,
            timing.groups_of(sets, calls),
            repeats=repeats,
            seconds=_BATCH_SECONDS,
            executions=(min(2, most), most),
        )

    of_one = timed(program, 1)
    calls = min(_MOST_LAYERS, math.ceil(_PROGRAM_SECONDS / of_one.seconds))
    if calls == 1:
        return of_one

    def in_one_program() -> timing.Timing:
        return timed(_compiled(function, *timing.groups_of(sets, calls)[0]), calls)

    of_many: timing.Timing | None = _unless_out_of_memory(in_one_program)
    return of_many or of_one


def _run(program: Callable[[Any], Any], given: Sequence[Any]) -> bool:
    """Runs a program to its end and frees what it made."""
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

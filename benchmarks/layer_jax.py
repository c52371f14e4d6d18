"""The whole layer through JAX, ours and plain JAX's: operands on the default device, times and memory."""

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
from benchmarks.peers import xla
from benchmarks.shapes import LayerShape, draw_experts

#: Share of the device's memory that JAX allocates at startup, in one piece to avoid fragmentation.
_MEMORY_SHARE = "0.92"
_BATCH_SECONDS = 40e-3
#: A program chains enough layers to take this long, as a model does, because the device idles briefly between programs.
_PROGRAM_SECONDS, _MOST_LAYERS = 5e-3, 8


class Layer(NamedTuple):
    """A layer to time: a function of x, gate, w_in, w_out, experts, with keyword arguments topk, b_in and b_out."""

    function: Callable[..., jax.Array]
    layouts: Layouts = OURS
    biases: bool = False


class Operands(NamedTuple):
    """x [T, D], gate [D, E], w_in [E, D, 2, F], w_out [E, F, D], d_out [T, D]; experts [T, K], or None: gate decides.

    A layer with biases also has b_in [E, 2, F] and b_out [E, D]. w_in, w_out and b_in have the layer's layouts.
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
        """Returns the biases by name; empty without biases."""
        return {name: bias for name in ("b_in", "b_out") if (bias := getattr(self, name)) is not None}


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key: jax.Array, scale: float, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Draws normal numbers expert by expert, because all of them as float32 may not fit into memory."""
    has_experts = len(shape) > 2

    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape[has_experts:]) * scale).astype(dtype)

    return jax.lax.map(draw, jax.random.split(key, shape[0])) if has_experts else draw(key)


def operands(shape: LayerShape, dtype: str, routing: str | None, seed: int = 0, by: str = "jax") -> Operands:
    """Returns random operands of a layer that preserve the scale of activations.

    Args:
      shape: sizes of the layer.
      dtype: dtype of all arrays except the experts.
      routing: "uniform": the gate decides, with nearly equal loads; "zipf": experts are given.
      seed: random seed.
      by: name in LAYERS.
    """
    T, D, F, E, K = shape
    layer = LAYERS[by]
    sizes = {"x": (T, D), "gate": (D, E), "d_out": (T, D)}
    names = ("w_in", "w_out", "b_in") if layer.biases else ("w_in", "w_out")
    sizes |= {name: layer.layouts.shape(name, e=E, d=D, p=2, f=F) for name in names}
    sizes |= {"b_out": (E, D)} if layer.biases else {}
    scales = {"w_in": D**-0.5, "w_out": F**-0.5, "gate": D**-0.5}
    keys = dict(zip(sizes, jax.random.split(jax.random.key(seed), len(sizes)), strict=True))
    arrays = {name: normal(keys[name], scales.get(name, 1.0), size, dtype) for name, size in sizes.items()}
    return Operands(
        **arrays, experts=jnp.asarray(draw_experts(T, E, K, seed, zipf=True)) if routing == "zipf" else None
    )


def ours(x: Any, gate: Any, w_in: Any, w_out: Any, experts: Any = None, *, topk: int, **options: Any) -> jax.Array:
    """Calls anabranch.jax.moe with normalised weights."""
    output: jax.Array = moe(x, gate, w_in, w_out, topk=topk, forced_experts=experts, **options).output
    return output


#: "ragged-dot": plain JAX with ragged_dot imported from us. "jax-...": ours with weights in the layouts of checkpoints,
#: and with biases.
LAYERS = {
    "jax": Layer(ours),
    "xla": Layer(xla.layer),
    "ragged-dot": Layer(functools.partial(xla.layer, product=ragged_dot)),
    "jax-transposed": Layer(functools.partial(ours, w_in_layout="pfd", w_out_layout="df"), Layouts("pfd", "df")),
    "jax-biases": Layer(ours, biases=True),
}


def passes(layer: Layer, topk: int) -> dict[str, Callable[..., Any]]:
    """Returns functions of the fields of Operands.

    "forward" returns the output; "both" returns the output and the gradients of all inputs but the experts.
    """

    def forward(*arrays: Any) -> jax.Array:
        given = Operands(*arrays)
        return layer.function(*given[:4], given.experts, topk=topk, **given.biases())

    def both(*arrays: Any) -> tuple[jax.Array, ...]:
        given = Operands(*arrays)

        def output_of(biases: dict[str, Any], *main: Any) -> jax.Array:
            return layer.function(*main, given.experts, topk=topk, **biases)

        output, pull = jax.vjp(output_of, given.biases(), *given[:4])
        of_biases, *gradients = pull(given.d_out)
        return output, *gradients, *of_biases.values()

    return {"forward": forward, "both": both}


def cpu_programs(by: str, shape: LayerShape, dtype: str, routing: str | None) -> dict[str, timing.Program]:
    """Returns the programs of both passes for `timing.times_of`."""
    given = operands(shape, dtype, routing, by=by)
    return {name: timing.program(function, [given]) for name, function in passes(LAYERS[by], shape.K).items()}


def claim_memory() -> None:
    """Makes JAX allocate most of the GPU's memory at startup."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name; setting both is an error
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", _MEMORY_SHARE)


def _unless_out_of_memory(function: Callable[[], Any]) -> Any:
    """Returns the function's result, or None if the device ran out of memory."""
    try:
        return function()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _compiled(function: Callable[..., Any], *sets: Sequence[Any]) -> Any:
    """Compiles a program that calls `function` on each of the sets, for `timing.seconds_of_program`."""
    return jax.jit(timing.chained(function)).lower(list(sets)).compile()


def _memory_stat(name: str) -> int | None:
    """Returns one of the device's memory statistics, or None if the device has none."""
    return (jax.devices()[0].memory_stats() or {}).get(name)


def executions_that_fit(arguments: int, others: int, device_bytes: int | None) -> int:
    """Returns how many executions fit into memory at once, at least 1. Each holds outputs and temporaries (`others`).

    >>> [executions_that_fit(4 << 30, others << 30, 84 << 30) for others in (4, 52)], executions_that_fit(1, 1, None)
    ([16, 1], 30)
    """
    if device_bytes is None:
        return timing.MOST_EXECUTIONS
    free = (device_bytes - arguments) * 4 // 5  # leave 1/5 for fragmentation
    return min(max(1, free // max(others, 1)), timing.MOST_EXECUTIONS)


class _Product:
    """The rate of a large square GEMM through JAX."""

    def __init__(self, dtype: str, size: int, repeats: int):
        keys = jax.random.split(jax.random.key(1), 2)
        self._matrices = tuple(normal(key, 1.0, (size, size), dtype) for key in keys)
        self._program = _compiled(jnp.matmul, self._matrices)
        self._flops, self._repeats = 2.0 * size**3, repeats
        self.by = "cuBLAS" if "__cublas" in self._program.as_text() else "XLA"

    def rate(self) -> float:
        """Measures FLOP/s with the queue full."""
        timed = timing.seconds_of_program(
            self._program, [[self._matrices]], repeats=self._repeats, seconds=_BATCH_SECONDS
        )
        return self._flops / timed.seconds


def measure(
    by: str, shape: LayerShape, dtype: str, routing: str | None, *, repeats: int, product_size: int = 8192
) -> dict[str, Any]:
    """Measures times and memory of one layer on a GPU. The process should not have used the device before.

    Args:
      by: name in LAYERS.
      shape: sizes of the layer.
      dtype: dtype of its arrays.
      routing: see `operands`.
      repeats: timed batches of executions, of the layer and of the large GEMM.
      product_size: rows and columns of that GEMM.

    Returns:
      `times` by pass; `product`: FLOP/s of the GEMM, before and after; `planned`, `peak`: bytes in use, from XLA's
      analysis and on the device; `note`: what is missing and why. All but `times` and `note` may be missing.
    """
    found = _unless_out_of_memory(lambda: _measure(by, shape, dtype, routing, repeats, product_size))
    return {"times": {}, "note": "out of memory"} if found is None else found


def _measure(
    by: str, shape: LayerShape, dtype: str, routing: str | None, repeats: int, product_size: int
) -> dict[str, Any]:
    functions = passes(LAYERS[by], shape.K)
    given, programs = operands(shape, dtype, routing, by=by), {}
    found: dict[str, Any] = {}
    for name in ("both", "forward"):  # "both" runs first, so that the peak is the one of both passes
        program = _unless_out_of_memory(functools.partial(_compiled, functions[name], given))
        ran = program is not None and _unless_out_of_memory(functools.partial(_run, program, given))
        if ran:
            programs[name] = program
        if name == "both" and program is not None:
            found["planned"] = sum(_memory(program))
            found |= {"peak": _memory_stat("peak_bytes_in_use")} if ran else {}
    if not programs:
        return {**found, "times": {}, "note": "out of memory"}
    product = _Product(dtype, product_size, repeats)
    before = product.rate()
    count = timing.sets_past_cache("cuda", shape.operand_bytes(given.x.dtype.itemsize), least=1)
    sets = [given, *(operands(shape, dtype, routing, seed, by) for seed in range(1, count))]
    times = {name: _time(functions[name], program, sets, repeats) for name, program in programs.items()}
    notes = [f"{name}: out of memory" for name in functions if name not in programs]
    notes += [f"product: by {product.by}, not cuBLAS"] if product.by != "cuBLAS" else []
    return {**found, "times": times, "product": (before, product.rate()), "note": "; ".join(notes)}


def _time(function: Callable[..., Any], program: Any, sets: Sequence[Any], repeats: int) -> timing.Timing:
    """Times one call. Short calls are timed in programs of several calls.

    Args:
      function: the function to time.
      program: the compiled program of one call.
      sets: operands, rotated between programs.
      repeats: timed batches of executions.
    """

    def timed(program: Any, calls: int) -> timing.Timing:
        most = executions_that_fit(*_memory(program), _memory_stat("bytes_limit"))
        groups, executions = timing.groups_of(sets, calls), (min(2, most), most)
        return timing.seconds_of_program(
            program, groups, repeats=repeats, seconds=_BATCH_SECONDS, executions=executions
        )

    single = timed(program, 1)
    calls = min(_MOST_LAYERS, math.ceil(_PROGRAM_SECONDS / single.seconds))
    if calls == 1:
        return single

    def in_one_program() -> timing.Timing:
        return timed(_compiled(function, *timing.groups_of(sets, calls)[0]), calls)

    chained: timing.Timing | None = _unless_out_of_memory(in_one_program)
    return chained or single


def _run(program: Callable[[Any], Any], given: Sequence[Any]) -> bool:
    """Runs a program to completion and frees its results."""
    jax.block_until_ready(program([given]))
    return True


def _memory(program: Any) -> tuple[int, int]:
    """Returns the bytes of arguments, and of outputs and temporaries; what aliases an argument counts there."""
    analysis = program.memory_analysis()
    others = analysis.output_size_in_bytes + analysis.temp_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes, others

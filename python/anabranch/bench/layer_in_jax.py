"""The whole layer in JAX: ours, and as users of plain JAX write it; its operands on JAX's default device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.bench.layer_shape import LayerShape, zipf_experts
from anabranch.jax import moe, ragged_dot
from anabranch.layouts import OURS, Layouts


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


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key: jax.Array, scale: float, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers; those of every expert by themselves, as float32 for all of them would not always fit."""
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
    return moe(x, gate, w_in, w_out, topk=topk, forced_experts=experts, **options).output


def select(
    x: jax.Array, gate: jax.Array, experts: jax.Array | None, *, topk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights and experts [T, K], the best ones where none are given, and tokens_per_expert [E]."""
    logits = jnp.dot(x, gate.astype(x.dtype), preferred_element_type=jnp.float32)
    if experts is None:
        top, experts = jax.lax.top_k(logits, topk)
    else:
        top = jnp.take_along_axis(logits, experts, -1)
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[1]).astype(jnp.int32)
    return jax.nn.softmax(top), experts, sizes


def ragged_dot_layer(
    x: jax.Array,
    gate: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    experts: jax.Array | None = None,
    *,
    topk: int,
    product: Callable[..., jax.Array] = jax.lax.ragged_dot,
) -> jax.Array:
    """The layer as JAX users write it today: top_k, argsort, ragged_dot, segment sum."""
    E, D, _, F = w_in.shape
    weights, experts, sizes = select(x, gate, experts, topk=topk)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token = order // topk
    h = product(x[token], w_in.reshape(E, D, 2 * F), sizes)
    y = product(jax.nn.silu(h[:, :F]) * h[:, F:], w_out, sizes)
    weighted = (y * weights.reshape(-1)[order][:, None]).astype(x.dtype)
    return jax.ops.segment_sum(weighted, token, num_segments=x.shape[0])


def _in_layouts(w_in: str, w_out: str) -> Layer:
    return Layer(functools.partial(ours, w_in_layout=w_in, w_out_layout=w_out), Layouts(w_in, w_out))


#: "ragged-dot": the same code with our ragged_dot by one import. "jax-...": ours with weights as PyTorch's Linear has
#: them, with gate and up interleaved, with biases, and with these and gpt-oss's activation.
LAYERS = {
    "jax": Layer(ours),
    "xla": Layer(ragged_dot_layer),
    "ragged-dot": Layer(functools.partial(ragged_dot_layer, product=ragged_dot)),
    "jax-transposed": _in_layouts("pfd", "df"),
    "jax-interleaved": _in_layouts("dfp", "fd"),
    "jax-biases": Layer(ours, biases=True),
    "jax-swiglu-oai": Layer(functools.partial(ours, activation="swiglu_oai"), biases=True),
}


def _biases(given: Operands) -> dict[str, Any]:
    return {name: bias for name in ("b_in", "b_out") if (bias := getattr(given, name)) is not None}


def forward(layer: Layer, topk: int) -> Callable[..., jax.Array]:
    """A function of Operands' fields: the output."""

    def run(*arrays: Any) -> jax.Array:
        given = Operands(*arrays)
        return layer.function(*given[:4], given.experts, topk=topk, **_biases(given))

    return run


def forward_and_backward(layer: Layer, topk: int) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of Operands' fields: the output and the gradients of x, gate, w_in, w_out and biases."""

    def run(*arrays: Any) -> tuple[jax.Array, ...]:
        given = Operands(*arrays)

        def output_of(biases: dict[str, Any], *main: Any) -> jax.Array:
            return layer.function(*main, given.experts, topk=topk, **biases)

        output, pull = jax.vjp(output_of, _biases(given), *given[:4])
        of_biases, *gradients = pull(given.d_out)
        return output, *gradients, *of_biases.values()

    return run


def largest_load(given: Operands, topk: int) -> float:
    """The largest load of an expert over the mean."""
    sizes = jax.jit(functools.partial(select, topk=topk))(given.x, given.gate, given.experts)[2]
    return float(sizes.max() / sizes.mean())

"""The whole layer in JAX: ours, and as users of plain JAX write it; its operands on JAX's default device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.bench.layer_shape import LayerShape, zipf_experts
from anabranch.jax import moe, ragged_dot

Layer = Callable[..., jax.Array]


class Operands(NamedTuple):
    """x [T, D], gate [D, E], w_in [E, D, 2, F], w_out [E, F, D], d_out [T, D]; experts [T, K] where they are given."""

    x: jax.Array
    gate: jax.Array
    w_in: jax.Array
    w_out: jax.Array
    d_out: jax.Array
    experts: jax.Array | None


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key: jax.Array, scale: float, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers; those of every expert by themselves, as float32 for all of them would not always fit."""
    of_experts = len(shape) > 2

    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape[of_experts:]) * scale).astype(dtype)

    return jax.lax.map(draw, jax.random.split(key, shape[0])) if of_experts else draw(key)


def operands(shape: LayerShape, dtype: str, routing: str, seed: int = 0) -> Operands:
    """Random operands that keep the scale of activations.

    Args:
      shape: of the layer.
      dtype: of all arrays but the experts.
      routing: "uniform": the gate decides, and the loads are nearly equal; "zipf": experts are given.
      seed: of everything.
    """
    T, D, F, E, _ = shape
    sizes = {"w_in": (E, D, 2, F), "w_out": (E, F, D), "x": (T, D), "gate": (D, E), "d_out": (T, D)}
    scales = {"w_in": D**-0.5, "w_out": F**-0.5, "x": 1.0, "gate": D**-0.5, "d_out": 1.0}
    keys = dict(zip(sizes, jax.random.split(jax.random.key(seed), len(sizes)), strict=True))
    arrays = {name: normal(keys[name], scales[name], size, dtype) for name, size in sizes.items()}
    return Operands(**arrays, experts=jnp.asarray(zipf_experts(shape, seed)) if routing == "zipf" else None)


def ours(
    x: jax.Array, gate: jax.Array, w_in: jax.Array, w_out: jax.Array, experts: jax.Array | None = None, *, topk: int
) -> jax.Array:
    """anabranch.jax.moe, weights normalised."""
    return moe(x, gate, w_in, w_out, topk=topk, forced_experts=experts).output


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


#: "ragged-dot": the same code with our ragged_dot by one import.
LAYERS = {
    "jax": ours,
    "xla": ragged_dot_layer,
    "ragged-dot": functools.partial(ragged_dot_layer, product=ragged_dot),
}


def forward(layer: Layer, topk: int) -> Callable[..., jax.Array]:
    """A function of Operands' fields: the output."""

    def run(x: Any, gate: Any, w_in: Any, w_out: Any, d_out: Any, experts: Any) -> jax.Array:
        del d_out
        return layer(x, gate, w_in, w_out, experts, topk=topk)

    return run


def forward_and_backward(layer: Layer, topk: int) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of Operands' fields: the output and the gradients of x, gate, w_in and w_out."""

    def run(x: Any, gate: Any, w_in: Any, w_out: Any, d_out: Any, experts: Any) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(lambda *given: layer(*given, experts, topk=topk), x, gate, w_in, w_out)
        return output, *pull(d_out)

    return run


def largest_load(given: Operands, topk: int) -> float:
    """The largest load of an expert over the mean."""
    sizes = jax.jit(functools.partial(select, topk=topk))(given.x, given.gate, given.experts)[2]
    return float(sizes.max() / sizes.mean())

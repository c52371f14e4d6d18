"""Low-rank adapters of the experts: new factors, their sum with the weights, and joined adapters."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check
from anabranch.jax.ops.packed import Packed, check_weight, weight_shape
from anabranch.layouts import Layouts
from anabranch.lora import PROJECTIONS, Lora, check_join, check_lora, check_names_of, check_scales, factor_shapes
from anabranch.options import check_layouts
from anabranch.packed import check_plain


def _sizes(layouts: Layouts, w_in: Any, w_out: Any) -> dict[str, int]:
    """Checks weights, plain or packed, and returns their sizes "e", "d", "p" and "f"."""
    of_w_in = check_weight("w_in", w_in, check.FLOATS, layouts, e="E", d="D", p="P", f="F")
    sizes = layouts.sizes("w_in", weight_shape(of_w_in["w_in"]))
    E, D, F = (("E", sizes["e"]), ("D", sizes["d"]), ("F", sizes["f"]))
    check_weight("w_out", w_out, check.FLOATS, layouts, e=E, f=F, d=D)
    return sizes


def init_lora(
    key: jax.Array,
    w_in: jax.Array | Packed,
    w_out: jax.Array | Packed,
    rank: int,
    *,
    projections: Sequence[str] = PROJECTIONS,
    shared: Sequence[str] = (),
    dtype: Any = jnp.float32,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
) -> Lora:
    """New adapters that do not change the experts: B is 0, and A is uniform in +-1/sqrt(its inputs), as in PEFT.

    Args:
      key: a key of jax.random.
      w_in, w_out: the experts' weights, float [E, D, 2 or 1, F] and [E, F, D], or packed; only their shapes are
        read.
      rank: of both adapters, at least 1.
      projections: "in" and "out", or one of them.
      shared: the fields of `Lora` that all experts share, for example ("a_in",).
      dtype: dtype of the factors: that of x, or float32.
      w_in_layout, w_out_layout: the layouts of w_in and w_out, as in `moe`.

    Returns:
      A `Lora` for the argument `lora` of `moe`, `routed_experts` and `expert_ffn`.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: none is defined for the weights. Source: PEFT's default initialisation.

    >>> lora = init_lora(jax.random.key(0), jnp.ones((4, 8, 2, 16)), jnp.ones((4, 16, 8)), 3, shared=("a_in",))
    >>> [factor.shape for factor in lora]
    [(1, 8, 3), (4, 3, 2, 16), (4, 16, 3), (4, 3, 8)]
    """
    sizes = _sizes(check_layouts(w_in_layout, w_out_layout), w_in, w_out)
    rank = check.integer("rank", rank, 1, check.INDEX_LIMIT - 1)
    dtype = jnp.dtype(check.dtype("dtype", dtype, check.FLOATS))
    projections = check_names_of("projections", projections, PROJECTIONS)
    shared = check_names_of("shared", shared, Lora._fields)
    try:
        keys = dict(zip(("a_in", "a_out"), jax.random.split(key), strict=True))
    except (TypeError, ValueError) as error:
        raise TypeError(f"key: got {check.describe(key)}, expected a key of jax.random") from error
    shapes = factor_shapes(sizes, rank, projections, shared)
    return Lora(**{name: new_factor(name, keys.get(name), shape, dtype) for name, shape in shapes.items()})


def new_factor(name: str, key: jax.Array | None, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A factor of a new adapter, by its field of `Lora`; only A needs a key."""
    if name.startswith("b"):
        return jnp.zeros(shape, dtype)
    assert key is not None
    bound = shape[1] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def merge_lora(
    w_in: jax.Array,
    w_out: jax.Array,
    lora: Lora,
    lora_scale: float | tuple[float, float] = 1.0,
    *,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
) -> tuple[jax.Array, jax.Array]:
    """The weights with their adapters: W_in[e] + s_in A_in[e] B_in[e], and W_out[e] + s_out A_out[e] B_out[e].

    The sums are computed in float32 and rounded once. For 16-bit weights that loses most of a small adapter, so merge
    for inference only.

    Args:
      w_in, w_out, w_in_layout, w_out_layout: as for `init_lora`, but not packed.
      lora: the adapters.
      lora_scale: as in `moe`.

    Returns:
      (w_in, w_out) in the shapes and dtypes of the arguments.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: for the weights and the factors, by JAX.

    >>> lora = Lora(a_out=jnp.ones((1, 1, 1)), b_out=jnp.ones((1, 1, 1)))
    >>> merge_lora(jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1)), lora, 0.5)[1].tolist()
    [[[1.5]]]
    """
    check_plain(w_in=w_in, w_out=w_out)
    layouts = check_layouts(w_in_layout, w_out_layout)
    sizes = _sizes(layouts, w_in, w_out)
    checked = check_lora(check.array, check.FLOATS, lora, sizes)
    s_in, s_out = check_scales(lora_scale, checked)
    if checked is None:
        return w_in, w_out

    def added(name: str, weight: jax.Array, a: Any, b: Any, scale: float, product: str) -> jax.Array:
        if a is None:
            return weight
        a, b = (jnp.broadcast_to(factor, (sizes["e"], *factor.shape[1:])) for factor in (a, b))
        delta = jnp.einsum(
            product, a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        ).transpose(layouts.from_ours(name))
        return (weight.astype(jnp.float32) + scale * delta).astype(weight.dtype)

    return (
        added("w_in", w_in, checked.a_in, checked.b_in, s_in, "edr,erpf->edpf"),
        added("w_out", w_out, checked.a_out, checked.b_out, s_out, "efr,erd->efd"),
    )


def join_lora(gate: tuple[jax.Array, jax.Array], up: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Joins separate adapters of gate and up, of ranks r and q, into one of rank r + q.

    Args:
      gate: (A [E or 1, D, r], B [E or 1, r, F]) of the gate columns.
      up: (A [E or 1, D, q], B [E or 1, q, F]) of the up columns.

    Returns:
      (a_in [E or 1, D, r + q], b_in [E or 1, r + q, 2, F]) for a `Lora`; b_in is 0 from the gate's ranks to up and from
      up's ranks to the gate. The scales of both adapters must be equal, or be part of the factors.

    Raises:
      TypeError, ValueError: an argument is wrong; the message names it.

    Gradient: for all factors, by JAX.

    >>> a, b = join_lora((jnp.ones((1, 4, 2)), jnp.ones((1, 2, 3))), (jnp.ones((1, 4, 1)), jnp.ones((1, 1, 3))))
    >>> a.shape, b[0, :, 0, 0].tolist(), b[0, :, 1, 0].tolist()
    ((1, 4, 3), [1.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    """
    (gate_a, gate_b), (up_a, up_b) = check_join(check.array, check.FLOATS, gate, up)

    def alike(*factors: jax.Array) -> list[jax.Array]:
        experts = jnp.broadcast_shapes(*(factor.shape[:1] for factor in factors))
        return [jnp.broadcast_to(factor, (*experts, *factor.shape[1:])) for factor in factors]

    gate_b, up_b = alike(gate_b, up_b)
    no_gate, no_up = jnp.zeros_like(up_b), jnp.zeros_like(gate_b)
    b_in = jnp.concatenate([jnp.stack([gate_b, no_up], axis=2), jnp.stack([no_gate, up_b], axis=2)], axis=1)
    return jnp.concatenate(alike(gate_a, up_a), axis=2), b_in

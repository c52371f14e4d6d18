"""Random LoRA factors for tests of both frameworks, and how a function takes them as operands by name."""

import jax.numpy as jnp
import numpy as np

from anabranch.lora import NAMES, PROJECTIONS, Lora

#: (options, ranks (r, q), names of shared factors, adapted projections, dtype of x, dtype of the factors).
CASES = {
    "both projections": ({}, (5, 3), (), ("in", "out"), "float32", "float32"),
    "shared factors": ({}, (3, 8), ("a_in", "b_out"), ("in", "out"), "float32", "float32"),
    "all factors shared, early weights": (
        dict(weight_early=True),
        (1, 2),
        ("a_in", "b_in", "a_out", "b_out"),
        ("in", "out"),
        "float32",
        "float32",
    ),
    "w_in alone, interleaved": (
        dict(w_in_layout="fpd", w_out_layout="df"),
        (4, 4),
        (),
        ("in",),
        "float32",
        "float32",
    ),
    "w_out alone, early weights": (
        dict(w_in_layout="pfd", w_out_layout="df", weight_early=True),
        (2, 17),
        (),
        ("out",),
        "float32",
        "float32",
    ),
    "bfloat16": (dict(w_in_layout="pfd", w_out_layout="df"), (16, 5), ("b_in",), ("in", "out"), "bfloat16", "bfloat16"),
    "bfloat16 with float32 factors": (dict(weight_early=True), (4, 9), (), ("in", "out"), "bfloat16", "float32"),
    "bfloat16 with float32 factors, transposed weights": (
        dict(w_in_layout="pfd", w_out_layout="df"),
        (8, 3),
        ("a_out",),
        ("in", "out"),
        "bfloat16",
        "float32",
    ),
    "bfloat16 with float32 factors, interleaved": (
        dict(w_in_layout="fpd"),
        (5, 16),
        ("b_in",),
        ("in", "out"),
        "bfloat16",
        "float32",
    ),
    "bfloat16 with float32 factors of w_out": (
        dict(w_in_layout="dfp"),
        (1, 6),
        (),
        ("out",),
        "bfloat16",
        "float32",
    ),
}
SCALES = (0.7, -1.3)


def lora_factors(E, D, P, F, ranks=(5, 3), *, shared=(), projections=("in", "out"), dtype="float32", seed=0):
    """Random factors as arrays by the names of operands, such that x A and u B have unit size."""
    rng = np.random.default_rng(seed)
    r, q = ranks
    shapes = {"a_in": (D, r), "b_in": (r, P, F), "a_out": (F, q), "b_out": (q, D)}
    factors = {}
    for name, shape in shapes.items():
        if name.split("_")[1] in projections:
            values = rng.standard_normal((1 if name in shared else E, *shape)) * shape[0] ** -0.5
            factors[f"lora_{name}"] = values.astype(jnp.dtype(dtype))
    return factors


def with_lora(arrays, ranks, shared=(), seed=7):
    """The arrays of a layer, and factors of the dtype of x. ranks: (r, q), 0: no adapter of that projection."""
    projections = [name for name, rank in zip(PROJECTIONS, ranks, strict=True) if rank]
    options = dict(shared=shared, projections=projections, dtype=arrays["x"].dtype, seed=seed)
    return arrays | lora_factors(*arrays["w_in"].shape, ranks, **options)


def as_lora(arrays):
    """A Lora of the factors among arrays by the names of operands; None if there are none."""
    factors = {name.removeprefix("lora_"): arrays[name] for name in NAMES if name in arrays}
    return Lora(**factors) if factors else None


def oracle_options(arrays):
    """The options of the oracle for the factors among arrays; it rounds as a layer in the dtype of x does."""
    lora = as_lora(arrays)
    dtype = arrays["x"].dtype
    return {} if lora is None else {"lora": lora, "lora_dtype": None if dtype == np.float32 else dtype}


def with_factors(gradients):
    """The oracle's gradients by the names of operands."""
    return gradients | dict(zip(NAMES, gradients.get("lora") or (None,) * len(NAMES), strict=True))


def takes_factors(function):
    """The function with the fields of its argument `lora` as arguments of their own, by the names of operands."""

    def call(*arguments, **given):
        factors = {name: given.pop(name) for name in NAMES if name in given}
        return function(*arguments, **given, **({"lora": as_lora(factors)} if factors else {}))

    return call

"""Meshes of 8 devices, arrays on them, and the collectives of a compiled program."""

import contextlib
import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from anabranch.reference.capacity import kept_slots
from moe_cases import selected

P = PartitionSpec
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)

_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|ragged-all-to-all)(?:-start)?\("
)


def mesh_of(axis_type=AxisType.Auto, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


def around(mesh):
    """jax.set_mesh for explicit axes, which eager calls need; automatic axes do not."""
    return jax.set_mesh(mesh) if mesh.explicit_axes else contextlib.nullcontext()


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def collectives(function, *arrays):
    """[(kind, elements of the largest array)] of the compiled program's collectives."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    found = []
    for kind, name in _COLLECTIVE.findall(text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", kind)
        found.append((name, max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)))
    return found


def assert_no_traffic_of_tokens(function, arrays, at_most):
    """Asserts that devices exchange only sums of at most `at_most` elements."""
    found = collectives(function, *arrays)
    assert all(name == "all-reduce" and size <= at_most for name, size in found), found


def assert_trees_close(got, want, rtol=2e-6, atol=2e-6):
    def compare(g, w):
        g, w = np.asarray(g), np.asarray(w)
        assert g.dtype == w.dtype and g.shape == w.shape
        if g.dtype.kind in "iub":
            np.testing.assert_array_equal(g, w)
        else:
            np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=rtol, atol=atol)

    jax.tree.map(compare, got, want)


def placed(mesh, parallel, *layouts):
    """Places an array in the sharding that `parallel` requires; layouts: the layouts of w_in and w_out."""
    specs = parallel.specs(*layouts)
    tokens = dict.fromkeys(("output", "token_mask", "forced_experts", "replay", "experts", "weights"), "x")
    return lambda name, array: put(mesh, array, *specs[tokens.get(name, name)])


def kept_and_dropped(arrays, options, parallel, expert, data):
    """(bool [T, K], assignments within capacity; drops per source rank), from the contract's rule."""
    experts = options.get("forced_experts")
    if experts is None:
        experts = selected(arrays, options)
    groups = experts.reshape(data, expert, -1, experts.shape[-1])
    capacity = math.ceil(parallel.capacity_factor * groups.shape[2] * experts.shape[-1])
    kept = np.stack([kept_slots(group, len(arrays["w_in"]), capacity) for group in groups])
    return kept.reshape(experts.shape), (~kept).sum((-1, -2)).ravel()

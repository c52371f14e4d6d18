"""Every row of docs/models.md is what the model family's published definition computes, and so is its gradient."""

import contextlib
import functools
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import MODELS, D, T

from anabranch.activation import as_activation
from anabranch.checkpoints import FAMILIES, Block, load, store
from oracle import assert_close, assert_close_per_expert, relative_error

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "models.md").read_text()
ROW = re.compile(r"^\| ([^|`]+) \| (`[^|]+`) \| `([^|]+)` \|$", re.MULTILINE)
CASES = [
    pytest.param(family, call, id=f"{family} groups" if f"{family} groups" in MODELS and "num_groups" in call else family)
    for _, families, call in ROW.findall(PAGE)
    for family in re.findall("`([^`]+)`", families)
]
BOUND = 2e-6


class Top:
    """The k largest of what a block compares, in its first run; remembered for the next, which is the same block."""

    def __init__(self):
        self._found, self._at, self.margin = [], None, np.inf

    def remember(self, find):
        if self._at is None:
            self._found.append(find())
            return self._found[-1]
        self._at += 1
        return self._found[self._at - 1]

    def again(self):
        self._at = 0

    def __call__(self, keys, k):
        return self.remember(lambda: self._largest(np.asarray(keys()), k))

    def _largest(self, keys, k):
        order = np.argsort(-keys, kind="stable")
        if k < len(keys) and np.isfinite(keys[order[k]]):
            self.margin = min(self.margin, keys[order[k - 1]] - keys[order[k]])
        return [int(e) for e in order[:k]]


def random_tensors(model, seed):
    """By name, float64 that float32 holds. Hidden values are about 5 wide, so that limits are reached."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in model.shapes.items():
        fan_in = D if len(shape) < 2 else shape[-2] if re.search(r"gate_up_proj$", name) and shape[-2] == D else shape[-1]
        of_router = re.match(r"gate\.|router\.|mlp\.gate\.|moe\.(gate\.weight|router)|block_sparse_moe\.router", name)
        first = re.search(r"gate_up|gate_proj|up_proj|\.w1\b|\.w3\b|v1$|w13|fc1|input_linear|\.wi\.", name)
        scale = 1.5 if of_router else 5.0 if first else 1.0
        if name.endswith("tid2eid"):
            tensors[name] = np.stack([rng.permutation(16)[: shape[1]] for _ in range(shape[0])]).astype(np.int32)
        elif re.search("norm|scale", name):
            tensors[name] = 1 + 0.2 * rng.standard_normal(shape)
        else:
            tensors[name] = scale / fan_in**0.5 * rng.standard_normal(shape)
    model.adjust(tensors)
    return {name: a if a.dtype == np.int32 else a.astype(np.float32).astype(np.float64) for name, a in tensors.items()}


def random_inputs(model, seed):
    rng = np.random.default_rng(seed + 1)

    def draw(name, shape):
        if name == "input_ids":
            return rng.integers(0, 20, shape)
        return rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    return {name: draw(name, shape) for name, shape in {"x": (T, D), **model.inputs}.items()}


def floats_and_rest(arrays):
    floats = {name: a for name, a in arrays.items() if a.dtype.kind == "f"}
    return floats, {name: a for name, a in arrays.items() if a.dtype.kind != "f"}


def defined(model, tensors, inputs, cotangent):
    """Value, and the gradients of tensors and inputs, of the published definition."""
    top = Top()
    value = model.block(np, tensors, top=top, **inputs)
    assert top.margin > 1e-5, "a selection so close that float32 may differ: another seed"
    with jax.enable_x64(True):
        t, fixed = floats_and_rest(tensors)
        i, fixed_inputs = floats_and_rest(inputs)

        def total(t, i):
            top.again()
            y = model.block(jnp, {**t, **fixed}, top=top, **i, **fixed_inputs)
            return jnp.vdot(y, cotangent), y

        (_, again), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
            jax.tree.map(jnp.asarray, t), jax.tree.map(jnp.asarray, i)
        )
        assert relative_error(np.asarray(again), value) < 1e-13
        return value, *jax.tree.map(np.asarray, gradients)


@functools.cache
def page_namespace():
    """What the page's Python blocks define."""
    namespace = {}
    for source in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, "docs/models.md", "exec"), namespace)
    return namespace


def called(family, call, block, inputs):
    """What the row's call gives for these arrays."""
    layouts = {name: getattr(FAMILIES[family], name) for name in ("w_in_layout", "w_out_layout")}
    names = {**block.router, **block.experts, "others": block.others, "shared": block.shared, "as_stored": layouts}
    return eval(call, {**page_namespace(), **names, **inputs})


def as_float32(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32 if a.dtype.kind == "f" else jnp.int32), tree)


def assert_gradients(family, got, want):
    """Of every array of the block, and of each expert by itself."""
    for part in ("router", "experts", "shared"):
        for name, gradient in getattr(want, part).items():
            if name == "expert_bias":
                assert not np.any(getattr(got, part)[name])
                continue
            of_ours = np.asarray(getattr(got, part)[name])
            assert_close(of_ours, gradient, BOUND, f"{part} {name}")
            if part == "experts":
                assert_close_per_expert(of_ours, gradient, 4 * BOUND, f"{part} {name}")
    for name, gradient in want.others.items():
        assert_close(np.asarray(got.others[name]), gradient, BOUND, name)


@pytest.mark.parametrize("family, call", CASES)
def test_a_row_is_the_familys_published_block(family, call, request):
    model = MODELS[request.node.callspec.id]
    tensors, inputs = random_tensors(model, 0), random_inputs(model, 0)
    cotangent = np.random.default_rng(2).standard_normal((T, D))
    value, of_tensors, of_inputs = defined(model, tensors, inputs, cotangent)

    block, given = as_float32(load(family, tensors)), as_float32(inputs)
    def total(block, given):
        y = called(family, call, block, given)
        return jnp.vdot(y, cotangent.astype(np.float32)), y
    (_, y), (d_block, d_given) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True, allow_int=True)(block, given)
    assert_close(np.asarray(y), value, BOUND, "output")
    import os
    if os.environ.get("SHOW"):
        zeros = {n: np.zeros(a.shape) for n, a in tensors.items()}
        want = load(family, zeros | of_tensors)
        out=[f"{relative_error(np.asarray(y), value):.1e}"]
        for n,g in of_inputs.items(): out.append(f"{n} {relative_error(np.asarray(d_given[n]), g):.1e}")
        for part in ("router","experts","shared","others"):
            for n,g in getattr(want,part).items():
                gg=getattr(d_block,part)[n]
                if gg.dtype==jax.dtypes.float0: continue
                out.append(f"{part[0]}.{n} {relative_error(np.asarray(gg), g):.1e}")
        print("SHOW", request.node.callspec.id, *out)

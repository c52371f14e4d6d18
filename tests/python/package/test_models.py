"""Every row of docs/models.md computes the values and gradients of the model family's published definition."""

import ast
import contextlib
import functools
import io
import pathlib
import re
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from definitions import MODELS, D, E, F, T

from anabranch.activation import as_activation
from anabranch.checkpoints import FAMILIES, load
from oracle import assert_close, assert_close_per_expert, relative_error

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "models.md").read_text()
ROW = re.compile(r"^\| ([^|`]+) \| (`[^|]+`) \| `([^|]+)` \|$", re.MULTILINE)
ROWS = [(re.findall("`([^`]+)`", families), call) for _, families, call in ROW.findall(PAGE)]


def definition_of(family, call):
    """The key in MODELS: DeepSeek-V2 has a row with groups and one without."""
    return f"{family} groups" if f"{family} groups" in MODELS and "num_groups" in call else family


def cases(rows):
    return [
        pytest.param(family, call, id=definition_of(family, call)) for families, call in rows for family in families
    ]


CASES = cases(ROWS)
FIRST_OF_A_ROW = cases([(families[:1], call) for families, call in ROWS])
#: Families that share tensors and block are one case.
DIFFERENT = {(id(FAMILIES[case.values[0]]), id(MODELS[case.id]), case.values[1]): case for case in CASES}.values()
BOUND = 2e-6


class Top:
    """Records the top-k selections of a block's first run, and replays them in its next run."""

    def __init__(self):
        self._found, self._at, self._finding, self.margin = [], None, False, np.inf

    def again(self):
        """Starts the replay from the first selection."""
        self._at = 0

    def remember(self, find):
        """The result of find() in the first run; selections inside of find() are not recorded."""
        if self._finding:
            return find()
        if self._at is None:
            self._finding = True
            self._found.append(find())
            self._finding = False
            return self._found[-1]
        self._at += 1
        return self._found[self._at - 1]

    def __call__(self, keys, k):
        return self.remember(lambda: self._largest(np.asarray(keys()), k))

    def _largest(self, keys, k):
        order = np.argsort(-keys, kind="stable")
        if k < len(keys) and np.isfinite(keys[order[k]]):
            self.margin = min(self.margin, keys[order[k - 1]] - keys[order[k]])
        return [int(e) for e in order[:k]]


def of_two(function):
    """torch's function of two tensors, as numpy's: the second may be a number or a list."""
    return lambda a, b: function(a, torch.as_tensor(b, dtype=a.dtype))


#: The functions of numpy that definitions use, on torch's tensors. JAX would compile each operation for each shape.
TORCH = types.SimpleNamespace(
    **{
        name: getattr(torch, name)
        for name in "arange clip erf exp log log1p max mean sqrt stack sum tanh where".split()
    },
    **{name: of_two(getattr(torch, name)) for name in ("isin", "maximum", "minimum")},
    inf=np.inf,
)


def random_tensors(model, seed):
    """Tensors by name, in float64 with float32 values. Intermediate values of about 12 reach the limits."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in model.shapes.items():
        fan_in = (
            D if len(shape) < 2 else shape[-2] if re.search(r"gate_up_proj$", name) and shape[-2] == D else shape[-1]
        )
        is_router = re.match(r"gate\.|router\.|mlp\.gate\.|moe\.(gate\.weight|router)|block_sparse_moe\.router", name)
        first = re.search(r"gate_up|gate_proj|up_proj|\.w1\b|\.w3\b|v1$|w13|fc1|input_linear|\.wi\.", name)
        scale = 1.5 if is_router else 12.0 if first else 1.0
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


class Case(NamedTuple):
    """Random tensors and inputs of a block, and the results of its published definition."""

    tensors: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    cotangent: np.ndarray
    value: np.ndarray
    d_tensors: dict[str, np.ndarray]
    d_inputs: dict[str, np.ndarray]


_CASES: dict[int, Case] = {}


def case_of(model):
    """The case of a definition, which several families may share."""
    if id(model) not in _CASES:
        _CASES[id(model)] = _new_case(model)
    return _CASES[id(model)]


def _new_case(model):
    tensors, inputs = random_tensors(model, 0), random_inputs(model, 0)
    cotangent = np.random.default_rng(2).standard_normal((T, D)).astype(np.float32)
    top = Top()
    value = model.block(np, tensors, top=top, **inputs)
    assert top.margin > 1e-5, "a selection so close that float32 may differ: another seed"
    floats, tables = floats_and_rest(tensors)
    given, others = floats_and_rest(inputs)
    floats, given = ({n: torch.from_numpy(a).requires_grad_() for n, a in arrays.items()} for arrays in (floats, given))
    top.again()
    again = model.block(TORCH, {**floats, **tables}, top=top, **given, **others)
    assert relative_error(again.detach().numpy(), value) < 1e-13  # the replay computes the same function
    leaves = [*floats.values(), *given.values()]
    found = torch.autograd.grad(again, leaves, torch.from_numpy(cotangent).double(), materialize_grads=True)
    gradients = [gradient.numpy() for gradient in found]
    d_tensors = dict(zip(floats, gradients, strict=False))
    return Case(tensors, inputs, cotangent, value, d_tensors, dict(zip(given, gradients[len(floats) :], strict=True)))


@functools.cache
def page():
    """The names that the page's Python blocks define."""
    namespace = {}
    blocks = PAGE.partition("## Packed checkpoints")[0]  # the rest needs checkpoints, see test_docs.py
    for source in re.findall(r"^```python\n(.*?)^```$", blocks, re.DOTALL | re.MULTILINE):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, "docs/models.md", "exec"), namespace)
    return namespace


def called(family, call, block, inputs, namespace=None):
    """The result of a row's call for these arrays."""
    layouts = {name: getattr(FAMILIES[family], name) for name in ("w_in_layout", "w_out_layout")}
    names = {**block.router, **block.experts, "others": block.others, "shared": block.shared, "as_stored": layouts}
    return eval(call, {**(namespace or page()), **names, **inputs})


def loaded(family, tensors):
    """The block, loaded with the sizes that do not follow from its tensors."""
    sizes = {"longcat_flash": {"num_experts": E}, "dbrx": {"intermediate_size": F}}.get(family, {})
    return load(family, tensors, **sizes)


def arrays_of(family, case):
    """The block and the inputs in the form of the call's arguments."""

    def as_jax(array):
        return jax.device_put(array.astype(np.float32 if array.dtype.kind == "f" else np.int32))

    return jax.tree.map(as_jax, (loaded(family, case.tensors), case.inputs))


def assert_gradients(got, want, without_gradient):
    """Checks the gradient of every array of the block, and of each expert."""
    for part in ("router", "experts", "shared", "others"):
        for name, gradient in getattr(want, part).items():
            if name in without_gradient:
                continue
            ours = np.asarray(getattr(got, part)[name])
            assert_close(ours, gradient, BOUND, f"gradient of {name} ({part})")
            if part == "experts":
                assert_close_per_expert(ours, gradient, 4 * BOUND, f"gradient of {name}")


@pytest.mark.parametrize("family, call", DIFFERENT)
def test_a_row_is_its_familys_published_block(family, call, request):
    case = case_of(MODELS[request.node.callspec.id])

    def total(block, inputs):
        y = called(family, call, block, inputs)
        return jnp.vdot(y, case.cotangent), y

    gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True, allow_int=True)
    (_, y), (d_block, d_inputs) = gradient(*arrays_of(family, case))
    assert_close(np.asarray(y), case.value, BOUND, "output")
    for name, wanted in case.d_inputs.items():
        assert_close(np.asarray(d_inputs[name]), wanted, BOUND, f"gradient of {name}")
    tables = {name: a for name, a in case.tensors.items() if name not in case.d_tensors}
    assert_gradients(d_block, loaded(family, case.d_tensors | tables), tables)


def without_one_option(call):
    """The call without each of the options that it names, one at a time."""
    tree = ast.parse(call, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for option in [keyword for keyword in node.keywords if keyword.arg not in (None, "topk", "group_topk")]:
                node.keywords.remove(option)
                yield option.arg, ast.unparse(tree)
                node.keywords.append(option)


@pytest.mark.parametrize("family, call", FIRST_OF_A_ROW)
def test_every_option_of_a_row_matters(family, call, request):
    case = case_of(MODELS[request.node.callspec.id])
    arrays = arrays_of(family, case)
    for option, other_call in without_one_option(call):
        with contextlib.suppress(TypeError, ValueError):  # a required argument
            assert relative_error(called(family, other_call, *arrays), case.value) > 1e-3, option


@pytest.mark.parametrize("family, call", [case for case in CASES if case.id != "muse_spark"])
def test_a_row_has_the_options_that_checkpoints_gives(family, call, monkeypatch):
    """Gradients of `moe`, or of the experts alone if the family has a router of its own."""

    class Called(Exception):
        pass

    def recorded(*args, **options):
        raise Called(options)

    for name in ("moe", "routed_experts"):
        monkeypatch.setitem(page(), name, recorded)
    with pytest.raises(Called) as call_of_ours:
        called(family, call, *arrays_of(family, case_of(MODELS[family])))
    (options,) = call_of_ours.value.args
    fixed = FAMILIES[family].options
    if not FAMILIES[family].router_options or "forced_experts" in options:
        fixed = FAMILIES[family].experts_options
    defaults = {"score_function": "softmax", "normalize": True, "activation": "silu"}
    got = {name: (defaults | options)[name] for name in fixed}
    if fixed["activation"] is not None:
        assert as_activation(got["activation"]) == as_activation(fixed["activation"])
    del got["activation"]
    assert got == {name: value for name, value in fixed.items() if name != "activation"}


def test_every_family_and_every_definition_has_a_row():
    assert {case.id for case in CASES} == MODELS.keys()
    assert {case.values[0] for case in CASES} == FAMILIES.keys()

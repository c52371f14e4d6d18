"""Gradients that nobody asks for are neither computed nor allocated: outputs of C calls, and memory, in torch."""

import contextlib

import pytest
import torch
import torch.utils.flop_counter

from anabranch.lora import NAMES
from anabranch.torch import Lora, expert_ffn, grouped_matmul, moe, routed_experts
from anabranch.torch.binding import calls, define
from torch_transforms import normal

T, E, K, D, F = 3, 8, 2, 64, 32
SHAPES = {
    "x": (T, D),
    "w_in": (E, D, 2, F),
    "w_out": (E, F, D),
    "b_in": (E, 2, F),
    "b_out": (E, D),
    "lora_a_in": (E, D, 3),
    "lora_b_in": (E, 3, 2, F),
    "lora_a_out": (E, F, 3),
    "lora_b_out": (E, 3, D),
}
OF_DH = {"x", "w_in", "b_in"}


def of_moe(x, w_in, w_out, b_in, b_out, *lora, gate):
    return moe(x, gate, w_in, w_out, topk=K, b_in=b_in, b_out=b_out, lora=Lora(*lora)).output


def of_routed(x, w_in, w_out, b_in, b_out, *lora, weights):
    experts = torch.arange(T * K, dtype=torch.int32).view(T, K) % E
    return routed_experts(x, experts, weights, w_in, w_out, b_in=b_in, b_out=b_out, lora=Lora(*lora)).output


def of_ffn(x, w_in, w_out, b_in, b_out, *lora, weights):
    sizes = torch.tensor([T, *[0] * (E - 1)])
    given = dict(b_in=b_in, b_out=b_out, lora=Lora(*lora), weights=weights)
    return expert_ffn(x, w_in, w_out, sizes, **given)


#: For each function: the function, and the name and shape of its further operand.
FUNCTIONS = {
    "moe": (of_moe, "gate", (D, E)),
    "routed": (of_routed, "weights", (T, K)),
    "ffn": (of_ffn, "weights", (T,)),
}
NEEDS = [(name,) for name in (*SHAPES, "other")] + [NAMES, ("x", *NAMES), ("w_in", "b_out")]


def operands(other_shape, needs):
    arrays = {name: normal(*shape, seed=i, scale=0.3) for i, (name, shape) in enumerate(SHAPES.items())}
    arrays["other"] = normal(*other_shape, seed=20)
    return {name: array.requires_grad_(name in needs) for name, array in arrays.items()}


@pytest.fixture
def outputs(monkeypatch):
    """The gradients that C calls compute, by operand."""
    found, describe = set(), calls.Operation.__call__

    def recorded(operation, tensors, orders=None, **options):
        given = {name for name, tensor in tensors.items() if tensor is not None}
        if operation.name == "grouped_matmul_dw":
            found.add("gate")
        elif operation.name == "router_backward":
            found.add("router")
        else:
            found.update(name.removeprefix("d_") for name in given if name.startswith("d_") and name != "d_out")
        if "dx_rows" in given or (operation.name == "grouped_matmul_combine" and options.get("backward")):
            found.add("x")
        if "dh" in given and "h" in given:
            found.add("dh")
        return describe(operation, tensors, orders, **options)

    monkeypatch.setattr(calls.Operation, "__call__", recorded)
    define.forget_prepared()
    return found


@pytest.mark.parametrize("needs", NEEDS, ids="+".join)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_of_the_c_calls(outputs, name, needs):
    function, other, shape = FUNCTIONS[name]
    *given, last = operands(shape, needs).values()
    result = function(*given, **{other: last})
    result.backward(normal(*result.shape))
    want = {other if name == "other" else name for name in needs}
    if name == "moe" and want & {"x", "gate"}:
        want |= {"weights", "router"}
    if name != "ffn" and want & OF_DH:
        want.add("dh")
    assert outputs == want


@pytest.mark.parametrize("observed", ["mode", "compiled"])
@pytest.mark.parametrize("needs", [NAMES, ("b_out",)], ids="+".join)
def test_outputs_of_the_c_calls_of_single_operations(outputs, needs, observed):
    """A mode and torch.compile run the layer's operations one by one."""
    *given, gate = operands((D, E), needs).values()
    torch._dynamo.reset()
    function = torch.compile(of_moe, fullgraph=True, backend="aot_eager") if observed == "compiled" else of_moe
    mode = torch.utils.flop_counter.FlopCounterMode(display=False) if observed == "mode" else contextlib.nullcontext()
    with mode:
        result = function(*given, gate=gate)
        result.backward(normal(*result.shape))
    assert outputs == {*needs, *(["dh"] if OF_DH & {*needs} else [])}


@pytest.mark.parametrize("needs", [("x", "w"), ("x",), ("w",), ("a",), ("b",), ("x", "a", "b")], ids="+".join)
def test_outputs_of_grouped_matmul(monkeypatch, needs):
    found, describe = [], calls.Operation.__call__

    def recorded(operation, tensors, orders=None, **options):
        found.append(operation.name)
        return describe(operation, tensors, orders, **options)

    monkeypatch.setattr(calls.Operation, "__call__", recorded)
    leaves = dict(x=normal(T, D), w=normal(E, D, F), a=normal(E, D, 1), b=normal(1, 1, F))
    leaves = {name: leaf.requires_grad_(name in needs) for name, leaf in leaves.items()}
    y = grouped_matmul(leaves["x"], leaves["w"], torch.full((E,), 1), lora=(leaves["a"], leaves["b"]))
    define.forget_prepared()
    found.clear()
    y.backward(normal(T, F))
    assert found.count("grouped_matmul_dw") == len({*needs} - {"x"})
    assert found.count("grouped_matmul") == (1 if {*needs} & {"x", "a"} else 0)


def allocated(step):
    """The sizes in bytes of all memory that a step allocates."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [size for size in sizes if size > 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_layer_allocates_no_gradient_of_its_operands(compiled):
    *given, gate = operands((D, E), NAMES).values()
    # The weights are larger than the workspace, which has some MiB per thread.
    given = [array.repeat(64, *[1] * (array.dim() - 1)).detach() if i > 0 else array for i, array in enumerate(given)]
    gate = gate.repeat(1, 64)
    for factor in given[5:]:
        factor.requires_grad_()
    torch._dynamo.reset()
    function = torch.compile(of_moe, fullgraph=True, backend="aot_eager") if compiled else of_moe
    d_output = normal(T, D)

    def step():
        function(*given, gate=gate).backward(d_output)

    step()
    frozen = {operand.nbytes for operand in (*given[1:5], gate)}
    sizes = allocated(step)
    assert sizes and max(sizes) < given[2].nbytes and frozen.isdisjoint(sizes)
    given[2].requires_grad_()
    step()
    assert given[2].nbytes in allocated(step)

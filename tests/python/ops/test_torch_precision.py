"""The option `precision` in torch: which calls of the C library get it, forward and backward."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist

import anabranch.torch as ab
from anabranch.torch.binding import calls as binding_calls
from anabranch.torch.binding import define
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.factors import NO_FACTORS
from anabranch.torch.ops.gradients import request

T, E, K, D, F, R = 6, 3, 2, 4, 5, 9
SIZES, EXPERTS = torch.tensor([4, 0, 3], dtype=torch.int32), torch.arange(T * K).view(T, K) % E
FORWARD, BACKWARD, COMBINE = "expert_ffn_forward", "expert_ffn_backward", "grouped_matmul_combine"
OF_LAYER = {FORWARD, COMBINE, BACKWARD}


def leaf(*shape):
    return torch.ones(shape, requires_grad=True)


def layer(**options):
    return ab.moe(leaf(T, D), leaf(D, E), leaf(E, D, 2, F), leaf(E, F, D), topk=K, **options).output


def after_router(**options):
    return ab.routed_experts(leaf(T, D), EXPERTS, leaf(T, K), leaf(E, D, 2, F), leaf(E, F, D), **options).output


def of_rows(**options):
    return ab.expert_ffn(leaf(R, D), leaf(E, D, 2, F), leaf(E, F, D), SIZES, **options)


def product(**options):
    return ab.grouped_matmul(leaf(R, D), leaf(E, D, F), SIZES, **options)


def shared(**options):
    return ab.shared_expert(leaf(T, D), leaf(D, 2, F), leaf(F, D), **options)


def module(**options):
    made = ab.MoE(D, F, num_experts=E, topk=K, shared_features=7, **options)
    return copy.deepcopy(made)(leaf(T, D)).output


CASES = {
    "moe": (layer, OF_LAYER),
    "routed_experts": (after_router, OF_LAYER),
    "expert_ffn": (of_rows, {FORWARD, BACKWARD}),
    "grouped_matmul": (product, {"grouped_matmul", "grouped_matmul_dw"}),
    "shared_expert": (shared, {FORWARD, BACKWARD}),
    "MoE": (module, OF_LAYER),
}


def precisions(monkeypatch, function):
    """{(function, precision)} of the GEMM calls of a step; None: a call without a precision."""
    found = set()
    describe = binding_calls.Operation.__call__

    def recorded(operation, tensors, orders=None, **options):
        if operation.name.startswith(("grouped_", "expert_")):
            found.add((operation.name, options.get("precision")))
        return describe(operation, tensors, orders, **options)

    monkeypatch.setattr(binding_calls.Operation, "__call__", recorded)

    define.forget_prepared()
    result = function()
    result.backward(torch.randn_like(result))
    return found


def operations():
    """(operation, its arguments before the precision) of every operation, with and without quantised operands."""
    x, h, d_out, weights = torch.ones(R, D), torch.ones(R, 2, F), torch.ones(R, D), torch.ones(R, 1)
    w_in, w_out, slots = torch.ones(E, D, 2, F), torch.ones(E, F, D), torch.arange(R, dtype=torch.int32)
    maps, dtype = (slots[:, None], slots, SIZES), torch.float32
    of_rows, of_tokens = (0, 0.0, 0.0, False, 0, "dpf", "fd"), (0, 0.0, 0.0, False, 1, "dpf", "fd")
    matrices, none = (w_in, None, w_out, None), (*(None,) * 4, *NO_FACTORS)
    of_w_in = request({"w_in": True})
    yield torch_ops.grouped_matmul, (x, torch.ones(E, D, F), SIZES, False)
    yield torch_ops.grouped_matmul_dw, (x, d_out, SIZES, dtype)
    yield torch_ops.ffn, (x, None, SIZES, *matrices, None, *none, *of_rows)
    yield (
        torch_ops.ffn_backward,
        (d_out, h, x, None, SIZES, *matrices, None, None, dtype, dtype, of_w_in, *none, *of_rows),
    )
    yield torch_ops.experts, (x, None, None, None, *maps, *matrices, *none, *of_tokens)
    yield (
        torch_ops.experts_hidden,
        (d_out, None, None, h, x, weights, slots, SIZES, *matrices, None, dtype, of_w_in, *none, *of_tokens),
    )
    for requested in (request({"x": True}), of_w_in):
        options = (None, dtype, dtype, requested, *none, *of_tokens)
        yield torch_ops.experts_inputs, (h, x, x, x, None, *maps, w_in, None, w_out, *options)


PRODUCTS = list(operations())
AFTER_PRECISION = {torch_ops.grouped_matmul: (0,), torch_ops.grouped_matmul_dw: (False,)}


#: The gate's GEMMs on a CPU, which never round to TF32.
OF_GATE = {("grouped_matmul", 0), ("grouped_matmul_dw", 0)}


def each(calls, number):
    return {(name, number) for name in calls}


@pytest.mark.parametrize("name", CASES)
def test_every_call_of_a_step_has_the_precision(monkeypatch, name):
    function, calls = CASES[name]
    of_gate = OF_GATE if name in ("moe", "MoE") else set()
    assert precisions(monkeypatch, functools.partial(function, precision="tf32")) == each(calls, 1) | of_gate
    assert precisions(monkeypatch, function) == each(calls, 0) | of_gate


def test_every_call_of_a_group_has_the_precision(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for transport in ("ring", "all_to_all"):
            function = functools.partial(layer, group=dist.group.WORLD, transport=transport, precision="tf32")
            assert precisions(monkeypatch, function) == each(OF_LAYER, 1) | OF_GATE
    finally:
        dist.destroy_process_group()


def test_torchs_own_setting_changes_nothing(monkeypatch):
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert precisions(monkeypatch, layer) == each(OF_LAYER, 0) | OF_GATE
    finally:
        torch.set_float32_matmul_precision(usual)


@pytest.mark.parametrize("value", ["high", "TF32", "", None, 1, True], ids=repr)
def test_invalid_values_are_refused(value):
    for function, _ in CASES.values():
        with pytest.raises(ValueError, match=r"^precision: got .*, expected one of 'highest', 'tf32'"):
            function(precision=value)


@pytest.mark.parametrize(("operation", "arguments"), PRODUCTS, ids=[str(operation) for operation, _ in PRODUCTS])
def test_the_library_checks_the_precision(operation, arguments):
    """The library refuses a number that no option has."""
    with pytest.raises(ValueError, match=r"precision: got 7, expected 0 (to 2|or 1), an ab_precision"):
        operation(*arguments, 7, *AFTER_PRECISION.get(operation, (0, 0.0, 0.0)))


def test_repr_shows_the_precision():
    assert "precision='tf32'" in repr(ab.MoE(D, F, num_experts=E, topk=K, precision="tf32"))
    assert "precision" not in repr(ab.MoE(D, F, num_experts=E, topk=K))


def test_float32_weights_beside_bfloat16_rows():
    """The weights are rounded for the GEMM; their gradients are unrounded float32."""
    generator = torch.Generator().manual_seed(0)
    rows, w_in, w_out, d_y = (
        torch.randn(shape, generator=generator) for shape in ((R, D), (E, D, 2, F), (E, F, D), (R, D))
    )

    def run(*weights):
        weights = [w.requires_grad_() for w in weights]
        y = ab.expert_ffn(rows.bfloat16(), *weights, SIZES)
        return y, torch.autograd.grad(y, weights, d_y.bfloat16())

    y, found = run(w_in, w_out)
    rounded_y, rounded = run(w_in.detach().bfloat16(), w_out.detach().bfloat16())
    assert torch.equal(y, rounded_y)
    for gradient, other in zip(found, rounded, strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient.bfloat16(), other)
        assert not torch.equal(gradient, other.float())

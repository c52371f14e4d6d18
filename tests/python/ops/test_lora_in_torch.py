"""LoRA in torch: transforms, factors that are views, autocast, errors."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from anabranch.lora import NAMES
from anabranch.torch import Lora, dispatch, expert_ffn, grouped_matmul, moe, plan, route, routed_experts
from anabranch.torch.layer import forward
from anabranch.torch.ops import experts
from anabranch.torch.ops.factors import factor_arguments
from torch_transforms import (
    assert_close,
    check_compiled,
    check_compiled_once,
    check_frozen,
    check_grad_and_vmap,
    check_second_derivative_raises,
    check_strided,
    gradients,
    normal,
)

pytestmark = pytest.mark.usefixtures("device")
T, E, K, D, F, RANK = 12, 4, 2, 6, 5, 3


def operands(tokens=T):
    """x, gate, w_in, w_out, and the factors as PEFT stores them: [r E, in] with row e r + i, [out, r E] with column
    i E + e."""
    return [
        normal(tokens, D, seed=1),
        normal(D, E, seed=2),
        normal(E, 2, F, D, seed=3, scale=0.3),
        normal(E, D, F, seed=4, scale=0.3),
        normal(RANK * E, D, seed=5, scale=0.3),
        normal(2 * F, RANK * E, seed=6, scale=0.3),
        normal(RANK * E, F, seed=7, scale=0.3),
        normal(D, RANK * E, seed=8, scale=0.3),
    ]


def as_lora(a_in, b_in, a_out, b_out):
    return Lora(
        a_in.reshape(E, -1, D).mT,
        b_in.reshape(2, F, -1, E).permute(3, 2, 0, 1),
        a_out.reshape(E, -1, F).mT,
        b_out.reshape(D, -1, E).permute(2, 1, 0),
    )


LAYOUTS = dict(w_in_layout="pfd", w_out_layout="df")


def layer(x, gate, w_in, w_out, *factors):
    lora = as_lora(*factors)
    result = moe(x, gate, w_in, w_out, topk=K, lora=lora, lora_scale=(0.5, 2.0), aux_loss_coeff=0.1, **LAYOUTS)
    return torch.sin(result.output).sum() + result.aux_loss + torch.cos(result.weights).sum()


def by_parts(x, gate, w_in, w_out, *factors):
    lora = as_lora(*factors)
    routing = route(x @ gate, K)
    routed = routed_experts(x, routing.experts, routing.weights, w_in, w_out, lora=lora, weight_early=True, **LAYOUTS)
    layout = plan(routing.experts, E)
    rows = expert_ffn(dispatch(x, layout), w_in, w_out, layout.group_sizes, lora=lora, lora_scale=0.3, **LAYOUTS)
    pair = lora.a_in, lora.b_in.flatten(2)
    columns = grouped_matmul(rows, w_in.flatten(1, 2), layout.group_sizes, transpose_w=True, lora=pair, lora_scale=-2)
    return torch.sin(routed.output).sum() + torch.sin(rows).sum() + torch.cos(columns).sum()


FUNCTIONS = (layer, by_parts)


def test_compiled_gradients_are_the_eager_ones():
    check_compiled(by_parts, operands)


def test_compiled_for_any_number_of_tokens():
    check_compiled_once(layer, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_grad_and_vmap_of_torch_func(function):
    check_grad_and_vmap(function, operands(), batched=4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoints_compute_the_same_bits(function):
    want = gradients(function, operands())
    got = gradients(lambda *arguments: checkpoint(function, *arguments, use_reentrant=False), operands())
    assert torch.equal(got[0], want[0]) and all(map(torch.equal, got[1], want[1]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_derivative_is_an_error(function):
    check_second_derivative_raises(function, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("frozen", [(0,), (1, 2, 3), (0, 1, 2, 3, 5, 7), (4, 5), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_frozen_operands_change_no_other_gradient(function, frozen):
    check_frozen(function, operands, frozen)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_that_are_not_contiguous(function):
    check_strided(function, operands)


def test_views_are_not_copied(monkeypatch):
    """The operations get PEFT's parameters at their own addresses, as contiguous views."""
    given = operands()
    lora, found = as_lora(*given[4:]), set()

    def recorded(factors, copies=None):
        arguments = factor_arguments(factors, copies)
        views = arguments[: len(NAMES)]
        assert all(view.is_contiguous() for view in views if view is not None)
        found.update(view.data_ptr() for view in views if view is not None)
        return arguments

    for module in (experts, forward):
        monkeypatch.setattr(module, "factor_arguments", recorded)
    x, gate, w_in, w_out = (a.requires_grad_() for a in given[:4])
    expert_ffn(x, w_in, w_out, torch.tensor([T, 0, 0, 0]), lora=lora, **LAYOUTS).sum().backward()
    moe(x, gate, w_in, w_out, topk=K, gate_bias=normal(E), lora=lora, **LAYOUTS).output.sum().backward()
    assert not any(factor.is_contiguous() for factor in lora)
    assert found == {parameter.data_ptr() for parameter in given[4:]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_the_layer_in_its_dtype(dtype):
    """Factors keep their dtype, in which they get their gradients."""
    given = operands()
    factors = [f.to(dtype) for f in given[4:]]

    def under_autocast(x, gate, w_in, w_out, *factors):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return moe(x, gate, w_in, w_out, topk=K, lora=as_lora(*factors), **LAYOUTS).output.float().sum()

    def in_bfloat16(x, gate, w_in, w_out, *factors):
        x = x.to(torch.bfloat16)
        return moe(x, gate, w_in, w_out, topk=K, lora=as_lora(*factors), **LAYOUTS).output.float().sum()

    got, want = (gradients(function, [*given[:4], *factors]) for function in (under_autocast, in_bfloat16))
    assert torch.equal(got[0], want[0]) and all(map(torch.equal, got[1], want[1]))
    assert all(gradient.dtype == dtype for gradient in got[1][4:])


def wrong(**changed):
    lora = as_lora(*operands()[4:])
    return lora._replace(**{name: change(getattr(lora, name)) for name, change in changed.items()})


@pytest.mark.parametrize(
    ("lora", "error", "message"),
    [
        (lambda: 3, TypeError, r"lora: got int 3, expected a Lora"),
        (lambda: wrong(b_in=lambda b: None), ValueError, r"lora.b_in: got None, expected a factor, since lora.a_in"),
        (lambda: wrong(a_in=lambda a: a[:2]), ValueError, r"lora.a_in: got .*\[2, 6, 3\], expected a first dim"),
        (lambda: wrong(b_out=lambda b: b[:, :2]), ValueError, r"lora.b_out: got .*\[4, 2, 6\], expected .*r=3"),
        (lambda: wrong(a_out=lambda a: a.double()), TypeError, r"lora.a_out: got .*float64"),
        (lambda: wrong(a_in=lambda a: a.to("meta")), ValueError, r"lora.a_in: got a tensor on meta, expected"),
        (lambda: wrong(a_in=lambda a: a[..., :0], b_in=lambda b: b[:, :0]), ValueError, r"lora.a_in: .* a rank of at"),
    ],
)
def test_wrong_factors(lora, error, message):
    x, gate, w_in, w_out = operands()[:4]
    sizes = torch.tensor([T, 0, 0, 0])
    with pytest.raises(error, match=message):
        moe(x, gate, w_in, w_out, topk=K, lora=lora(), **LAYOUTS)
    with pytest.raises(error, match=message):
        expert_ffn(x, w_in, w_out, sizes, lora=lora(), **LAYOUTS)
    with pytest.raises(error, match=message):
        routed_experts(x, torch.zeros(T, 1, dtype=torch.int32), torch.ones(T, 1), w_in, w_out, lora=lora(), **LAYOUTS)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e39, "1", (1.0, 2.0, 3.0), None])
def test_wrong_scales(scale):
    x, gate, w_in, w_out, *factors = operands()
    with pytest.raises((TypeError, ValueError), match=r"^lora_scale: got"):
        moe(x, gate, w_in, w_out, topk=K, lora=as_lora(*factors), lora_scale=scale, **LAYOUTS)
    with pytest.raises((TypeError, ValueError), match=r"^lora_scale: got"):
        a = as_lora(*factors).a_in
        grouped_matmul(x, w_in[:, 0].mT, torch.tensor([T, 0, 0, 0]), lora=(a, a.mT[:, :, :F]), lora_scale=scale)


def test_factors_of_zero_change_no_bit():
    x, gate, w_in, w_out, *factors = operands()
    zeros = [f if i % 2 == 0 else torch.zeros_like(f) for i, f in enumerate(factors)]
    plain = moe(x, gate, w_in, w_out, topk=K, **LAYOUTS).output
    adapted = moe(x, gate, w_in, w_out, topk=K, lora=as_lora(*zeros), **LAYOUTS).output
    assert torch.equal(adapted, plain) and not torch.equal(layer(*operands()), layer(*operands()[:4], *zeros))
    assert_close(moe(x, gate, w_in, w_out, topk=K, lora=Lora(), **LAYOUTS).output, plain)

"""Operations under torch.compile, vmap, torch.func, checkpoints, autocast and threads, with gradients."""

import concurrent.futures
import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from anabranch.torch import combine, dispatch, expert_ffn, grouped_matmul, moe, plan, route, routed_experts
from anabranch.torch.binding import define
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

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("error:.*not yet implemented the batching rule"),  # torch's warning
]

T, E, K, D, F = 24, 6, 2, 8, 12


def operands(tokens=T):
    return [
        normal(tokens, D, seed=1),
        normal(D, E, seed=2),
        normal(E, D, 2, F, seed=3, scale=0.3),
        normal(E, F, D, seed=4, scale=0.3),
    ]


def layer(x, gate, w_in, w_out):
    result = moe(x, gate, w_in, w_out, topk=K, aux_loss_coeff=0.1, z_loss_coeff=0.01, score_function="sigmoid")
    return torch.sin(result.output).sum() + result.aux_loss + result.z_loss + torch.cos(result.weights).sum()


def after_router(x, gate, w_in, w_out):
    routing = route(x @ gate, K)
    return torch.sin(routed_experts(x, routing.experts, routing.weights, w_in, w_out).output).sum() + routing.lse.sum()


def by_parts(x, gate, w_in, w_out):
    routing = route(x @ gate, K, normalize=False)
    layout = plan(routing.experts, E, align_size=4)
    rows = expert_ffn(dispatch(x, layout), w_in, w_out, layout.group_sizes)
    rows = rows + 0.1 * grouped_matmul(rows, w_in.flatten(2), layout.group_sizes)[:, :D]
    return torch.sin(combine(rows, layout, routing.weights)).sum()


FUNCTIONS = (layer, after_router, by_parts)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_gradients_are_the_eager_ones(function):
    check_compiled(function, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("needs", [True, False])
def test_compiled_without_gradients(function, needs):
    """Under torch.no_grad(), and with operands that need no gradient."""
    torch._dynamo.reset()
    arguments = [a.requires_grad_(needs) for a in operands()]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.no_grad() if needs else contextlib.nullcontext():
        assert_close(compiled(*arguments), function(*arguments))


def test_compiled_for_any_number_of_tokens():
    check_compiled_once(layer, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_for_a_number_of_tokens_that_depends_on_data(function):
    def chosen(x, chosen, *others):
        return function(x[chosen], *others)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
        x, *others = operands()
        for threshold in (0.0, 0.5):
            mask = x[:, 0] > threshold
            got = gradients(lambda x, *o, mask=mask: compiled(x, mask, *o), [x, *others])
            assert_close(got, gradients(lambda x, *o, mask=mask: chosen(x, mask, *o), [x, *others]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_grad_and_vmap_of_torch_func(function):
    check_grad_and_vmap(function, operands(), batched=0)


def test_vmap_of_no_slice_is_an_error():
    with pytest.raises(ValueError, match="vmap: got a dimension of size 0"):
        torch.func.vmap(lambda logits: route(logits, K).weights)(normal(0, T, E))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoints_compute_the_same_bits(function, reentrant):
    def saved(*arguments):
        return checkpoint(function, *arguments, use_reentrant=reentrant)

    want_value, want = gradients(function, operands())
    leaves = [a.requires_grad_() for a in operands()]
    value = saved(*leaves)
    value.backward()
    assert torch.equal(value, want_value)
    for leaf, gradient in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("kept", ["ours", "others"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_selective_checkpoints_compute_the_same_bits(function, kept):
    """Operations that the policy saves are not called again, others are."""

    def policy(ctx, operation, *_, **__):
        return (
            CheckpointPolicy.MUST_SAVE
            if (operation.namespace == "anabranch") == (kept == "ours")
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def saved(*arguments):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)

    want_value, want = gradients(function, operands())
    start = define.num_runs()
    leaves = [a.requires_grad_() for a in operands()]
    value = saved(*leaves)
    forward = define.num_runs() - start
    value.backward()
    with_backward = define.num_runs() - start
    function(*[a.requires_grad_() for a in operands()]).backward()
    again = 2 * with_backward - (define.num_runs() - start)
    assert again == 0 if kept == "ours" else 0 < again <= forward
    assert torch.equal(value, want_value)
    for leaf, gradient in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_retained_graph_has_the_same_bits_again(function):
    leaves = [a.requires_grad_() for a in operands()]
    value = function(*leaves)
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    again = torch.autograd.grad(value, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_derivative_is_an_error(function):
    check_second_derivative_raises(function, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("frozen", [(0,), (1,), (2, 3), (0, 1), (1, 2, 3)], ids=str)
def test_frozen_operands_change_no_other_gradient(function, frozen):
    check_frozen(function, operands, frozen)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_that_are_not_contiguous(function):
    check_strided(function, operands)


def test_one_tensor_in_several_calls():
    """x is the input of two layers and a part of the cotangent, and the weights are used twice."""
    x, gate, w_in, w_out = operands()

    def twice(x, gate, w_in, w_out):
        first = moe(x, gate, w_in, w_out, topk=K).output
        return (moe(x + first, gate, w_in, w_out, topk=1).output * x).sum()

    def apart(x, y, gate, w_in, w_out, again_in, again_out):
        first = moe(x, gate, w_in, w_out, topk=K).output
        return (moe(x + first, gate, again_in, again_out, topk=1).output * y).sum()

    _, got = gradients(twice, (x, gate, w_in, w_out))
    _, (d_x, d_y, d_gate, d_in, d_out, more_in, more_out) = gradients(apart, (x, x, gate, w_in, w_out, w_in, w_out))
    assert_close(got, (d_x + d_y, d_gate, d_in + more_in, d_out + more_out))


def test_one_tensor_as_two_arguments():
    """The gradient is the sum of both arguments': x and the gate, w_in and w_out, weights and rows."""
    square, cube = normal(E, E, seed=1), normal(E, E, 1, E, seed=2, scale=0.3)
    weights = normal(E, seed=3)
    sizes = torch.tensor([0, 2, 1, 0, 3, 0], device=square.device)

    def both(square, cube, weights):
        output = moe(square, square, cube, cube[:, :, 0], topk=K, activation="relu2", b_out=square).output
        rows = expert_ffn(square, cube, cube[:, :, 0], sizes, activation="silu", weights=weights, b_out=square)
        return (torch.sin(output) + torch.cos(rows) + grouped_matmul(rows, cube[:, :, 0], sizes)).sum()

    def apart(x, gate, b_out, rows, again, w_in, w_out, weights):
        output = moe(x, gate, w_in, w_out, topk=K, activation="relu2", b_out=b_out).output
        rows = expert_ffn(rows, w_in, w_out, sizes, activation="silu", weights=weights, b_out=again)
        return (torch.sin(output) + torch.cos(rows) + grouped_matmul(rows, w_out, sizes)).sum()

    value, got = gradients(both, (square, cube, weights))
    want_value, want = gradients(apart, (square,) * 5 + (cube, cube[:, :, 0], weights))
    assert_close(value, want_value)
    assert_close(got, (sum(want[:5]), want[5] + want[6][:, :, None], want[7]))


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_the_layer_in_its_dtype(device, gate_dtype):
    x, gate, w_in, w_out = operands()
    gate = gate.to(gate_dtype)
    with torch.autocast(device, torch.bfloat16):
        value, got = gradients(lambda *a: moe(*a, topk=K).output.float().square().sum(), (x, gate, w_in, w_out))
    want_value, want = gradients(
        lambda x, *a: moe(x.to(torch.bfloat16), *a, topk=K).output.float().square().sum(), (x, gate, w_in, w_out)
    )
    assert torch.equal(value, want_value)
    assert [g.dtype for g in got] == [torch.float32, gate_dtype, torch.float32, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_the_experts_in_its_dtype(device, rows_dtype):
    """The cases include mixed dtypes, which torch's own matmuls return under autocast."""
    x, _, w_in, w_out = operands()
    x, biases, sizes = (
        x.to(rows_dtype),
        [normal(E, 2, F, seed=7), normal(E, D, seed=8)],
        torch.tensor([4, 0, 9, 3, 1, 5]),
    )

    def experts(rounded, x, w_in, w_out, b_in, b_out):
        y = expert_ffn(rounded(x), w_in, w_out, sizes, b_in=rounded(b_in), b_out=rounded(b_out))
        z = grouped_matmul(rounded(x), rounded(w_in.flatten(2)), sizes)
        assert y.dtype == z.dtype == torch.bfloat16
        return y.float().square().sum() + z.float().square().sum()

    arguments = (x, w_in, w_out, *biases)
    with torch.autocast(device, torch.bfloat16):
        value, got = gradients(functools.partial(experts, lambda a: a), arguments)
    want_value, want = gradients(functools.partial(experts, lambda a: a.to(torch.bfloat16)), arguments)
    assert torch.equal(value, want_value)
    assert [g.dtype for g in got] == [a.dtype for a in arguments]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_does_not_round_the_gates_gemms(device):
    x, gate, w_in, w_out = operands()
    want = moe(x.to(torch.bfloat16), gate, w_in, w_out, topk=K).weights
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(moe(x.to(torch.bfloat16), gate, w_in, w_out, topk=K).weights, want)


def test_threads_do_not_share_call_buffers(device):
    sizes = list(range(1, 33))
    want = {n: gradients(layer, operands(n)) for n in sizes}

    def run(n):
        with torch.device(device):  # the default device is per thread
            return n, gradients(layer, operands(n))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, got in pool.map(run, sizes * 3):
            assert_close(got, want[n], rtol=0, atol=0)


def test_the_same_bits_on_every_run():
    first, again = (gradients(layer, operands(300)) for _ in range(2))
    assert_close(first, again, rtol=0, atol=0)


def test_no_gradient_no_graph():
    with torch.no_grad():
        result = moe(*[a.requires_grad_() for a in operands()], topk=K)
    assert not result.output.requires_grad and not result.weights.requires_grad
    with torch.inference_mode():
        assert_close(moe(*operands(), topk=K).output, result.output)


def test_meta_tensors_have_the_shapes_of_results():
    meta = [a.to("meta") for a in operands()]
    result = moe(*meta, topk=K, aux_loss_coeff=0.1)
    assert result.output.shape == (T, D) and result.tokens_per_expert.shape == (E,) and result.output.is_meta

"""TransformerEngine's functions under torch.compile, vmap, checkpoints and strides."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from anabranch.torch import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
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

T, E, K, D = 24, 6, 2, 8


def operands(tokens=T):
    """Tokens, logits, and a matrix in place of the experts."""
    return [normal(tokens, D, seed=1), normal(tokens, E, seed=2), normal(D, D, seed=3)]


def routed(logits, **options):
    return fused_topk_with_score_function(logits, K, False, None, None, 1.5, "sigmoid", None, **options)


def by_mask(x, logits, w):
    probs, routing_map = routed(logits)
    rows, permuted, row_id_map = moe_permute_with_probs(x, probs, routing_map, K * x.shape[0])
    out = moe_unpermute(torch.tanh(rows @ w) * permuted[:, None], row_id_map, restore_shape=x.shape)
    return torch.sin(out).sum()


def by_padded_mask(x, logits, w):
    probs, routing_map = routed(logits, routing_map_format="bytemap")
    num_rows = (K * x.shape[0] + E * 3) // 4 * 4
    rows, permuted, row_id_map, pad_offsets, _ = moe_permute_and_pad_with_probs(
        x, probs, routing_map, routing_map.sum(0), 4, num_rows=num_rows
    )
    out = moe_unpermute(torch.tanh(rows @ w), row_id_map, probs, pad_offsets=pad_offsets)
    return torch.sin(out).sum() + torch.cos(permuted).sum()


def by_index(x, logits, w):
    index = logits.topk(K).indices
    rows, row_id_map = moe_permute(x, index, 0, map_type="index")
    out = moe_unpermute(torch.tanh(rows @ w), row_id_map, logits.gather(1, index).sigmoid(), map_type="index")
    return torch.sin(out).sum()


def losses(x, logits, w):
    routing_map, scores = fused_compute_score_for_moe_aux_loss(logits + (x @ w)[:, :E], K, "softmax")
    counts = routing_map.sum(0)
    number = torch.full((), x.shape[0], dtype=torch.int64, device=x.device)
    return fused_moe_aux_loss(scores, counts, x.shape[0], E, K, 0.1) + fused_moe_aux_loss(
        scores.sin(), counts, number, E, K, 0.2
    )


def sorted_chunks(x, logits, w):
    sizes, order = torch.tensor([5, 0, 9], device=x.device), torch.tensor([2, 1, 0], device=x.device)
    rows, probs = moe_sort_chunks_by_index_with_probs(x @ w, logits[:, 0], sizes, order)
    rows = moe_sort_chunks_by_index(torch.sin(rows * probs[:, None]), sizes, order)
    return (rows * logits[:, :1]).sum()


FUNCTIONS = (by_mask, by_padded_mask, by_index, losses, sorted_chunks)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_gradients_are_the_eager_ones(function):
    check_compiled(function, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_for_any_number_of_tokens(function):
    check_compiled_once(function, operands)


def in_place(logits, indices, histogram):
    probs, written = routed(logits, topk_indices=indices)
    fused_topk_with_score_function(
        logits, K, False, None, None, None, "sigmoid", torch.zeros(E), "bytemap", None, histogram, (-1.0, 1.0)
    )
    return torch.sin(probs).sum() + written.sum()


def test_compiled_functions_write_in_place():
    torch._dynamo.reset()
    compiled = torch.compile(in_place, fullgraph=True)
    results = []
    for function in (in_place, compiled):
        indices, histogram = torch.full((T, K), -7), torch.ones(E, 5, dtype=torch.int32)
        leaf = operands()[1].requires_grad_()
        value = function(leaf, indices, histogram)
        value.backward()
        results.append((value.detach(), leaf.grad, indices, histogram))
    assert_close(*results)
    assert (results[0][2] >= 0).all() and results[0][3].sum() == E * 5 + T * E


@pytest.mark.parametrize("function", FUNCTIONS)
def test_grad_and_vmap_of_torch_func(function):
    check_grad_and_vmap(function, operands(), batched=1)


def test_vmap_writes_to_a_buffer_a_slice():
    logits = normal(3, T, E)
    indices = torch.full((3, T, K), -7, dtype=torch.int16)
    probs, _ = torch.func.vmap(lambda z, indices: routed(z, topk_indices=indices))(logits, indices)
    want = torch.full((3, T, K), -7, dtype=torch.int16)
    assert torch.equal(probs, routed(logits, topk_indices=want)[0])
    assert torch.equal(indices, want)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoints_and_kept_graphs_give_the_same_bits(function):
    want_value, want = gradients(function, operands())
    leaves = [a.requires_grad_() for a in operands()]
    value = checkpoint(function, *leaves, use_reentrant=False)
    value.backward()
    assert torch.equal(value, want_value)
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, want, strict=True))
    leaves = [a.requires_grad_() for a in operands()]
    value = function(*leaves)
    for _ in range(2):
        got = torch.autograd.grad(value, leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_derivative_is_an_error(function):
    check_second_derivative_raises(function, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_frozen_operands_change_no_other_gradient(function, frozen):
    check_frozen(function, operands, frozen)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_that_are_not_contiguous(function):
    check_strided(function, operands)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_meta_tensors_have_the_shapes_of_results(function):
    with torch.device("meta"):
        value = function(*[a.to("meta") for a in operands()])
    assert value.shape == () and value.is_meta

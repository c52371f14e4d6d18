"""Tools that process a module: torch.export for any number of tokens, summaries by forward hooks, copies, pickles."""

import copy
import pickle

import pytest
import torch
from torch.export import Dim

import anabranch.torch as ab

D, F, E, K = 8, 6, 16, 2
#: Options of layers that together cover all variants of the program.
LAYERS = {
    "losses": dict(aux_loss_coeff=0.1, z_loss_coeff=0.01, align_size=16, num_groups=2, group_topk=1),
    "biases": dict(
        score_function="sigmoid", use_expert_bias=True, use_bias=True, use_gate_bias=True, interleaved=True,
        shared_features=5, shared_gate=True, z_loss_coeff=0.01,
    ),
    "quantile": dict(score_function="sigmoid", balance="quantile", gated=False, activation="relu2", aux_loss_coeff=0.1),
}  # fmt: skip


def make_layer(name, **options):
    torch.manual_seed(0)
    return ab.MoE(D, F, num_experts=E, topk=K, **LAYERS[name], **options)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def tensors(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_same(got, want):
    for one, other in zip(tensors(got), tensors(want), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def check_export(module, arguments, others, dynamic, strict):
    """A program exported for some arguments computes the module's results for others."""
    exported = torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=strict).module()
    assert_same(exported(*others), module(*others))


#: Without tracing by Dynamo, torch.export loses symbols in the shapes of fake tensors.
LOSES_SYMBOLS = pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="torch 2.9 exports few dynamic shapes non-strictly"
)


@pytest.mark.parametrize("strict", [pytest.param(False, marks=LOSES_SYMBOLS), True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_exported_for_any_number_of_tokens(name, strict):
    layer = make_layer(name).eval()
    dynamic = ({0: Dim("B", min=2, max=2**20), 1: Dim("S", min=2, max=2**10)},)
    check_export(layer, (normal(2, 3, D),), (normal(5, 7, D),), dynamic, strict)


class Pieces(torch.nn.Module):
    """Operations with numbers of tokens or rows as arguments, which follow from the shape of x."""

    def forward(self, x, gate, w_in, w_out, experts):
        T = x.shape[0]
        routing = ab.route(x @ gate, K)
        plan = ab.plan(routing.experts, E, num_rows=T * K)
        y = ab.expert_ffn(ab.dispatch(x, plan), w_in, w_out, plan.group_sizes)
        losses = (
            ab.load_balance_loss(routing.score_sum, routing.tokens_per_expert, K, 0.1, T),
            ab.z_loss(routing.lse, 0.1),
            ab.z_loss(routing.lse, 0.1, num_tokens=T),
        )
        padded = ab.plan(experts, E, align_size=8, num_destinations=2).slot_of_row
        probs, routing_map = ab.fused_topk_with_score_function(
            x @ gate, K, False, None, None, None, score_function="softmax", expert_bias=None
        )
        rows, row_id_map = ab.moe_permute(x, routing_map, num_out_tokens=T * K)
        again = ab.moe_unpermute(rows, row_id_map, merging_probs=probs, restore_shape=x.shape)
        dense_loss = ab.fused_moe_aux_loss(probs, routing_map.sum(0), T, E, K, 0.1)
        by_index, _ = ab.moe_permute(x, experts, T * K, map_type="index")
        chunks = torch.tensor([1, 0]), torch.tensor([1, 0])
        output = ab.combine(y, plan, routing.weights)
        return output, losses, padded, again, dense_loss, by_index, ab.moe_sort_chunks_by_index(x, *chunks)


@pytest.mark.parametrize("strict", [False, True])
def test_operations_are_exported_for_any_number_of_tokens(strict):
    T, weights = {0: Dim("T", min=2, max=2**20)}, (normal(D, E), normal(E, D, 2, F), normal(E, F, D))
    arguments, others = (
        (normal(n, D), *weights, torch.arange(n * K, dtype=torch.int32).reshape(n, K) % E) for n in (3, 11)
    )
    check_export(Pieces(), arguments, others, (T, None, None, None, T), strict)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_summarised_and_copied(name):
    layer, x, seen = make_layer(name), normal(3, 4, D), []
    parents = torch.nn.Sequential(layer)
    hooks = [
        module.register_forward_hook(lambda module, _, output: seen.append((module, tensors(output)[0].shape)))
        for module in parents.modules()
    ]
    want = parents(x)
    assert (layer, x.shape) in seen and (parents, x.shape) in seen
    assert f"num_experts={E}" in repr(parents)
    for hook in hooks:
        hook.remove()
    counts = {n: p.numel() for n, p in layer.named_parameters()}
    assert sum(p.numel() for m in layer.modules() for p in m.parameters(recurse=False)) == sum(counts.values())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert {n: p.numel() for n, p in other.named_parameters()} == counts
        assert_same(other(x), want)
        with torch.no_grad():
            next(other.parameters()).zero_()
    assert_same(layer(x), want)

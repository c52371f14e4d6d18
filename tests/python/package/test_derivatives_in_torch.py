"""Unsupported derivatives in torch raise, for each function and by each operand; none is silently zero."""

import inspect

import pytest
import torch

import anabranch.torch as ab
from torch_transforms import assert_close, gradients, normal

pytestmark = pytest.mark.usefixtures("device")

T, E, K, D, F = 12, 4, 2, 8, 6

LAYER = ab.MoE(D, F, E, topk=K, device="meta")


def experts(like):
    # A compiled program does not always use torch's default device.
    return torch.arange(T * K, device=like.device).reshape(T, K) % E


def sizes(like):
    return torch.tensor([3, 0, 7, 2], device=like.device)


def order(like):
    return torch.tensor([2, 0, 3, 1], device=like.device)


def routing_map(like):
    return torch.zeros(T, E, dtype=torch.bool, device=like.device).scatter(1, experts(like), True)


def with_biases(x, gate, gate_bias, w_in, w_out):
    result = ab.moe(
        x,
        gate,
        w_in,
        w_out,
        topk=K,
        score_function="sigmoid",
        gate_bias=gate_bias,
        aux_loss_coeff=0.1,
        z_loss_coeff=0.1,
    )
    return result.output, result.weights, result.aux_loss, result.z_loss


def module(x, down_proj):
    fixed = {
        name: torch.linspace(-1, 1, p.numel(), device=x.device).reshape(p.shape) for name, p in LAYER.named_parameters()
    }
    return torch.func.functional_call(LAYER, fixed | {"down_proj": down_proj}, (x,)).output


def unpermuted(rows, probs):
    _, row_id_map = ab.moe_permute(torch.zeros(T, D, device=rows.device), routing_map(rows), T * K)
    return ab.moe_unpermute(rows, row_id_map, probs, restore_shape=(T, D))


#: For each function: a call, and the shapes of the differentiated operands.
CASES = {
    "moe": (lambda *a: ab.moe(*a, topk=K).output, [(T, D), (D, E), (E, D, 2, F), (E, F, D)]),
    "moe with losses": (with_biases, [(T, D), (D, E), (E,), (E, D, 2, F), (E, F, D)]),
    "MoE": (module, [(T, D), (E, D, F)]),
    "routed_experts": (
        lambda x, *a: ab.routed_experts(x, experts(x), *a).output,
        [(T, D), (T, K), (E, D, 2, F), (E, F, D)],
    ),
    "expert_ffn": (
        lambda rows, w_in, w_out, weights: ab.expert_ffn(rows, w_in, w_out, sizes(rows), weights=weights),
        [(T, D), (E, D, 2, F), (E, F, D), (T,)],
    ),
    "grouped_matmul": (lambda x, w: ab.grouped_matmul(x, w, sizes(x)), [(T, D), (E, D, F)]),
    "shared_expert": (lambda x, *a: ab.shared_expert(x, *a[:2], w_gate=a[2]), [(T, D), (D, 2, F), (F, D), (D,)]),
    "route": (lambda logits: ab.route(logits, K)[0], [(T, E)]),
    "lse of route": (lambda logits: ab.route(logits, K).lse, [(T, E)]),
    "dispatch": (lambda x: ab.dispatch(x, ab.plan(experts(x), E)), [(T, D)]),
    "combine": (lambda rows, w: ab.combine(rows, ab.plan(experts(rows), E), w), [(T * K, D), (T, K)]),
    "fused_topk_with_score_function": (
        lambda logits: ab.fused_topk_with_score_function(logits, K, False, None, None, 2.0, "sigmoid", None)[0],
        [(T, E)],
    ),
    "fused_compute_score_for_moe_aux_loss": (
        lambda logits: ab.fused_compute_score_for_moe_aux_loss(logits, K, "softmax")[1],
        [(T, E)],
    ),
    "fused_moe_aux_loss": (lambda probs: ab.fused_moe_aux_loss(probs, sizes(probs), T, E, K, 0.1), [(T, E)]),
    "moe_permute": (lambda x: ab.moe_permute(x, routing_map(x), T * K)[0], [(T, D)]),
    "moe_permute_with_probs": (
        lambda x, probs: ab.moe_permute_with_probs(x, probs, routing_map(x), T * K)[:2],
        [(T, D), (T, E)],
    ),
    "moe_unpermute": (unpermuted, [(T * K, D), (T, E)]),
    "moe_sort_chunks_by_index": (lambda x: ab.moe_sort_chunks_by_index(x, sizes(x), order(x)), [(T, D)]),
    "moe_sort_chunks_by_index_with_probs": (
        lambda x, probs: ab.moe_sort_chunks_by_index_with_probs(x, probs, sizes(x), order(x))[:2],
        [(T, D), (T,)],
    ),
}
#: Functions that are linear in all differentiated operands: their gradient depends on the cotangent alone.
LINEAR = {name for name in CASES if name.startswith(("dispatch", "moe_permute", "moe_sort", "fused_moe_aux_loss"))}


def leaves_of(name):
    return [normal(*shape, seed=i, scale=0.5) for i, shape in enumerate(CASES[name][1])]


def outputs(name, leaves):
    found = CASES[name][0](*leaves)
    return (found,) if isinstance(found, torch.Tensor) else found


def curved(name):
    """A loss that is linear in no result."""
    return lambda *leaves: sum(torch.sin(o).sum() for o in outputs(name, leaves))


def straight(name):
    """A loss whose cotangents are constants."""
    return lambda *leaves: sum((o * normal(*o.shape, seed=9)).sum() for o in outputs(name, leaves))


def places(name):
    return tuple(range(len(CASES[name][1])))


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_of_a_gradient_is_an_error(name):
    def norm(*leaves):
        return sum(g.square().sum() for g in torch.func.grad(curved(name), argnums=places(name))(*leaves))

    with pytest.raises(RuntimeError, match="double backward is unsupported"):
        torch.func.grad(norm, argnums=places(name))(*leaves_of(name))


@pytest.mark.parametrize("name", CASES)
def test_create_graph_returns_gradients_with_a_graph(name):
    """Tests all operands, and each operand with the others frozen; the cotangent may be a constant."""
    for trained in [places(name), *((i,) for i in places(name))]:
        leaves = [leaf.requires_grad_(i in trained) for i, leaf in enumerate(leaves_of(name))]
        wanted = [leaves[i] for i in trained]
        found = torch.autograd.grad(straight(name)(*leaves), wanted, create_graph=True)
        if name in LINEAR:
            assert not any(g.requires_grad for g in found)
            found = torch.autograd.grad(curved(name)(*leaves), wanted, create_graph=True)
        assert all(g.requires_grad for g in found) or len(trained) == 1
        for gradient in found:
            if gradient.requires_grad:
                with pytest.raises(RuntimeError, match="double backward is unsupported"):
                    torch.autograd.grad(gradient.square().sum(), wanted, retain_graph=True)
        assert_close(
            [g.detach() for g in found],
            list(torch.autograd.grad((straight, curved)[name in LINEAR](name)(*leaves), wanted)),
        )


#: Functions without a rule of ours: their results have no gradient, or they are plain torch.
OTHERS = {
    *("clip_grad_norm_", "ddp_ignore_experts", "plan", "quantile_bias", "quantize_experts"),
    *("load_balance_loss", "z_loss", "add_lora", "init_lora", "join_lora", "merge_lora"),
    *("pack_experts", "pack_fp8", "pack_mxfp4", "unpack"),
}


def test_every_public_function_is_here():
    public = {name for name in ab.__all__ if inspect.isfunction(getattr(ab, name))}
    # The padded function is moe_permute_with_probs with other rows.
    assert public == (OTHERS | {name for name in CASES if name in public} | {"moe_permute_and_pad_with_probs"})


def dual(function, leaves):
    with torch.autograd.forward_ad.dual_level():
        return function(*(torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf)) for leaf in leaves))


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_raises_our_error(name):
    leaves, loss, func = leaves_of(name), curved(name), torch.func
    value, vjp = func.vjp(loss, *leaves)
    ones = (torch.ones_like(value),)
    for forward in (
        lambda: func.jvp(loss, tuple(leaves), tuple(leaves)),
        lambda: func.jvp(lambda d: vjp(d)[0], ones, ones),
        lambda: func.jacfwd(loss)(*leaves),
        lambda: func.linearize(loss, *leaves),
        lambda: func.hessian(loss)(*leaves),
        lambda: dual(loss, leaves),
    ):
        with pytest.raises(NotImplementedError, match=r"got a forward-mode derivative|got a tangent"):
            forward()


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="this torch raises when it compiles torch.func.grad")
def test_torch_compile_around_torch_func_is_the_eager_gradient():
    """One program contains all functions, because it is compiled only once."""

    def found(leaves):
        return {n: torch.func.grad(curved(n), argnums=places(n))(*leaves[n]) for n in CASES}

    torch._dynamo.reset()
    leaves = {n: leaves_of(n) for n in CASES}
    got = torch.compile(found, fullgraph=True, backend="aot_eager")(leaves)
    for name in CASES:
        want = gradients(curved(name), leaves[name])[1]
        assert all(g.abs().max() > 0 for g in want)
        assert_close(got[name], want)


@pytest.mark.parametrize("name", ["moe", "grouped_matmul"])
@pytest.mark.parametrize("outer", ["torch.func", "autograd"])
def test_a_gradient_of_a_gradient_is_an_error_when_compiled(name, outer):
    def norm(*leaves):
        return torch.func.grad(curved(name))(*leaves).square().sum()

    torch._dynamo.reset()
    leaves = leaves_of(name)
    function = torch.func.grad(norm) if outer == "torch.func" else norm
    if outer == "autograd":
        leaves[0].requires_grad_()
    # torch 2.11 hides the reason of some errors; 2.9 and 2.10 do not compile gradients of torch.func.
    with pytest.raises(Exception, match=r"got a request for its derivative|Observed exception|functorch transforms"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves).sum().backward()


def test_the_gates_gemm_raises_the_same_error():
    """Only torch 2.9 compiles to this operation. Tensors without data are enough to test its error."""
    a, b = (torch.ones(2, 2, dtype=torch.bfloat16, device="meta").requires_grad_() for _ in range(2))
    product = torch.ops.anabranch.mm_float32(a, b)
    assert product.requires_grad
    with pytest.raises(RuntimeError, match="got a request for its derivative"):
        product.sum().backward()

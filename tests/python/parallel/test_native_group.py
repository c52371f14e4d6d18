"""The layer over the memory of peers in native operations: the bits of other transports, its calls, caches and errors.

Two ranks of a Gloo group run each case; exchange_on_cpu.py stands in for the exchanges.
"""

import contextlib
import functools

import exchange_on_cpu
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gloo_ranks
from anabranch.peer_exchange import ALL_BUFFERS
from anabranch.torch import Lora, MoE, moe
from anabranch.torch.binding import define, native
from anabranch.torch.layer import native_group

T, D, F, E, K, RANKS = 12, 16, 24, 4, 2, 2

pytestmark = [
    pytest.mark.skipif(native.native is None, reason=f"NO NATIVE OPERATIONS: {native.reason}"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo"),
    pytest.mark.skipif(not exchange_on_cpu.SUPPORTED, reason="STAND-INS FOR EXCHANGES NEED x86-64"),
]

CASES = {
    "plain": {},
    "bfloat16, losses": dict(dtype=torch.bfloat16, losses=True, aux_loss_coeff=0.3, z_loss_coeff=0.1),
    "a mask and forced experts": dict(
        token_mask=torch.arange(T) % 3 > 0,
        forced_experts=torch.stack([torch.arange(T) % E, torch.arange(T) % 2 - 1], 1),
    ),
    "quantile balancing": dict(
        score_function="sigmoid", expert_bias=torch.arange(E) / 9.0, qb_bins=7, qb_bin_bounds=(-1.0, 1.0)
    ),
    "adapters and biases": dict(
        dtype=torch.bfloat16, lora=True, lora_scale=(0.5, -2.0), weight_early=True, align_size=8, biases=True
    ),
    "FP8": dict(dtype=torch.bfloat16, widths=(128, 128), precision="fp8"),
    "frozen experts": dict(frozen=(2, 3)),
    "frozen router and x": dict(frozen=(0, 1)),
}


def operands(rank, dtype=torch.float32, widths=(D, F), tokens=T):
    """x of this rank, the gate, and this rank's experts."""
    D, F = widths
    common, own = (torch.Generator().manual_seed(seed) for seed in (7, 8 + rank))
    shapes = (tokens, D), (D, E), (E // RANKS, D, 2, F), (E // RANKS, F, D)
    draws = (own, common, own, own)
    return [torch.randn(*shape, generator=g).to(dtype) for shape, g in zip(shapes, draws, strict=True)]


def step(rank, transport, dtype=torch.float32, widths=(D, F), losses=False, lora=False, biases=False, frozen=(),
         tokens=T, **options):  # fmt: skip
    """Results and gradients of one step."""
    given = operands(rank, dtype, widths, tokens)
    generator = torch.Generator().manual_seed(20 + rank)
    local, (D, F) = E // RANKS, widths

    def random(*shape, kind=dtype):
        return torch.randn(shape, generator=generator).to(kind)

    if biases:
        given += [random(local, 2, F), random(local, D)]
        options |= dict(b_in=given[4], b_out=given[5])
    if lora:
        factors = (
            random(local, D, 3, kind=torch.float32),
            random(local, 3, 2, F),
            random(local, F, 2),
            random(local, 2, D),
        )
        given += factors
        options["lora"] = Lora(*factors)
    leaves = [a.requires_grad_() for i, a in enumerate(given) if i not in frozen]
    result = moe(*given[:4], topk=K, group=dist.group.WORLD, transport=transport, **options)
    outputs = [result.output, *([result.aux_loss, result.z_loss, result.weights] if losses else [])]
    torch.autograd.backward(outputs, [random(*o.shape, kind=o.dtype) for o in outputs])
    return [*(r for r in result if r is not None), *(leaf.grad for leaf in leaves)]


def assert_equal(got, want, name):
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), (name, i, a, b)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def natively(function, *arguments, **options):
    """(result of a function, whether native operations computed each of its layers)."""
    used, applies = [], native_group.applies

    def record(*given):
        used.append(applies(*given))
        return used[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_group, "applies", record)
        return function(*arguments, **options), used


def check_bits(rank):
    for name, options in CASES.items():
        want = step(rank, "ring", **options)
        exchange_on_cpu.log.clear()
        got, used = natively(step, rank, "p2p", **options)
        log = list(exchange_on_cpu.log)
        assert used == [True], name
        assert_equal(got, want, name)
        exchange_on_cpu.log.clear()
        with Mode():
            got, used = natively(step, rank, "p2p", **options)
        assert used == [False], name
        assert_equal(got, want, f"{name}, under a mode")
        if "lora" not in options:  # under a mode x is sent in the second half of the backward pass
            assert sorted(log) == sorted(exchange_on_cpu.log), name


def check_other_cases_use_other_passes(rank):
    for options in (dict(capacity_factor=0.7), dict(gate_bias=torch.arange(E) / 9.0)):
        want = step(rank, "ring", **options)
        got, used = natively(step, rank, "p2p", **options)
        assert used == [False]
        assert_equal(got, want, options)


def check_caches(rank):
    """Calls are prepared once for all numbers of tokens, and for each dtype."""
    define.forget_prepared()
    step(rank, "p2p")
    prepared = native.native.counts()[0]
    found = {tokens: step(rank, "p2p", tokens=tokens) for tokens in (5, 9)}
    assert native.native.counts()[0] == prepared
    step(rank, "p2p", dtype=torch.bfloat16)
    assert native.native.counts()[0] > prepared
    for tokens, got in found.items():
        assert_equal(got, step(rank, "ring", tokens=tokens), tokens)


def check_errors(rank):
    """The status of a call is raised as Python's exception. Nothing that a failed pass has begun is left."""
    given = [a.requires_grad_() for a in operands(rank)]

    def forward(transport="p2p"):
        return moe(*given, topk=K, group=dist.group.WORLD, transport=transport).output

    def backward(output):
        return torch.autograd.grad(output.square().sum(), given)

    want = forward("ring")
    want = [want, *backward(want)]

    def check(name, mode, function):
        arguments = [] if function is forward else [forward()]
        exchange_on_cpu.failures[name] = "exchange: rank 0 waited for rank 1"
        exchange_on_cpu.log.clear()
        with mode(), pytest.raises(RuntimeError, match=r"^exchange: rank 0 waited for rank 1$"):
            function(*arguments)
        exchange_on_cpu.failures.clear()
        # Calls that have started copies end them before their memory is freed.
        in_calls = name not in ("pointers", "ab_exchange_all_gather")
        assert (("exchange_release", ALL_BUFFERS, 0) in exchange_on_cpu.log) == in_calls
        assert not any(one.copying or one.held for one in exchange_on_cpu.exchanges.values())
        output = forward()
        assert_equal([output, *backward(output)], want, (name, mode, function))

    for mode in (contextlib.nullcontext, Mode):
        for name in ("exchange_all_gather", "grouped_matmul_combine", "exchange_sum"):
            check(f"ab_{name}", mode, forward)
            check(f"ab_{name}", mode, backward)
        check("pointers", mode, forward)
        check("pointers", mode, backward)
        check("ab_expert_ffn_forward", mode, forward)
        check("ab_expert_ffn_backward", mode, backward)
        check("ab_exchange_all_to_all", mode, backward)


def module_step(transport, rank, run, mode=contextlib.nullcontext):
    """Results and gradients of a layer in two micro-batches, whose forward passes come before the backward passes.

    mode: a context around the backward passes.
    """
    torch.manual_seed(3)
    layer = MoE(D, F, E, K, use_bias=True, group=dist.group.WORLD, transport=transport)
    batches = [operands(rank, tokens=tokens)[0].requires_grad_() for tokens in (T, 7)]
    outputs = [run(lambda x: layer(x).output, x) for x in batches]
    for output in outputs:
        loss = output.square().sum()
        with mode():
            loss.backward()
    return [*outputs, *(x.grad for x in batches), *(p.grad for p in layer.parameters())]


def call(function, x):
    return function(x)


def check_a_module(rank):
    want = module_step("ring", rank, call)
    for run, mode in (
        (call, contextlib.nullcontext),
        (functools.partial(checkpoint, use_reentrant=False), contextlib.nullcontext),
        (call, Mode),
    ):
        got, used = natively(module_step, "p2p", rank, run, mode)
        assert used and all(used)
        assert_equal(got, want, (run, mode))


def check_inference(rank):
    x, gate, w_in, w_out = operands(rank)
    want = moe(x, gate, w_in, w_out, topk=K, group=dist.group.WORLD, transport="ring").output
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            got = moe(x.clone(), gate, w_in, w_out, topk=K, group=dist.group.WORLD, transport="p2p").output
        assert torch.equal(got, want)


def check_rank(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=rank, world_size=RANKS)
    with pytest.MonkeyPatch.context() as patch, exchange_on_cpu.stand_ins(patch):
        for check in (
            check_inference, check_bits, check_other_cases_use_other_passes, check_caches, check_errors, check_a_module,
        ):  # fmt: skip
            check(rank)
    gloo_ranks.leave()


def test_ranks_have_the_bits_of_ring(tmp_path):
    gloo_ranks.start(check_rank, RANKS, str(tmp_path / "store"))

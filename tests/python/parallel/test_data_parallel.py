"""Two processes that share a batch have the losses, gradients and router state of one: DDP and FSDP over Gloo."""

import functools

import pytest
import torch
import torch.distributed as dist
from one_batch import (
    D,
    E,
    batch,
    check_gradients,
    check_results,
    loss_of,
    make_layer,
    one_process,
    rank_batches,
    run_in_processes,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from anabranch.torch import MoE

RANKS = 2

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


def check_updates(layer, one):
    """The counts of both ranks move the bias, and later set it."""
    counts = layer.tokens_per_expert.clone()
    layer.update_expert_bias(0.1, dist.group.WORLD)
    dist.all_reduce(counts)
    assert torch.equal(counts, one.tokens_per_expert)
    assert not layer.tokens_per_expert.any() and layer.qb_histogram.any()
    before = one.expert_bias.clone()
    one.update_expert_bias(0.1)
    assert torch.equal(layer.expert_bias, one.expert_bias) and not torch.equal(before, one.expert_bias)
    layer.update_quantile_bias(dist.group.WORLD)
    one.update_quantile_bias()
    assert torch.equal(layer.expert_bias, one.expert_bias)


def check_ddp(rank):
    one, want = one_process(RANKS)
    layer = make_layer(loss_group=dist.group.WORLD)
    parallel = DistributedDataParallel(layer)
    (first, real), (second, really) = rank_batches(rank, RANKS)
    with parallel.no_sync():
        results = [parallel(first, token_mask=real)]
        loss_of(results[0]).backward()
    results.append(parallel(second, token_mask=really))
    loss_of(results[1]).backward()
    check_results(results, rank, want)
    check_gradients(layer, one, lambda _, gradient: gradient)
    check_updates(layer, one)


def check_fsdp(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    one, want = one_process(RANKS)
    layer = fully_shard(make_layer(loss_group=dist.group.WORLD), mesh=mesh)
    results = [layer(part, token_mask=real) for part, real in rank_batches(rank, RANKS)]
    for result in results:
        loss_of(result).backward()
    check_results(results, rank, want)
    check_gradients(layer, one, lambda _, gradient: gradient.full_tensor())
    check_updates(layer, one)


def check_fsdp_of_mixed_precision(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer = fully_shard(make_layer(loss_group=dist.group.WORLD), mesh=mesh, mp_policy=policy)
    whole = make_layer().to(torch.bfloat16)
    x, mask = batch(RANKS)
    got, want = layer(x[0, rank], token_mask=mask[0, rank]), whole(x[0].to(torch.bfloat16), token_mask=mask[0])
    assert got.output.dtype == torch.bfloat16 and layer.expert_bias.dtype == torch.float32
    assert torch.equal(got.output, want.output[rank]) and torch.equal(got.experts, want.experts[rank])
    loss_of(got).backward()
    loss_of(want).backward()
    for parameter, expected in zip(layer.parameters(), whole.parameters(), strict=True):
        gradient = parameter.grad.full_tensor()
        error = (gradient - expected.grad.float()).norm() / expected.grad.float().norm()
        assert gradient.dtype == torch.float32 and error < 4 * 2.0**-8


def check_sharded_before_there_is_memory(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    layer = fully_shard(make_layer(device="meta", loss_group=dist.group.WORLD), mesh=mesh)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    for name, value in make_layer().state_dict().items():
        sharded = layer.state_dict()[name]
        assert torch.equal(sharded if name == "expert_bias" else sharded.full_tensor(), value), name


def check_a_group_without_losses(rank):
    with pytest.raises(ValueError, match="loss_group: got one without losses"):
        make_layer(loss_group=dist.group.WORLD, aux_loss_coeff=0.0, z_loss_coeff=0)


def check_compiled(rank):
    """The graph includes the sums over the ranks."""
    layer, again = make_layer(loss_group=dist.group.WORLD), make_layer(loss_group=dist.group.WORLD)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    ((x, mask), _) = rank_batches(rank, RANKS)
    got, want = compiled(x, token_mask=mask), layer(x, token_mask=mask)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    for result in (got, want):
        loss_of(result).backward()
    for parameter, expected in zip(again.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


class Model(nn.Module):
    """A layer after a linear map; with `saved`, inside an activation checkpoint."""

    def __init__(self, saved=False, **options):
        super().__init__()
        self.saved = saved
        torch.manual_seed(1)
        self.before = nn.Linear(D, D)
        self.moe = make_layer(**options)

    def forward(self, x, **given):
        x = x + self.before(x)
        return checkpoint(self.moe, x, use_reentrant=False, **given) if self.saved else self.moe(x, **given)


def fsdp1(module, **options):
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=cpu, **options)


def fsdp2(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))


def check_layer(rank, wrap):
    check_steps(rank, make_layer(), make_layer(loss_group=dist.group.WORLD), wrap)


def check_saved(rank, wrap):
    """An activation checkpoint around the layer, inside the wrapper."""
    check_steps(rank, Model(), Model(saved=True, loss_group=dist.group.WORLD), wrap)


def check_model(rank, wrap):
    """FSDP shards the layer separately; the first micro-batch is compiled, the second one runs eagerly.

    The compiled one is first, because torch cannot trace FSDP1's parameters while they have gradients.
    """
    torch._dynamo.reset()
    model = Model(loss_group=dist.group.WORLD)
    if wrap is not DistributedDataParallel:
        model.moe = wrap(model.moe)
    check_steps(rank, Model(), model, wrap, functools.partial(torch.compile, backend="aot_eager"))


def check_steps(rank, one, module, wrap, compiled=lambda wrapped: wrapped):
    one, want = one_process(RANKS, one)
    wrapped = wrap(module)
    calls = compiled(wrapped), wrapped
    results = []
    for call, (x, real) in zip(calls, rank_batches(rank, RANKS), strict=True):
        results.append(call(x, token_mask=real))
        loss_of(results[-1]).backward()
    check_results(results, rank, want)
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            check_gradients(wrapped, one, lambda _, gradient: gradient)
    else:
        check_gradients(module, one, lambda _, g: g.full_tensor() if hasattr(g, "full_tensor") else g)
    layer, own = (next(m for m in root.modules() if isinstance(m, MoE)) for root in (module, one))
    layer.update_expert_bias(0.1, dist.group.WORLD)
    own.update_expert_bias(0.1)
    assert torch.equal(layer.expert_bias, own.expert_bias)


def check_buffers_of_16_bits(rank):
    """FSDP1 casts buffers in place, without losing updates."""
    module = make_layer(loss_group=dist.group.WORLD)
    module.expert_bias.fill_(7.0)
    wrapped = fsdp1(module, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    ((x, mask), _) = rank_batches(rank, RANKS)
    for step in range(3):
        result = wrapped(x, token_mask=mask)
        assert module.expert_bias.dtype == (torch.float32 if step else torch.bfloat16)
        counts = module.tokens_per_expert.clone()
        dist.all_reduce(counts)
        before = module.expert_bias.float().clone()
        module.update_expert_bias(1e-3, dist.group.WORLD)
        moved = 1e-3 * torch.sign(counts.float().mean() - counts)
        torch.testing.assert_close(module.expert_bias, before + moved)
    assert (module.expert_bias != 7).any() and wrapped.state_dict()["expert_bias"].dtype == torch.float32
    assert torch.isfinite(result.output).all()


def check_buffers_that_are_rounded_again(rank):
    """FSDP1 rounds buffers after evaluation in full precision. This is refused after an update has restored the bias."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        module = make_layer(loss_group=dist.group.WORLD)
        policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        wrapped = fsdp1(module, mixed_precision=policy)
    ((x, mask), _) = rank_batches(rank, RANKS)
    for _ in range(2):  # nothing is lost before the first update
        wrapped.train()(x, token_mask=mask)
        assert module.expert_bias.dtype == torch.bfloat16
        wrapped.eval()(x, token_mask=mask)
        assert module.expert_bias.dtype == torch.float32
    wrapped.train()(x, token_mask=mask)
    module.update_expert_bias(1e-3, dist.group.WORLD)
    wrapped.eval()(x, token_mask=mask)
    with pytest.raises(ValueError, match=r"expert_bias: got bfloat16\[8\] again, since FSDP's buffer_dtype rounds it"):
        wrapped.train()(x, token_mask=mask)
    state = dict(expert_bias=torch.ones(E, dtype=torch.bfloat16))
    module.load_state_dict(state, strict=False, assign=True)  # restores it
    wrapped(x, token_mask=mask)


CHECKS = (
    check_ddp,
    check_fsdp,
    check_fsdp_of_mixed_precision,
    check_sharded_before_there_is_memory,
    check_a_group_without_losses,
    check_compiled,
    functools.partial(check_layer, wrap=fsdp1),
    *(
        functools.partial(check, wrap=wrap)
        for check in (check_saved, check_model)
        for wrap in (DistributedDataParallel, fsdp1, fsdp2)
    ),
    check_buffers_of_16_bits,
    check_buffers_that_are_rounded_again,
)


def test_two_processes_are_one(tmp_path):
    run_in_processes(RANKS, CHECKS, tmp_path)

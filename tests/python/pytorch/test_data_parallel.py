"""Two processes that share a batch are one process: DDP and FSDP over Gloo, losses, gradients and the router's state."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from anabranch.torch import MoE

RANKS, D, F, E, K = 2, 12, 20, 6, 2
OPTIONS = dict(
    score_function="sigmoid",
    use_bias=True,
    use_gate_bias=True,
    use_expert_bias=True,
    balance="quantile",
    qb_bins=50,
    shared_features=8,
    shared_gate=True,
    aux_loss_coeff=0.3,
    z_loss_coeff=0.2,
)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


def batch():
    """Two micro-batches of RANKS sequences each, and which of their tokens are no padding: not the same everywhere."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((2, RANKS, 9, D)), dtype=torch.float32)
    return x, torch.tensor(rng.random((2, RANKS, 9)) < [[[0.9], [0.5]]])


def made(**options):
    torch.manual_seed(0)
    return MoE(D, F, E, K, **OPTIONS | options)


def loss_of(result):
    """Of the output what a mean over ranks of equal size adds up; the layer's losses are those of all tokens."""
    return result.output.square().mean() + result.aux_loss + result.z_loss


def one_process():
    """Losses, outputs and gradients of two accumulated micro-batches, and the layer."""
    layer, (x, mask) = made(), batch()
    results = [layer(part, token_mask=real) for part, real in zip(x, mask, strict=True)]
    for result in results:
        loss_of(result).backward()
    return layer, results


def check_results(results, rank, want):
    for result, whole in zip(results, want, strict=True):
        torch.testing.assert_close(result.output, whole.output[rank])
        for name in ("aux_loss", "z_loss"):
            torch.testing.assert_close(getattr(result, name), getattr(whole, name), rtol=1e-6, atol=0)


def check_updates(layer, one):
    """The bias is moved, and then set, by the counts of both ranks."""
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


def of_this_rank(rank):
    return [(part[rank], real[rank]) for part, real in zip(*batch(), strict=True)]


def check_ddp(rank):
    one, want = one_process()
    layer = made(loss_group=dist.group.WORLD)
    parallel = DistributedDataParallel(layer)
    (first, real), (second, really) = of_this_rank(rank)
    with parallel.no_sync():
        results = [parallel(first, token_mask=real)]
        loss_of(results[0]).backward()
    results.append(parallel(second, token_mask=really))
    loss_of(results[1]).backward()
    check_results(results, rank, want)
    for (name, parameter), whole in zip(layer.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, whole.grad, msg=lambda text, name=name: f"{name}: {text}")
    check_updates(layer, one)


def check_fsdp(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    one, want = one_process()
    layer = fully_shard(made(loss_group=dist.group.WORLD), mesh=mesh)
    results = [layer(part, token_mask=real) for part, real in of_this_rank(rank)]
    for result in results:
        loss_of(result).backward()
    check_results(results, rank, want)
    for (name, parameter), whole in zip(layer.named_parameters(), one.parameters(), strict=True):
        gradient = parameter.grad.full_tensor()
        torch.testing.assert_close(gradient, whole.grad, msg=lambda text, name=name: f"{name}: {text}")
    check_updates(layer, one)


def check_fsdp_of_mixed_precision(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer = fully_shard(made(loss_group=dist.group.WORLD), mesh=mesh, mp_policy=policy)
    whole = made().to(torch.bfloat16)
    x, mask = batch()
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
    layer = fully_shard(made(device="meta", loss_group=dist.group.WORLD), mesh=mesh)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    whole = made()
    whole.load_state_dict({name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in layer.state_dict().items()})
    assert abs(float(whole.gate_up_proj.std()) * D**0.5 - 1) < 0.1 and not whole.expert_bias.any()
    x = batch()[0][0, rank]
    torch.testing.assert_close(layer(x).output, whole(x).output)


def check_a_group_without_losses(rank):
    with pytest.raises(ValueError, match="loss_group: got one without losses"):
        made(loss_group=dist.group.WORLD, aux_loss_coeff=0.0, z_loss_coeff=0)


def check_compiled(rank):
    """Sums over the ranks are part of the graph."""
    layer, again = made(loss_group=dist.group.WORLD), made(loss_group=dist.group.WORLD)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    ((x, mask), _) = of_this_rank(rank)
    got, want = compiled(x, token_mask=mask), layer(x, token_mask=mask)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    for result in (got, want):
        loss_of(result).backward()
    for parameter, expected in zip(again.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


CHECKS = (
    check_ddp,
    check_fsdp,
    check_fsdp_of_mixed_precision,
    check_sharded_before_there_is_memory,
    check_a_group_without_losses,
    check_compiled,
)


def run(rank, rendezvous):
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*returned a view tensor")  # FSDP's, of outputs
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    for check in CHECKS:
        check(rank)
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    torch.multiprocessing.spawn(run, (f"file://{tmp_path / 'rendezvous'}",), nprocs=RANKS)

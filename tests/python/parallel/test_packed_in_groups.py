"""Packed experts in a group of two Gloo processes have the results of one process."""

import pytest
import torch
import torch.distributed as dist
from one_batch import run_in_processes

from anabranch.torch import Fp8Blocks, MoE, Mxfp4, add_lora, moe, pack_experts, routed_experts

RANKS, T, E, K, D, F = 2, 8, 4, 2, 128, 128
PFD = dict(w_in_layout="pfd", w_out_layout="df")

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(kind, own=slice(None)):
    from anabranch.torch import pack_fp8, pack_mxfp4

    pack = pack_mxfp4 if kind == "mxfp4" else pack_fp8
    packed = pack(normal(E, 2, F, D) / 11), pack(normal(E, D, F, seed=1) / 11)
    return [type(w)(*(part[own] for part in w)) for w in packed]


def loss_of(function, x, gate, *packed, rank=None, **options):
    """The sum of this rank's outputs; for one process that of one rank's tokens."""
    if function is moe:
        return moe(x, gate, *packed, topk=K, **PFD, **options).output
    experts = torch.arange(RANKS * T * K, dtype=torch.int32).view(RANKS * T, K) % E
    given = normal(RANKS * T, K, seed=4)
    own = slice(None) if rank is None else slice(rank * T, (rank + 1) * T)
    return routed_experts(x, experts[own], given[own], *packed, **PFD, **options).output


def check_functions(rank):
    mine, tokens = slice(rank * E // RANKS, (rank + 1) * E // RANKS), slice(rank * T, (rank + 1) * T)
    for kind in ("mxfp4", "fp8_blocks"):
        for function in (moe, routed_experts):
            for transport in ("ring", "all_to_all"):
                x, gate = normal(RANKS * T, D, seed=2).requires_grad_(), normal(D, E, seed=3)
                whole = loss_of(function, x, gate, *weights(kind))
                (d_x,) = torch.autograd.grad(whole.square().sum(), x)
                own = x.detach()[tokens].requires_grad_()
                options = dict(group=dist.group.WORLD, transport=transport, rank=rank)
                if function is moe:
                    del options["rank"]
                output = loss_of(function, own, gate, *weights(kind, mine), **options)
                torch.testing.assert_close(output, whole[tokens], rtol=1e-5, atol=1e-5)
                (d_own,) = torch.autograd.grad(output.square().sum(), own)
                torch.testing.assert_close(d_own, d_x[tokens], rtol=1e-5, atol=1e-4)


def check_layer(rank):
    tokens = slice(rank * T, (rank + 1) * T)
    x = normal(RANKS * T, D, seed=2)
    for packed in ("mxfp4", "fp8_blocks"):
        layers = []
        for group in (None, dist.group.WORLD):
            torch.manual_seed(0)
            layer = add_lora(pack_experts(MoE(D, F, E, K, group=group), packed), 2)
            with torch.no_grad():
                for name in ("lora_b_in", "lora_b_out"):
                    factor = getattr(layer, name)
                    whole = normal(E, *factor.shape[1:], seed=6)
                    factor.copy_(whole if group is None else whole[rank * E // RANKS : (rank + 1) * E // RANKS])
            layers.append(layer)
        one, mine = layers
        kind = Mxfp4 if packed == "mxfp4" else Fp8Blocks
        part = getattr(mine, f"down_proj_{kind._fields[0]}")
        assert part.shape[0] == E // RANKS
        output, want = mine(x[tokens]).output, one(x).output
        torch.testing.assert_close(output, want[tokens], rtol=1e-5, atol=1e-5)
        # Gradients of the experts are those of the mean of the ranks' losses.
        output.square().sum().backward()
        (want.square().sum() / RANKS).backward()
        own = slice(rank * E // RANKS, (rank + 1) * E // RANKS)
        torch.testing.assert_close(mine.lora_a_in.grad, one.lora_a_in.grad[own], rtol=1e-4, atol=1e-4)


def test_two_processes(tmp_path):
    run_in_processes(RANKS, [check_functions, check_layer], tmp_path)

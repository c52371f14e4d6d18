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


def output_of(function, x, gate, *packed, rank=None, **options):
    """The outputs for this rank's tokens x; without a rank x is that of all ranks."""
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
                cotangent = normal(RANKS * T, D, seed=7)
                whole = output_of(function, x, gate, *weights(kind))
                (d_x,) = torch.autograd.grad(whole, x, cotangent)
                own = x.detach()[tokens].requires_grad_()
                options = dict(group=dist.group.WORLD, transport=transport, rank=rank)
                if function is moe:
                    del options["rank"]
                output = output_of(function, own, gate, *weights(kind, mine), **options)
                torch.testing.assert_close(output, whole[tokens], rtol=1e-5, atol=1e-5)
                (d_own,) = torch.autograd.grad(output, own, cotangent[tokens])
                torch.testing.assert_close(d_own, d_x[tokens], rtol=1e-5, atol=1e-4)


def check_layer(rank):
    """The output, and the gradients of x, the gate, the biases and all factors, for random cotangents."""
    tokens, own = slice(rank * T, (rank + 1) * T), slice(rank * E // RANKS, (rank + 1) * E // RANKS)
    cotangent = normal(RANKS * T, D, seed=7)
    for packed in ("mxfp4", "fp8_blocks"):
        layers = []
        for group in (None, dist.group.WORLD):
            torch.manual_seed(0)
            layer = add_lora(pack_experts(MoE(D, F, E, K, use_bias=True, group=group), packed), 2).requires_grad_()
            with torch.no_grad():
                for seed, name in enumerate(("lora_b_in", "lora_b_out", "gate_up_proj_bias", "down_proj_bias")):
                    parameter = getattr(layer, name)
                    whole = normal(E, *parameter.shape[1:], seed=seed)
                    parameter.copy_(whole if group is None else whole[own])
            layers.append(layer)
        one, mine = layers
        kind = Mxfp4 if packed == "mxfp4" else Fp8Blocks
        assert getattr(mine, f"down_proj_{kind._fields[0]}").shape[0] == E // RANKS
        x = normal(RANKS * T, D, seed=2).requires_grad_()
        x_own = x.detach()[tokens].requires_grad_()
        output, want = mine(x_own).output, one(x).output
        torch.testing.assert_close(output, want[tokens], rtol=1e-5, atol=1e-5)
        # Gradients of the experts are those of the mean of the ranks' losses.
        output.backward(cotangent[tokens])
        want.backward(cotangent / RANKS)
        torch.testing.assert_close(x_own.grad, RANKS * x.grad[tokens], rtol=1e-4, atol=1e-4)
        dist.all_reduce(mine.gate.weight.grad)
        names = [name for name, parameter in mine.named_parameters() if parameter.grad is not None]
        assert len(names) == 7
        for name in names:
            got, whole = mine.get_parameter(name).grad, one.get_parameter(name).grad
            want_own = RANKS * whole if name == "gate.weight" else whole[own]
            torch.testing.assert_close(got, want_own, rtol=1e-4, atol=1e-4)
            assert got.abs().max() > 0, name


def test_two_processes(tmp_path):
    run_in_processes(RANKS, [check_functions, check_layer], tmp_path)

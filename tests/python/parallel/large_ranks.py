"""Ranks that compare the transports "ring" and "p2p" bit by bit, with tokens that are large enough for all overlaps.

    python large_ranks.py FOLDER RANK RANKS STEPS

The ranks first run each of CASES, eagerly and in a CUDA graph, then STEPS steps of small layers with random routing, in
which some ranks have no tokens or no arriving tokens, and one rank is late now and then.
"""

import sys
import time

import torch
import torch.distributed as dist

from anabranch.torch import Lora, Replay, moe, pack_fp8, pack_mxfp4

T, D, F, E, K = 8320, 1024, 256, 32, 4
CASES = {
    "bfloat16": {},
    "layouts of checkpoints": {"w_in_layout": "pfd", "w_out_layout": "df"},
    "interleaved": {"w_in_layout": "dfp"},
    "aligned, early weights": {"align_size": 128, "weight_early": True},
    "capacity": {"capacity_factor": 0.6, "skew": 2.0},
    "experts of one rank": {"forced": True},
    "fp8": {"precision": "fp8"},
    "adapters": {"lora_scale": 0.5},
    "float32": {"dtype": torch.float32},
    "biases": {"biases": True},
    "MXFP4": {"pack": pack_mxfp4, "w_in_layout": "pfd", "w_out_layout": "df", "lora_scale": 0.5},
    "FP8 blocks": {"pack": pack_fp8, "w_in_layout": "pfd", "w_out_layout": "df", "precision": "fp8"},
    "replay": {"replay": True, "score_function": "sigmoid"},
}


def _random(generator, *shape, dtype=torch.bfloat16, scale=0.1):
    values = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)
    return (values * scale).to(dtype)


def _layer(options, rank, ranks, generator):
    """A function of a transport that returns the outputs and all gradients."""
    options = dict(options)
    dtype, skew = options.pop("dtype", torch.bfloat16), options.pop("skew", 0.0)
    axes = {"e": E // ranks, "d": D, "p": 2, "f": F}

    def of(*shape):
        return _random(generator, *shape, dtype=dtype)

    shapes = [[axes[a] for a in "e" + options.get(name, default)] for name, default in _LAYOUTS]
    x, gate = of(T, D), _random(torch.Generator("cuda").manual_seed(1), D, E, dtype=dtype)
    gate[:, 0] += skew
    weights, leaves = [of(*shape) for shape in shapes], [x, gate]
    arguments = {"topk": K, "group": dist.group.WORLD}
    if pack := options.pop("pack", None):  # frozen weights
        weights = list(map(pack, weights))
    else:
        leaves += weights
    if options.pop("biases", False):
        biases = [of(E // ranks, 2, F), of(E // ranks, D)]
        leaves += biases
        arguments |= dict(zip(("b_in", "b_out"), biases, strict=True))
    if "lora_scale" in options:
        factors = [of(E // ranks, *shape) for shape in ((D, 16), (16, 2, F), (F, 16), (16, D))]
        leaves += factors
        arguments["lora"] = Lora(*factors)
    if options.pop("forced", False):
        arguments["forced_experts"] = torch.randint(0, E // ranks, (T, K), generator=generator, device="cuda")
    if options.pop("replay", False):
        experts = torch.randint(0, E, (T, K), generator=generator, device="cuda", dtype=torch.int32)
        recorded = torch.rand(T, K, generator=generator, device="cuda"), torch.arange(T, device="cuda") % 4 < 2
        arguments["replay"] = Replay(experts, *recorded)
    arguments |= options
    cotangent = of(T, D)
    for leaf in leaves:
        leaf.requires_grad_()

    def run(transport):
        output = moe(x, gate, *weights, transport=transport, **arguments).output
        return output.detach(), *torch.autograd.grad(output, leaves, cotangent, allow_unused=True)

    return run


_LAYOUTS = (("w_in_layout", "dpf"), ("w_out_layout", "fd"))


def _captured(run, transport):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = run(transport)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return found


def _expect_same(what, got, want):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if (g is None) != (w is None) or (g is not None and not torch.equal(g, w)):
            raise AssertionError(f"{what}: result {i} of p2p differs from that of ring")
        if g is not None and not g.isfinite().all():
            raise AssertionError(f"{what}: result {i} is not finite")


def _step(step, rank, ranks, weights):
    """A small layer with random routing, on all transports."""
    generator = torch.Generator("cuda").manual_seed(1000 * step + rank)
    tokens = int(torch.randint(1, 300, (1,), generator=torch.Generator().manual_seed(step)))
    x = _random(generator, tokens, 64).requires_grad_()
    experts = torch.randint(-1, 16, (tokens, 2), generator=generator, device="cuda", dtype=torch.int32)
    kind = step % 5
    if kind == 1 and rank == step % ranks:
        experts.fill_(-1)  # this rank has no tokens for anybody
    if kind == 2:
        experts.clamp_(-1, 16 // ranks - 1)  # only rank 0 gets tokens
    if kind == 3 and step % 500 == 3 and rank == ranks - 1:
        time.sleep(1)
    found = []
    for transport in ("p2p", "ring"):
        output = moe(x, *weights, topk=2, forced_experts=experts, group=dist.group.WORLD, transport=transport).output
        found.append((output.detach(), *torch.autograd.grad(output, [x, *weights], torch.ones_like(output))))
    return found


def main():
    folder, rank, ranks, steps = sys.argv[1], *map(int, sys.argv[2:])
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    generator = torch.Generator("cuda").manual_seed(rank)
    for name, options in CASES.items():
        run = _layer(options, rank, ranks, generator)
        want = run("ring")
        _expect_same(name, run("p2p"), want)
        _expect_same(f"{name}, graph", _captured(run, "p2p"), want)
        torch.cuda.synchronize()
    weights = [_random(torch.Generator("cuda").manual_seed(7), 64, 16)]
    weights += [_random(generator, 16 // ranks, 64, 2, 32), _random(generator, 16 // ranks, 32, 64)]
    for leaf in weights:
        leaf.requires_grad_()
    for step in range(steps):
        got, want = _step(step, rank, ranks, weights)
        if step % 10 == 0 or step == steps - 1:
            _expect_same(f"step {step}", got, want)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Ranks that use the transport "p2p" as training programs do, until one of them ends.

    python robust_ranks.py FOLDER RANK RANKS

Each function of SITUATIONS compares "p2p" with "ring", bit by bit. The last rank then exits; the others expect an
error that names it.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from anabranch.torch import moe

T, D, F, E, K = 384, 256, 128, 8, 2
LIMIT = 20  # seconds that an exchange waits: longer than a rank needs to compile


def leaves_of(seed, experts, width=F):
    """x, gate, w_in and w_out of this rank."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def of(*shape):
        return (0.1 * torch.randn(*shape, generator=generator, device="cuda")).bfloat16().requires_grad_()

    return of(T, D), of(D, E), of(experts, D, 2, width), of(experts, width, D)


def both_passes(leaves, group, transport):
    """The output and all gradients, for a cotangent that depends on the output."""
    output = moe(*leaves, topk=K, group=group, transport=transport).output
    return output.detach(), *torch.autograd.grad(output, leaves, silu(output.detach()) - 0.1)


def expect_same(got, want):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if not torch.equal(g, w) or not g.isfinite().all():
            raise AssertionError(f"result {i} of p2p differs from that of ring, or is not finite")


def expect_bits_of_ring(group, seed=0):
    leaves = leaves_of(seed + dist.get_rank(), E // dist.get_world_size(group))
    expect_same(both_passes(leaves, group, "p2p"), both_passes(leaves, group, "ring"))


def one_rank_compiles_first(rank, ranks):
    leaves = leaves_of(rank, E // ranks)
    if rank == 0:
        compiled = torch.compile(lambda x: silu(x) * x + 1, dynamic=False)
        compiled(leaves[0].detach())
    if rank == 1:
        time.sleep(1)
    expect_bits_of_ring(dist.group.WORLD)


def a_group_is_made_again(rank, ranks):
    for attempt in range(3):
        group = dist.new_group(list(range(ranks)))
        expect_bits_of_ring(group, seed=attempt)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)


def two_groups_take_turns(rank, ranks):
    everyone = list(range(ranks))
    groups = [dist.new_group(everyone), dist.new_group(everyone)]
    layers = [leaves_of(10 * i + rank, E // ranks) for i in range(2)]
    want = [both_passes(leaves, groups[0], "ring") for leaves in layers]
    for _ in range(5):  # no wait in between
        got = [both_passes(leaves, group, "p2p") for leaves, group in zip(layers, groups, strict=True)]
    for g, w in zip(got, want, strict=True):
        expect_same(g, w)


def groups_of_some_ranks(rank, ranks):
    """Each rank is in a group of neighbours and in a group of every other rank."""
    if ranks < 4:
        return
    neighbours = [dist.new_group([i, i + 1]) for i in range(0, ranks, 2)]
    others = [dist.new_group(list(range(i, ranks, 2))) for i in range(2)]
    for _ in range(3):
        expect_bits_of_ring(neighbours[rank // 2])
        expect_bits_of_ring(others[rank % 2])
        expect_bits_of_ring(dist.group.WORLD)


def other_collectives_run(rank, ranks):
    leaves = leaves_of(rank, E // ranks)
    want = both_passes(leaves, dist.group.WORLD, "ring")
    for _ in range(5):
        large = torch.full((1 << 24,), float(rank), device="cuda")
        work = dist.all_reduce(large, async_op=True)
        got = both_passes(leaves, dist.group.WORLD, "p2p")
        work.wait()
        assert bool((large == ranks * (ranks - 1) / 2).all())
        expect_same(got, want)


def layers_in_flight(rank, ranks):
    """Four layers of different widths in one program, backward after all of them, repeated without a wait."""
    layers = [leaves_of(20 * i + rank, E // ranks, width) for i, width in enumerate((F, 2 * F, F, 64))]
    flat = [leaf for leaves in layers for leaf in leaves[1:]] + [layers[0][0]]

    def run(transport):
        x = layers[0][0]
        for _, *weights in layers:
            x = x + moe(x, *weights, topk=K, group=dist.group.WORLD, transport=transport).output
        return x.detach(), *torch.autograd.grad(x, flat, silu(x.detach()))

    want = run("ring")
    for got in [run("p2p") for _ in range(6)]:
        expect_same(got, want)


SITUATIONS = (
    one_rank_compiles_first,
    a_group_is_made_again,
    two_groups_take_turns,
    groups_of_some_ranks,
    other_collectives_run,
    layers_in_flight,
)


def a_rank_ends(rank, ranks):
    """In forward passes. Backward passes also sum the gate's gradient by NCCL, which has a time limit of its own."""
    leaves = leaves_of(rank, E // ranks)

    @torch.no_grad()
    def forward():
        moe(*leaves, topk=K, group=dist.group.WORLD, transport="p2p")
        torch.cuda.synchronize()

    forward()
    if rank == ranks - 1:
        os._exit(0)
    start = time.monotonic()
    while time.monotonic() - start < 2 * LIMIT + 10:  # two exchanges wait one after the other
        try:
            forward()
        except RuntimeError as error:
            assert f"rank {ranks - 1}" in str(error), error
            print(f"after {time.monotonic() - start:.1f} s: {error}")
            return
    raise AssertionError("no error after a rank ended")


def main():
    folder, rank, ranks = sys.argv[1], *map(int, sys.argv[2:])
    os.environ["ANABRANCH_EXCHANGE_TIMEOUT"] = str(LIMIT)
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    for situation in SITUATIONS:
        try:
            situation(rank, ranks)
            torch.cuda.synchronize()
        except Exception as error:
            raise AssertionError(f"{situation.__name__}, rank {rank}") from error
    dist.barrier()
    torch.cuda.synchronize()
    a_rank_ends(rank, ranks)
    sys.stdout.flush()
    os._exit(0)  # the process group would wait for the rank that ended


if __name__ == "__main__":
    main()

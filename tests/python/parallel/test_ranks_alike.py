"""Ranks that call a layer with different options raise on every rank; none loses tokens silently."""

import datetime
import os
import pathlib
import subprocess
import sys

RANKS, T, E, K, D, F = 2, 6, 4, 2, 128, 128

#: The second rank's different options, and the message that names the argument.
DIFFERENT = [
    ({"capacity_factor": 0.5}, "capacity_factor: got 0.0 on rank 0 and 0.5 on rank 1 of the group, expected one value"),
    ({"transport": "all_to_all"}, "transport: got ring on rank 0 and all_to_all on rank 1"),
    ({"align_size": 8}, "align_size: got 0 on rank 0 and 8 on rank 1"),
    ({"topk": 1}, "topk: got 2 on rank 0 and 1 on rank 1"),
    ({"tokens": 5}, "x (tokens): got 6 on rank 0 and 5 on rank 1"),
    ({"dtype": "bfloat16"}, "x (dtype): got torch.float32 on rank 0 and torch.bfloat16 on rank 1"),
    ({"width": 256}, "x (width): got 128 on rank 0 and 256 on rank 1"),
    ({"experts": 8}, "w_in (experts): got 2 on rank 0 and 4 on rank 1"),
    ({"precision": "fp8"}, "precision: got 0 on rank 0 and 2 on rank 1"),
    ({"precision": "fp8", "fp8_exchange": True}, "fp8_exchange: got 0 on rank 0 and 1 on rank 1"),
    ({"score_function": "sigmoid"}, "score_function: got softmax on rank 0 and sigmoid on rank 1"),
    ({"z_loss_coeff": 0.1}, "z_loss_coeff (used): got 0 on rank 0 and 1 on rank 1"),
    ({"weight_early": True}, "weight_early: got 0 on rank 0 and 1 on rank 1"),
    ({"activation": "gelu"}, "activation: got "),
]


def main(folder, rank):
    """One rank: every case of `DIFFERENT`, with valid calls before, between and after them."""
    import torch
    import torch.distributed as dist

    import gloo_ranks
    from anabranch.torch import moe
    from anabranch.torch.parallel import alike

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)

    def call(function=moe, *, tokens=T, dtype="float32", width=D, experts=E, **options):
        torch.manual_seed(rank)
        arrays = {
            "x": torch.randn(tokens, width, dtype=getattr(torch, dtype)),
            "gate": torch.randn(width, experts),
            "w_in": torch.randn(experts // RANKS, width, 2, F),
            "w_out": torch.randn(experts // RANKS, F, width),
        }
        return function(**arrays, **{"topk": K, "transport": "ring", "group": dist.group.WORLD} | options)

    def error_of(function):
        try:
            function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def check_error(found, message, kind=""):
        print(message if message in found and found.startswith(kind) else found)

    for number, (different, message) in enumerate(DIFFERENT):
        new_on_both = {"scaling_factor": 2.0 + number}
        check_error(
            error_of(lambda options=new_on_both | different if rank else new_on_both: call(**options)),
            message,
            "ValueError",
        )
    for capacity_factor in (1.5, 1.25):
        assert not call(capacity_factor=capacity_factor).output.isnan().any()
    times = alike._by_group[dist.group.WORLD].times
    found = call(capacity_factor=(1.5, 1.25)[rank])
    assert found.weights.isnan().all() and found.output.isnan().any()
    assert alike._by_group[dist.group.WORLD].times == times
    compiled = torch.compile(moe, fullgraph=True, backend="eager")
    assert (
        not call(compiled, capacity_factor=1.25).output.isnan().any()
        and alike._by_group[dist.group.WORLD].times == times
    )
    check_error(error_of(lambda: call(compiled, align_size=8 + rank)), "align_size: got 8 on rank 0 and 9 on rank 1")
    # Options that are new on one rank alone: it times out, and the others raise after it has left.
    alike._store(dist.group.WORLD).set_timeout(datetime.timedelta(seconds=2))
    found = error_of(lambda: call(**{"topk": 1, "scaling_factor": 0.5} if rank else {"capacity_factor": 1.25}))
    assert found.startswith("RuntimeError"), found
    if rank:
        check_error(found, "group: got new options on rank 1 (x (tokens) 6, transport ring, x (dtype) torch.float32, ")
    gloo_ranks.leave()


def test_differences_between_ranks_raise_on_every_rank(tmp_path):
    root = pathlib.Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
        for rank in range(RANKS)
    ]
    try:
        output = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, lines in enumerate(output):
        expected = [message for _, message in DIFFERENT] + ["align_size: got 8 on rank 0 and 9 on rank 1"]
        if rank == 1:
            expected += ["group: got new options on rank 1 (x (tokens) 6, transport ring, x (dtype) torch.float32, "]
        assert lines.splitlines() == expected


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

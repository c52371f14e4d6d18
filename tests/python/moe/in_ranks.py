"""What one rank of a process group does with its part of the cases that stand in a folder; see test_group.py."""

import json
import os
import pathlib
import sys

import numpy as np
import torch
import torch.distributed as dist

import in_torch
from anabranch.torch import moe, routed_experts

EXPERTS = ("w_in", "w_out", "b_in", "b_out")
TOKENS = ("x", "token_mask", "forced_experts", "experts", "weights", "d_output", "d_weights")


def part(name, array, rank, ranks):
    """A rank's part of an array of the whole: of tokens, of experts, or all of it."""
    if name not in (*TOKENS, *EXPERTS):
        return array
    return np.array_split(array, ranks)[rank]


def load(path):
    with np.load(path) as file:
        return {name: in_torch.from_bytes(array) for name, array in file.items()}


def run(case, arrays, rank, ranks, group):
    own = {name: part(name, array, rank, ranks) for name, array in arrays.items()}
    cotangents = {name.removeprefix("d_"): own.pop(name) for name in list(own) if name.startswith("d_")}
    options = case["options"] | {n: in_torch.tensor(own.pop(n)) for n in ("token_mask", "forced_experts") if n in own}
    options |= {"group": group, "transport": case["transport"], "capacity_factor": case["capacity_factor"]}
    function = moe if "gate" in own else routed_experts

    def layer(**given):
        if case["compiled"]:
            return torch.compile(function, fullgraph=True, backend="aot_eager")(**given, **options)
        return function(**given, **options)

    result, pull = in_torch.vjp(layer, own)
    found = {name: array for name, array in in_torch.arrays(result)._asdict().items() if array is not None}
    given = {name: cotangents[name] for name in found if name in cotangents}
    return found | {f"d_{name}": array for name, array in pull(given).items()}


def main(folder, rank, ranks, backend):
    folder, rank, ranks = pathlib.Path(folder), int(rank), int(ranks)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        in_torch.on(f"cuda:{rank}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    for path in sorted(folder.glob("*.json")):
        case = json.loads(path.read_text())
        found = run(case, load(path.with_suffix(".npz")), rank, ranks, dist.group.WORLD)
        np.savez(folder / f"{path.stem}.{rank}", **{name: in_torch.to_bytes(array) for name, array in found.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])

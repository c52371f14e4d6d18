"""Runs one rank's part of the cases in a folder; see test_group.py."""

import contextlib
import json
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gloo_ranks
import in_torch
import module_in_torch
from anabranch.lora import NAMES
from anabranch.torch import Replay, moe, routed_experts
from anabranch.torch.parallel import peers
from lora_cases import takes_factors

REPLAY = tuple(f"replay_{name}" for name in Replay._fields)
EXPERTS = ("w_in", "w_out", "b_in", "b_out", *NAMES)
TOKENS = ("x", "token_mask", "forced_experts", *REPLAY, "experts", "weights", "d_output", "d_weights")
PASSED = ("token_mask", "forced_experts")


def part(name, array, rank, ranks, expert_ranks):
    """A rank's part of a global array: its tokens, its experts, or all of it. For cotangents see `run`."""
    if name in EXPERTS and len(array) > 1:  # not a LoRA factor that all experts share
        return np.array_split(array, expert_ranks)[rank % expert_ranks]
    if name not in TOKENS:
        return array
    own = np.array_split(array, ranks)[rank]
    return (own * ranks).astype(own.dtype) if name.startswith("d_") else own


def load(path):
    with np.load(path) as file:
        return {name: in_torch.from_bytes(array) for name, array in file.items()}


def on_cuda():
    return torch.device(in_torch.device()).type == "cuda"


@contextlib.contextmanager
def nothing_waits(case):
    """On a GPU, synchronisation with the host is an error, and a case may have a stream of its own."""
    if not on_cuda():
        yield
        return
    stream = torch.cuda.Stream() if case["own_stream"] else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()


def function_of(case, own, options):
    """(a function without arguments that returns the result, the differentiated tensors, names of their gradients)."""
    passed = {name: in_torch.tensor(own.pop(name)) for name in PASSED if name in own}
    if case["replay"]:
        passed["replay"] = Replay(*(in_torch.tensor(own.pop(name, None)) for name in REPLAY))
    compiled = (lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")) if case["compiled"] else lambda f: f
    if case["module"]:
        layer = module_in_torch.make_layer(own, case["num_experts"], **options)
        floats = {"x": in_torch.tensor(own["x"]).requires_grad_(), **dict(layer.named_parameters())}
        call = compiled(layer)
        rename = lambda found: module_in_torch.with_oracle_names(found, layer, options)  # noqa: E731
        return lambda: call(floats["x"], **passed), floats, rename
    given, floats = in_torch.leaves(own)
    call = compiled(takes_factors(moe if "gate" in own else routed_experts))
    return lambda: call(**given, **passed, **options), floats, lambda found: found


def run(case, arrays, rank, ranks, mesh):
    """Results and gradients of the case.

    The mean of the ranks' losses must be the loss of the whole batch, a sum over tokens. So a rank's loss is the part
    of its own tokens times the number of ranks. Losses over all tokens are equal on every rank.
    """
    own = {name: part(name, array, rank, ranks, mesh["expert"].size()) for name, array in arrays.items()}
    cotangents = {name.removeprefix("d_"): in_torch.tensor(own.pop(name)) for name in list(own) if name[:2] == "d_"}
    options = case["options"] | {name: case[name] for name in ("transport", "capacity_factor")}
    options["group"] = mesh["expert"].get_group()
    if mesh["data"].size() > 1 and not case["routed"]:
        options["loss_group"] = dist.group.WORLD
    function, floats, rename = function_of(case, own, options)

    def both_passes():
        result = function()
        names = [name for name in cotangents if getattr(result, name, None) is not None]
        return result, in_torch.gradients_of([(getattr(result, name), cotangents[name]) for name in names], floats)

    if on_cuda() and (case["compiled"] or case["transport"] in ("p2p", "auto")):
        both_passes()  # compilation and the first call of p2p, which makes the exchange, may synchronise
    with nothing_waits(case):
        result, found = both_passes()
    gradients = rename({name: torch.zeros_like(floats[name]) if g is None else g for name, g in found.items()})
    arrays = {name: array for name, array in in_torch.arrays(result)._asdict().items() if array is not None}
    return arrays | {f"d_{name}": in_torch.array(gradient) for name, gradient in gradients.items()}


def main(rank, folder, ranks, backend):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        in_torch.on(f"cuda:{rank}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    cases = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    kind = "cuda" if backend == "nccl" else "cpu"
    meshes = {
        data: init_device_mesh(kind, (data, ranks // data), mesh_dim_names=("data", "expert"))
        for data in sorted({case["data"] for case in cases.values()})
    }
    for path, case in cases.items():
        mesh = meshes[case["data"]]
        found = run(case, load(path.with_suffix(".npz")), rank, ranks, mesh)
        if case["transport"] == "auto":
            group = mesh["expert"].get_group().group_name
            assert peers.has_made(group, 1) == (on_cuda() and not peers.unavailable_reason(group))
        np.savez(folder / f"{path.stem}.{rank}", **{name: in_torch.to_bytes(array) for name, array in found.items()})
    if backend == "gloo":
        gloo_ranks.leave()
    dist.destroy_process_group()

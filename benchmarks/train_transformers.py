"""Training steps of a whole Transformers model on all devices: expert parallelism and FSDP2, ours and Transformers'."""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import BenchError
from benchmarks import flags, mesh_torch
from benchmarks.processes import Case, as_bench_errors, rows_of_cases
from benchmarks.shapes import NAMED, LayerShape
from benchmarks.tables import selected

LAYERS, SEQ = 4, 2048
CAPTION = f"""a step (forward, backward, fused AdamW) of a random Qwen3-MoE with {LAYERS} layers of this shape and the
attention and vocabulary of Qwen3-30B-A3B, one process per device. T: tokens per device and step, in sequences of {SEQ};
ranks have batches of their own. parallelize: anabranch.torch.transformers.parallelize with a mesh of one dimension;
fsdp-anabranch, fsdp-grouped_mm: FSDP2 alone, which gathers all experts of a layer on every device; ep: expert
parallelism of Transformers with batches of their own (DistributedConfig(fsdp_size=N, ep_size=N)), which older releases
lack; ep-replicated: its expert parallelism in which all N ranks have one batch of T tokens, with tensor parallelism of
everything else where releases have ep_size. tokens/s: distinct tokens of all ranks, from the median of the steps; peak:
largest peak memory of a rank's allocator during the steps; first loss, last loss: of rank 0's batch, which is the same
for all. On the CPU there are 2 processes with Gloo and a small vocabulary"""

DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
BY = ("parallelize", "ep", "ep-replicated", "fsdp-grouped_mm", "fsdp-anabranch")
TRANSPORTS = ("ring", "p2p", "all_to_all")
SHAPES = {"cpu": (LayerShape(256, 128, 96, 16, 4),), "cuda": (NAMED["qwen3-30b"]._replace(T=4 * SEQ),)}
OPTIONS = {
    **flags.shapes("qwen3-30b with T = 8192 on a GPU, a small one on the CPU; T is per rank"),
    **flags.by(BY),
    **flags.choices("--transport", TRANSPORTS, "of parallelize; default: ring, and p2p on GPUs"),
}
_WARM_UP, _STEPS = 3, 10


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, implementation and transport.

    Raises:
      BenchError: the only case failed. Of several cases, a failed one has a row with `error`.
    """
    device = options.device
    transports = options.transport or (["ring", "p2p"] if device == "cuda" else ["ring"])
    cases = [
        Case("train_transformers", device, shape, DTYPES[device][0], by, transport=transport)
        for shape in flags.sized(options.shape or SHAPES[device], options.tokens, options.quick)
        for by in dict.fromkeys(options.by or BY)
        for transport in (dict.fromkeys(transports) if by == "parallelize" else transports[:1])
    ]
    steps = 2 if options.quick else _STEPS
    yield from rows_of_cases("train_transformers", cases, options.quick, lambda case: _measure(case, steps))


def _measure(case: Case, steps: int) -> Iterator[dict[str, Any]]:
    _, device, shape, dtype, by, _, transport = case
    ranks = mesh_torch.ranks_on(device)
    if ranks < 2:
        raise BenchError(f"train_transformers: got {ranks} device, expected 2 or more")
    with as_bench_errors(by):
        found = mesh_torch.in_ranks(device, _rank, (shape, dtype, by, transport, steps))
    tokens = shape.T * (1 if by == "ep-replicated" else ranks)
    seconds = statistics.median(found["seconds"])
    yield {
        **case._replace(transport=transport if by == "parallelize" else None).head(),
        "ranks": ranks,
        "tokens/s": tokens / seconds,
        "step ms": 1e3 * seconds,
        "peak GiB": found["peak"] / 2**30 if device == "cuda" else None,
        "first loss": found["losses"][0],
        "last loss": found["losses"][-1],
        "spread": {"step ms": [1e3 * min(found["seconds"]), 1e3 * max(found["seconds"])]},
        "losses": found["losses"],
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns one table, without the loss of every step."""
    names = ["T,D,F,E,K", "by", "transport", "ranks", "tokens/s", "step ms", "peak GiB", "first loss", "last loss"]
    return {"train_transformers": selected(rows, names)}


# ---------------------------------------------------------------- on the ranks


def _rank(device: str, shape: LayerShape, dtype: str, by: str, transport: str, steps: int) -> dict[str, Any]:
    """Trains on this rank. Returns the seconds and losses of the steps, and the largest peak memory of a rank."""
    import torch
    import torch.distributed as distributed

    shape = LayerShape(*shape)
    model = _model(device, shape, getattr(torch, dtype), by, transport)
    by_mesh: dict[Any, list[Any]] = {}  # a fused step has tensors of one mesh, or plain ones
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh.values()], lr=1e-4, fused=True)
    rank = 0 if by == "ep-replicated" else distributed.get_rank()
    seq = min(SEQ, shape.T)
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(_vocabulary(device), (shape.T // seq, seq), generator=draw).to(device)
    found: dict[str, Any] = {"seconds": [], "losses": []}
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss.detach()))  # synchronises with the device
        if step >= _WARM_UP:
            found["seconds"].append(time.perf_counter() - begin)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if device == "cuda" else 0, device=device)
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    return found | {"peak": int(peak)}


def _vocabulary(device: str) -> int:
    return 151936 if device == "cuda" else 512


def _model(device: str, shape: LayerShape, dtype: Any, by: str, transport: str) -> Any:
    """Returns the sharded model. All implementations start from the same weights."""
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    import anabranch.torch.transformers as adapter

    ranks = torch.distributed.get_world_size()
    sizes: dict[str, Any] = dict(
        vocab_size=_vocabulary(device),
        hidden_size=shape.D,
        moe_intermediate_size=shape.F,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(2, shape.D // 64),
        num_key_value_heads=max(2, shape.D // 512),
        head_dim=128,
        num_experts=shape.E,
        num_experts_per_tok=shape.K,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    config = transformers.Qwen3MoeConfig(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if by.startswith("ep"):
        return _transformers_ep(model, ranks, replicated=by == "ep-replicated")
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("expert",))
    if by == "parallelize":
        return adapter.parallelize(model.train(), mesh, transport=transport, equal_tokens=True)
    adapter.register()
    model.set_experts_implementation(by.removeprefix("fsdp-"))
    from torch.distributed.fsdp import fully_shard

    for part in (model.model.embed_tokens, *model.model.layers):
        fully_shard(part, mesh=mesh)
    return fully_shard(model.train(), mesh=mesh, reshard_after_forward=False)


def _transformers_ep(model: Any, ranks: int, *, replicated: bool) -> Any:
    """Returns the model under Transformers' expert parallelism, which shards models only while it loads them.

    Raises:
      NotImplementedError: this release has no expert parallelism with batches per rank.
    """
    import torch.distributed as distributed
    import transformers
    from transformers.distributed import DistributedConfig

    has_sizes = "ep_size" in {field.name for field in dataclasses.fields(DistributedConfig)}
    if not replicated and not has_sizes:
        raise NotImplementedError(
            f"transformers {transformers.__version__} has no ep_size: its expert parallelism has one batch on all ranks"
        )
    options: dict[str, Any]
    if not replicated:
        options = dict(fsdp_size=ranks, ep_size=ranks)
    elif has_sizes:
        options = dict(tp_size=ranks, ep_size=ranks)
    else:
        options = dict(tp_size=ranks, enable_expert_parallel=True)
    rank = distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}  # as torchrun sets them
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folders)
    if rank == 0:
        model.save_pretrained(folders[0])
    distributed.barrier()
    dtype = model.dtype
    del model
    return transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], dtype=dtype, distributed_config=DistributedConfig(**options)
    ).train()

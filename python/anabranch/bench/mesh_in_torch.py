"""NCCL's all_to_all through torch, a process a GPU."""

import json
import os
import pathlib
import socket
import tempfile

from anabranch.bench import gpu
from anabranch.bench.errors import BenchError
from anabranch.bench.gpu import Timing


def measure_all_to_all(count: int, *, repeats: int) -> tuple[Timing, int]:
    """Times of one exchange between all GPUs in which a rank has `count` bfloat16 elements, and the bytes it sends.

    Raises:
      BenchError: torch is missing, or sees fewer than two GPUs.
    """
    torch = gpu.torch_with_gpu()
    ranks = torch.cuda.device_count()
    if ranks < 2:
        raise BenchError(f"NCCL's all_to_all: got {ranks} GPU, expected 2 or more")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, port, count, repeats, folder), nprocs=ranks)
        samples = json.loads((pathlib.Path(folder) / "seconds.json").read_text())
    return gpu.summary(samples), count // ranks * (ranks - 1) * 2


def _rank(rank: int, ranks: int, port: int, count: int, repeats: int, folder: str) -> None:
    import torch
    import torch.distributed as distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    try:
        sent = torch.ones(count // ranks * ranks, dtype=torch.bfloat16, device="cuda")
        received = torch.empty_like(sent)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples = []
        for repeat in range(repeats + 3):
            start.record()
            for _ in range(8):
                distributed.all_to_all_single(received, sent)
            end.record()
            end.synchronize()
            if repeat >= 3:
                samples.append(start.elapsed_time(end) * 1e-3 / 8)
        if rank == 0:
            (pathlib.Path(folder) / "seconds.json").write_text(json.dumps(samples))
    finally:
        distributed.destroy_process_group()

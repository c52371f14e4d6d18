"""Trains a Hugging Face Transformers model on several devices, with its experts sharded over them.

    pip install '.[peft]'    # in the folder of the repository
    torchrun --nproc-per-node 2 examples/transformers_parallel.py
    torchrun --nproc-per-node 4 examples/transformers_parallel.py --data 2 --lora 8 --checkpoint /tmp/run

`anabranch.torch.transformers.parallelize` is all that differs from a program for one device. There is one process per
GPU, over NCCL, or with `--cpu` or without a GPU several processes on the CPU, over Gloo. The text is the source of
Python's standard library. By default the model is a small random Qwen3-MoE over bytes; `--model` names a config.json,
or a folder with a configuration and optionally weights, which rank 0 reads and sends to the others. Losses depend on
the number of sequences of all ranks, not on the number of ranks. With --checkpoint a run resumes from the newest step
in the folder, which any number of ranks may have written.
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path

from finetune_options import checked, common
from run_error import RunError, as_run_error, needs, run_main


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    known = common(__doc__)
    known.set_defaults(batch=2)
    known.add_argument("--data", type=int, default=1, help="number of groups of ranks that each hold all experts")
    known.add_argument("--transport", default="auto", help="transport of tokens: auto, ring, p2p or all_to_all")
    known.add_argument("--capacity-factor", type=float, help="limits the buffers of the exchange (default: no limit)")
    known.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    known.add_argument("--lora", type=int, default=0, help="rank of PEFT's adapters of the experts (0: full training)")
    known.add_argument("--checkpoint", type=Path, help="folder to resume from and to save to")
    known.add_argument("--save", type=Path, help="folder for the trained model, or its adapter, for from_pretrained")
    known.add_argument("--cpu", action="store_true", help="do not use GPUs")
    options = checked(known, arguments)
    for name, least in (("data", 1), ("lora", 0)):
        if getattr(options, name) < least:
            known.error(f"--{name}: got {getattr(options, name)}, expected at least {least}")
    return options


if __name__ == "__main__":
    OPTIONS = parse()  # before imports that take seconds and may fail

with needs("peft"):
    import peft
    import torch
    import torch.distributed as dist
    import transformers
    from torch import nn
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    import anabranch.torch.transformers
    import transformers_finetune as finetune
    from anabranch.torch import clip_grad_norm_
    from byte_lm.data import training_batch


def join(chosen: argparse.Namespace) -> torch.device:
    """Joins the processes that torchrun started, and returns this rank's device.

    Raises:
      RunError: the program does not run under torchrun, or there are fewer GPUs than ranks.
    """
    if "RANK" not in os.environ:
        raise RunError("got no RANK in the environment, expected a start by torchrun --nproc-per-node N")
    if chosen.cpu or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise RunError(f"got {torch.cuda.device_count()} GPUs, expected one per rank of this host")
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    return torch.device("cuda", local)


def make_mesh(chosen: argparse.Namespace, device: torch.device) -> dist.DeviceMesh:
    """The mesh: ranks that share experts have neighbouring numbers.

    Raises:
      RunError: --data does not divide the number of ranks.
    """
    ranks = dist.get_world_size()
    if ranks % chosen.data:
        raise RunError(f"--data: got {chosen.data}, expected a divisor of the {ranks} ranks")
    if chosen.data == 1:
        return dist.init_device_mesh(device.type, (ranks,), mesh_dim_names=("expert",))
    sizes = (chosen.data, ranks // chosen.data)
    return dist.init_device_mesh(device.type, sizes, mesh_dim_names=("data", "expert"))


def build(chosen: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The model with random weights, equal on all ranks, or with those of a checkpoint on rank 0 only."""
    named = {"dtype": getattr(torch, chosen.dtype)}
    with as_run_error(f"--model: could not make {chosen.model or 'the small model'}", (OSError, ValueError, KeyError)):
        if chosen.model is None:
            config = transformers.Qwen3MoeConfig(**finetune.SMALL)
        else:
            config = AutoConfig.from_pretrained(chosen.model)
        has_weights = chosen.model is not None and finetune.has_weights(chosen.model)
        if has_weights and dist.get_rank() == 0:
            return AutoModelForCausalLM.from_pretrained(chosen.model, **named)
        torch.manual_seed(chosen.seed)
        with torch.device("meta" if has_weights else device):
            return AutoModelForCausalLM.from_config(config, **named)


def adapted(chosen: argparse.Namespace, model: PreTrainedModel) -> nn.Module:
    """The model, with adapters of the experts if --lora asks for them; then everything else is frozen."""
    if not chosen.lora:
        return model
    names = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(chosen.seed)
    config = peft.LoraConfig(r=chosen.lora, lora_alpha=2 * chosen.lora, target_parameters=names, target_modules=[])
    return peft.get_peft_model(model, config)


class Checkpoints:
    """Steps in a folder, saved by torch.distributed.checkpoint: one file per rank, for any number of ranks."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.options = StateDictOptions(ignore_frozen_params=True, strict=False)

    def _state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def restore(self) -> int:
        """Loads the newest complete step, and returns the number of steps done."""
        complete = [int(path.parent.name) for path in self.folder.glob("*/.metadata") if path.parent.name.isdecimal()]
        if not complete:
            return 0
        newest, state = max(complete), self._state()
        with as_run_error(f"--checkpoint: could not read step {newest} in {self.folder}", (OSError, RuntimeError)):
            checkpoint.load(state, checkpoint_id=self.folder / str(newest))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )
        return newest

    def save(self, step: int) -> None:
        """Saves the trained parameters and the optimizer's state."""
        checkpoint.save(self._state(), checkpoint_id=self.folder / str(step))


def train(chosen: argparse.Namespace, model: nn.Module, device: torch.device) -> None:
    """Trains with AdamW, and prints losses, tokens per second and peak memory on rank 0.

    Raises:
      RunError: the checkpoint has more steps than --steps.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = finetune.text_tokens(chosen, model.config.get_text_config().vocab_size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=chosen.lr)
    checkpoints = None if chosen.checkpoint is None else Checkpoints(chosen.checkpoint, model, optimizer)
    done = checkpoints.restore() if checkpoints else 0
    if done >= chosen.steps:
        raise RunError(f"--steps: got {chosen.steps}, expected more than the {done} of the checkpoint")
    seconds: list[float] = []
    for step in range(done, chosen.steps):
        begin = time.perf_counter()
        windows = training_batch(tokens, step, ranks * chosen.batch, chosen.seq - 1, chosen.seed)
        own = windows[rank * chosen.batch : (rank + 1) * chosen.batch]
        ids = torch.tensor(own.astype("int64"), device=device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = clip_grad_norm_(model, chosen.clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        value = float(mean) / ranks  # synchronises with the device
        seconds.append(time.perf_counter() - begin)
        if rank == 0 and (step % max(1, chosen.steps // 10) == 0 or step == chosen.steps - 1):
            print(f"step {step:5}  loss {value:.6f}  norm {float(norm):.4f}", flush=True)
    if checkpoints:
        checkpoints.save(chosen.steps)
    if rank == 0:
        steady = sorted(seconds[1:] or seconds)
        rate = ranks * chosen.batch * chosen.seq / steady[len(steady) // 2]
        print(f"{rate:.0f} tokens/s on {ranks} ranks, peak memory of rank 0: {peak_memory(device) / 2**20:.0f} MiB")


def peak_memory(device: torch.device) -> int:
    """Bytes: of the allocator on a GPU, of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def save(folder: Path, model: nn.Module) -> None:
    """Saves the whole model, or the adapter of a model of PEFT, on rank 0, for from_pretrained."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)


def run(chosen: argparse.Namespace, device: torch.device) -> None:
    """Shards the model over all ranks and trains it."""
    mesh = make_mesh(chosen, device)
    transformers.utils.logging.disable_progress_bar()
    with as_run_error("could not shard the model", (ValueError, NotImplementedError)):
        model = anabranch.torch.transformers.parallelize(
            adapted(chosen, build(chosen, device)).train(),
            mesh,
            transport=chosen.transport,
            capacity_factor=chosen.capacity_factor,
            equal_tokens=True,
        )
    train(chosen, model, device)
    if chosen.save is not None:
        save(chosen.save, model)


def main(chosen: argparse.Namespace) -> None:
    """Runs this rank."""
    device = join(chosen)
    try:
        run(chosen, device)
    finally:
        dist.destroy_process_group()
    if device.type == "cpu":
        # A thread of Gloo may abort the process while the interpreter shuts down.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(run_main("transformers_parallel", lambda: main(OPTIONS)))

"""Trains a Hugging Face Transformers model twice from the same start, with its own experts and with anabranch's.

    pip install '.[transformers]'    # in the folder of the repository
    python examples/transformers_finetune.py

The text is the source of Python's standard library. By default the model is a small random Qwen3-MoE over bytes;
`--model` names a config.json, or a folder with a configuration and optionally weights and a tokenizer. The program
prints both losses of every step, which agree up to rounding, and the time per step of each run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from finetune_options import checked, parser
from run_error import RunError, as_run_error, needs, run_main


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    return checked(parser(__doc__), arguments)


if __name__ == "__main__":
    OPTIONS = parse()  # before imports that take seconds and may fail

with needs("transformers"):
    import numpy as np
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    import anabranch.torch.transformers
    from byte_lm.data import load_corpus, stdlib_folder, training_batch
    from progress import Progress

OURS = anabranch.torch.transformers.NAME
SMALL = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
    max_position_embeddings=4096,
)
#: Relative difference of losses that rounding may cause in a few dozen steps.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


class Run(NamedTuple):
    """The loss and the seconds of each training step."""

    losses: list[float]
    seconds: list[float]


def check(chosen: argparse.Namespace) -> None:
    """Checks options that need the libraries, and sets the default device.

    Raises:
      RunError: an option is wrong.
    """
    known = ("default", "eager", *ALL_EXPERTS_FUNCTIONS.valid_keys())
    if chosen.beside not in known:
        raise RunError(f"--beside: got {chosen.beside}, expected one of {', '.join(known)}")
    if chosen.device is None:
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    with as_run_error(f"--device: could not use {chosen.device}", (RuntimeError, AssertionError)):
        torch.empty(1, device=chosen.device)


def has_weights(model: Path) -> bool:
    """Whether a folder holds a checkpoint and not a configuration alone."""
    return model.is_dir() and any(any(model.glob(name)) for name in ("*.safetensors", "*.bin"))


def build(chosen: argparse.Namespace, implementation: str) -> PreTrainedModel:
    """The initial model, equal for every implementation."""
    torch.manual_seed(chosen.seed)
    named = {} if implementation == "default" else {"experts_implementation": implementation}
    named |= {"dtype": getattr(torch, chosen.dtype)}
    with as_run_error(
        f"--model: could not make {chosen.model or 'the small model'}",
        (OSError, ValueError, KeyError, NotImplementedError),
    ):
        if chosen.model is not None and has_weights(chosen.model):
            model = AutoModelForCausalLM.from_pretrained(chosen.model, **named)
        else:
            config = AutoConfig.from_pretrained(chosen.model) if chosen.model else transformers.Qwen3MoeConfig(**SMALL)
            with torch.device(chosen.device):  # a CPU takes a minute to draw the weights of a large model
                model = AutoModelForCausalLM.from_config(config, **named)
    return model.to(chosen.device).train()


def text_tokens(chosen: argparse.Namespace, vocab_size: int) -> np.ndarray:
    """The text as tokens of the model's tokenizer, or as bytes without one."""
    text = load_corpus(chosen.text or stdlib_folder()).train
    folder = chosen.model
    if folder is not None and folder.is_dir() and any(folder.glob("tokenizer*")):
        enough = text[: 8 * chosen.steps * chosen.batch * chosen.seq].tobytes().decode(errors="ignore")
        tokens = np.array(AutoTokenizer.from_pretrained(folder)(enough)["input_ids"])
    else:
        tokens = text
    if int(tokens.max()) >= vocab_size:
        raise RunError(
            f"--model: got a vocabulary of {vocab_size}, expected more than {int(tokens.max())} for this text"
        )
    return tokens


def batches(chosen: argparse.Namespace, tokens: np.ndarray) -> Iterator[torch.Tensor]:
    """int64 [batch, seq], equal for every run."""
    for step in range(chosen.steps):
        windows = training_batch(tokens, step, chosen.batch, chosen.seq - 1, chosen.seed)
        yield torch.tensor(windows.astype(np.int64), device=chosen.device)


def train(chosen: argparse.Namespace, model: PreTrainedModel, tokens: np.ndarray, name: str) -> Run:
    """Trains a model with AdamW."""
    wait: Callable[[], None] = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr)
    run = Run([], [])
    progress = Progress(batches(chosen, tokens), desc=name, total=chosen.steps, file=sys.stderr)
    for ids in progress:
        wait()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(loss.detach()))  # synchronises with the device
        run.seconds.append(time.perf_counter() - begin)
        progress.set_postfix(loss=f"{run.losses[-1]:.4f}", refresh=False)
    return run


def report(chosen: argparse.Namespace, theirs: Run, ours: Run) -> None:
    """Prints losses and times of both runs.

    Raises:
      RunError: the losses differ.
    """
    shown = max(1, chosen.steps // 10)
    print(f"{'step':>6} {chosen.beside:>12} {OURS:>12}")
    for step in [*range(0, chosen.steps - 1, shown), chosen.steps - 1]:
        print(f"{step:6} {theirs.losses[step]:12.6f} {ours.losses[step]:12.6f}")
    differences = [abs(a - b) / abs(a) for a, b in zip(theirs.losses, ours.losses, strict=True)]
    times = [1000 * statistics.median(run.seconds[1:]) for run in (theirs, ours)]
    print(f"largest relative difference of losses: {max(differences):.1e}")
    print(f"a step takes {times[0]:.1f} ms with {chosen.beside}, {times[1]:.1f} ms with {OURS}")
    tolerance = TOLERANCE[chosen.dtype]
    if not max(differences) <= tolerance:
        raise RunError(f"losses: got a difference of {max(differences):.1e}, expected at most {tolerance:.0e}")


def main(chosen: argparse.Namespace) -> None:
    """Runs both trainings and compares them."""
    check(chosen)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # the bar of loaded weights would fill a line of a log
    anabranch.torch.transformers.register()
    runs = []
    for name in (chosen.beside, OURS):
        model = build(chosen, name)
        for path, experts in anabranch.torch.transformers.check(model).items() if name == OURS else ():
            print(f"{path}: {experts.activation}, {experts.w_in_layout}, {experts.w_out_layout}")
        tokens = text_tokens(chosen, model.config.get_text_config().vocab_size)
        runs.append(train(chosen, model, tokens, name))
        del model
    report(chosen, *runs)


if __name__ == "__main__":
    sys.exit(run_main("transformers_finetune", lambda: main(OPTIONS)))

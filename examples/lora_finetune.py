"""Fine-tunes adapters of a Transformers model's experts with PEFT and Trainer, with its own experts and anabranch's.

    pip install '.[peft]'    # in the folder of the repository
    python examples/lora_finetune.py

The text is the source of Python's standard library. By default the model is a small random Qwen3-MoE over bytes;
`--model` names a config.json, or a folder with a configuration and optionally weights and a tokenizer. The script for
both runs is the same: `anabranch.torch.transformers.register()` and `experts_implementation="anabranch"` are all that
differs. The program prints the losses of both, which agree up to rounding, the time per step, and on a GPU the peak
memory.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from finetune_options import checked, parser
from run_error import RunError, needs, run_main


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    known = parser(__doc__)
    known.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    known.add_argument("--alpha", type=float, default=16.0, help="lora_alpha: the adapters are scaled by alpha / rank")
    known.add_argument("--save", type=Path, help="folder for anabranch's trained adapter, as PEFT saves it")
    options = checked(known, arguments)
    if options.rank < 1:
        known.error(f"--rank: got {options.rank}, expected at least 1")
    return options


def keep_one_gpu(chosen: argparse.Namespace) -> None:
    """Hides all GPUs but the chosen one: Trainer would spread the batch over all that it sees (DataParallel).

    Has an effect only before torch is imported.
    """
    kind, _, index = (chosen.device or "cuda").partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else []
    place = int(index or 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place] if place < len(gpus) else str(place)
    chosen.device = chosen.device and kind


if __name__ == "__main__":
    OPTIONS = parse()
    keep_one_gpu(OPTIONS)  # before imports that take seconds and may fail

with needs("peft"):
    import peft
    import torch
    import transformers
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    import anabranch.torch.transformers
    import transformers_finetune as finetune
    from progress import Progress


class Recorder(Trainer):
    """A Trainer that records the loss and the time of each step."""

    def __init__(self, *arguments: object, bar: Progress, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.run, self.bar, self.begin = finetune.Run([], []), bar, time.perf_counter()

    def training_step(self, *arguments: object, **options: object) -> torch.Tensor:
        """Runs the forward and backward pass. The time of the optimizer's step counts in the next step."""
        loss = super().training_step(*arguments, **options)
        self.run.losses.append(float(loss))  # synchronises with the device
        now = time.perf_counter()
        self.run.seconds.append(now - self.begin)
        self.begin = now
        self.bar.set_postfix(loss=f"{self.run.losses[-1]:.4f}", refresh=False)
        self.bar.update()
        return loss


def adapted(chosen: argparse.Namespace, model: PreTrainedModel) -> peft.PeftModel:
    """The model with adapters of all experts' weights; everything else is frozen."""
    names = ("gate_up_proj", "down_proj")
    found = [name for name, _ in model.named_parameters() if name.endswith(tuple(f"experts.{part}" for part in names))]
    if not found:
        raise RunError("--model: got a model without experts.gate_up_proj, expected fused experts")
    config = peft.LoraConfig(r=chosen.rank, lora_alpha=chosen.alpha, target_parameters=found, target_modules=[])
    torch.manual_seed(chosen.seed)
    return peft.get_peft_model(model, config)


def train(chosen: argparse.Namespace, model: peft.PeftModel, data: list[torch.Tensor], name: str) -> finetune.Run:
    """Trains the adapters with Trainer's AdamW at a constant learning rate."""
    with tempfile.TemporaryDirectory() as folder, Progress(desc=name, total=chosen.steps, file=sys.stderr) as bar:
        arguments = TrainingArguments(
            folder,
            max_steps=chosen.steps,
            per_device_train_batch_size=chosen.batch,
            learning_rate=chosen.lr,
            lr_scheduler_type="constant",
            seed=chosen.seed,
            use_cpu=chosen.device == "cpu",
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
        )
        rows = [{"input_ids": row, "labels": row} for batch in data for row in batch.cpu()]
        trainer = Recorder(model, arguments, train_dataset=rows, bar=bar)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer.run


def main(chosen: argparse.Namespace) -> None:
    """Runs both trainings and compares them."""
    finetune.check(chosen)
    transformers.utils.logging.disable_progress_bar()
    anabranch.torch.transformers.register()
    runs, peaks = [], []
    for name in (chosen.beside, finetune.OURS):
        model = finetune.build(chosen, name)
        tokens = finetune.text_tokens(chosen, model.config.get_text_config().vocab_size)
        model = adapted(chosen, model)
        if not runs:
            trained, every = model.get_nb_trainable_parameters()
            print(f"{trained:,} of {every:,} parameters are trained")
        if chosen.device != "cpu":
            torch.cuda.reset_peak_memory_stats(chosen.device)
        runs.append(train(chosen, model, list(finetune.batches(chosen, tokens)), name))
        if chosen.device != "cpu":
            peaks.append(f"{torch.cuda.max_memory_allocated(chosen.device) / 2**20:.0f} MiB with {name}")
        if name == finetune.OURS and chosen.save is not None:
            model.save_pretrained(chosen.save)
        del model
    finetune.report(chosen, *runs)
    if peaks:
        print("peak GPU memory: " + ", ".join(peaks))


if __name__ == "__main__":
    sys.exit(run_main("lora_finetune", lambda: main(OPTIONS)))

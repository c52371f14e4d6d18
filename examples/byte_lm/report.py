"""The texts of a run: introduction, progress line, and at the end a table, a sample and summary.json."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from byte_lm import pictures
from byte_lm.checkpoint import LOAD_MAP, LOSS_CURVE, SAMPLE, SUMMARY, History
from byte_lm.data import Corpus
from byte_lm.options import Options
from byte_lm.step import TrainState

#: Number of steps in "recent" figures.
RECENT = 50


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Bits per byte of the model and of the trigram on the same held-out bytes."""

    bytes: int
    model: float
    trigram: float


def imbalance(history: History) -> np.ndarray:
    """float [layers]: recent load of the busiest expert over the mean load; 1 is perfect balance."""
    loads = np.sum(history.loads[-RECENT:], axis=0)
    return loads.max(axis=-1) / loads.mean(axis=-1)


def bytes_per_second(options: Options, history: History) -> float:
    """Training speed of the recent median step, which excludes compilation."""
    return options.batch * options.seq / float(np.median(history.seconds[-RECENT:]))


def count_parameters(options: Options, state: TrainState) -> tuple[int, int]:
    """(number of all parameters, number of active parameters per byte)."""
    total = sum(value.size for value in jax.tree.leaves((state.params, state.frozen)))
    expert = 3 * options.width * options.hidden + options.lora * (2 * options.width + 3 * options.hidden)
    return total, total - options.layers * (options.experts - options.topk) * expert


def introduction(options: Options, corpus: Corpus, state: TrainState, done: int) -> str:
    """The introduction; `state` may be shapes alone, `done` is the step of the checkpoint."""
    total, active = count_parameters(options, state)
    trained = sum(value.size for value in jax.tree.leaves(state.params))
    return "\n".join(
        [
            f"Corpus    {options.corpus}",
            f"          {len(corpus.train) / 1e6:.1f} MB in {len(corpus.train_files)} files to train on, "
            f"{len(corpus.held_out) / 1e6:.2f} MB in {len(corpus.held_out_files)} files held out",
            f"Model     {options.layers} layers of width {options.width}, {options.experts} experts of width "
            f"{options.hidden}, {options.topk} per byte",
            f"          {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M of them active per byte"
            + (f", {trained / 1e6:.2f} M trained (adapters of rank {options.lora})" if options.lora else ""),
            f"Training  {options.steps} steps of {options.batch} x {options.seq} bytes"
            + (f", resumed after step {done}" if done else ""),
            f"Output    {options.out}",
            "Ctrl-C saves and stops; the same command resumes.",
        ]
    )


def progress_line(options: Options, history: History) -> str:
    """Loss, speed and balance of the recent steps."""
    bits = np.mean(history.train_bits[-RECENT // 2 :])
    speed = bytes_per_second(options, history)
    return f"{bits:.3f} bits/byte, {speed:,.0f} bytes/s, max/mean load {imbalance(history).max():.2f}"


def table(comparison: Comparison, files: int) -> str:
    """The comparison as a table."""
    less = 1 - comparison.model / comparison.trigram
    verdict = f"{abs(less):.1%} {'below' if less > 0 else 'above'} the trigram"
    return "\n".join(
        [
            f"Bits per byte on {comparison.bytes:,} bytes of {files} held-out files (lower is better)",
            f"  no model        {8:6.3f}",
            f"  byte trigram    {comparison.trigram:6.3f}",
            f"  this model      {comparison.model:6.3f}   {verdict}",
        ]
    )


def curves(history: History) -> dict[str, Any]:
    """Bits per byte of every step's batch, and of the measured held-out windows as [step, bits]."""
    return {
        "train_bits": [round(bits, 4) for bits in history.train_bits],
        "held_out_bits": [
            [step, round(bits, 4)] for step, bits in enumerate(history.held_out_bits, 1) if np.isfinite(bits)
        ],
    }


def summarise(
    options: Options,
    corpus: Corpus,
    state: TrainState,
    history: History,
    comparison: Comparison | None,
    sample: str | None,
) -> dict[str, Any]:
    """The run's figures as JSON values; `held_out` and `sample` are None in an unfinished run."""
    done = len(history.train_bits)
    total, active = count_parameters(options, state)
    return {
        "finished": done == options.steps,
        "steps": done,
        "bytes_seen": done * options.batch * options.seq,
        "seconds": round(sum(history.seconds), 1),
        "bytes_per_second": round(bytes_per_second(options, history)),
        "train_bits_per_byte": round(float(np.mean(history.train_bits[-RECENT:])), 4),
        "max_over_mean_load": [round(float(value), 3) for value in imbalance(history)],
        "held_out": None if comparison is None else dataclasses.asdict(comparison),
        "curves": curves(history),
        "parameters": {"all": total, "active": active},
        "corpus": {
            "train_bytes": len(corpus.train),
            "train_files": len(corpus.train_files),
            "held_out_bytes": len(corpus.held_out),
            "held_out_files": len(corpus.held_out_files),
            "fingerprint": corpus.fingerprint,
        },
        "options": options.as_json(),
        "sample": sample,
    }


def write(
    options: Options,
    corpus: Corpus,
    state: TrainState,
    history: History,
    comparison: Comparison | None = None,
    sample: str | None = None,
) -> None:
    """Writes the figures, the sample and summary.json to the out folder; prints the sample and the table.

    `comparison` and `sample` are None in an unfinished run.
    """
    folder = options.out
    pictures.draw_loss(folder / LOSS_CURVE, history, options.batch * options.seq, comparison)
    pictures.draw_loads(folder / LOAD_MAP, history, options.topk)
    summary = summarise(options, corpus, state, history, comparison, sample)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    written = [LOSS_CURVE, LOAD_MAP, SUMMARY]
    if sample is not None:
        (folder / SAMPLE).write_text(sample)
        written.append(SAMPLE)
        print("\nA sample for the prompt " + repr(options.prompt) + ":\n")
        print("\n".join("    " + line for line in sample.splitlines()))
    if comparison is not None:
        print("\n" + table(comparison, len(corpus.held_out_files)))
    print(f"\nIn {folder}: {', '.join(written)}")

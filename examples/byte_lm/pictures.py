"""The figures of a run: the loss over the steps, and the expert load of each layer over the steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import TwoSlopeNorm

from byte_lm.checkpoint import History

if TYPE_CHECKING:
    from byte_lm.report import Comparison

#: Maximum number of columns of the load map; each averages several steps.
COLUMNS = 120
#: Loads above this many fair shares have one colour.
HIGHEST_LOAD = 3.0

BLUE, ORANGE, GREY = "#2166ac", "#d6604d", "#777777"
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.titlesize": 14,
    "figure.titleweight": "bold",
    "savefig.dpi": 130,
}


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of each value and up to `width` neighbours on either side."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(at - width, 0), np.minimum(at + width + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def draw_loss(path: Path, history: History, step_bytes: int, comparison: "Comparison | None") -> None:
    """Draws bits per byte of the training batches and of held-out text, with the trigram's level if known."""
    train, held_out = np.array(history.train_bits), np.array(history.held_out_bits)
    steps = np.arange(1, len(train) + 1)
    measured = np.isfinite(held_out)
    smoothed = smooth(train, len(train) // 60)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        figure.suptitle("How well the model predicts the next byte", x=0.02, ha="left")
        axes.set_title("in bits per byte; lower is better, 8 is a blind guess", color=GREY)
        axes.plot(steps, train, color=BLUE, alpha=0.2, linewidth=0.8)
        axes.plot(steps, smoothed, color=BLUE, linewidth=2, label="training text, smoothed")
        axes.plot(
            steps[measured], held_out[measured], "o", color=ORANGE, markersize=6, label="held-out files, along the way"
        )
        if comparison is not None:
            axes.axhline(comparison.trigram, color=GREY, linestyle="--", linewidth=1.5)
            axes.annotate(
                f"byte trigram on held-out files: {comparison.trigram:.3f}", (0.99, comparison.trigram), (0, 5),
                xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", color=GREY,
            )  # fmt: skip
            axes.plot(
                steps[-1], comparison.model, "*", color=ORANGE, markersize=16, clip_on=False,
                label=f"held-out files, at the end: {comparison.model:.3f}",
            )  # fmt: skip
        ends = [smoothed[-1], *([comparison.model, comparison.trigram] if comparison else [])]
        low = min([train.min(), *ends])
        axes.set_ylim(0.92 * low, max(min(1.05 * train.max(), 3 * low), 1.1 * max(ends)))
        axes.set_xlim(0, len(train))
        axes.set_xlabel(f"training step, {step_bytes:,} bytes each")
        axes.set_ylabel("bits per byte")
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def draw_comparison(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws bits per byte of several runs: smoothed curves for the training text, points for held-out windows.

    Args:
      runs: `curves` of a run's summary.json, by the name in the legend.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        figure.suptitle("How well the models predict the next byte", x=0.02, ha="left")
        axes.set_title("in bits per byte; lines: training text, smoothed; points: held-out windows", color=GREY)
        highest, lowest = [], []
        for index, (name, curve) in enumerate(runs.items()):
            train, held_out = np.array(curve["train_bits"]), np.array(curve["held_out_bits"]).reshape(-1, 2)
            smoothed = smooth(train, max(len(train) // 60, 1))
            colour, dashed = f"C{index}", "--" if index % 2 else "-"
            axes.plot(np.arange(1, len(train) + 1), smoothed, dashed, color=colour, linewidth=1.6, label=name)
            axes.plot(*held_out.T, "ox+s^"[index % 5], color=colour, markersize=6, fillstyle="none")
            highest.append(train.max())
            lowest.append(min(smoothed.min(), *held_out[:, 1]))
        axes.set_ylim(0.92 * min(lowest), max(min(max(highest), 3 * min(lowest)), 1.1 * min(lowest)))
        axes.set_xlim(0, None)
        axes.set_xlabel("training step")
        axes.set_ylabel("bits per byte")
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def shares(loads: np.ndarray, columns: int) -> np.ndarray:
    """Loads [steps, layers, E] in fair shares, averaged over the steps of each of C columns: [layers, E, C]."""
    fair = loads.mean(axis=-1, keepdims=True)
    parts = np.array_split(loads / fair, min(columns, len(loads)))
    return np.stack([part.mean(axis=0) for part in parts], axis=-1)


def draw_loads(path: Path, history: History, topk: int) -> None:
    """Draws one map per layer: the load of each expert (rows) over the steps (columns), in fair shares."""
    loads = np.array(history.loads)
    steps, layers, experts = loads.shape
    share = shares(loads, COLUMNS)
    height = np.clip(0.22 * experts, 1.1, 4)
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(
            layers, 1, figsize=(9, 1.4 + layers * height), sharex=True, squeeze=False, layout="constrained"
        )
        figure.suptitle("Where the bytes go: the load of each expert while training", x=0.02, ha="left")
        rows[0, 0].annotate(
            f"White: a fair share, {topk} / {experts} of the bytes.  Red: more.  Blue: less.", (0, 1), (0, 24),
            xycoords="axes fraction", textcoords="offset points", color=GREY,
        )  # fmt: skip
        for layer, axes in enumerate(rows[:, 0]):
            image = axes.imshow(
                share[layer],
                aspect="auto",
                interpolation="nearest",
                origin="upper",
                extent=(0, steps, experts - 0.5, -0.5),
                cmap="RdBu_r",
                norm=TwoSlopeNorm(1.0, 0.0, HIGHEST_LOAD),
            )
            axes.set_title(f"layer {layer + 1}")
            axes.set_ylabel("expert")
            axes.set_yticks(np.unique(np.linspace(0, experts - 1, min(experts, 8)).astype(int)))
            for spine in axes.spines.values():
                spine.set_visible(False)
        axes.set_xlabel("training step")
        bar = figure.colorbar(image, ax=rows[:, 0], ticks=[0, 0.5, 1, 2, 3], pad=0.02, aspect=30)
        bar.ax.set_yticklabels(["0, idle", "½", "1, fair share", "2", "3 or more"])
        bar.set_label("load of an expert, in fair shares")
        bar.outline.set_visible(False)
        figure.savefig(path)
        plt.close(figure)

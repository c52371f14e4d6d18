"""Draws docs/layer_speed.png: the layer beside SonicMoE, torch and Transformers, from the rows of benchmarks."""

import argparse
import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
OURS, SONICMOE = ("moe", "c"), "sonicmoe"
#: Bars of the second panel: (by, mode) of a row and its label.
BARS = {
    ("moe", "eager"): "anabranch, eager",
    ("hf-grouped_mm", "compiled"): "Transformers grouped_mm, compiled",
    ("grouped_mm", "compiled"): "torch grouped_mm, compiled",
    ("hf-grouped_mm", "eager"): "Transformers grouped_mm, eager",
}
BLUE, ORANGE, GREY = "#2166ac", "#d6604d", "#8a8a8a"
HELP = """New rows, on a machine with an H200 (each file is one run):

    python -m benchmarks layer --device cuda --by c --by sonicmoe --json layer.json
    python -m benchmarks torch --device cuda --shape qwen3-30b --tokens 8192 --json torch.json
    python benchmarks/draw_layer_speed.py layer.json torch.json

Without files it draws benchmarks/layer_h200.json: its "sources" say where each row was measured, by what and when."""


def rows_of(files: list[pathlib.Path]) -> dict[str, list[dict[str, Any]]]:
    """The rows of all files by operation: "layer" and "torch"."""
    rows: dict[str, list[dict[str, Any]]] = {"layer": [], "torch": []}
    for file in files:
        for operation, found in json.loads(file.read_text())["rows"].items():
            rows.setdefault(operation, []).extend(found)
    return rows


def rates(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """TFLOP/s of both passes by shape, (ours, SonicMoE's), where both were measured."""
    found: dict[str, dict[bool, float]] = {}
    for row in rows:
        if row["by"] in (*OURS, SONICMOE) and row.get("both TFLOP/s") is not None:
            found.setdefault(row["T,D,F,E,K"], {})[row["by"] == SONICMOE] = row["both TFLOP/s"]
    return {shape: (pair[False], pair[True]) for shape, pair in found.items() if len(pair) == 2}


def draw(rows: dict[str, list[dict[str, Any]]], out: pathlib.Path) -> None:
    """Writes the picture.

    Raises:
      ValueError: a panel has no rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pairs = rates(rows["layer"])
    times: dict[Any, Any] = {(row["by"], row.get("mode")): row.get("both ms") for row in rows["torch"]}
    bars = {label: times[key] for key, label in BARS.items() if times.get(key) is not None}
    for operation, found in (("layer", pairs), ("torch", bars)):
        if not found:
            raise ValueError(f"files: got no rows of the benchmark {operation}, expected those that --help names")
    style: dict[Any, Any] = {"font.size": 10, "axes.titlelocation": "left"}
    style |= dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 3.9), width_ratios=(3, 2), layout="constrained")
        places = range(len(pairs))
        left.bar([p - 0.2 for p in places], [ours for ours, _ in pairs.values()], 0.4, color=BLUE, label="anabranch")
        left.bar([p + 0.2 for p in places], [peer for _, peer in pairs.values()], 0.4, color=ORANGE, label="SonicMoE")
        for place, (ours, peer) in zip(places, pairs.values(), strict=True):
            left.text(place, ours + 6, f"{ours / peer:.2f}x", ha="center", fontsize=8)
        labels = ["\n".join(shape.split(",")[1:]) for shape in pairs]
        left.set_xticks(list(places), labels, fontsize=8)
        left.text(-0.9, -0.035, "D\nF\nE\nK", transform=left.get_xaxis_transform(), ha="center", va="top", fontsize=8)
        left.set_title("Forward and backward, TFLOP/s (higher is better)")
        left.set_ylim(0, 1.12 * max(max(pair) for pair in pairs.values()))
        left.legend(frameon=False, loc="upper left", ncols=2)
        places = range(len(bars))
        right.barh(places, list(bars.values()), 0.5, color=[BLUE, *[GREY] * (len(bars) - 1)])
        for place, (label, time) in enumerate(bars.items()):
            ratio = "" if place == 0 else f" ({time / next(iter(bars.values())):.1f}x)"
            right.text(0.1, place - 0.27, label, va="bottom", fontsize=9)
            right.text(time + 0.1, place, f"{time:.2f} ms{ratio}", va="center", fontsize=9)
        right.set_ylim(len(bars) - 0.6, -0.65)
        right.set_yticks([])
        right.set_xlim(0, 1.28 * max(bars.values()))
        right.set_title(f"Forward and backward, ms (lower is better)\nT, D, F, E, K = {rows['torch'][0]['T,D,F,E,K']}")
        figure.savefig(out, dpi=110)


def main() -> None:
    """Reads the command line and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="JSON files that benchmarks wrote with --json")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "layer_speed.png", help="the picture")
    options = parser.parse_args()
    try:
        draw(rows_of(options.files or [ROOT / "benchmarks" / "layer_h200.json"]), options.out)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

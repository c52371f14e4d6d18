"""Draws docs/speed_sonicmoe.svg and docs/speed_torch.svg: the layer beside its peers, from the rows of benchmarks.

The pictures use the colour of the text around them, so that they suit a light and a dark page.
"""

import argparse
import html
import json
import pathlib
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
OURS, SONICMOE = ("moe", "c"), "sonicmoe"
#: Bars of the second picture: (by, mode) of a row and its label.
BARS = {
    ("moe", "eager"): "anabranch, eager",
    ("hf-grouped_mm", "compiled"): "Transformers, compiled",
    ("grouped_mm", "compiled"): "torch grouped_mm, compiled",
    ("hf-grouped_mm", "eager"): "Transformers, eager",
}
BLUE, ORANGE, GREY = "#3182bd", "#e6755b", "#8a8a8a"
WIDTH, PLOT = 500, 190
#: svg:root: a page that contains the picture chooses the colour itself.
STYLE = """<style>
svg:root { color: #24292f } @media (prefers-color-scheme: dark) { svg:root { color: #d0d7de } }
text { font: 13px system-ui, sans-serif; fill: currentColor } .title { font-weight: 600; font-size: 15px }
.source { font-size: 11px; opacity: .75 }
</style>"""
HELP = """New rows, on a machine with an H200 (each file is one run):

    python -m benchmarks layer --device cuda --by c --by sonicmoe --json layer.json
    python -m benchmarks torch --device cuda --shape qwen3-30b --tokens 8192 --json torch.json
    python benchmarks/draw_speed.py layer.json torch.json

Without files it draws benchmarks/layer_h200.json: its "sources" say where each row was measured, by what and when."""


class Row(NamedTuple):
    """The text before some bars, their (length, colour), and the text after them."""

    label: str
    bars: list[tuple[float, str]]
    text: str


def rates(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """TFLOP/s of both passes by shape, (ours, SonicMoE's), where both were measured."""
    found: dict[str, dict[bool, float]] = {}
    for row in rows:
        if row["by"] in (*OURS, SONICMOE) and row.get("both TFLOP/s") is not None:
            found.setdefault(row["T,D,F,E,K"], {})[row["by"] == SONICMOE] = row["both TFLOP/s"]
    return {shape: (pair[False], pair[True]) for shape, pair in found.items() if len(pair) == 2}


def chart(title: str, subtitle: str, rows: list[Row], left: int, source: list[str]) -> str:
    """Horizontal bars as SVG. left: where they begin.

    Raises:
      ValueError: there are no bars.
    """
    if not rows:
        raise ValueError("files: got no rows of a benchmark, expected those that --help names")
    lines = [STYLE]

    def text(words: str, x: float, y: float, kind: str = "plain") -> None:
        lines.append(f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{html.escape(words)}</text>')

    text(title, 0, 18, "title")
    text(subtitle, 0, 38)
    y, longest = 52, max(length for row in rows for length, _ in row.bars)
    for row in rows:
        height = 22 / len(row.bars)
        text(row.label, 0, y + 15)
        for i, (length, colour) in enumerate(row.bars):
            width = PLOT * length / longest
            lines.append(
                f'<rect x="{left}" y="{y + i * height:g}" width="{width:.1f}" height="{height}" fill="{colour}"/>'
            )
        text(row.text, left + PLOT * max(row.bars)[0] / longest + 6, y + 15)
        y += 30
    for words in source:
        y += 15
        text(words, 0, y, "source")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {y + 6}">\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def beside_sonicmoe(rows: list[dict[str, Any]], source: list[str]) -> str:
    """The rates of the layer and of SonicMoE by shape."""
    found = [
        Row(
            shape.partition(",")[2].replace(",", ", "),
            [(ours, BLUE), (peer, ORANGE)],
            f"{ours:g} / {peer:g}: {ours / peer:.2f}x",
        )
        for shape, (ours, peer) in rates(rows).items()
    ]
    title = "Forward and backward, TFLOP/s (higher is better)"
    return chart(title, "D, F, E, K: anabranch (blue) / SonicMoE (orange)", found, 145, source)


def beside_torch(rows: list[dict[str, Any]], source: list[str]) -> str:
    """The times of the layer, of torch and of Transformers for one shape."""
    if len(shapes := {row["T,D,F,E,K"] for row in rows}) != 1 or not any(row["by"] == "moe" for row in rows):
        raise SystemExit(f"rows of torch: got shapes {sorted(shapes)}, expected one shape, and rows by moe")
    times: dict[Any, Any] = {(row["by"], row.get("mode")): row.get("both ms") for row in rows}
    found = {label: times[key] for key, label in BARS.items() if times.get(key) is not None}
    first = next(iter(found.values()), 1)
    bars = [
        Row(label, [(time, GREY if i else BLUE)], f"{time:.2f} ms" + (f", {time / first:.1f}x" if i else ""))
        for i, (label, time) in enumerate(found.items())
    ]
    shape = f"T, D, F, E, K = {rows[0]['T,D,F,E,K'].replace(',', ', ')}" if rows else ""
    return chart("Forward and backward, ms (lower is better)", shape, bars, 205, source)


PICTURES = {
    "layer": (beside_sonicmoe, ROOT / "docs" / "speed_sonicmoe.svg"),
    "torch": (beside_torch, ROOT / "docs" / "speed_torch.svg"),
}


def main() -> None:
    """Reads the command line and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="JSON files that benchmarks wrote with --json")
    options = parser.parse_args()
    try:
        for file in options.files or [ROOT / "benchmarks" / "layer_h200.json"]:
            report = json.loads(file.read_text())
            for operation, rows in report["rows"].items():
                draw, path = PICTURES[operation]
                source = report.get("sources", {}).get(operation) or [
                    f"{report['machine'].get('cuda device 0', '')}. anabranch {report['machine']['anabranch']}:",
                    f"python -m benchmarks {' '.join(report['arguments'])}",
                ]
                path.write_text(draw(rows, source))
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
